"""A task that a network learns: settings of training, and data as batches."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from lp_jax import data
from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax.data._dataset import Scaler
from lp_jax.nn import Classifier
from lp_jax.train import classification, cross_entropy, mean_squared_error, regression
from lp_jax.train._supervised import Measure
from lp_jax.train._types import Batch, LossFn

Predict = Callable[[PyTree], np.ndarray]
"""A function from a batch of inputs to outputs."""

_EVALUATION_BATCH = 500
_LARGEST = 2**31 - 1


def check_size(name: str, value: int | float | None) -> None:
    """Refuse a setting of a model or a training that is not positive, or too large for arrays of JAX."""
    if isinstance(value, int):
        _check.integer(name, value, least=0 if name in ("seed", "buffers") else 1)
        if value > _LARGEST:
            raise ValueError(f"{name} must be at most {_LARGEST}; got {value}.")
    elif value is not None and name != "dropout" and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Training.

    Args:
        epochs: Number of epochs.
        batch_size: Number of examples per step.
        learning_rate: Learning rate of Adam.
        seed: Seed of the split, the initial parameters and the order of the batches.
    """

    epochs: int = 30
    batch_size: int = 50
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_size(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Data as batches ``(x, labels)`` or ``(x, values)``, and the sizes that a network for them needs."""

    batches: Callable[[int], Iterable[Batch]]  # training batches of an epoch
    steps_per_epoch: int  # number of batches of an epoch
    test_batches: list[Batch]  # the test set
    shape: tuple[int, ...]  # shape of one input, without the batch: of an image, a point, or one time of a sequence
    outputs: int  # number of classes, or of values
    loss: Callable[[Classifier], tuple[LossFn, PyTree]] = classification  # from a model to its loss and parameters
    measure: Measure = cross_entropy  # the same, of outputs and targets
    unscaled: Callable[[np.ndarray], np.ndarray] | None = None  # turns outputs into the units of the file, for values
    about: str = ""  # a line on the data
    names: tuple[str, ...] = ()  # names of the classes; empty where they are numbers
    length: int = 0  # largest number of positions of a sequence; 0 for other inputs
    sizes: tuple[int, ...] = ()  # number of values of each of the numbers that describe a token; empty for other inputs
    causal: bool = False  # whether a position sees only itself and earlier ones
    samples: Callable[[Predict], str] | None = None  # writes a few answers as text; None shows nothing


def task_of(dataset: data.Dataset, training: Training) -> Task:
    """Return the task of a data set: batches in an order that depends on the seed, pixels scaled to [0, 1].

    Values instead of classes are scaled to mean 0 and standard deviation 1.
    """
    unscaled = None
    if not dataset.classes:
        scale = Scaler(dataset.train_y)
        dataset, unscaled = dataset._replace(train_y=scale(dataset.train_y), test_y=scale(dataset.test_y)), scale.back

    def batches(epoch: int) -> Iterator[Batch]:
        for x, y in data.batches(dataset, training.batch_size, seed=training.seed, epoch=epoch):
            yield _scaled(x), y

    starts = range(0, len(dataset.test_y), _EVALUATION_BATCH)
    cuts = [slice(start, start + _EVALUATION_BATCH) for start in starts]
    test = [jax.tree.map(operator.itemgetter(part), (dataset.test_x, dataset.test_y)) for part in cuts]
    return Task(
        batches=batches,
        steps_per_epoch=steps_per_epoch(len(dataset.train_y), training),
        test_batches=[(_scaled(x), y) for x, y in test],
        shape=dataset.shape,
        outputs=dataset.classes or dataset.train_y.shape[-1],
        loss=classification if dataset.classes else regression,
        measure=cross_entropy if dataset.classes else mean_squared_error,
        unscaled=unscaled,
        names=dataset.names,
    )


def steps_per_epoch(examples: int, training: Training) -> int:
    if examples < training.batch_size:
        raise ValueError(f"--batch_size {training.batch_size} is more than the {examples} training examples.")
    return examples // training.batch_size


def _scaled(x: PyTree) -> PyTree:
    """Return bytes as numbers in [0, 1], anything else unchanged."""
    return x.astype(np.float32) / np.float32(255) if getattr(x, "dtype", None) == np.uint8 else x
