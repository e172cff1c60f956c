"""Times of a network's own layers on the machine at hand, in seconds."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import _tree
from lp_jax._picard import Picard
from lp_jax._serial import Serial
from lp_jax._solve import solve, solve_vjp
from lp_jax._types import PyTree, State
from lp_jax.planning._machine import Machine

_SWEEPS = 9  # of the longer runs
_SAMPLE = 0.02  # seconds that a sample lasts at least
_SAMPLES = 5


def calibrate(
    step: Callable[..., Any],
    params: PyTree,
    y0: State,
    *,
    shared: PyTree = None,
    data: PyTree = None,
    t0: float = 0.0,
    t1: float = 1.0,
    name: str = "",
) -> Machine:
    """Measure what the layers of a network take here, by how many are evaluated at once.

    Serial propagation gives the time of a layer alone. Runs of Picard sweeps that differ in nothing but their number give that
    of a sweep, forward and adjoint: over all layers on a CPU, where they are evaluated one after another anyway, over
    1/64, 1/8 and all of them elsewhere.

    Args:
        step: as for `lp_jax.solve`.
        params: as for `lp_jax.solve`, leaves ``(N, ...)``.
        y0: as for `lp_jax.solve`.
        shared: as for `lp_jax.solve`.
        data: as for `lp_jax.solve`, leaves ``(N, ...)``.
        t0: time at which the first layer starts.
        t1: time at which the last one ends.
        name: of the result.

    Returns:
        A `Machine` without wires: ``latency`` and ``bandwidth`` are those of a single worker.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> machine = planning.calibrate(step, jnp.zeros((32, 8, 8)), jnp.ones((4, 8)))
        >>> machine.state_bytes, machine.layer_bytes, machine.seconds("forward", 32) > 0
        (128, 256, True)
    """
    arrays = jax.tree.map(jnp.asarray, (params, data, y0, shared))
    params, data, y0, shared = arrays
    count = _tree.leading((params, data))

    def problem(layers: int) -> dict[str, Any]:
        first = jax.tree.map(lambda x: x[:layers], {"params": params, "data": data})
        return first | {"y0": y0, "shared": shared}

    options = {"t0": t0}
    forward, backward = _serial(step, problem(count), options | {"t1": t1})
    looped = jax.default_backend() == "cpu"
    sizes = [count] if looped else sorted({max(2, count // 64), max(2, count // 8), count})
    sweeps = {size: _sweeps(step, problem(size), options | {"t1": t0 + (t1 - t0) * size / count}) for size in sizes}
    rows = {1: [forward, backward / 2, backward / 2], **sweeps}
    if looped:  # batches are counted as single layers there
        rows = {1: [seconds / count for seconds in sweeps[count]]}
    forwards, adjoints, gradients = zip(*rows.values(), strict=True)
    return Machine(
        layers=tuple(rows),
        forward=forwards,
        linearise=forwards,
        adjoint=adjoints,
        gradient=gradients,
        serial=(forward, backward),
        looped=looped,
        state_bytes=_tree.nbytes(y0),
        layer_bytes=_tree.nbytes(params) // count,
        name=name,
    )


_LEAST = 1e-9  # seconds; what noise may leave of a difference


def _serial(step: Any, problem: dict[str, Any], options: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a layer in serial propagation: forward, and what the gradient adds."""
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


def _sweeps(step: Any, problem: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """Seconds of a sweep over all layers at once: forward, adjoint, and of the gradient."""

    @jax.jit
    def run(problem: dict[str, Any], rtol: jax.Array, adjoint_rtol: jax.Array) -> Any:
        solvers = {
            "solver": Picard(sweeps=_SWEEPS, rtol=rtol),
            "adjoint_solver": Picard(sweeps=_SWEEPS, rtol=adjoint_rtol),
        }
        solution, pullback = solve_vjp(step, **problem, **options, **solvers)
        gradients, stats = pullback(solution.y1)
        return gradients, solution.stats.iterations, stats.iterations

    once, often = jnp.float32(1e30), jnp.float32(0)
    calls = [(problem, once, once), (problem, often, once), (problem, once, often)]
    counts = np.array([[int(n) for n in run(*call)[1:]] for call in calls])
    seconds = np.array(_seconds(run, calls))
    forward = (seconds[1] - seconds[0]) / max(1, counts[1, 0] - counts[0, 0])
    adjoint = (seconds[2] - seconds[0]) / max(1, counts[2, 1] - counts[0, 1])
    gradient = seconds[0] - counts[0] @ (forward, adjoint) - forward  # a last evaluation is kept for the adjoint
    return [max(float(s), _LEAST) for s in (forward, adjoint, gradient)]


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
