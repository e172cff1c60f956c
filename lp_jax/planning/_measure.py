"""Measure the seconds of the parts of a solve on the machine at hand, and cut a problem to fewer examples."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax._arrays._types import PyTree, State
from lp_jax._choice._fastest import MOST_NUMBERS, Pair
from lp_jax._comms._comm import default_platform
from lp_jax._problem import Gradients, Problem
from lp_jax._programs import _inputs
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver, Stats
from lp_jax._solvers._sweeps import Picard

Found = TypeVar("Found")

_LEAST = 1e-9  # seconds; lower bound of a difference of times, which noise may make negative
ITERATIONS = 9  # of the longer runs
_SAMPLE = 0.02  # seconds that a sample lasts at least
_SAMPLES = 15
_LONGEST = 2.0  # seconds of all samples


class Deadline:
    """The time that measurements have, and the names of those that were left out.

    A measurement starts only if there is as much time left as the longest one before it took. One that has begun is finished,
    because a compilation cannot be stopped.
    """

    def __init__(self, seconds: float):
        self._last = time.perf_counter()  # when the last measurement began, or was left out
        self._end = self._last + seconds
        self._longest = 0.0
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - time.perf_counter()

    def allows(self, what: str) -> bool:
        """Return whether a measurement may start. If not, its name is noted."""
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        allowed = self._end - now >= self._longest and now < self._end
        if not allowed and what not in self.left_out:
            self.left_out.append(what)
        return allowed


def announce(what: str, seconds: float) -> None:
    """Say on standard error how long something takes at most, before it begins."""
    text = f"{what}: at most {seconds:g} s; a compilation that has begun by then is finished."
    print(text, file=sys.stderr, flush=True)


def require(problem: Problem) -> None:
    """Refuse anything that is not a problem."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem must be a lp_jax.Problem(step, params, y0); got {type(problem).__name__}."
        )


def as_pair(solvers: Solver | Pair | tuple[Solver, None]) -> Pair:
    """Return a solver with its adjoint one; by default that for linear systems."""
    return _inputs.pair(*(solvers if isinstance(solvers, tuple) else (solvers, None)))


def small(y0: State) -> bool:
    """Return whether full Jacobians are affordable: examples along the first axis, and few numbers per example."""
    leaves = jax.tree.leaves(y0)
    return (
        all(x.ndim > 1 for x in leaves)
        and sum(x.size for x in leaves) // examples_of(y0) <= MOST_NUMBERS
    )


def examples_of(y0: State) -> int:
    """Return the size of the leading axis that all leaves of the state share; 1 if they share none."""
    leading = {x.shape[0] if x.ndim > 1 else 1 for x in jax.tree.leaves(y0)}
    return leading.pop() if len(leading) == 1 else 1


def few(problem: Problem, count: int) -> Problem:
    """Return the problem with its first examples only, if its step accepts that shape."""
    whole = examples_of(problem.y0)
    if whole <= count:
        return problem

    def cut(tree: PyTree, axis: int) -> PyTree:
        def leaf(x: PyTree) -> PyTree:
            of_examples = getattr(x, "shape", ())[axis : axis + 1] == (whole,)
            return x[(slice(None),) * axis + (slice(count),)] if of_examples else x

        return jax.tree.map(leaf, tree)

    only_state = problem.replace(y0=cut(problem.y0, 0))
    and_data = only_state.replace(data=cut(problem.data, 1))
    for candidate in (and_data, and_data.replace(shared=cut(problem.shared, 0)), only_state):
        try:
            jax.eval_shape(lambda p=candidate: p.solve(solver=Serial()).y1)
        except Exception:  # the user's step raises what it likes for shapes that it does not take
            continue
        return candidate
    return problem


def arrays(problem: Problem) -> dict[str, PyTree]:
    """Return the arrays of a problem as arguments of a compiled function, which solves ``problem.replace(**arrays)``."""
    return {name: getattr(problem, name) for name in ("params", "y0", "shared", "data")}


