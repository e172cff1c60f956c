"""Solvers, which are settings and a few small methods on the levels of a chain, and the driver of their iterations.

A method from outside subclasses `Solver` or `CoarseStep`, as the built-in ones do.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import Advance, CPoints, Points, PyTree, Scalar, Slices, State, Transfer
from lp_jax._comms._mesh import anywhere
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, Residual, largest
from lp_jax._levels._result import DONE, FELL_BACK, NON_FINITE, NOT_CONVERGED, of_norms
from lp_jax._levels._sweep import march, sweep
from lp_jax._levels._tolerance import (
    Progress,
    changes,
    growth,
    hopeless,
    scale_of,
)
from lp_jax._solvers._coarse_step import Coarse, CoarseStep


class Start(NamedTuple):
    """Where the iterations of a solver begin.

    Attributes:
        state: the state of `Solver.improve`, a pytree: C-points, or a record that holds them.
        spent: number of iterations that this start cost.
        taken: number of iterations to report for it, where that depends on the data.
    """

    state: PyTree
    spent: int = 0
    taken: jax.Array | None = None


class Needs(NamedTuple):
    """Evaluations of a solver besides the step on states like ``y0``. All are traced before the solve.

    Attributes:
        transfers: pairs (restrict, prolong) of the state from each level to the next coarser one; None where it keeps its size.
        steps: further functions of the user, such as ``jacobian_of``, to trace.

    Example:
        >>> import lp_jax
        >>> lp_jax.Newton(jacobian="shared", batch_axes=1).needs(64) == lp_jax.Needs()
        True
        >>> lp_jax.Start(state=None).spent  # the other record that a solver returns
        0
    """

    transfers: Sequence[Transfer | None] = ()
    steps: tuple[Callable[..., PyTree], ...] = ()


class Solver(CoarseStep):
    """A method for a chain of layers, forward or adjoint. With a fixed effort it is also a `CoarseStep`.

    A subclass is a frozen, keyword-only dataclass and a pytree (`lp_jax.register`): tolerances and weights are leaves,
    all else is structure. It has a field or property `iterations` and a method `improve`; the other members have
    defaults. On a level it may use `f_relax`, `c_relax`, `residual`, and ``level.cumsum``.

    Attributes:
        rtol: stop when the residuals are at most this times the first ones that were measured, or what else `terminate` compares
            with it; None: no such test. Each component of the state is compared with its own size, so that units do not matter.
        atol: stop when the residual norm is at most this; None: no such test.
        fallback: whether the layers are propagated serially where the tolerance is not met.
        storage: "all" if the forward solve keeps all arrays that the adjoint needs.
        at_once: number of layers that a worker evaluates at once, or "auto".
        exact: whether the states are those of serial propagation, for all settings.
        in_turn: whether layers are propagated one after another, and nothing else.
        recovers: whether iterations continue after a state that is not finite.
        errors_fall_fast: whether errors fall like ``(L T)^s / s!``, so that two of them foretell the last one.
        chooses: whether it stands for solvers that are chosen when a network is traced, as `Fastest` does.
        iteration_name: what plans and pictures call one of its iterations.
    """

    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    storage: str = "states"
    at_once: int | float | str = "auto"
    exact: bool = False
    in_turn: bool = False
    recovers: bool = False
    errors_fall_fast: bool = False
    chooses: bool = False
    iteration_name: str = "iteration"

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """Number of iterations; with a tolerance their maximum. 0 for a solver that has only a final sweep."""

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        """Return the start of the iterations: by default the guess, or ``y0`` at every C-point."""
        return Start(constant(levels[0], guess))

    def improve(self, levels: Sequence[Level], state: PyTree) -> tuple[PyTree, Residual]:
        """Make one iteration on the levels from `discretize`, finest first, from a state like that of `init`.

        It returns the new state, and this worker's residuals before they were corrected, by `multigrid.measure`. By default
        states are C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has iterations, and needs a method `improve` that makes one."
        )

    def c_points(self, levels: Sequence[Level], state: PyTree) -> CPoints:
        """Return the C-points that a state holds; by default the state itself."""
        return state

    def terminate(
        self,
        levels: Sequence[Level],
        before: PyTree,
        after: PyTree,
        residual: Residual,
        progress: Progress,
    ) -> Progress:
        """Judge an iteration, which made the state ``after`` of the one ``before``: is a tolerance met, or is it hopeless?

        By default the residuals are compared with the first ones. It is not called where there is no tolerance.
        """
        level = levels[0]
        progress = self._compare_norm(level, residual, progress)
        if self.rtol is not None:
            # Decisions to stop have no gradient. Both maxima go in one message.
            both = residual.largest, largest(self.c_points(levels, after))
            residuals, sizes = level.workers.max(stop_gradient(both))
            progress = progress.compare_residuals(level.y0, residuals, sizes, self.rtol)
        return self._give_up(progress)

    def _compare_norm(self, level: Level, residual: Residual, progress: Progress) -> Progress:
        """Compare the norm of the residuals with ``atol``, if there is one."""
        if self.atol is None:
            return progress
        norm = level.norm(residual)
        return progress.measured(norm).within(norm, self.atol)

    def _give_up(self, progress: Progress, goal: float | Scalar | None = None) -> Progress:
        """Give up if the error is not finite, or shows that serial propagation has to take over. For ``goal`` see `hopeless`."""
        # A solver that recovers sets entries that overflowed back, so that they are no reason to stop.
        given_up = jnp.asarray(False) if self.recovers else ~jnp.isfinite(progress.last)
        if self.fallback:
            # Iterations that will miss the tolerance end early, because serial propagation follows them anyway.
            given_up |= hopeless(progress.errors, progress.done + 1, goal)
        return progress._replace(given_up=given_up)

    def finish(
        self, levels: Sequence[Level], u: CPoints, advance: Advance | None
    ) -> tuple[CPoints, PyTree]:
        """Make the final sweep: the last C-points, and the trees that ``advance`` emitted at each step of the finest level.

        Without an ``advance`` nothing is emitted. A solver that returns ``u`` itself has moved no C-point.
        """
        return sweep(levels[0], levels[0].incoming(u), advance=advance)

    def stride(self, steps: int) -> int:
        """Return the number of layers between two C-points of the finest level, in a network of ``steps`` layers."""
        return 1

    def unit(self, steps: int) -> int:
        """Return the number of layers that must stay on one worker: by default those between two C-points."""
        return self.stride(steps)

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        """Return the levels of the solver, finest first: by default one, with intervals of `stride` layers."""
        return (chain.finest(self.stride(chain.total), at_once=chain.at_once(self.at_once)),)

    def needs(self, steps: int) -> Needs:
        """Return the evaluations of the solver in a network of ``steps`` layers: by default only the step."""
        return Needs()

    def resolve(self, steps: int, *, warm: bool = False) -> "Solver":
        """Return the solver for a network of ``steps`` layers, to start at a trajectory if ``warm``; refuse what does not fit."""
        return self

    def for_adjoint(self) -> "Solver":
        """Return the default solver of the adjoint system, which is linear."""
        return self

    def with_effort(self, iterations: int) -> "Solver":
        """Return the solver with a fixed number of iterations and no tolerance; itself if it has no iterations.

        Override it in a solver whose number of iterations is not a field ``iterations``.

        Example:
            >>> import lp_jax
            >>> lp_jax.Picard(sweeps=32, rtol=1e-3).with_effort(5) == lp_jax.Picard(sweeps=5)
            True
        """
        if not self.iterations:
            return self
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        if "iterations" not in names:
            raise TypeError(
                f"{type(self).__name__} has no field `iterations`; give it a method `with_effort` "
                f"that sets their number, {self.iterations} now."
            )
        without = {name: value for name, value in WITHOUT_TOLERANCE.items() if name in names}
        return dataclasses.replace(self, iterations=iterations, **without)  # type: ignore[type-var]

    @property
    def effort(self) -> str:
        """The number of iterations in words, with the names of the solver and of an iteration."""
        return _check.numbered(self.iterations, f"{type(self).__name__} {self.iteration_name}")

    summary = effort

    def check_settings(self, least: str = "states") -> None:
        """Check the settings that all solvers with iterations have. ``least`` is the smaller of the two storages."""
        _check.one_of("storage", self.storage, (least, "all"))
        _check.at_once(self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)

    @property
    def keeps_states(self) -> bool:
        """Whether the forward solve leaves all states to the adjoint, or only one per interval."""
        return self.storage == "all"

    @property
    def has_tolerance(self) -> bool:
        """Whether iterations end when a tolerance is met."""
        return self.rtol is not None or self.atol is not None

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        require_fixed_effort(self)
        solver = self.resolve(span)

        # As a coarse step the solver solves the chain of one interval from the state that enters it.
        def through(u: State, xs: Slices, shared: PyTree) -> State:
            levels = solver.discretize(chain.interval(level, xs, shared, u, solver.unit(span)))
            return levels[0].last(solve_levels(solver, levels))

        return Coarse(through, _tree.split(chain.slices, span))


