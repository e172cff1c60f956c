"""Normalisation layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax import _check


class BatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm`, with running statistics in the dtype of its parameters.

    In a layer of `LayerParallel` it normalises by the mean and variance of the batch, and the final sweep of the solve
    updates the running statistics. After ``model.eval()`` it normalises by the running statistics.

    Args:
        features: size of the last axis.
        **options: all others of `nnx.BatchNorm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> norm = nn.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        >>> norm(jnp.ones((8, 3), "float32")).shape
        (8, 3)
    """

    def __init__(self, features: int, **options: Any):
        super().__init__(features, **options)
        dtype = options.get("param_dtype", jnp.float32)
        self.mean = nnx.BatchStat(jnp.zeros((features,), dtype))
        self.var = nnx.BatchStat(jnp.ones((features,), dtype))


def make_norm(
    kind: str | None, kinds: tuple[str, ...], features: int, groups: int, param_dtype: Any, rngs: nnx.Rngs
) -> Callable[[jax.Array], jax.Array]:
    """Return the normalisation called ``kind``, one of ``kinds``; the identity for None."""
    if kind is None:
        return nnx.identity
    _check.one_of("norm", kind, kinds, otherwise="or None")
    if kind == "layer":
        return nnx.LayerNorm(features, param_dtype=param_dtype, rngs=rngs)
    if kind == "batch":
        return BatchNorm(features, momentum=0.9, param_dtype=param_dtype, rngs=rngs)
    return nnx.GroupNorm(features, num_groups=groups, param_dtype=param_dtype, rngs=rngs)
