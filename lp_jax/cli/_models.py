"""Tasks, and the models that learn them: settings, from which a network is built for a task."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from sklearn.preprocessing import StandardScaler

from lp_jax import MGRIT, Picard, Serial, data, nn, train
from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._default import SWEEPS, Pair
from lp_jax.cli._errors import UsageError
from lp_jax.cli._launch import unchanged
from lp_jax.train._supervised import Measure
from lp_jax.train._types import Batch, LossFn

Predict = Callable[[PyTree], np.ndarray]
"""A function from a batch of inputs to outputs."""


class Scaler:
    """Scales channels, the last axis, to the mean 0 and standard deviation 1 of ``values``, as float32, and back."""

    def __init__(self, values: np.ndarray):
        self._scaler = StandardScaler().fit(_rows(values))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        scaled = self._scaler.transform(_rows(values)).reshape(values.shape)
        if not (fine := np.abs(scaled) < float(np.finfo(np.float32).max)).all():
            at = np.argwhere(~fine)[0].tolist()
            raise data.DataError(
                f"after scaling by the training samples: the data holds {scaled[*at]} at {at}; wanted finite numbers below 3e+38."
            )
        return scaled.astype(np.float32)

    def back(self, scaled: np.ndarray) -> np.ndarray:
        return self._scaler.inverse_transform(_rows(scaled)).reshape(scaled.shape)


def _rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1]).astype(np.float64)


def check_sizes(settings: Any) -> None:
    """Refuse settings of a model or a training that are not positive, or too large for arrays of JAX."""
    for name, value in vars(settings).items():
        if name == "dropout":
            if not 0 <= value < 1:
                raise ValueError(f"dropout must be at least 0 and less than 1; got {value}.")
        elif isinstance(value, int):
            _check.integer(name, value, least=0 if name in ("seed", "buffers") else 1)
            if value >= 2**31:
                raise ValueError(f"{name} must be at most {2**31 - 1}; got {value}.")
        elif value is not None and not 0 < value < math.inf:
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
        check_sizes(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Data as batches ``(x, labels)`` or ``(x, values)``, and the sizes that a network for them needs."""

    batches: Callable[[int], Iterable[Batch]]  # training batches of an epoch
    steps_per_epoch: int  # number of batches of an epoch
    test_batches: list[Batch]  # the test set
    shape: tuple[
        int, ...
    ]  # shape of one input, without the batch: of an image, a point, or one time of a sequence
    outputs: int  # number of classes, or of values
    # from a model to its loss and parameters, and the same loss of outputs and targets
    loss: Callable[[nn.Classifier], tuple[LossFn, PyTree]] = train.classification
    measure: Measure = train.cross_entropy
    # turns outputs into the units of the file, for values
    unscaled: Callable[[np.ndarray], np.ndarray] | None = None
    about: str = ""  # a line on the data
    names: tuple[str, ...] = ()  # names of the classes; empty where they are numbers
    length: int = 0  # largest number of positions of a sequence; 0 for other inputs
    sizes: tuple[
        int, ...
    ] = ()  # number of values of each of the numbers that describe a token; empty for other inputs
    causal: bool = False  # whether a position sees only itself and earlier ones
    # writes a few answers as text; None shows nothing
    samples: Callable[[Predict], str] | None = None


def task_of(dataset: data.Dataset, training: Training) -> Task:
    """Return the task of a data set: pixels are scaled to [0, 1], values to mean 0 and standard deviation 1."""
    unscaled = None
    if not dataset.classes:
        scale = Scaler(dataset.train_y)
        dataset = dataset._replace(train_y=scale(dataset.train_y), test_y=scale(dataset.test_y))
        unscaled = scale.back

    def batches(epoch: int) -> Iterator[Batch]:
        for x, y in data.batches(dataset, training.batch_size, seed=training.seed, epoch=epoch):
            yield _scaled(x), y

    cuts = [slice(i, i + 500) for i in range(0, len(dataset.test_y), 500)]
    return Task(
        batches=batches,
        steps_per_epoch=steps_per_epoch(len(dataset.train_y), training),
        test_batches=[
            (_scaled(jax.tree.map(itemgetter(i), dataset.test_x)), dataset.test_y[i]) for i in cuts
        ],
        shape=dataset.shape,
        outputs=dataset.classes or dataset.train_y.shape[-1],
        loss=train.classification if dataset.classes else train.regression,
        measure=train.cross_entropy if dataset.classes else train.mean_squared_error,
        unscaled=unscaled,
        names=dataset.names,
    )


def steps_per_epoch(examples: int, training: Training) -> int:
    if examples < training.batch_size:
        raise ValueError(
            f"--batch_size {training.batch_size} is more than the {examples} training examples."
        )
    return examples // training.batch_size


def _scaled(x: PyTree) -> PyTree:
    """Return bytes as numbers in [0, 1], anything else unchanged."""
    return x.astype(np.float32) / np.float32(255) if getattr(x, "dtype", None) == np.uint8 else x


