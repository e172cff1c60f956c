"""Times of a network's own layers on the machine at hand, in seconds."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import _tree
from lp_jax._mgrit import MGRIT
from lp_jax._newton import Newton
from lp_jax._picard import Picard
from lp_jax._problem import Operands, Problem, prepare
from lp_jax._serial import Serial
from lp_jax._solve import solve, solve_vjp
from lp_jax._types import PyTree, State
from lp_jax.planning._machine import Machine

_SWEEPS, _CYCLES = 9, 2  # of the longer runs
_SHORT, _LONG = 4, 16  # layers of an interval, at least
_SAMPLE = 0.02  # seconds that a sample lasts at least
_SAMPLES = 15  # with five, what the gradient takes in an interval was off by an eighth; with these by a twentieth


def calibrate(
    step: Callable[..., Any],
    params: PyTree,
    y0: State,
    *,
    shared: PyTree = None,
    data: PyTree = None,
    t0: float = 0.0,
    t1: Any = 1.0,
    has_aux: bool = False,
    comm: Any = None,
    fewer: Mapping[str, Any] | None = None,
    newton: bool = False,
    batched: bool = False,
    name: str = "",
) -> Machine:
    """Measure what the layers of a network take here, by how many are evaluated at once.

    Serial propagation gives the time of a layer alone. Runs of Picard sweeps that differ in nothing but their number give that
    of a sweep, forward and adjoint: over 1/64, 1/8 and all of them; on a CPU, where they are evaluated one after another
    anyway, over as many layers as take 30 ms. There an interval's layers, which follow each other, take less than those of a
    sweep, which stores the states of all: cycles without coarse steps give their time, over intervals of four layers and
    over four intervals, so that what an interval takes beside its layers is known, too; where those would be short, serial
    propagation stands for them.

    Args:
        step: as for `lp_jax.solve`.
        params: as for `lp_jax.solve`, leaves ``(N, ...)``.
        y0: as for `lp_jax.solve`.
        shared: as for `lp_jax.solve`.
        data: as for `lp_jax.solve`, leaves ``(N, ...)``.
        t0: time at which the first layer starts.
        t1: as for `lp_jax.solve`.
        has_aux: as for `lp_jax.solve`.
        comm: None: layers are measured on one device.
        fewer: those of ``y0``, ``shared`` and ``data`` that examples make smaller, with a quarter of these, say: how a
            layer's time falls with them decides what data parallelism gives. None takes it to fall like that of many layers
            at once with their number; on a CPU in proportion.
        newton: whether to measure Newton's method with full Jacobians, too, for a state whose first axis is that of the
            examples. Small states only: a Jacobian has the square of its numbers.
        batched: whether to measure layers at once where they are evaluated one after another unless a solver is told not to,
            by ``interval_map="vmap"`` on a CPU. If not, they count as that there, too.
        name: of the result.

    Returns:
        A `Machine` without an interconnect: messages take no time.

    Raises:
        ValueError: for a ``comm``.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> machine = planning.calibrate(step, jnp.zeros((32, 8, 8)), jnp.ones((4, 8)))
        >>> machine.state_bytes, machine.layer_bytes, machine.seconds("forward", 32) > 0
        (128, 256, True)
    """
    if comm is not None:
        raise ValueError(
            "calibrate got a comm; it measures one device. Pass comm=None, and the network's layers as one has them."
        )
    whole = jax.tree.map(jnp.asarray, {"params": params, "data": data, "y0": y0, "shared": shared})
    count = _tree.leading((whole["params"], whole["data"]))
    times = np.asarray(t1, float)
    times = times if times.ndim else np.linspace(t0, times, count + 1)

    def run(layers: int, **changed: Any) -> _Run:
        problem = whole | jax.tree.map(jnp.asarray, changed)
        first = jax.tree.map(lambda x: x[:layers], {name: problem[name] for name in ("params", "data")})
        return _Run(step, problem | first, {"t0": t0, "t1": times[: layers + 1], "has_aux": has_aux})

    looped = jax.default_backend() == "cpu"
    most = _enough(run(min(_FEW, count)), count) if looped else count
    sizes = [most] if looped else sorted({max(2, count // 64), max(2, count // 8), count})
    forward, backward = _serial(run(most))
    sweeps = {size: _sweeps(run(size)) for size in sizes}
    rows = {1: [forward, backward / 2, backward / 2], **sweeps}
    relaxation = interval = None
    if looped:  # batches are counted as single layers there
        rows = {1: [seconds / most for seconds in sweeps[most]]}
        if most >= 2 * _SHORT:
            relaxation, interval = _intervals(run(most // _SHORT * _SHORT), (forward, backward))
        if batched:
            rows |= {
                n: _batch(run(most // n * n), n) for n in sorted({*_BATCHES, most // _SHORT}) if most >= n * _SHORT
            }
    forwards, adjoints, gradients = zip(*rows.values(), strict=True)
    examples, overhead = examples_of(whole["y0"]), 0.0 if looped else _overhead(sizes, forwards)
    if fewer is not None:
        part = run(most, **fewer)
        share = examples_of(part.problem["y0"]) / examples
        ratio = sum(_serial(part)) / (forward + backward)
        overhead = min(1.0, max(0.0, (ratio - share) / (1 - share)))
    iterations = {1: _newton(run(2)) / 2, **{size: _newton(run(size)) for size in sizes}} if newton else {}
    if looped and newton:
        iterations = {size: iterations[most] / most * size for size in rows}
    return Machine(
        at_once=tuple(rows),
        forward=forwards,
        linearise=forwards,
        adjoint=adjoints,
        gradient=gradients,
        newton=tuple(iterations.values()) if newton else None,
        serial=(forward, backward),
        relaxation=relaxation,
        interval=interval,
        looped=looped,
        adding=_adding(whole["params"]) / count,
        state_bytes=_tree.nbytes(whole["y0"]),
        layer_bytes=_tree.nbytes(whole["params"]) // count,
        kept_bytes=kept_bytes(*prepare(step, **whole, **run(count).options, comm=None, solvers=(Serial(),))),
        examples=examples,
        overhead=overhead,
        name=name,
    )


_FEW, _ENOUGH = 8, 0.03  # layers that are enough to tell how many are; seconds that those take


def _enough(few: "_Run", count: int) -> int:
    """Layers whose serial propagation takes 30 ms: more tell nothing new where they do not run at once."""
    if count <= _FEW:
        return count
    whole = math.ceil(_ENOUGH / sum(_serial(few)) / _SHORT)
    return min(count, max(_FEW, whole * _SHORT))


_MOST_NUMBERS = 256  # of an example's state, for full Jacobians
_LEAST = 1e-9  # seconds; what noise may leave of a difference


class _Run(NamedTuple):
    """Arguments of `solve`: those that are arrays, and those that are not."""

    step: Callable[..., Any]
    problem: dict[str, Any]
    options: dict[str, Any]


def _overhead(sizes: list[int], times: Sequence[float]) -> float:
    """Part of the time of one layer that is not that of its arithmetic, which is what one layer more takes."""
    more = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[-1] / sizes[-1]
    return min(1.0, max(0.0, 1 - more / times[0]))


def small(y0: State) -> bool:
    """Whether full Jacobians are thinkable: examples along the first axis of all leaves, and few numbers in each."""
    leaves = jax.tree.leaves(y0)
    return all(x.ndim > 1 for x in leaves) and sum(x.size for x in leaves) // examples_of(y0) <= _MOST_NUMBERS


def examples_of(y0: State) -> int:
    """The leading axis of all of the state's leaves; 1 where they have none in common."""
    leading = {x.shape[0] if x.ndim > 1 else 1 for x in jax.tree.leaves(y0)}
    return leading.pop() if len(leading) == 1 else 1


