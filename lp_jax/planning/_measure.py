"""Seconds of the parts of a solve on the machine at hand, and bytes of a network's linearisation."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax._arrays._types import Arrays, PyTree, State
from lp_jax._comms._comm import default_platform
from lp_jax._problem import Problem
from lp_jax._programs._program import Program
from lp_jax._programs._traced import trace
from lp_jax._solvers._coarse_step import Identity
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._picard import Picard
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver


def compile_fast() -> dict[str, bool | str] | None:
    """Return options of `jax.jit` for programs that run a few times: 2.8 instead of 6.1 s for 256 dense layers on two cores."""
    return {"xla_backend_optimization_level": 0} if default_platform() == "cpu" else None  # type: ignore[dict-item]


_MOST_NUMBERS = 256  # of an example's state, for full Jacobians


def small(y0: State) -> bool:
    """Return whether full Jacobians are affordable: examples along the first axis, and few numbers per example."""
    leaves = jax.tree.leaves(y0)
    return all(x.ndim > 1 for x in leaves) and sum(x.size for x in leaves) // examples_of(y0) <= _MOST_NUMBERS


def examples_of(y0: State) -> int:
    """Return the size of the leading axis that all leaves of the state share; 1 if they share none."""
    leading = {x.shape[0] if x.ndim > 1 else 1 for x in jax.tree.leaves(y0)}
    return leading.pop() if len(leading) == 1 else 1


def kept_bytes(program: Program, arrays: Arrays) -> int:
    """Return the bytes that the linearisation of a layer holds besides its state."""
    first = jax.tree.map(lambda x: x[0], arrays.slices)
    kept = jax.eval_shape(program.chain(arrays).linearised.evaluate, arrays.y0, first, arrays.shared)[2]
    return sum(x.size * x.dtype.itemsize for x in kept)


LEAST = 1e-9  # seconds; lower bound of a difference of times, which noise may make negative

_SWEEPS, _CYCLES = 9, 2  # of the longer runs
_SAMPLE = 0.02  # seconds that a sample lasts at least
_SAMPLES = 15  # with five, the gradient's time in an interval was off by an eighth; with these by a twentieth
_LONGEST = 2.0  # seconds of all samples


def arrays(problem: Problem) -> dict[str, PyTree]:
    """Return the arrays of a problem as arguments of a compiled function, which solves ``problem.replace(**arrays)``."""
    return {name: getattr(problem, name) for name in ("params", "y0", "shared", "data")}


def serial(problem: Problem) -> tuple[float, float]:
    """Seconds of a layer in serial propagation: forward, and the further seconds of the gradient."""

    @jax.jit
    def forward(arrays: dict[str, PyTree]) -> State:
        return problem.replace(**arrays).solve(solver=Serial()).y1

    @jax.jit
    def both(arrays: dict[str, PyTree]) -> PyTree:
        solution, pullback = problem.replace(**arrays).solve_vjp(solver=Serial())
        return pullback(solution.y1)

    (first,), (whole,) = (seconds([partial(f, arrays(problem))]) for f in (forward, both))
    return first / problem.layers, max(whole - first, LEAST) / problem.layers


def adding(params: PyTree) -> float:
    """Seconds of adding the gradients of all layers to others, measured with arrays like the parameters."""
    added = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not added:
        return 0.0
    add = jax.jit(lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)], donate_argnums=0)
    total = [jnp.zeros_like(x) for x in added]

    def call() -> None:
        nonlocal total
        total = jax.block_until_ready(add(total, added))

    return seconds([call])[0]


def has_counts(problem: Problem) -> bool:
    """Return whether the operations of a layer's program can be counted."""
    return trace(problem, (Picard(),))[0].footprint.counted


def layers_at_once(problem: Problem) -> int:
    """Return the number of layers that ``at_once="auto"`` evaluates at once, on one device."""
    program, arrays = trace(problem.replace(comm=None), (Picard(),))
    return program.chain(arrays).at_once("auto")