def jitted(
    f: Callable[..., Found], problem: Problem, *, fast: bool = False
) -> Callable[..., Found]:
    """Return ``f(problem, *more)`` as a compiled function of ``more``, which takes the problem's arrays as arguments.

    A ``fast`` compilation is for programs that run a few times: 2.8 instead of 6.1 s for 256 dense layers on two cores.
    """
    options = {"xla_backend_optimization_level": 0} if default_platform() == "cpu" else None

    @partial(jax.jit, compiler_options=options if fast else None)
    def run(arrays: dict[str, PyTree], *more: PyTree) -> Found:
        return f(problem.replace(**arrays), *more)

    return partial(run, arrays(problem))


def solved(
    problem: Problem, solver: Solver, adjoint_solver: Solver, cotangent: State | None
) -> tuple[Gradients, Stats, Stats]:
    """Solve a problem and its adjoint for a cotangent, by default the last state."""
    solution, pullback = problem.solve_vjp(solver=solver, adjoint_solver=adjoint_solver)
    gradients, stats = pullback(solution.y1 if cotangent is None else cotangent)
    return gradients, solution.stats, stats


def serial(problem: Problem) -> tuple[float, float]:
    """Measure the seconds of a layer in serial propagation: forward, and the further seconds of the gradient."""
    forward = jitted(lambda problem: problem.solve(solver=Serial()).y1, problem)
    # Serial propagation has no iterations to subtract, so whole solves are timed and divided by the number of layers.
    first, whole = seconds([forward, partial(jitted(solved, problem), Serial(), Serial(), None)])
    return first / problem.layers, max(whole - first, _LEAST) / problem.layers


def sweep(problem: Problem, at_once: int) -> list[float]:
    """Measure the seconds of a sweep over all layers, ``at_once`` of them at once: forward, adjoint, and gradient."""
    run = jitted(solved, problem)
    once, often = (
        Picard(sweeps=ITERATIONS, at_once=at_once, atol=jnp.float32(atol)) for atol in (1e30, -1)
    )
    calls = [partial(run, *pair, None) for pair in ((once, once), (often, once), (once, often))]
    counts = np.array([[int(stats.iterations) for stats in call()[1:]] for call in calls])
    spent = np.array(seconds(calls))
    # The longer runs differ from the first one in the number of sweeps only, so a difference cancels everything else.
    forward, adjoint = (spent[1:] - spent[0]) / np.maximum(1, np.diag(counts[1:] - counts[0]))
    # a last evaluation is kept for the adjoint
    gradient = spent[0] - counts[0] @ (forward, adjoint) - forward
    return [max(float(s), _LEAST) for s in (forward, adjoint, gradient)]


def iteration(problem: Problem, solver: Solver, **sampling: int) -> float:
    """Measure the seconds of an iteration of a forward solve with ``solver``."""

    def solved(problem: Problem, atol: jax.Array) -> tuple[State, jax.Array]:
        limited = dataclasses.replace(solver, atol=atol)  # type: ignore[type-var]
        solution = problem.solve(solver=limited)
        return solution.y1, solution.stats.iterations

    # A tolerance of 1e30 is met after the first iteration, and a negative one never, so one program makes both runs.
    run = jitted(solved, problem)
    calls = [partial(run, jnp.float32(atol)) for atol in (1e30, -1.0)]
    few, many = (int(call()[1]) for call in calls)
    once, often = seconds(calls, **sampling)
    return max(_LEAST, (often - once) / max(1, many - few))


def seconds(
    calls: Sequence[Callable[[], PyTree]], *, samples: int | None = None, repeats: int = 0
) -> list[float]:
    """Return the median time of each call, interleaved: of ``samples``, or of 15 that start in 2 s, of 20 ms each."""
    for call in calls:
        jax.block_until_ready(call())  # compiled
    often = [repeats or max(1, round(_SAMPLE / _once(call, 1))) for call in calls]
    taken: list[list[float]] = []
    end = math.inf if samples else time.perf_counter() + _LONGEST
    while not taken or (len(taken) < (samples or _SAMPLES) and time.perf_counter() < end):
        # Calls are interleaved, so that a slow phase of the machine meets all of them alike.
        taken.append(list(map(_once, calls, often)))
    return [float(x) for x in np.median(taken, axis=0)]


def _once(call: Callable[[], PyTree], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats
