"""Count the work of a multigrid cycle along its path through the levels."""

import math
from collections.abc import Sequence

from lp_jax._solvers._coarse_step import CoarseStep
from lp_jax._solvers._solver import Solver
from lp_jax.planning._path import Stop
from lp_jax.planning._work import Work, count_work, is_identity

Grid = Sequence[tuple[int, int]]
"""(steps, coarsening factor) of every level, finest first."""


def busiest(grid: Grid, level: int, workers: int) -> int:
    """Return the number of intervals of a level on the busiest worker, which holds whole intervals of all levels."""
    steps, factor = grid[level]
    intervals, together = math.ceil(steps / factor), math.prod(factor for _, factor in grid[level + 1 :])
    return min(intervals, math.ceil(math.ceil(intervals / together) / workers) * together)


def count_stops(work: Work, grid: Grid, stops: Sequence[Stop], coarse_step: CoarseStep, coarsest: Solver) -> None:
    """Record a cycle, up to where its last F-points would be interpolated."""
    spans = [math.prod(factor for _, factor in grid[:level]) for level in range(len(grid))]
    levels = [work, *(work.on(grid[n][0], coarse_step, spans[n]) for n in range(1, len(grid)))]
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        at, level, factor = stop.level, levels[stop.level], grid[stop.level][1]
        intervals = busiest(grid, at, work.workers)
        if stop.label == "solve":
            solve = level.during("coarse solve")
            if is_identity(coarse_step):
                solve.sent(solve.prefix)
            else:
                count_work(coarsest, solve)
        elif following is not None and following.level > at:  # down
            relaxed = level.during("coarse relaxation" if at else "relaxation")
            for _ in range(stop.label.count("F")):
                if at == 0 and level.at_once < max(2, intervals):  # states at F-points, in every sweep
                    level.during("states again").evaluate_again(factor - 1, intervals)
                relaxed.steps(factor, intervals)
                relaxed.sent(1)
            levels[at + 1].during("coarse right-hand side").steps(1, intervals)
        elif at > 0:  # up
            corrected = level.during("correction")
            corrected.steps(factor - 1, intervals)
            corrected.sent(1)