class AllStates(Solver):
    """A solver that iterates on the states after all layers, and ends when they no longer change.

    Residuals add up along a chain of layers, and a change of the states is their sum.
    """

    def states(self, levels: Sequence[Level], state: PyTree) -> tuple[Points, State]:
        """The states that are compared, and the one that leaves this worker."""
        u = self.c_points(levels, state)
        return u, levels[0].edge(u)

    def terminate(
        self,
        levels: Sequence[Level],
        before: PyTree,
        after: PyTree,
        residual: Residual,
        progress: Progress,
    ) -> Progress:
        level, goal = levels[0], self.atol
        progress = self._compare_norm(level, residual, progress)
        if self.rtol is not None:
            # Residuals of all layers together would not bound the error: a small one in each layer adds up along the chain.
            found = changes(level, self.states(levels, before), self.states(levels, after))
            if self.recovers:  # what was set back has not changed, and is no solution
                finite = jnp.isfinite(residual.total)
                change = jax.tree.map(lambda x: jnp.where(finite, x, jnp.inf), found.change)
                found = found._replace(change=change)
            found = level.workers.max(stop_gradient(found))
            progress, goal = progress.compare_changes(level.y0, found, self.rtol)
        return self._give_up(progress, goal if self.errors_fall_fast else None)

    def finish(
        self, levels: Sequence[Level], u: CPoints, advance: Advance | None
    ) -> tuple[CPoints, PyTree]:
        if advance is None:
            return u, None
        # The states do not change any more, so the sweep serves only what `advance` emits.
        return u, super().finish(levels, u, advance)[1]


