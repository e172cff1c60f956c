"""Solvers: settings and a few small methods on the levels of a chain; and the driver of their iterations.

A method from outside subclasses `Solver` or `CoarseStep`, as the built-in ones do.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Advance, CPoints, PyTree, Scalar, Slices, State, Transfer
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._result import DONE, FELL_BACK, of_norms
from lp_jax._levels._sweep import march, sweep
from lp_jax._levels._tolerance import (
    ROUNDING,
    changed_unseen,
    eps_of,
    hopeless,
    largest_reference,
    relative_error,
    rounding_of,
    unit_of,
)
from lp_jax._solvers._coarse_step import Coarse, CoarseStep


class Start(NamedTuple):
    """Where the iterations of a solver begin.

    Attributes:
        state: the state of `Solver.improve`, a pytree: C-points, or a record that holds them.
        spent: number of iterations that this start cost.
        taken: number of iterations to report for it, where that depends on the data.
        first: first residual norm, if the start measured it; None for that of the first iteration.
        recovers: whether iterations continue after a residual norm that is not finite.
        corrections: ``corrections(before, after)`` squares the corrections of an iteration, by leaves of the state, ``(leaves,
            4)``, for the test of ``rtol``; None tests residual norms.
        series: whether errors fall like ``(L T)^s / s!``, so that two of them foretell the last one.
    """

    state: PyTree
    spent: int = 0
    taken: jax.Array | None = None
    first: Scalar | None = None
    recovers: bool = False
    corrections: Callable[[PyTree, PyTree], jax.Array] | None = None
    series: bool = False


class Needs(NamedTuple):
    """Evaluations of a solver besides the step on states like ``y0``. All are traced before the solve.

    Attributes:
        transfers: pairs (restrict, prolong) of the state from each level to the next coarser one; None where it keeps its size.
        steps: other steps of the user.
        averaged_axes: number of leading axes of examples, if the step is also evaluated at their mean; else 0.

    Example:
        >>> import lp_jax
        >>> lp_jax.Newton(jacobian="shared", batch_axes=1).needs(64) == lp_jax.Needs(averaged_axes=1)
        True
        >>> lp_jax.Start(state=None).spent  # the other record that a solver returns
        0
    """

    transfers: Sequence[Transfer | None] = ()
    steps: tuple[Callable[..., PyTree], ...] = ()
    averaged_axes: int = 0


class Solver(CoarseStep):
    """Method for a chain of layers, forward or adjoint; with fixed effort also a `CoarseStep`.

    A subclass is a frozen, keyword-only dataclass and a pytree (`lp_jax.register`): tolerances and weights are leaves,
    all else is structure. It has a field or property `iterations` and a method `improve`; the other members have
    defaults. On a level it may use `f_relax`, `c_relax`, `residual`, and ``level.cumsum``.

    Attributes:
        rtol: stop when the residual norm is at most this times the first one that was measured, or, with `Start.corrections`,
            when the last change of the states is at most this times their size; None: no such test.
        atol: stop when the residual norm is at most this; None: no such test.
        fallback: whether the layers are propagated serially where the tolerance is not met.
        storage: "all" if the forward solve keeps all arrays that the adjoint needs.
        at_once: number of layers that a worker evaluates at once, or "auto".
        exact: whether the states are those of serial propagation, for all settings.
    """

    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    storage: str = "states"
    at_once: int | float | str = "auto"
    exact: bool = False

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """Number of iterations; with a tolerance their maximum. 0 for a solver that has only a final sweep."""

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        """Return the start of the iterations: by default the guess, or ``y0`` at every C-point."""
        return Start(constant(levels[0], guess))

    def improve(self, levels: Sequence[Level], state: PyTree) -> tuple[PyTree, Scalar]:
        """Make one iteration on the levels from `discretize`, finest first, from a state like that of `init`.

        It returns the new state, and this worker's sum of squared residuals (`multigrid.sum_of_squares`) before they were
        corrected. By default states are C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has iterations, and needs a method `improve` that makes one."
        )

    def c_points(self, levels: Sequence[Level], state: PyTree) -> CPoints:
        """Return the C-points that a state holds; by default the state itself."""
        return state

    def finish(
        self, levels: Sequence[Level], u: CPoints, advance: Advance | None
    ) -> tuple[CPoints, PyTree]:
        """Make the final sweep: the last C-points, and the trees that ``advance`` emitted at each step of the finest level."""
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

        def through(u: State, xs: Slices, shared: PyTree) -> State:
            levels = solver.discretize(chain.interval(level, xs, shared, u, solver.unit(span)))
            return levels[0].last(solve_levels(solver, levels))

        return Coarse(through, _tree.split(chain.slices, span))


