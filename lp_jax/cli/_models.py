"""From the name of a model to a network for a task."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from lp_jax import Serial, nn
from lp_jax._solver import Solver
from lp_jax.cli._settings import Settings
from lp_jax.cli._tasks import Task

_MOST_INPUTS = 65_536  # of a dense closing layer; larger states are averaged over space


def model(settings: Settings, task: Task, solvers: tuple[Solver, Solver], comm: Any) -> nn.Classifier:
    """The network, at its initial parameters.

    Args:
        settings: what is trained.
        task: what it is trained on.
        solvers: forward and adjoint.
        comm: where its layers live.
    """
    return _MODELS[settings.model](_Site(settings, task, solvers, comm, nnx.Rngs(settings.seed)))


class _Site(NamedTuple):
    """Where a network is built."""

    settings: Settings
    task: Task
    solvers: tuple[Solver, Solver]
    comm: Any
    rngs: nnx.Rngs

    def trunk(self, make: Callable[[nnx.Rngs], nnx.Module], layers: int) -> nn.LayerParallel:
        solver, adjoint_solver = self.solvers
        return nn.LayerParallel(
            make,
            layers,
            t1=self.settings.t1,
            solver=solver,
            adjoint_solver=adjoint_solver,
            comm=self.comm,
            rngs=self.rngs,
        )


def _dense(site: _Site) -> nn.Classifier:
    settings, task, rngs = site.settings, site.task, site.rngs
    width = settings.width
    return nn.Classifier(
        nn.DenseOpening(task.shape, width, rngs=rngs),
        site.trunk(lambda rngs: nn.DenseResidual(width, rngs=rngs), settings.layers),
        nn.DenseClosing((width,), task.classes, rngs=rngs),
    )


def _conv(site: _Site) -> nn.Classifier:
    settings, task, rngs = site.settings, site.task, site.rngs
    width, (*space, inputs) = settings.width, task.shape
    kernel, state = (3,) * len(space), (*(-(-size // settings.stride) for size in space), width)
    closing = nn.DenseClosing if math.prod(state) <= _MOST_INPUTS else nn.PoolClosing
    return nn.Classifier(
        nn.ConvTransition(inputs, width, kernel=kernel, factor=settings.stride, rngs=rngs),
        site.trunk(lambda rngs: nn.ConvResidual(width, kernel=kernel, rngs=rngs), settings.layers),
        closing(state, task.classes, rngs=rngs),
    )


def _pooled(site: _Site) -> nn.Classifier:
    settings, task, rngs = site.settings, site.task, site.rngs
    width, (*space, inputs) = settings.width, task.shape
    kernel = (3,) * len(space)
    parts: list[Any] = []
    for number in range(settings.blocks):
        channels = width * 2**number
        if number > 0:
            parts.append(nn.ConvTransition(channels // 2, channels, kernel=kernel, norm="batch", rngs=rngs))

        def make(rngs: nnx.Rngs, channels: int = channels) -> nnx.Module:
            return nn.ConvResidual(channels, kernel=kernel, norm="batch", rngs=rngs)

        parts.append(site.trunk(make, settings.layers // settings.blocks))
    return nn.Classifier(
        nn.ConvOpening(inputs, width, kernel=kernel, rngs=rngs),
        nn.Network(*parts),
        nn.PoolClosing((*space, channels), task.classes, rngs=rngs),
    )


def _transformer(site: _Site) -> nn.Classifier:
    settings, task, rngs = site.settings, site.task, site.rngs
    width, depth = settings.width, settings.layers + 2 * settings.buffers

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.EncoderLayer(
            width, settings.heads, causal=task.causal, dropout=settings.dropout, depth=depth, rngs=rngs
        )

    def buffer() -> nn.LayerParallel:
        return nn.LayerParallel(make, settings.buffers, t1=settings.buffers, solver=Serial(), rngs=rngs)

    sizes = task.sizes[0] if task.causal else task.sizes
    middle = site.trunk(make, settings.layers)
    return nn.Classifier(
        nn.TokenOpening(sizes, width, max_length=task.length, rngs=rngs),
        nn.Network(buffer(), middle, buffer()) if settings.buffers else middle,
        nn.TokenClosing(width, task.classes, rngs=rngs),
        context=None if task.causal else _is_token,
    )


def _is_token(tokens: jax.Array) -> jax.Array:
    """Where there is no padding."""
    return tokens[..., 0] > 0


def _gru(site: _Site) -> nn.Classifier:
    settings, task, rngs = site.settings, site.task, site.rngs
    gru = nn.GRU(
        task.shape[-1],
        settings.width,
        units=settings.units,
        dt=settings.t1 / settings.layers,
        solver=site.solvers[0],
        adjoint_solver=site.solvers[1],
        comm=site.comm,
        rngs=rngs,
    )
    return nn.Classifier(_as_it_is, gru, LastUnit(settings.width, task.classes, rngs=rngs))


def _as_it_is(x: Any) -> Any:
    return x


class LastUnit(nnx.Module):
    """A dense layer on the last state of the uppermost unit."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, states: tuple[jax.Array, ...]) -> jax.Array:
        """The logits."""
        return self.linear(states[-1])


_MODELS: dict[str, Callable[..., nn.Classifier]] = {
    "dense": _dense,
    "conv": _conv,
    "pooled": _pooled,
    "transformer": _transformer,
    "gru": _gru,
}
