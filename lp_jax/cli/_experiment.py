"""What is trained: data, model, loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from lp_jax import MGRIT, nn
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.cli._catalog import resolved
from lp_jax.cli._models import model as make_model
from lp_jax.cli._settings import Settings
from lp_jax.cli._tasks import Task, task
from lp_jax.cli._workers import OneDevice
from lp_jax.train import LossFn, classification


class Experiment(NamedTuple):
    """Settings made into arrays and functions.

    Attributes:
        task: what is learned.
        model: at its initial parameters.
        tested: the same as it is evaluated: no dropout, running statistics.
        loss_fn: of training, on batches ``(inputs, labels)``, with a key where there is dropout.
        test_fn: of evaluation.
        params: the initial ones.
        batches: of training, by epoch.
        place: where all this lives.
    """

    task: Task
    model: nn.Classifier
    tested: nn.Classifier
    loss_fn: LossFn
    test_fn: LossFn
    params: PyTree
    batches: Callable[[int], Iterable[Any]]
    place: OneDevice


def experiment(
    settings: Settings,
    task: Task,
    place: OneDevice = OneDevice(),
    solvers: Sequence[Solver] = (MGRIT(), MGRIT()),
) -> Experiment:
    """Build the model, its layers where they will be used.

    Args:
        settings: what is trained.
        task: what it is trained on.
        place: where.
        solvers: forward and adjoint; MPI ranks hold whole intervals of theirs.
    """
    forward, adjoint = solvers
    model = make_model(settings, task, (forward, adjoint), place.comm)
    place = place.holding(model)
    loss_fn, params = classification(model)
    tested: Any = nnx.clone(model)
    tested.eval()
    test_fn, _ = classification(tested)

    def batches(epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(task.batches(epoch)):
            x, labels = place.share(batch)
            if settings.dropout == 0:
                yield x, labels
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(settings.seed), epoch), number)
                yield x, labels, place.everywhere(key)

    return Experiment(
        task=task,
        model=model,
        tested=tested,
        loss_fn=place.loss(loss_fn),
        test_fn=place.loss(test_fn),
        params=place.everywhere(params),
        batches=batches,
        place=place,
    )


def settings_and_task(problem: str, options: Mapping[str, Any]) -> tuple[Settings, Task]:
    """What the options ask for, with the data that they name.

    Args:
        problem: one of the catalog.
        options: of the command line, by name.
    """
    chosen = resolved(problem, options)
    learned = task(
        problem,
        Path(chosen.get("data") or ""),
        name=chosen.get("name") or "",
        batch_size=chosen["batch_size"],
        seed=chosen["seed"],
    )
    return settings_of(problem, chosen, learned), learned


def settings_of(problem: str, options: Mapping[str, Any], learned: Task) -> Settings:
    """What ``resolved`` options ask for. The steps of a sequence are its layers, each of time 1, if not said otherwise."""
    names = ("model", "width", "stride", "heads", "buffers", "dropout", "units")
    training = ("epochs", "batch_size", "learning_rate", "seed")
    layers = options["layers"] or learned.length
    path = options.get("data")
    return Settings(
        problem=problem,
        data=None if path is None else str(path),
        name=options.get("name"),
        layers=layers,
        t1=options["t1"] or float(layers),
        **{name: options[name] for name in (*names, *training)},
    )
