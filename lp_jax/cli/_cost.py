"""The cost of a run: evaluations of layers, and the number of evaluations one after another."""

import functools
from collections.abc import Sequence

from lp_jax import Serial, planning
from lp_jax.cli._models import Pair
from lp_jax.planning._schedule import count
from lp_jax.train._log import Row, unflat

_training_step = functools.lru_cache(maxsize=1024)(planning.training_step)
_count = functools.lru_cache(maxsize=1024)(count)


def with_costs(rows: Sequence[Row], solvers: Pair, *, layers: int, examples: int) -> list[Row]:
    """Return the rows of training with work and depth up to there, without probes.

    ``layers`` are those before any row of kind "depth". Tolerances count as the iterations that they took: forward
    those of each row, adjoint those of the last probe. A row without iterations was a serial step of a controller.
    """
    probed = next((unflat("adjoint_residual", row) for row in rows if row["kind"] == "probe"), [])
    found, work, depth = [], 0.0, 0.0
    for row in rows:
        if row["kind"] == "depth":
            layers = row["layers"]
        elif row["kind"] == "probe":
            probed = unflat("adjoint_residual", row)
        elif row["kind"] == "train":
            forward, adjoint = _with_iterations(solvers, len(unflat("forward_residual", row)), len(probed))
            gradient, trials = _training_step(forward, adjoint, layers), row.get("trials", 0)
            trial = _count(adjoint, layers)  # of a line search: a forward solve with the adjoint's iterations
            work += float(examples * (gradient.work() + trials * trial.work()))
            depth += float(gradient.depth() + trials * trial.depth())
            found.append({**row, "work": work, "depth": depth})
    return found


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
