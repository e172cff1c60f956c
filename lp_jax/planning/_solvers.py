"""Work and memory of the library's own solvers and coarse steps, registered by their classes."""

import dataclasses
import math
from typing import cast

from lp_jax._solvers._coarse_step import CoarseStep, Identity
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._picard import Picard
from lp_jax._solvers._rediscretize import Rediscretize
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import WITHOUT_TOLERANCE
from lp_jax.planning import _work
from lp_jax.planning._cycle_work import busiest, count_stops
from lp_jax.planning._path import cascade_stops, cycle_stops, relaxations
from lp_jax.planning._work import Held, Sizes, Uncounted, Work, count_steps, count_work, held, most_at_once, with_effort

# --- multigrid ------------------------------------------------------------------------------------------------------


@count_work.register
def _(solver: MGRIT, work: Work) -> None:
    work = dataclasses.replace(work, in_rows=True)
    grid, coarse_step = solver.grid(work.layers), cast(CoarseStep, solver.coarse_step)
    rules = solver.relaxation if isinstance(solver.relaxation, tuple) else (solver.relaxation,)
    if callable(solver.cycle) or any(map(callable, rules[: len(grid)])):
        raise Uncounted
    labels = relaxations(solver, len(grid))
    first = cascade_stops if solver.start == "cascade" else cycle_stops
    for stops, times in ((first, 1), (cycle_stops, solver.iterations - 1)):
        once = work.apart()
        count_stops(once, grid, stops(labels, solver.cycle), coarse_step, solver.coarsest)
        work.schedule.events += times * once.schedule.events
        work.schedule.reductions += times * once.schedule.reductions
    intervals, factor = busiest(grid, 0, work.workers), grid[0][1]
    work.during("states again").evaluate_again(factor - 1, intervals)
    last = work.during("final sweep")
    last.evaluate(factor, intervals, gradient=True)
    last.sent(1)


@held.register
def _(solver: MGRIT, sizes: Sizes) -> Held:
    grid = solver.grid(sizes.layers)[:-1]
    intervals = [busiest(grid, level, sizes.workers) for level in range(len(grid))]
    working = _OF_A_CYCLE * sum(intervals) * sizes.state
    if solver.keeps_states:
        return Held(sizes.mine * sizes.linearised, working)
    at_once = min(most_at_once(solver, sizes.auto), intervals[0])
    some = at_once < max(2, intervals[0])  # as in `_adjoint.solve_adjoint`
    recomputed = at_once * grid[0][1] * sizes.linearised if some else _F_POINTS * sizes.mine * sizes.state
    return Held(intervals[0] * sizes.state, working + int(recomputed))


_OF_A_CYCLE = 8  # arrays of C-points per level, forward and adjoint
_F_POINTS = 2  # arrays of all states, where intervals are recomputed as one batch


@_work.evaluates.register
def _(solver: MGRIT) -> str:
    return "intervals"


# --- sweeps ---------------------------------------------------------------------------------------------------------


