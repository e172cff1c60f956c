"""What is trained: data, model, loss."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flax import nnx

from lp_jax import MGRIT, data, nn
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.cli._workers import OneDevice
from lp_jax.train import LossFn, classification

WIDTHS = {"dense": 64, "conv": 8}
_EVALUATION_BATCH = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes a run what it is, the solvers apart. Two runs of equal settings take the same batches.

    Attributes:
        problem: "digits" or "mnist".
        data: folder of the data, None for what needs none.
        model: "dense" or "conv".
        layers: number of residual layers.
        width: size of the state, or number of channels.
        t1: time at which the last layer ends.
        epochs: number of epochs.
        batch_size: examples per step.
        learning_rate: of Adam.
        seed: of the split, the initial parameters and the order of the batches.
    """

    problem: str
    data: str | None
    model: str
    layers: int
    width: int
    t1: float
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree in; the length of a run and its learning rate may change on the way."""
        free = ("data", "epochs", "learning_rate")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}


class Experiment(NamedTuple):
    """Settings made into arrays and functions.

    Attributes:
        model: at its initial parameters.
        loss_fn: of batches ``(images, labels)``.
        params: the initial ones.
        batches: of training, by epoch.
        steps_per_epoch: number of them.
        test_batches: the test set.
        place: where all this lives.
    """

    model: nn.Classifier
    loss_fn: LossFn
    params: PyTree
    batches: Callable[[int], Iterable[Any]]
    steps_per_epoch: int
    test_batches: list[Any]
    place: OneDevice


def experiment(
    settings: Settings, place: OneDevice = OneDevice(), solvers: Sequence[Solver] = (MGRIT(), MGRIT())
) -> Experiment:
    """Load the data and build the model, its layers where they will be used.

    Args:
        settings: what is trained.
        place: where.
        solvers: forward and adjoint; MPI ranks hold whole intervals of theirs.

    Raises:
        lp_jax.data.DataError: for files that are missing or damaged.
        ValueError: for a batch that is larger than the training set.
    """
    dataset = data.digits(seed=settings.seed) if settings.data is None else data.mnist(settings.data)
    steps_per_epoch = len(dataset.train_y) // settings.batch_size
    if steps_per_epoch == 0:
        count = len(dataset.train_y)
        raise ValueError(f"--batch-size {settings.batch_size} is more than the {count} training examples.")
    model = _model(settings, dataset.shape, dataset.classes, place, solvers)
    loss_fn, params = classification(model)

    def batches(epoch: int) -> Iterable[Any]:
        return map(place.share, data.batches(dataset, settings.batch_size, seed=settings.seed, epoch=epoch))

    test = [
        (dataset.test_x[i : i + _EVALUATION_BATCH], dataset.test_y[i : i + _EVALUATION_BATCH])
        for i in range(0, len(dataset.test_y), _EVALUATION_BATCH)
    ]
    params = place.everywhere(params)
    return Experiment(model, place.loss(loss_fn), params, batches, steps_per_epoch, test, place)


def _model(
    settings: Settings, shape: tuple[int, ...], classes: int, place: OneDevice, solvers: Sequence[Solver]
) -> nn.Classifier:
    rngs, width = nnx.Rngs(settings.seed), settings.width
    opening: nnx.Module
    layer: type[nn.DenseResidual] | type[nn.ConvResidual]
    state: tuple[int, ...]
    if settings.model == "dense":
        opening, layer, state = nn.DenseOpening(shape, width, rngs=rngs), nn.DenseResidual, (width,)
    else:
        opening, layer, state = nn.ConvOpening(shape[-1], width, rngs=rngs), nn.ConvResidual, (*shape[:-1], width)
    trunk = nn.LayerParallel(
        lambda rngs: layer(width, rngs=rngs),
        settings.layers,
        t1=settings.t1,
        solver=solvers[0],
        adjoint_solver=solvers[1],
        comm=place.comm,
        rngs=rngs,
    )
    return nn.Classifier(opening, trunk, nn.DenseClosing(state, classes, rngs=rngs))


def describe(settings: Settings, count: int) -> str:
    """One line on what is trained, a network of ``count`` parameters."""
    kind = f"{settings.layers} {'dense' if settings.model == 'dense' else 'convolutional'} residual layers"
    unit = "wide" if settings.model == "dense" else "channels"
    return f"{settings.problem}: {kind}, {settings.width} {unit}, {count:,} parameters, t1 = {settings.t1:g}"
