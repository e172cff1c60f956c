"""Problems of `lp-jax train`, for the suites that train: the one module here that knows the command line's own."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.networks import Pair
from lp_jax.cli._experiment import experiment
from lp_jax.cli._problem import prepare
from lp_jax.train import LossFn, residuals


class Problem(NamedTuple):
    """A model with its data, as `lp-jax train` takes it."""

    layers: int
    model: Any  # at its initial parameters
    params: Any
    loss_fn: LossFn  # of training
    test_fn: LossFn  # of evaluation
    batches: Callable[[int], Iterable[Any]]  # of training, by epoch
    steps_per_epoch: int  # number of them
    epochs: int
    learning_rate: float  # of Adam
    test_batches: list[Any]  # the test set
    solvers: Pair  # what it is trained with if nothing else is said


def load(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> Problem:
    """Load a problem with its settings on the command line, apart from ``options``."""
    settings, learned = prepare(problem, {"model": model, "data": path, "seed": seed} | options)
    made = experiment(settings, learned)
    training = settings.training
    return Problem(
        layers=settings.layers,
        model=made.model,
        params=made.params,
        loss_fn=made.loss_fn,
        test_fn=made.test_fn,
        batches=made.batches,
        steps_per_epoch=learned.steps_per_epoch,
        epochs=training.epochs,
        learning_rate=training.learning_rate,
        test_batches=learned.test_batches,
        solvers=settings.model.solvers,
    )


def taken(problem: Problem, params: Any, batch: Any, solvers: Pair) -> Pair:
    """Return the solvers with the iterations that their tolerances take on a batch, and no tolerance."""
    if not any(solver.has_tolerance for solver in solvers):
        return solvers
    solves = residuals(problem.model, params, batch, *solvers)
    forward, adjoint = (s.with_effort(int(found.iterations)) for s, found in zip(solvers, solves[:2], strict=True))
    return forward, adjoint