@count_work.register
def _(solver: Picard, work: Work) -> None:
    sweeps = solver.sweeps
    if solver.windows > 1:
        span = solver.unit(work.layers)
        work = dataclasses.replace(work, unit=span)
        in_turn = dataclasses.replace(work, in_turn=True)
        in_turn.steps(-(-work.layers // span) * (sweeps - 1), span)
        in_turn.sent(work.workers - 1)
        work.sent(1)
        sweeps = 1
    if work.adjoint and not work.kept:  # the states that enter
        work.sent(1)
    for _ in range(sweeps):
        work.steps(1, work.mine)
        work.sent(work.prefix)
    work.last_evaluation()


@held.register
def _(solver: Picard, sizes: Sizes) -> Held:
    kept, working = held.dispatch(object)(solver, sizes)
    return Held(kept, working + solver.secant * sizes.mine * sizes.state)  # the last change


@count_steps.register
def _(coarse_step: Picard, work: Work, count: int, at_once: int) -> None:
    sweeps = count * coarse_step.sweeps
    work.evaluate(sweeps, at_once * work.span, rows=sweeps * at_once)


@with_effort.register
def _(solver: Picard, iterations: int) -> Picard:
    if solver.windows > 1 and solver.has_tolerance:  # all sweeps of the window, and one over all layers
        iterations = 1 + max(1, round((iterations - 1) / solver.windows))
    return dataclasses.replace(solver, sweeps=iterations, **WITHOUT_TOLERANCE)


@count_steps.register
def _(coarse_step: Identity, work: Work, count: int, at_once: int) -> None:
    pass


@_work.is_identity.register
def _(coarse_step: Identity) -> bool:
    return True


@_work.is_identity.register
def _(coarse_step: Picard) -> bool:
    return coarse_step.sweeps == 0


# --- Newton's method ------------------------------------------------------------------------------------------------


@count_work.register
def _(solver: Newton, work: Work) -> None:
    if work.step is not None:
        raise NotImplementedError(_WITHIN)
    relaxations = min(solver.relaxations, work.layers)
    for _ in range(relaxations):
        work.steps(1, work.mine)
        work.sent(1)
    iteration = work.during("Newton iteration")
    for _ in range(solver.iterations):
        if solver.jacobian == "full":
            iteration.add("newton", 1, work.mine)
        else:  # the states; their derivative for diagonal Jacobians, or that of the mean state and the chain of its Jacobians
            iteration.steps(1 + (solver.jacobian != "identity"), work.mine)
        iteration.sent(1 + work.prefix)
    work.last_evaluation()


@count_steps.register
def _(coarse_step: Newton, work: Work, count: int, at_once: int) -> None:
    raise NotImplementedError(_WITHIN)


@held.register
def _(solver: Newton, sizes: Sizes) -> Held:
    example = sizes.state / sizes.examples
    jacobian = example * example / _BYTES if solver.jacobian in ("full", "shared") else 0
    jacobians = _OF_A_SCAN * sizes.mine * (1 if solver.jacobian == "shared" else sizes.examples) * jacobian
    kept = held.dispatch(object)(solver, sizes).kept
    return Held(kept, _OF_NEWTON * sizes.mine * sizes.state + math.ceil(jacobians))


@_work.most_at_once.register
def _(solver: Newton, auto: float) -> float:
    return most_at_once.dispatch(object)(solver, math.inf)  # an iteration holds the Jacobians of all layers anyway


_WITHIN = "Newton's method is not counted within multigrid; plan with Picard(...), Serial() or Rediscretize(...) there."
_OF_NEWTON = 6  # arrays of all states: those of a sweep, entries, increments, their sum
_OF_A_SCAN = 3  # arrays of all Jacobians: themselves, and two in the scan
_BYTES = 4  # of a number


# --- serial propagation ---------------------------------------------------------------------------------------------


@count_work.register
def _(solver: Serial | Elementwise, work: Work) -> None:
    work = dataclasses.replace(work, in_turn=True)
    if work.step is None:
        work = work.during("propagation")
        work.evaluate(work.layers, 1, gradient=True)
    else:
        work.steps(work.layers, 1)
    work.sent(work.workers - 1)


@count_steps.register
def _(coarse_step: Serial | Elementwise, work: Work, count: int, at_once: int) -> None:
    work.evaluate(count * work.span, at_once, rows=count * at_once)


@held.register
def _(solver: Serial, sizes: Sizes) -> Held:
    if solver.checkpoint_every is None:
        return Held(sizes.mine * sizes.linearised, 0)
    span = min(sizes.mine, solver.checkpoint_every)
    working = span * (sizes.linearised + 2 * sizes.parameters)
    return Held(math.ceil(sizes.mine / span) * sizes.state, working)


@with_effort.register
def _(solver: Serial | Elementwise, iterations: int) -> Serial | Elementwise:
    return solver


@_work.evaluates.register
def _(solver: Serial | Elementwise) -> str:
    return "series"


# --- one step for an interval ---------------------------------------------------------------------------------------


@count_steps.register
def _(coarse_step: Rediscretize, work: Work, count: int, at_once: int) -> None:
    work.evaluate(count, at_once)