WITHOUT_TOLERANCE: dict[str, Any] = {"rtol": None, "atol": None, "fallback": False}
"""Fields of a solver with a fixed number of iterations."""


def require_fixed_effort(solver: Solver) -> None:
    """Refuse tolerances of a coarse step."""
    if solver.has_tolerance:
        raise ValueError(
            f"coarse_step={type(solver).__name__}(...) got a tolerance, rtol={solver.rtol}, atol={solver.atol}; a coarse "
            "step must take a fixed effort to be a function of the state. Leave both out and set the iterations."
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
    """

    iterations: jax.Array
    residual_norms: jax.Array
    result: jax.Array

    def __repr__(self) -> str:
        """Short text, if the values are numbers: not under a transformation, nor for a batch of solves."""
        if isinstance(self.iterations, jax.core.Tracer) or jnp.ndim(self.iterations) != 0:
            return f"Stats(iterations={self.iterations}, residual_norms={self.residual_norms})"
        norms = [float(norm) for norm in self.residual_norms]
        while norms and norms[-1] < 0:  # iterations that were not needed
            norms.pop()
        shown = ["–" if norm < 0 else f"{norm:.3g}" for norm in norms[:12]] + ["..."] * (
            len(norms) > 12
        )
        return f"Stats(iterations={int(self.iterations)}, residual_norms=[{', '.join(shown)}])"


def solve_levels(solver: Solver, levels: Sequence[Level], guess: CPoints | None = None) -> CPoints:
    """Solve by hand, on the levels of `hierarchy` or on the coarsest of them, from C-points of the first or its own start.

    It returns the C-points of the solution, leaves ``(intervals, ...)``. Nothing is measured.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> problem = lp_jax.Problem(step, jnp.ones(8), jnp.ones(()))
        >>> lp_jax.multigrid.solve_levels(lp_jax.Serial(), lp_jax.multigrid.hierarchy(problem, lp_jax.Serial())).shape
        (8,)
    """
    u, _ = iterate(solver, levels, guess)
    return solver.finish(levels, u, None)[0]


class Progress(NamedTuple):
    """State of the iterations of a solver with a tolerance."""

    state: PyTree  # of the solver
    done: jax.Array  # number of iterations
    norms: jax.Array  # of residuals
    errors: jax.Array  # compared with the tolerance: residual norms, or relative errors from the solver's corrections
    first: jax.Array  # size of the first correction, by leaves of the state
    met: jax.Array  # whether the tolerance is met


def iterate(
    solver: Solver, levels: Sequence[Level], guess: CPoints | None
) -> tuple[CPoints, Stats]:
    """Run ``solver`` on ``levels`` from a guess or its own start, to a fixed number of iterations or to a tolerance.

    The result in the stats does not say whether the states are finite.
    """
    fine = dataclasses.replace(levels[0], unit=unit_of(levels[0]))
    levels, workers, dtype = (
        (fine, *levels[1:]),
        fine.workers,
        _tree.real_dtype(fine.y0, at_least=jnp.float32),
    )
    state, spent, reported, first, recovers, corrections, series = solver.init(levels, guess)
    taken, cycles = spent if reported is None else reported, solver.iterations - spent
    # from rounding, for states about as large as y0
    largest = fine.in_units(workers.total(fine.interval_span) * rounding_of(fine, fine.y0))

    def stats(iterations: jax.Array | int, norms: jax.Array, met: jax.Array | bool) -> Stats:
        norms = jnp.concatenate([jnp.full((spent,), NOT_MEASURED, dtype), norms])
        return Stats(
            jnp.asarray(iterations, jnp.int32), norms, of_norms(norms, met, ROUNDING * largest)
        )

    if cycles <= 0:
        measured = stats(taken, jnp.zeros((0,), dtype), not solver.has_tolerance)
        if not solver.fallback:
            return solver.c_points(levels, state), measured
        return march(fine), measured._replace(result=jnp.int32(FELL_BACK))  # nothing was measured
    if not solver.has_tolerance:
        state, squares = _tree.scan(
            lambda state, _: solver.improve(levels, state), state, length=cycles
        )
        norms = fine.norm(squares).astype(dtype)  # once, not in every cycle
        return solver.c_points(levels, state), stats(solver.iterations, norms, True)

    most = largest_reference(fine).astype(dtype) if spent and first is None else jnp.inf
    corrections = None if solver.rtol is None else corrections

    def limit(norms: jax.Array, least: jax.Array) -> jax.Array:
        """The largest residual norm that meets a tolerance; no smaller one than rounding leaves."""
        reference = jnp.minimum(norms[0] if first is None else first, most)
        asked = jnp.asarray(-jnp.inf if solver.atol is None else solver.atol, dtype)
        if solver.rtol is not None and corrections is None:
            # a network that starts from zeros has no other measure of rounding
            rtol, smallest = (
                jnp.asarray(solver.rtol, dtype),
                2 * max(map(eps_of, jax.tree.leaves(fine.y0))),
            )
            asked = jnp.maximum(
                asked, jnp.where(rtol < 0, rtol, jnp.maximum(rtol, smallest)) * reference
            )
        return jnp.where(asked < 0, asked, jnp.maximum(asked, least))  # below zero: all iterations

    def unfinished(at: Progress) -> jax.Array:
        last = at.errors[at.done - 1]
        wanted = (
            ~at.met if recovers and not solver.fallback else ~at.met & ~jnp.isnan(last)
        )  # else a NaN ends it
        if solver.fallback:
            wanted &= ~hopeless(at.errors, at.done, solver.rtol if series and corrections else None)
        return workers.anywhere((at.done < cycles) & ((at.done == 0) | wanted))

    def body(at: Progress) -> Progress:
        state, squares = solver.improve(levels, at.state)
        if corrections is not None:
            parts = corrections(at.state, state)
        else:
            before, after = (solver.c_points(levels, u) for u in (at.state, state))
            parts = jnp.stack(
                [changed_unseen(fine, before, after)[0].astype(dtype), rounding_of(fine, after)]
            )
        summed = workers.sum(
            jnp.concatenate([squares[None].astype(dtype), parts.reshape(-1).astype(dtype)])
        )
        norms = at.norms.at[at.done].set(fine.in_units(summed[0]))
        met, last = jnp.asarray(False), norms[at.done]
        if (
            corrections is None or solver.atol is not None
        ):  # else XLA drops residual norms that nobody reads
            least = (
                jnp.minimum(largest, fine.in_units(summed[2])) if corrections is None else largest
            )
            met = jnp.isfinite(last) & (last <= limit(norms, least))
        if corrections is None:  # zero does not count where squares vanished
            met &= (last > 0) | (summed[1] == 0)
            return Progress(state, at.done + 1, norms, norms, at.first, met | at.met)
        sizes = fine.in_units(summed[1:].reshape(parts.shape))
        error, left, first = relative_error(
            fine, sizes, at.done, at.first, at.errors, warm=guess is not None
        )
        errors = at.errors.at[at.done].set(error)
        return Progress(
            state,
            at.done + 1,
            norms,
            errors,
            first,
            met | at.met | (left <= jnp.asarray(solver.rtol, dtype)),
        )

    none, leaves = jnp.full((cycles,), NOT_MEASURED, dtype), len(jax.tree.leaves(fine.y0))
    begin = jnp.int32(0), none, none, jnp.zeros((leaves,), dtype), jnp.asarray(False)
    end = _tree.while_loop(
        unfinished, body, Progress(state, *_tree.varying(begin, (state, fine.y0)))
    )
    u, met = solver.c_points(levels, end.state), end.met
    if solver.fallback:
        if corrections is None:
            last = end.norms[end.done - 1]
            least = jnp.minimum(largest, fine.in_units(workers.sum(rounding_of(fine, u))))
            met |= (last > 0) & (last <= ROUNDING * least)
        met = ~workers.anywhere(~met)
        # a loop of at most one turn: under vmap a cond would always propagate serially
        u, _ = _tree.while_loop(
            lambda carry: ~carry[1],
            lambda _: (march(fine), _tree.varying(jnp.asarray(True), met)),
            (u, met),
        )
    measured = stats(end.done + taken, end.norms, met)
    if solver.fallback:
        measured = measured._replace(result=jnp.where(met, DONE, FELL_BACK).astype(jnp.int32))
    return u, measured
