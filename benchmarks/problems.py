"""Problems of `lp-jax train`, for the suites that train: the one module here that knows the command line's own."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.networks import Pair
from lp_jax.cli._catalog import resolved
from lp_jax.cli._experiment import experiment
from lp_jax.cli._settings import Settings
from lp_jax.cli._solver import default_solvers, with_effort
from lp_jax.cli._tasks import task
from lp_jax.train import LossFn, residuals


class Problem(NamedTuple):
    """A model with its data, as `lp-jax train` takes it.

    Attributes:
        layers: number of layers.
        model: at its initial parameters.
        params: the initial ones.
        loss_fn: of training.
        test_fn: of evaluation.
        batches: of training, by epoch.
        steps_per_epoch: number of them.
        epochs: number of epochs.
        learning_rate: of Adam.
        test_batches: the test set.
        solvers: what it is trained with if nothing else is said.
    """

    layers: int
    model: Any
    params: Any
    loss_fn: LossFn
    test_fn: LossFn
    batches: Callable[[int], Iterable[Any]]
    steps_per_epoch: int
    epochs: int
    learning_rate: float
    test_batches: list[Any]
    solvers: Pair


def load(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> Problem:
    """Load a problem with its settings on the command line, apart from ``options``."""
    given = {"seed": seed, "name": None, "heads": 4, "buffers": 0, "dropout": 0.0, "units": 1} | options
    sizes = ("layers", "width", "stride", "t1", "epochs", "batch_size", "learning_rate")
    chosen = resolved(problem, dict.fromkeys(sizes) | {"model": model} | given)
    learned = task(problem, path, name=chosen["name"] or "", batch_size=chosen["batch_size"], seed=seed)
    layers = chosen["layers"] or learned.length
    t1 = chosen["t1"] or float(layers)
    settings = Settings(**chosen | {"problem": problem, "data": str(path), "layers": layers, "t1": t1})
    made = experiment(settings, learned)
    return Problem(
        layers=layers,
        model=made.model,
        params=made.params,
        loss_fn=made.loss_fn,
        test_fn=made.test_fn,
        batches=made.batches,
        steps_per_epoch=learned.steps_per_epoch,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        test_batches=learned.test_batches,
        solvers=default_solvers(model),
    )


def taken(problem: Problem, params: Any, batch: Any, solvers: Pair) -> Pair:
    """Return the solvers with the iterations that their tolerances take on a batch, and no tolerance."""
    if not any(solver.has_tolerance for solver in solvers):
        return solvers
    solves = residuals(problem.model, params, batch, *solvers)
    forward, adjoint = (with_effort(s, int(found.iterations)) for s, found in zip(solvers, solves[:2], strict=True))
    return forward, adjoint