def kept_bytes(problem: Problem, operands: Operands) -> int:
    """Of what the linearisation of a layer holds beside its state."""
    first = jax.tree.map(lambda x: x[0], operands.slices)
    common = operands.common
    kept = jax.eval_shape(problem.linearised.evaluate, common.y0, first, (common.shared, common.closed_over))[2]
    return sum(x.size * x.dtype.itemsize for x in kept)


def _serial(run: _Run) -> tuple[float, float]:
    """Seconds of a layer in serial propagation: forward, and what the gradient adds."""
    step, problem, options = run
    count = _tree.leading((problem["params"], problem["data"]))

    @jax.jit
    def forward(problem: dict[str, Any]) -> Any:
        return solve(step, **problem, **options, solver=Serial()).y1

    @jax.jit
    def both(problem: dict[str, Any]) -> Any:
        solution, pullback = solve_vjp(step, **problem, **options, solver=Serial())
        return pullback(solution.y1)

    (alone,), (whole,) = (_seconds(f, [(problem,)]) for f in (forward, both))
    return alone / count, max(whole - alone, _LEAST) / count


def _adding(params: PyTree) -> float:
    """Seconds of adding arrays like gradients of all layers to others: the parameters themselves."""
    added = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not added:
        return 0.0
    add = jax.jit(lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)], donate_argnums=0)
    total = [jnp.zeros_like(x) for x in added]

    def call() -> None:
        nonlocal total
        total = jax.block_until_ready(add(total, added))

    (seconds,) = _seconds(call, [()])
    return seconds


def _sweeps(run: _Run) -> list[float]:
    """Seconds of a sweep over all layers at once: forward, adjoint, and of the gradient."""
    forward, adjoint, gradient = _iterations(run, Picard(sweeps=_SWEEPS))
    return [max(s, _LEAST) for s in (forward, adjoint, gradient - forward)]  # a last evaluation is kept for the adjoint


_Times = tuple[float, float, float]
_BATCHES = (4, 16)  # layers at once, beside as many as there are