def sweep(problem: Problem, at_once: int | float) -> list[float]:
    """Seconds of a sweep over all layers, ``at_once`` of them at once: forward, adjoint, and gradient."""
    forward, adjoint, gradient = _iterations(problem, Picard(sweeps=_SWEEPS, at_once=at_once))
    return [max(s, LEAST) for s in (forward, adjoint, gradient - forward)]  # a last evaluation is kept for the adjoint


def relaxation(problem: Problem, span: int, at_once: int | float | str = "auto") -> np.ndarray:
    """Seconds per layer of sweeps over intervals of ``span`` layers: forward, adjoint, and gradient.

    Each cycle has several sweeps, so that its coarse level counts little. With few intervals it has one sweep, because more
    would make the first cycle exact and leave no second one.
    """
    sweeps = "FCFCF" if problem.layers // span > 3 else "F"
    solver = MGRIT(
        coarsening=span,
        iterations=_CYCLES,
        relaxation=sweeps,
        coarse_step=Identity(),
        start="guess",
        storage="all",
        at_once=at_once,
    )
    *cycles, last = _iterations(problem, solver)
    forward, adjoint = (spent / sweeps.count("F") for spent in cycles)
    gradient = last - forward - adjoint  # the last sweeps are as long as the others
    return np.maximum(LEAST, np.array([forward, adjoint, gradient])) / problem.layers


def newton(problem: Problem) -> float:
    """Seconds of a Newton iteration on all layers at once."""

    @jax.jit
    def iterated(arrays: dict[str, PyTree], atol: jax.Array) -> tuple[State, jax.Array]:
        solver = Newton(iterations=_SWEEPS, batch_axes=1, atol=atol)
        solution = problem.replace(**arrays).solve(solver=solver)
        return solution.y1, solution.stats.iterations

    calls = [partial(iterated, arrays(problem), jnp.float32(value)) for value in (1e30, -1.0)]
    few, many = (int(call()[1]) for call in calls)
    once, often = seconds(calls)
    return max(LEAST, (often - once) / max(1, many - few))


def _iterations(problem: Problem, solver: Solver) -> tuple[float, float, float]:
    """Seconds of an iteration, forward and adjoint, and of the rest: the final sweeps and the gradient."""

    @jax.jit
    def solved(arrays: dict[str, PyTree], atol: jax.Array, adjoint_atol: jax.Array) -> PyTree:
        forward, adjoint = (dataclasses.replace(solver, atol=x) for x in (atol, adjoint_atol))  # type: ignore[type-var]
        solution, pullback = problem.replace(**arrays).solve_vjp(solver=forward, adjoint_solver=adjoint)
        gradients, stats = pullback(solution.y1)
        return gradients, solution.stats.iterations, stats.iterations

    once, often = jnp.float32(1e30), jnp.float32(-1)
    calls = [partial(solved, arrays(problem), *limits) for limits in ((once, once), (often, once), (once, often))]
    counts = np.array([[int(n) for n in call()[1:]] for call in calls])
    spent = np.array(seconds(calls))
    forward = (spent[1] - spent[0]) / max(1, counts[1, 0] - counts[0, 0])
    adjoint = (spent[2] - spent[0]) / max(1, counts[2, 1] - counts[0, 1])
    return float(forward), float(adjoint), float(spent[0] - counts[0] @ (forward, adjoint))


def seconds(calls: Sequence[Callable[[], PyTree]], *, samples: int | None = None, repeats: int = 0) -> list[float]:
    """Return the median time of each call, after a first one; the calls are interleaved.

    A sample is ``repeats`` calls, or as many as take 20 ms. Without ``samples`` there are 15, or as many as start in 2 s.
    """
    for call in calls:
        jax.block_until_ready(call())  # compiled
    often = [repeats or max(1, round(_SAMPLE / _once(call, 1))) for call in calls]
    taken: list[list[float]] = []
    end = math.inf if samples else time.perf_counter() + _LONGEST
    while not taken or (len(taken) < (samples or _SAMPLES) and time.perf_counter() < end):
        taken.append(list(map(_once, calls, often)))
    return [float(x) for x in np.median(taken, axis=0)]


def _once(call: Callable[[], PyTree], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats
