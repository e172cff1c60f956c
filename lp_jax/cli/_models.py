"""Models of the command line: settings, from which a network is built for a task."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
from flax import nnx

from lp_jax import MGRIT, Picard, Serial, nn
from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._solvers._solver import Solver
from lp_jax.cli._task import Task
from lp_jax.planning import RECOMMENDED

Pair = tuple[Solver, Solver]
"""A forward and an adjoint solver."""

# A step changes the state of recurrent units too much for sweeps over all of them. Gradient errors at width 64, trained on
# BasicMotions for 240 steps: these cycles 5e-2, Picard(2) 4e-1, injection with 2/1 cycles 9e-1. On a device that is not full,
# `Newton(iterations=4, relaxations=16)` has 3e-2 at half the depth and five times the work.
CYCLES = MGRIT(levels=2, coarsening=4, iterations=1, coarse_step=Picard(sweeps=3))

_MOST_INPUTS = 65_536  # of a dense closing layer; larger states are averaged over space


class Site(NamedTuple):
    """Everything that a network is built for: its task, the solvers of its layers, and their devices."""

    task: Task
    layers: int
    t1: float
    solvers: Pair
    comm: Comm | None
    rngs: nnx.Rngs

    def trunk(self, make: Callable[[nnx.Rngs], nnx.Module], blocks: int = 1) -> nn.LayerParallel:
        """Return the layers, or those of one of several blocks."""
        solver, adjoint_solver = self.solvers
        return nn.LayerParallel(
            make,
            self.layers // blocks,
            t1=self.t1,
            solver=solver,
            adjoint_solver=adjoint_solver,
            comm=self.comm,
            rngs=self.rngs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(abc.ABC):
    """Settings of a network that do not depend on its task. The first line of a subclass's docstring is its help.

    Args:
        layers: Number of layers; null is the number of steps of the sequence.
        width: Size of the state, or number of channels.
        t1: Time at which the last layer ends; null is one unit of time per layer.
    """

    layers: int | None = 64
    width: int = 64
    t1: float | None = 2.0

    solvers: ClassVar[Pair] = RECOMMENDED
    """The best solvers measured for networks of this kind."""

    blocks: ClassVar[int] = 1
    """Number of blocks of layers, each with a solve of its own."""

    residual: ClassVar[bool] = False
    """Whether ``--model resnet`` may mean this model."""

    layer_name: ClassVar[str] = "layers"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                _check.integer(field.name, value, least=0 if field.name == "buffers" else 1)
        if self.t1 is not None and not self.t1 > 0:
            raise ValueError(f"t1 must be positive; got {self.t1}.")

    @classmethod
    def about(cls) -> str:
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @abc.abstractmethod
    def build(self, site: Site) -> nn.Classifier:
        """Return the network at its initial parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Model):
    """Dense residual layers."""

    residual: ClassVar[bool] = True

    def build(self, site: Site) -> nn.Classifier:
        return nn.Classifier(
            nn.DenseOpening(site.task.shape, self.width, rngs=site.rngs),
            site.trunk(lambda rngs: nn.DenseResidual(self.width, rngs=rngs)),
            nn.DenseClosing((self.width,), site.task.outputs, rngs=site.rngs),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Model):
    """Residual layers of two convolutions.

    Args:
        stride: Stride of the opening layer: how many times fewer points the states have along each axis.
    """

    stride: int = 1
    residual: ClassVar[bool] = True

    def build(self, site: Site) -> nn.Classifier:
        width, (*space, inputs) = self.width, site.task.shape
        kernel, state = (3,) * len(space), (*(-(-size // self.stride) for size in space), width)
        closing = nn.DenseClosing if math.prod(state) <= _MOST_INPUTS else nn.PoolClosing
        return nn.Classifier(
            nn.ConvTransition(inputs, width, kernel=kernel, factor=self.stride, rngs=site.rngs),
            site.trunk(lambda rngs: nn.ConvResidual(width, kernel=kernel, rngs=rngs)),
            closing(state, site.task.outputs, rngs=site.rngs),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooled(Model):
    """Four blocks of convolutional layers with batch norm; images are halved and channels doubled in between."""

    residual: ClassVar[bool] = True
    blocks: ClassVar[int] = 4

    def build(self, site: Site) -> nn.Classifier:
        width, (*space, inputs) = self.width, site.task.shape
        kernel = (3,) * len(space)
        parts: list[nnx.Module] = []
        for number in range(self.blocks):
            channels = width * 2**number
            if number > 0:
                parts.append(nn.ConvTransition(channels // 2, channels, kernel=kernel, norm="batch", rngs=site.rngs))

            def make(rngs: nnx.Rngs, channels: int = channels) -> nnx.Module:
                return nn.ConvResidual(channels, kernel=kernel, norm="batch", rngs=rngs)

            parts.append(site.trunk(make, self.blocks))
        return nn.Classifier(
            nn.ConvOpening(inputs, width, kernel=kernel, rngs=site.rngs),
            nn.Network(*parts),
            nn.PoolClosing((*space, channels), site.task.outputs, rngs=site.rngs),
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

    def build(self, site: Site) -> nn.Classifier:
        task, rngs, depth = site.task, site.rngs, site.layers + 2 * self.buffers

        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nn.EncoderLayer(
                self.width, self.heads, causal=task.causal, dropout=self.dropout, depth=depth, rngs=rngs
            )

        def buffer() -> nn.LayerParallel:
            return nn.LayerParallel(make, self.buffers, t1=self.buffers, solver=Serial(), rngs=rngs)

        sizes = task.sizes[0] if task.causal else task.sizes
        middle = site.trunk(make)
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

    def build(self, site: Site) -> nn.Classifier:
        gru = nn.GRU(
            site.task.shape[-1],
            self.width,
            units=self.units,
            dt=site.t1 / site.layers,
            solver=site.solvers[0],
            adjoint_solver=site.solvers[1],
            comm=site.comm,
            rngs=site.rngs,
        )
        return nn.Classifier(_unchanged, gru, LastUnit(self.width, site.task.outputs, rngs=site.rngs))


class LastUnit(nnx.Module):
    """A dense layer on the last state of the uppermost unit."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, states: tuple[jax.Array, ...]) -> jax.Array:
        return self.linear(states[-1])


def _is_token(tokens: jax.Array) -> jax.Array:
    return tokens[..., 0] > 0


def _unchanged(x: PyTree) -> PyTree:
    return x
