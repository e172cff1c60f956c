"""The cost of a run: evaluations of layers, and the number of evaluations one after another."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from lp_jax import Serial, planning
from lp_jax.cli._models import Pair
from lp_jax.planning._schedule import count
from lp_jax.train._log import Row, unflat

_training_step = functools.lru_cache(maxsize=1024)(planning.training_step)
_count = functools.lru_cache(maxsize=1024)(count)


def with_costs(rows: Sequence[Row], solvers: Pair, *, layers: int, blocks: int, examples: int) -> list[Row]:
    """Return the rows of training with the work and the depth up to there, of all blocks, without probes and buffers.

    Work is the number of evaluations of layers times the examples of each: forward ones, transposed ones and gradients of
    parameters. Depth is the number of evaluations one after another, if all others run at the same time. Both are None for
    solvers that cannot be counted. ``layers`` is the number of layers of a block, before any row of kind "depth". Blocks are
    solved one after another.

    A solver with a tolerance counts with the iterations that it took: forward those of each row, adjoint those of the last
    probe. A row without iterations was a serial step of a `lp_jax.train.Controller`.
    """
    try:
        costs = list(_costs(rows, solvers, layers))
    except NotImplementedError:  # the planner says which
        return [{**row, "work": None, "depth": None} for row in rows if row["kind"] == "train"]
    works = itertools.accumulate(float(work * blocks * examples) for _, work, _ in costs)
    depths = itertools.accumulate(float(depth * blocks) for _, _, depth in costs)
    return [
        {**row, "work": work, "depth": depth} for (row, _, _), work, depth in zip(costs, works, depths, strict=True)
    ]


def _costs(rows: Sequence[Row], solvers: Pair, layers: int) -> Iterator[tuple[Row, float, float]]:
    """Yield the rows of training, each with its work and its depth."""
    probed = next((unflat("adjoint_residual", row) for row in rows if row["kind"] == "probe"), [])
    for row in rows:
        if row["kind"] == "depth":
            layers = row["layers"]
        elif row["kind"] == "probe":
            probed = unflat("adjoint_residual", row)
        elif row["kind"] == "train":
            iterations = len(unflat("forward_residual", row)), len(probed)
            forward, adjoint = _with_iterations(solvers, *iterations)
            gradient, trials = _training_step(forward, adjoint, layers), row.get("trials", 0)
            trial = _count(adjoint, layers)  # of a line search: a forward solve with the adjoint's iterations
            yield row, gradient.work() + trials * trial.work(), gradient.depth() + trials * trial.depth()


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
