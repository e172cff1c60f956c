"""The cost of a run: evaluations of layers, and how many of them followed each other."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lp_jax import Serial, planning
from lp_jax._solvers._solver import Solver
from lp_jax.cli._models import Pair
from lp_jax.train._log import unflat

Row = Mapping[str, Any]


class Cost(NamedTuple):
    """Evaluations of layers: forward ones, transposed ones, gradients of parameters.

    Attributes:
        work: all of them; of a run, times the examples that each was for.
        depth: those that follow each other, if all that can be done at the same time is. None where it is not known.
    """

    work: float
    depth: float | None


def charged(rows: Sequence[Row], solvers: Pair, *, layers: int, blocks: int, examples: int) -> list[dict[str, Any]]:
    """Return the rows of training with the work and the depth up to there, of all blocks; probes and buffers are not counted.

    A solver with a tolerance is charged what it took: its forward iterations in each row, its adjoint ones in the last probe;
    a row without any was a step by serial propagation, for a `lp_jax.train.Controller`. Work and depth are None for solvers
    that cannot be counted.

    Args:
        rows: those of a log; rows of kind "depth" tell where the number of layers changes.
        solvers: the forward and the adjoint solver.
        layers: number of layers of a block, where no row tells.
        blocks: number of blocks, which are solved one after another.
        examples: number of examples of a step.
    """
    try:
        costs = list(_costs(rows, solvers, layers))
    except NotImplementedError:  # the planner says which
        return [{**row, "work": None, "depth": None} for row in rows if row["kind"] == "train"]
    work, depth, result = 0.0, 0.0 if all(cost.depth is not None for _, cost in costs) else None, []
    for row, cost in costs:
        work += cost.work * blocks * examples
        depth = None if depth is None or cost.depth is None else depth + cost.depth * blocks
        result.append({**row, "work": work, "depth": depth})
    return result


def _costs(rows: Sequence[Row], solvers: Pair, layers: int) -> Iterator[tuple[Row, Cost]]:
    exact = all(solver.exact for solver in solvers)
    probed = next((unflat("adjoint_residual", row) for row in rows if row["kind"] == "probe"), [])
    for row in rows:
        if row["kind"] == "depth":
            layers = row["layers"]
        elif row["kind"] == "probe":
            probed = unflat("adjoint_residual", row)
        elif row["kind"] == "train":
            gradient, trial = _counted(*_ended(solvers, len(unflat("forward_residual", row)), len(probed)), layers)
            if "gradients" in row:  # of MG/Opt, all of them
                work = gradient.work * row["gradients"]
                yield row, Cost(work, work if exact else None)
            else:
                trials = row.get("trials", 0)
                yield row, Cost(*(x + trials * y for x, y in zip(gradient, trial, strict=True)))


def _ended(solvers: Pair, forward: int, adjoint: int) -> Pair:
    """Return the solvers with the iterations that they took."""
    solver, adjoint_solver = solvers
    if solver.has_tolerance:
        if not forward:
            return Serial(), Serial()
        solver = planning.with_effort(solver, forward)
    if adjoint_solver.has_tolerance and adjoint:
        adjoint_solver = planning.with_effort(adjoint_solver, adjoint)
    return solver, adjoint_solver


@functools.lru_cache(maxsize=1024)
def _counted(solver: Solver, adjoint_solver: Solver, layers: int) -> tuple[Cost, Cost]:
    """Return what a gradient takes, and a trial of a line search: a forward solve with the effort of the adjoint."""
    gradient = planning.training_step(solver, adjoint_solver, layers)
    trial = planning.count(adjoint_solver, layers)
    return Cost(gradient.work(), gradient.depth()), Cost(trial.work(), trial.depth())
