"""Models of the command line: settings, from which a network is built for a task."""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
from flax import nnx

from lp_jax import MGRIT, Picard, Serial, nn
from lp_jax._solvers._default import SWEEPS
from lp_jax._solvers._solver import Solver
from lp_jax.cli._errors import UsageError
from lp_jax.cli._launch import unchanged
from lp_jax.cli._task import Task, check_size

Pair = tuple[Solver, Solver]
"""A forward and an adjoint solver."""

# A step changes the state of recurrent units too much for sweeps over all of them. Gradient errors at width 64, trained on
# BasicMotions for 240 steps: these cycles 5e-2, Picard(2) 4e-1, injection with 2/1 cycles 9e-1. On a device that is not full,
# `Newton(iterations=4, relaxations=16)` has 3e-2 at half the depth and five times the work.
CYCLES = MGRIT(levels=2, coarsening=4, iterations=1, coarse_step=Picard(sweeps=3))

_MOST_INPUTS = 65_536  # of a dense closing layer; larger states are averaged over space


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
        """Dropout rate."""
        return 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_size(field.name, getattr(self, field.name))

    @classmethod
    def about(cls) -> str:
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @abc.abstractmethod
    def build(self, task: Task, layers: int, t1: float, rngs: nnx.Rngs, **solve: Any) -> nn.Classifier:
        """Return the network for a task; ``solve`` are ``solver``, ``adjoint_solver`` and ``comm`` of the layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Model):
    """Dense residual layers."""

    def build(self, task: Task, layers: int, t1: float, rngs: nnx.Rngs, **solve: Any) -> nn.Classifier:
        return nn.Classifier(
            nn.DenseOpening(task.shape, self.width, rngs=rngs),
            nn.LayerParallel(lambda rngs: nn.DenseResidual(self.width, rngs=rngs), layers, t1=t1, rngs=rngs, **solve),
            nn.DenseClosing((self.width,), task.outputs, rngs=rngs),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Model):
    """Residual layers of two convolutions.

    Args:
        stride: Stride of the opening layer: how many times fewer points the states have along each axis.
    """

    stride: int = 1

    def build(self, task: Task, layers: int, t1: float, rngs: nnx.Rngs, **solve: Any) -> nn.Classifier:
        if len(task.shape) < 2:
            wanted = "inputs of shape (..., height, width, channels)"
            raise UsageError(f"--model conv needs {wanted}; these have shape {task.shape}.")
        width, (*space, inputs) = self.width, task.shape
        kernel, state = (3,) * len(space), (*(-(-size // self.stride) for size in space), width)
        closing = nn.DenseClosing if math.prod(state) <= _MOST_INPUTS else nn.PoolClosing
        return nn.Classifier(
            nn.ConvTransition(inputs, width, kernel=kernel, factor=self.stride, rngs=rngs),
            nn.LayerParallel(
                lambda rngs: nn.ConvResidual(width, kernel=kernel, rngs=rngs), layers, t1=t1, rngs=rngs, **solve
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1; got {self.dropout}.")

    def build(self, task: Task, layers: int, t1: float, rngs: nnx.Rngs, **solve: Any) -> nn.Classifier:
        depth = layers + 2 * self.buffers

        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nn.EncoderLayer(
                self.width, self.heads, causal=task.causal, dropout=self.dropout, depth=depth, rngs=rngs
            )

        def buffer() -> nn.LayerParallel:
            return nn.LayerParallel(make, self.buffers, t1=self.buffers, solver=Serial(), rngs=rngs)

        sizes = task.sizes[0] if task.causal else task.sizes
        middle = nn.LayerParallel(make, layers, t1=t1, rngs=rngs, **solve)
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

    def build(self, task: Task, layers: int, t1: float, rngs: nnx.Rngs, **solve: Any) -> nn.Classifier:
        gru = nn.GRU(task.shape[-1], self.width, units=self.units, dt=t1 / layers, rngs=rngs, **solve)
        return nn.Classifier(unchanged, gru, LastUnit(self.width, task.outputs, rngs=rngs))


class LastUnit(nnx.Module):
    """A dense layer on the last state of the uppermost unit."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, states: tuple[jax.Array, ...]) -> jax.Array:
        return self.linear(states[-1])


def _is_token(tokens: jax.Array) -> jax.Array:
    return tokens[..., 0] > 0
