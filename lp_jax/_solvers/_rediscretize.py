"""Rediscretization: one step with a stretched dt replaces the layers of an interval."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import PyTree, Slices, Stacked
from lp_jax._comms._workers import select
from lp_jax._levels._chain import Chain
from lp_jax._solvers._coarse_step import Coarse, CoarseStep


@register()
@dataclasses.dataclass(frozen=True)
class Rediscretize(CoarseStep):
    """The field's standard coarse step: the user's own step, once per interval, with the interval's whole dt.

    It needs a step that is a one-step method of an ODE, so that dt can be stretched, and costs one evaluation.

    Args:
        params: parameters of the coarse step. "inject": those of the interval's first layer; "mean": the mean over its
            layers; or a pure function of the interval's stacked parameters (leaves ``(k, ...)``, k the number of fine
            layers) that returns one layer's. Per-layer ``data`` follow the same rule: injected, or averaged where they
            are floating point; a function applies to parameters only and data are injected.

    Raises:
        ValueError: for an unknown ``params``.

    Example:
        >>> import lp_jax
        >>> lp_jax.MGRIT(coarse_step=lp_jax.Rediscretize(params="mean")).coarse_step
        Rediscretize(params='mean')
    """

    params: str | Callable[[PyTree], PyTree] = "inject"

    def __post_init__(self) -> None:
        if not callable(self.params):
            _check.one_of("params", self.params, ("inject", "mean"), otherwise="or a function")

    @property
    def stretches_dt(self) -> bool:
        return True

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        slices = chain.slices
        if callable(self.params):
            params = _per_interval(self.params, slices.params, chain, span)
            data = _inject(slices.data, span)
        elif self.params == "mean":
            weights = _weights(chain, span)
            params, data = (_mean(tree, weights, span) for tree in (slices.params, slices.data))
        else:
            params, data = (_inject(tree, span) for tree in (slices.params, slices.data))
        coarse = Slices(
            params=params,
            data=data,
            t=slices.t[::span],
            dt=jnp.sum(_tree.split(slices.dt, span), axis=1),
            index=slices.index[::span],
        )
        return Coarse(chain.step(level), coarse)


def _inject(tree: Stacked, span: int) -> Stacked:
    """The first entry of each group of ``span``."""
    return jax.tree.map(lambda x: x[::span], _tree.with_fresh_keys(tree))


def _weights(chain: Chain, span: int) -> jax.Array:
    """Weights ``(groups, span)`` of the layers in the mean over their group."""
    real = (chain.slices.index < chain.layers).astype(chain.slices.dt.dtype)
    groups = _tree.split(real, span)
    return groups / jnp.maximum(1, jnp.sum(groups, axis=1, keepdims=True))


def _mean(tree: Stacked, weights: jax.Array, span: int) -> Stacked:
    """Mean over each group of layers; integers and keys are injected."""

    def leaf(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[::span]
        groups = _tree.split(x, span)  # a product, as XLA's sum over such an axis is slow on a CPU
        return jnp.einsum("gs,gs...->g...", weights.astype(x.dtype), groups, precision="highest")

    return jax.tree.map(leaf, tree)


def _per_interval(rule: Callable[[PyTree], PyTree], params: Stacked, chain: Chain, span: int) -> Stacked:
    """Apply ``rule`` to every interval, without padding where the last interval is short."""
    values = jax.vmap(rule)(_tree.split(params, span))
    if chain.total % span == 0 or chain.steps == 0:
        return values
    here, at = chain.workers.end(1, chain.steps)
    last = at // span
    short = rule(jax.tree.map(lambda x: x[last * span : at + 1], params))
    return _tree.put(values, select(here, short, _tree.take(values, last)), last)
