"""What is trained: data, model, loss."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from lp_jax import nn
from lp_jax._types import PyTree
from lp_jax.cli._models import Pair, Site
from lp_jax.cli._problem import Settings
from lp_jax.cli._task import Task
from lp_jax.cli._workers import OneDevice, Place
from lp_jax.train import LossFn, classification


class Experiment(NamedTuple):
    """Settings made into arrays and functions."""

    settings: Settings
    task: Task
    solvers: Pair  # forward and adjoint
    model: nn.Classifier  # the network at its initial parameters
    tested: nn.Classifier  # the network in evaluation mode: no dropout, running statistics
    loss_fn: LossFn  # loss of training, on batches ``(inputs, labels)``, with a key where there is dropout
    test_fn: LossFn  # loss of evaluation
    params: PyTree  # the initial parameters
    batches: Callable[[int], Iterable[Any]]  # batches of training, by epoch
    place: Place  # where all this lives


def experiment(
    settings: Settings,
    task: Task,
    place: Place = OneDevice(),
    solvers: Pair | None = None,
) -> Experiment:
    """Build the model, its layers where they will be used."""
    pair, rngs = solvers or settings.model.solvers, nnx.Rngs(settings.training.seed)
    model = settings.model.build(Site(task, settings.layers, settings.t1, pair, place.comm, rngs))
    place = place.holding(model)
    loss_fn, params = classification(model)
    tested: Any = nnx.clone(model)
    tested.eval()
    test_fn, _ = classification(tested)

    dropout = getattr(settings.model, "dropout", 0.0)

    def batches(epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(task.batches(epoch)):
            x, labels = place.share(batch)
            if not dropout:
                yield x, labels
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(settings.training.seed), epoch), number)
                yield x, labels, place.everywhere(key)

    return Experiment(
        settings=settings,
        solvers=pair,
        task=task,
        model=model,
        tested=tested,
        loss_fn=place.loss(loss_fn),
        test_fn=place.loss(test_fn),
        params=place.everywhere(params),
        batches=batches,
        place=place,
    )
