"""The layer between two blocks: fewer points in space, more channels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax import _check
from lp_jax.nn._norm import make_norm
from lp_jax.nn._residual import Activation

_POOLS = ("max", "mean", "stride")


class ConvTransition(nnx.Module):
    """Convolution and pooling, from ``(batch, *space, inputs)`` to ``(batch, *space / factor, channels)``.

    Computes ``activation(norm(K * y + b))`` and pools windows of ``factor`` points along each axis. With "stride" the
    convolution is evaluated at every ``factor``-th point only.

    Args:
        inputs: number of channels of the state before.
        channels: number of channels of the state after.
        kernel: size of the kernel, one number for each axis of space.
        factor: number of points along each axis that become one.
        pool: "max", "mean" or "stride".
        norm: None, "layer", "group" or "batch", as for `ConvResidual`.
        activation: elementwise function.
        param_dtype: dtype of the parameters; that of the state.
        rngs: source of the initial parameters.

    Raises:
        ValueError: if ``pool`` or ``norm`` is unknown, or ``factor`` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> transition = nn.ConvTransition(4, 8, pool="max", rngs=nnx.Rngs(0))
        >>> transition(jnp.ones((2, 28, 28, 4), "float32")).shape
        (2, 14, 14, 8)
    """

    def __init__(
        self,
        inputs: int,
        channels: int,
        *,
        kernel: Sequence[int] = (3, 3),
        factor: int = 2,
        pool: str = "stride",
        norm: str | None = None,
        activation: Activation = nnx.relu,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check.one_of("pool", pool, _POOLS)
        _check.integer("factor", factor, least=1)
        strides = factor if pool == "stride" else 1
        self.conv = nnx.Conv(inputs, channels, tuple(kernel), strides, param_dtype=param_dtype, rngs=rngs)
        self.norm = make_norm(norm, ("layer", "group", "batch"), channels, 1, param_dtype, rngs)
        self.activation = activation
        self.pool = pool
        self.window = (factor,) * len(tuple(kernel))

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the state that enters the next block."""
        y = self.activation(self.norm(self.conv(y)))
        if self.pool == "stride":
            return y
        pool: Any = nnx.max_pool if self.pool == "max" else nnx.avg_pool
        pooled: jax.Array = pool(y, self.window, self.window)
        return pooled