def _intervals(run: _Run, serial: tuple[float, float]) -> tuple[_Times, _Times]:
    """Where layers run one after another: what those of an interval take, and the interval beside them.

    From short intervals and from long ones; where layers are too few for these, from serial propagation, which is one of
    all of them. The parts of its gradient are as those of the short ones'.

    Returns:
        `Machine.relaxation` and `Machine.interval`.
    """
    count = _tree.leading((run.problem["params"], run.problem["data"]))
    short = _relaxation(run, _SHORT)
    if count < _SHORT * _LONG:
        span, (forward, backward) = count, serial
        long = np.array([forward, *(backward * short[1:] / sum(short[1:]))])
    else:
        span = count // _SHORT
        long = _relaxation(run, span)
    interval = np.maximum(0.0, (short - long) / (1 / _SHORT - 1 / span))
    return _times(np.maximum(_LEAST, short - interval / _SHORT)), _times(interval)


def _batch(run: _Run, size: int) -> list[float]:
    """Seconds of so many layers at once: forward, adjoint, and of the gradient."""
    span = _tree.leading((run.problem["params"], run.problem["data"])) // size
    return (size * _relaxation(run, span, "vmap")).tolist()


def _times(seconds: np.ndarray) -> _Times:
    forward, adjoint, gradient = seconds.tolist()
    return forward, adjoint, gradient


def _relaxation(run: _Run, span: int, interval_map: str = "auto") -> np.ndarray:
    """Seconds per layer of sweeps over intervals of so many: forward, adjoint, and of the gradient.

    Cycles with several sweeps each, so that what belongs to their coarse level counts little; with one where so few intervals
    would be exact before the second cycle, which then there is none.
    """
    count = _tree.leading((run.problem["params"], run.problem["data"]))
    solver = MGRIT(
        coarsening=span,
        iterations=_CYCLES,
        relaxation="FCFCF" if count // span > 3 else "F",
        coarse_step=Picard(sweeps=0),
        skip_downcycle=False,
        storage="all",
        interval_map=interval_map,
    )
    *cycles, last = _iterations(run, solver)
    forward, adjoint = (seconds / (solver.c_relaxations(0) + 1) for seconds in cycles)
    gradient = last - forward - adjoint  # the last sweeps are as long as the others
    return np.maximum(_LEAST, np.array([forward, adjoint, gradient])) / count


def _iterations(run: _Run, solver: Any) -> tuple[float, float, float]:
    """Seconds of an iteration, forward and adjoint, and of what there is once: last sweeps, the gradient."""
    step, problem, options = run

    @jax.jit
    def solved(problem: dict[str, Any], atol: jax.Array, adjoint_atol: jax.Array) -> Any:
        solvers = (dataclasses.replace(solver, atol=x) for x in (atol, adjoint_atol))
        solution, pullback = solve_vjp(
            step, **problem, **options, **dict(zip(("solver", "adjoint_solver"), solvers, strict=True))
        )
        gradients, stats = pullback(solution.y1)
        return gradients, solution.stats.iterations, stats.iterations

    once, often = jnp.float32(1e30), jnp.float32(-1)
    calls = [(problem, once, once), (problem, often, once), (problem, once, often)]
    counts = np.array([[int(n) for n in solved(*call)[1:]] for call in calls])
    seconds = np.array(_seconds(solved, calls))
    forward = (seconds[1] - seconds[0]) / max(1, counts[1, 0] - counts[0, 0])
    adjoint = (seconds[2] - seconds[0]) / max(1, counts[2, 1] - counts[0, 1])
    return float(forward), float(adjoint), float(seconds[0] - counts[0] @ (forward, adjoint))


def _newton(run: _Run) -> float:
    """Seconds of a Newton iteration on all layers at once."""
    step, problem, options = run

    @jax.jit
    def iterated(problem: dict[str, Any], atol: jax.Array) -> Any:
        solution = solve(step, **problem, **options, solver=Newton(iterations=_SWEEPS, batch_axes=1, atol=atol))
        return solution.y1, solution.stats.iterations

    calls = [(problem, jnp.float32(value)) for value in (1e30, -1.0)]
    counts = [int(iterated(*call)[1]) for call in calls]
    seconds = _seconds(iterated, calls)
    return max(_LEAST, (seconds[1] - seconds[0]) / max(1, counts[1] - counts[0]))


def _seconds(f: Callable[..., Any], calls: list[tuple]) -> list[float]:
    """Median times of some calls of a compiled function, interleaved."""
    samples: list[list[float]] = [[] for _ in calls]
    jax.block_until_ready(f(*calls[0]))  # compiled
    repeats = [max(1, round(_SAMPLE / _once(f, call, 1))) for call in calls]
    for _ in range(_SAMPLES):
        for sample, call, repeat in zip(samples, calls, repeats, strict=True):
            sample.append(_once(f, call, repeat))
    return [float(np.median(sample)) for sample in samples]


def _once(f: Callable[..., Any], call: tuple, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        jax.block_until_ready(f(*call))
    return (time.perf_counter() - start) / repeat
