"""The cost of a run: evaluations of layers, and the number of evaluations one after another."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lp_jax import Serial, planning
from lp_jax._solvers._solver import Solver
from lp_jax.cli._models import Pair
from lp_jax.train._log import Row, unflat


class Cost(NamedTuple):
    """Evaluations of layers: forward ones, transposed ones, gradients of parameters.

    Attributes:
        work: number of evaluations; for a run, times the examples of each.
        depth: number of evaluations one after another, if all others run at the same time; None if it is not known.
    """

    work: float
    depth: float | None


def with_costs(rows: Sequence[Row], solvers: Pair, *, layers: int, blocks: int, examples: int) -> list[Row]:
    """Return the rows of training with the work and the depth up to there, of all blocks, without probes and buffers.

    A solver with a tolerance counts with the iterations that it took: forward those of each row, adjoint those of the last
    probe. A row without iterations was a serial step of a `lp_jax.train.Controller`. Work and depth are None for solvers
    that cannot be counted.

    Args:
        rows: rows of a log; rows of kind "depth" mark changes of the number of layers.
        solvers: the forward and the adjoint solver.
        layers: number of layers of a block, before any row of kind "depth".
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
            iterations = len(unflat("forward_residual", row)), len(probed)
            gradient, trial = _costs_of(*_with_iterations(solvers, *iterations), layers)
            if "gradients" in row:  # MG/Opt counts its gradients itself
                work = gradient.work * row["gradients"]
                yield row, Cost(work, work if exact else None)
            else:
                trials = row.get("trials", 0)
                yield row, Cost(*(x + trials * y for x, y in zip(gradient, trial, strict=True)))


def _with_iterations(solvers: Pair, forward: int, adjoint: int) -> Pair:
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
def _costs_of(solver: Solver, adjoint_solver: Solver, layers: int) -> tuple[Cost, Cost]:
    """Return the costs of a gradient, and of a trial of a line search: a forward solve with the adjoint's iterations."""
    gradient = planning.training_step(solver, adjoint_solver, layers)
    trial = planning.count(adjoint_solver, layers)
    return Cost(gradient.work(), gradient.depth()), Cost(trial.work(), trial.depth())