WITHOUT_TOLERANCE: dict[str, Any] = {"rtol": None, "atol": None, "fallback": False}
"""Fields of a solver with a fixed number of iterations."""


def require_fixed_effort(solver: Solver) -> None:
    """Refuse tolerances of a coarse step."""
    if solver.has_tolerance:
        raise ValueError(
            f"coarse_step={type(solver).__name__}(...) got a tolerance, rtol={solver.rtol}, "
            f"atol={solver.atol}; a coarse "
            "step must take a fixed effort to be a function of the state. Leave both out and set "
            "the iterations."
        )


def constant(level: Level, guess: CPoints | None) -> CPoints:
    """The guess, or ``y0`` at every C-point."""
    return _tree.repeat(level.y0, level.intervals) if guess is None else guess


NOT_MEASURED = -1.0
"""Marks a norm that was not measured."""


class Stats(NamedTuple):
    """Measurements of a solve.

    Attributes:
        iterations: number of cycles (of sweeps, for `Picard`) that were done, an int32 scalar.
        residual_norms: 2-norm of the residual over the C-points of the finest level, all leaves of the state and the
            whole batch, measured in each cycle after its pre-relaxation and before its coarse correction. Fixed
            length; -1 (`NOT_MEASURED`) for a skipped down-cycle and for cycles that were not needed.
        result: how it ended, an int32 code; 0 is done as asked, `RESULTS` has the messages.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> stats = problem.solve(solver=lp_jax.Picard(sweeps=32, rtol=1e-3)).stats
        >>> int(stats.iterations), lp_jax.RESULTS[int(stats.result)]
        (6, 'done as asked')
        >>> print(stats)
        iteration  residual norm  factor
                1      1.250e-01       –
                2      7.132e-02   0.571
                3      2.687e-02   0.377
                4      7.243e-03   0.270
                5      1.503e-03   0.208
                6      2.517e-04   0.167
    """

    iterations: jax.Array
    residual_norms: jax.Array
    result: jax.Array

    def __repr__(self) -> str:
        """Short text, if the values are numbers: not under a transformation, nor for a batch of solves."""
        norms = self._measured
        if norms is None:
            return f"Stats(iterations={self.iterations}, residual_norms={self.residual_norms})"
        more = ", ..." if len(norms) > 12 else ""
        return (
            f"Stats(iterations={int(self.iterations)}, residual_norms=[{first_norms(norms)}{more}])"
        )

    def __str__(self) -> str:
        """The history: a line for each iteration, its residual norm and convergence factor, if the values are numbers."""
        norms = self._measured
        if not norms:
            return repr(self)
        lines = ["iteration  residual norm  factor"]
        for number, (before, norm) in enumerate(itertools.pairwise([0.0, *norms]), 1):
            factor = f"{norm / before:.3f}" if before > 0 and norm >= 0 else "–"
            lines.append(f"{number:9}  {f'{norm:.3e}' if norm >= 0 else '–':>13}  {factor:>6}")
        return "\n".join(lines)

    @property
    def _measured(self) -> list[float] | None:
        """Residual norms of the iterations that were made, or None if they are not numbers of a single solve."""
        if isinstance(self.iterations, jax.core.Tracer) or jnp.ndim(self.iterations) != 0:
            return None
        # `float` waits for the device, so it is only done for printing.
        norms = [float(norm) for norm in self.residual_norms]
        while norms and norms[-1] < 0:  # iterations that were not needed
            norms.pop()
        return norms


