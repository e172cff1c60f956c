"""Work and memory of the library's own solvers and coarse steps, registered by their classes."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import cast

from lp_jax._solvers._coarse_step import CoarseStep, Identity
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._rediscretize import Rediscretize
from lp_jax._solvers._secant import Secant
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import WITHOUT_TOLERANCE
from lp_jax._solvers._sweeps import Sweeps
from lp_jax._solvers._windowed import Windowed
from lp_jax.planning._machine import Machine
from lp_jax.planning._path import Stop, cascade_stops, cycle_stops, relaxations
from lp_jax.planning._work import (
    Schedule,
    Uncounted,
    Work,
    count_steps,
    count_work,
    held,
    most_at_once,
    with_effort,
)

Grid = Sequence[tuple[int, int]]
"""(steps, coarsening factor) of every level, finest first."""


@count_work.register
def _(solver: MGRIT, work: Work) -> None:
    grid = solver.grid(work.layers)
    rules = solver.relaxation if isinstance(solver.relaxation, tuple) else (solver.relaxation,)
    if callable(solver.cycle) or any(map(callable, rules[: len(grid)])):
        raise Uncounted
    labels = relaxations(solver, len(grid))
    first = cascade_stops if solver.start == "cascade" else cycle_stops
    for stops, times in ((first, 1), (cycle_stops, solver.iterations - 1)):
        once = dataclasses.replace(work, schedule=Schedule())
        _count_stops(once, grid, stops(labels, solver.cycle), solver)
        work.schedule.events += times * once.schedule.events
    intervals, factor = busiest(grid, 0, work.workers), grid[0][1]
    work.evaluate_again(factor - 1, intervals)
    last = work.during("final sweep")
    last.evaluate(factor, intervals, gradient=True)
    last.sent(1)


def busiest(grid: Grid, level: int, workers: int) -> int:
    """Return the number of intervals of a level on the busiest worker, which holds whole intervals of all levels."""
    steps, factor = grid[level]
    intervals, together = math.ceil(steps / factor), math.prod(factor for _, factor in grid[level + 1 :])
    return min(intervals, math.ceil(math.ceil(intervals / together) / workers) * together)


def _count_stops(work: Work, grid: Grid, stops: Sequence[Stop], solver: MGRIT) -> None:
    """Record a cycle along its path through the levels, up to where its last F-points would be interpolated."""
    step, span, levels = cast(CoarseStep, solver.coarse_step), 1, [work]
    for (_, factor), (steps, _) in itertools.pairwise(grid):
        span *= factor
        levels.append(dataclasses.replace(work, layers=steps, step=step, span=span))
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        at, level, factor = stop.level, levels[stop.level], grid[stop.level][1]
        intervals = busiest(grid, at, work.workers)
        if stop.label == "solve":
            solve = level.during("coarse solve")
            if step == Identity():
                solve.sent(solve.prefix)
            else:
                count_work(solver.coarsest, solve)
        elif following is not None and following.level > at:  # down
            relaxed = level.during("coarse relaxation" if at else "relaxation")
            for _ in range(stop.label.count("F")):
                if at == 0 and level.at_once < max(2, intervals):  # states at F-points, in every sweep
                    level.evaluate_again(factor - 1, intervals)
                relaxed.steps(factor, intervals)
                relaxed.sent(1)
            levels[at + 1].during("coarse right-hand side").steps(1, intervals)
        elif at > 0:  # up
            corrected = level.during("correction")
            corrected.steps(factor - 1, intervals)
            corrected.sent(1)


@held.register
def _(solver: MGRIT, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    grid, mine, state = solver.grid(layers)[:-1], math.ceil(layers / workers), machine.state_bytes
    intervals = [busiest(grid, level, workers) for level in range(len(grid))]
    kept, working = held.dispatch(object)(solver, machine, layers, workers)[0], _OF_A_CYCLE * sum(intervals) * state
    if solver.keeps_states:
        return kept, working
    at_once = min(most_at_once(solver, machine.at_once[-1]), intervals[0])
    some = at_once < max(2, intervals[0])  # as in `_adjoint.solve_adjoint`
    recomputed = at_once * grid[0][1] * machine.linearised_bytes if some else _F_POINTS * mine * state
    return kept, working + int(recomputed)


_OF_A_CYCLE = 8  # arrays of C-points per level, forward and adjoint
_F_POINTS = 2  # arrays of all states, where intervals are recomputed as one batch


@count_work.register
def _(solver: Sweeps, work: Work) -> None:
    _count_sweeps(work, solver.sweeps)


@count_work.register
def _(solver: Windowed, work: Work) -> None:
    span = solver.unit(work.layers)
    work = dataclasses.replace(work, unit=span)
    in_turn = dataclasses.replace(work, in_turn=True)
    in_turn.steps(-(-work.layers // span) * (solver.sweeps - 1), span)
    in_turn.sent(work.workers - 1)
    work.sent(1)
    _count_sweeps(work, 1)


def _count_sweeps(work: Work, sweeps: int) -> None:
    if work.adjoint and not work.kept:  # the states that enter
        work.sent(1)
    for _ in range(sweeps):
        work.steps(1, work.mine)
        work.sent(work.prefix)
    work.last_evaluation()


@held.register
def _(solver: Secant, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    kept, working = held.dispatch(object)(solver, machine, layers, workers)
    return kept, working + math.ceil(layers / workers) * machine.state_bytes  # the last change


@count_steps.register
def _(coarse_step: Sweeps, work: Work, count: int, at_once: int) -> None:
    work.evaluate(count * coarse_step.sweeps, at_once * work.span)


@with_effort.register
def _(solver: Sweeps, iterations: int) -> Sweeps:
    return dataclasses.replace(solver, sweeps=iterations, **WITHOUT_TOLERANCE)


@with_effort.register
def _(solver: Windowed, iterations: int) -> Windowed:
    if solver.has_tolerance:  # all sweeps of the window, and one over all layers
        iterations = 1 + max(1, round((iterations - 1) / solver.windows))
    return dataclasses.replace(solver, sweeps=iterations, **WITHOUT_TOLERANCE)


@count_steps.register
def _(coarse_step: Identity, work: Work, count: int, at_once: int) -> None:
    pass


@count_work.register
def _(solver: Newton, work: Work) -> None:
    if work.step is not None:
        raise NotImplementedError(_WITHIN)
    if solver.at_once == "auto":  # an iteration holds the Jacobians of all layers anyway
        work = dataclasses.replace(work, at_once=math.inf)
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
def _(solver: Newton, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    mine, example = math.ceil(layers / workers), machine.state_bytes / machine.examples
    jacobian = example * example / _BYTES if solver.jacobian in ("full", "shared") else 0
    jacobians = _OF_A_SCAN * mine * (1 if solver.jacobian == "shared" else machine.examples) * jacobian
    kept, _ = held.dispatch(object)(solver, machine, layers, workers)
    return kept, _OF_NEWTON * mine * machine.state_bytes + math.ceil(jacobians)


_WITHIN = "Newton's method is not counted within multigrid; plan with Picard(...), Serial() or Rediscretize(...) there."
_OF_NEWTON = 6  # arrays of all states: those of a sweep, entries, increments, their sum
_OF_A_SCAN = 3  # arrays of all Jacobians: themselves, and two in the scan
_BYTES = 4  # of a number


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
    work.evaluate(count * work.span, at_once)


@held.register
def _(solver: Serial, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    kept, _ = held.dispatch(object)(solver, machine, layers, workers)
    span = min(math.ceil(layers / workers), solver.checkpoint_every or 0)
    return kept, span * (machine.linearised_bytes + 2 * machine.layer_bytes)


@with_effort.register
def _(solver: Serial | Elementwise, iterations: int) -> Serial | Elementwise:
    return solver


@count_steps.register
def _(coarse_step: Rediscretize, work: Work, count: int, at_once: int) -> None:
    work.evaluate(count, at_once)