# A step changes the state of recurrent units too much for sweeps over all of them. Gradient errors at width 64, trained on
# BasicMotions for 240 steps: these cycles 5e-2, Picard(2) 4e-1, injection with 2/1 cycles 9e-1. On a device that is not full,
# `Newton(iterations=4, relaxations=16)` has 3e-2 at half the depth and five times the work.
CYCLES = MGRIT(levels=2, coarsening=4, iterations=1, coarse_step=Picard(sweeps=3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(abc.ABC):
    """Settings of a network. The first line of a subclass's docstring is its help.

    Args:
        layers: Number of layers; null is the number of steps of the sequence.
        width: Size of the state, or number of channels.
        t1: Time at which the last layer ends; null is one unit of time per layer.
    """

    layers: int | None = 64
    width: int = 64
    t1: float | None = 2.0

    solvers: ClassVar[Pair] = SWEEPS  # the best ones measured for networks of this kind
    layer_name: ClassVar[str] = "layers"

    @property
    def dropout(self) -> float:
        return 0.0

    def __post_init__(self) -> None:
        check_sizes(self)

    @classmethod
    def about(cls) -> str:
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @abc.abstractmethod
    def build(self, task: Task, layers: int, rngs: nnx.Rngs, **trunk: Any) -> nn.Classifier:
        """Return the network for a task; ``trunk`` are ``t1``, ``solver``, ``adjoint_solver`` and ``comm`` of the layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Model):
    """Dense residual layers."""

    def build(self, task: Task, layers: int, rngs: nnx.Rngs, **trunk: Any) -> nn.Classifier:
        return nn.Classifier(
            nn.DenseOpening(task.shape, self.width, rngs=rngs),
            nn.LayerParallel(
                lambda rngs: nn.DenseResidual(self.width, rngs=rngs),
                layers,
                rngs=rngs,
                **trunk,
            ),
            nn.DenseClosing((self.width,), task.outputs, rngs=rngs),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Model):
    """Residual layers of two convolutions.

    Args:
        stride: Stride of the opening layer: how many times fewer points the states have along each axis.
    """

    stride: int = 1

    def build(self, task: Task, layers: int, rngs: nnx.Rngs, **trunk: Any) -> nn.Classifier:
        if len(task.shape) < 2:
            wanted = "inputs of shape (..., height, width, channels)"
            raise UsageError(f"--model conv needs {wanted}; these have shape {task.shape}.")
        width = self.width
        *space, inputs = task.shape
        kernel = (3,) * len(space)
        state = (*(-(-size // self.stride) for size in space), width)
        # large states are averaged over space
        closing = nn.DenseClosing if math.prod(state) <= 2**16 else nn.PoolClosing
        return nn.Classifier(
            nn.ConvTransition(inputs, width, kernel=kernel, factor=self.stride, rngs=rngs),
            nn.LayerParallel(
                lambda rngs: nn.ConvResidual(width, kernel=kernel, rngs=rngs),
                layers,
                rngs=rngs,
                **trunk,
            ),
            closing(state, task.outputs, rngs=rngs),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(Model):
    """Layers of self-attention and a dense network, causal for text.

    Args:
        heads: Number of attention heads.
        buffers: Number of serial layers before and after those that are solved in parallel.
        dropout: Dropout rate.
    """

    heads: int = 4
    buffers: int = 0
    dropout: float = 0.0

    def build(self, task: Task, layers: int, rngs: nnx.Rngs, **trunk: Any) -> nn.Classifier:
        depth = layers + 2 * self.buffers

        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nn.EncoderLayer(
                self.width,
                self.heads,
                causal=task.causal,
                dropout=self.dropout,
                depth=depth,
                rngs=rngs,
            )

        def buffer() -> nn.LayerParallel:
            return nn.LayerParallel(make, self.buffers, t1=self.buffers, solver=Serial(), rngs=rngs)

        sizes = task.sizes[0] if task.causal else task.sizes
        middle = nn.LayerParallel(make, layers, rngs=rngs, **trunk)
        return nn.Classifier(
            nn.TokenOpening(sizes, self.width, max_length=task.length, rngs=rngs),
            nn.Network(buffer(), middle, buffer()) if self.buffers else middle,
            nn.TokenClosing(self.width, task.outputs, rngs=rngs),
            context=None if task.causal else _is_token,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRU(Model):
    """Gated recurrent units; the steps of the sequence are the layers.

    Args:
        units: Number of recurrent units on top of each other.
    """

    units: int = 1
    solvers: ClassVar[Pair] = (CYCLES, CYCLES)
    layer_name: ClassVar[str] = "steps"

    def build(self, task: Task, layers: int, rngs: nnx.Rngs, **trunk: Any) -> nn.Classifier:
        dt = trunk.pop("t1") / layers
        gru = nn.GRU(task.shape[-1], self.width, units=self.units, dt=dt, rngs=rngs, **trunk)
        uppermost = nnx.Sequential(itemgetter(-1), nnx.Linear(self.width, task.outputs, rngs=rngs))
        return nn.Classifier(unchanged, gru, uppermost)


def _is_token(tokens: jax.Array) -> jax.Array:
    return tokens[..., 0] > 0