def first_norms(norms: Sequence[float]) -> str:
    """The first twelve norms as text; a dash is one that was not measured."""
    return ", ".join("–" if norm < 0 else f"{norm:.3g}" for norm in norms[:12])


def solve_levels(solver: Solver, levels: Sequence[Level], guess: CPoints | None = None) -> CPoints:
    """Solve on the levels of `hierarchy` or on the coarsest of them, from C-points of the first or its own start.

    It returns the C-points of the solution, leaves ``(intervals, ...)``, and no stats.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> problem = lp_jax.Problem(step, jnp.ones(8), jnp.ones(()))
        >>> lp_jax.multigrid.solve_levels(lp_jax.Serial(), lp_jax.multigrid.hierarchy(problem, lp_jax.Serial())).shape
        (8,)
    """
    u, _ = iterate(solver, levels, guess)
    return solver.finish(levels, u, None)[0]


# of the iterations: the solver's state, the progress, and the squares of each iteration's residuals
_Carry = tuple[PyTree, Progress, jax.Array]


def iterate(
    solver: Solver, levels: Sequence[Level], guess: CPoints | None
) -> tuple[CPoints, Stats]:
    """Run ``solver`` on ``levels`` from a guess or its own start, to a fixed number of iterations or to a tolerance.

    The result in the stats does not say whether the states are finite.
    """
    # Residuals are divided by the size of `y0`, so that their squares neither overflow nor vanish.
    fine = dataclasses.replace(levels[0], scale=scale_of(levels[0]))
    levels, workers, y0 = (fine, *levels[1:]), fine.workers, fine.y0
    dtype = _tree.wide_dtype(y0)
    state, spent, reported = solver.init(levels, guess)
    # The start may have cost iterations already; `cycles` are those that are left.
    taken, cycles = spent if reported is None else reported, solver.iterations - spent

    def stats(iterations: jax.Array | int, norms: jax.Array, result: jax.Array | int) -> Stats:
        # `spent` iterations were not measured.
        norms = jnp.concatenate([jnp.full((spent,), NOT_MEASURED, dtype), norms])
        return Stats(jnp.asarray(iterations, jnp.int32), norms, jnp.asarray(result, jnp.int32))

    if cycles <= 0:  # nothing is measured
        none = jnp.zeros((0,), dtype)
        if solver.fallback:
            return march(fine), stats(taken, none, FELL_BACK)
        code = NOT_CONVERGED if solver.has_tolerance else DONE
        return solver.c_points(levels, state), stats(taken, none, code)
    if not solver.has_tolerance:
        # A fixed number of iterations is a scan, which JAX can differentiate by itself.
        def fixed(state: PyTree, _: None) -> tuple[PyTree, State]:
            state, residual = solver.improve(levels, state)
            return state, residual.squares

        state, squares = _tree.scan(fixed, state, length=cycles)
        # Leaves of `squares` are ``(cycles, ...)``.
        totals = jax.vmap(lambda squares: Residual(squares).total)(squares)
        # one message for all cycles
        totals, grown = workers.sum((totals, growth(fine, squares)))
        norms = fine.norm_of(totals).astype(dtype)
        result = of_norms(norms, grown > 0)
        return solver.c_points(levels, state), stats(solver.iterations, norms, result)

    def unfinished(carry: _Carry) -> jax.Array:
        _, progress, _ = carry
        decided = progress.met | progress.given_up
        # All devices must take the same number of turns, because a step may exchange messages with others.
        return anywhere((progress.done < cycles) & ~decided, workers)

    def body(carry: _Carry) -> _Carry:
        before, progress, squares = carry
        after, residual = solver.improve(levels, before)
        squares = squares.at[progress.done].set(residual.total.astype(dtype))
        progress = solver.terminate(levels, before, after, residual, progress)
        return after, progress._replace(done=progress.done + 1), squares

    # Within a user's shard_map the initial carry must vary over the same axes as the carry after a turn.
    nothing = Progress.start(y0, cycles, dtype), jnp.zeros((cycles,), dtype)
    carry = state, *_tree.varying(nothing, (state, y0))
    # the squares are those of this worker
    state, progress, squares = (
        body(carry) if cycles == 1 else _tree.while_loop(unfinished, body, carry)
    )
    u, met, done = solver.c_points(levels, state), progress.met, progress.done
    if solver.fallback:
        met = ~anywhere(~met, workers)
        # a loop of at most one turn: under vmap a cond would always propagate serially
        u, _ = _tree.while_loop(
            lambda carry: ~carry[1],
            lambda _: (march(fine), _tree.varying(jnp.asarray(True), met)),
            (u, met),
        )
        missed = jnp.asarray(FELL_BACK)
    else:
        finite = jnp.isfinite(progress.errors[done - 1])
        missed = jnp.where(finite, NOT_CONVERGED, NON_FINITE)
    # `done` is the number of turns of the loop; entries beyond it were not measured.
    measured = jnp.arange(cycles, dtype=jnp.int32) < done
    norms = fine.norm_of(workers.sum(squares))
    norms = jnp.where(measured, norms, NOT_MEASURED).astype(dtype)
    return u, stats(done + taken, norms, jnp.where(met, DONE, missed))
