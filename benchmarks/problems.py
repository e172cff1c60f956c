"""Problems of `lp-jax train`, for the suites that train: the one module here that knows the command line's own."""

from pathlib import Path
from typing import Any

from benchmarks.networks import Pair
from lp_jax import planning
from lp_jax.cli._experiment import Experiment, experiment
from lp_jax.cli._problem import prepare
from lp_jax.train import residuals


def load(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> Experiment:
    """Load a problem with its settings on the command line, apart from ``options``."""
    return experiment(*prepare(problem, {"model": model, "data": path, "seed": seed} | options))


def taken(made: Experiment, params: Any, batch: Any, solvers: Pair) -> Pair:
    """Return the solvers with the iterations that their tolerances take on a batch, and no tolerance."""
    if not any(solver.has_tolerance for solver in solvers):
        return solvers
    solves = residuals(made.model, params, batch, *solvers)
    forward, adjoint = (
        planning.with_effort(s, int(found.iterations)) for s, found in zip(solvers, solves[:2], strict=True)
    )
    return forward, adjoint
