r"""Residual layers as steps of an ODE, :math:`y_{n+1} = y_n + \Delta t\, f(y_n)`.

Their initial parameters are those of `nnx.Linear` and `nnx.Conv`: kernels LeCun normal, biases zero. Nothing needs to
be scaled with the depth. Each layer adds ``dt`` times a term of the state's size, so ``t1`` decides how far the state
moves, and the number of layers does not. End times of 1 to 4 are usual.

References:
    He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016; Haber, Ruthotto, "Stable
    architectures for deep neural networks", Inverse Problems 34 (2018); Guenther, Ruthotto, Schroder, Cyr, Gauger,
    "Layer-parallel training of deep residual neural networks", SIAM J. Math. Data Sci. 2 (2020).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lp_jax._arrays import _check
from lp_jax.nn._convolution import same_conv


class BatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm` with all its options, running statistics in the dtype of its parameters.

    In a layer of `LayerParallel` the final sweep of the solve updates the running statistics.

    Example:
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> norm = nn.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    """

    def __init__(self, features: int, **options: Any):
        super().__init__(features, **options)
        dtype = options.get("param_dtype", jnp.float32)
        self.mean = nnx.BatchStat(jnp.zeros((features,), dtype))
        self.var = nnx.BatchStat(jnp.ones((features,), dtype))


def make_norm(
    kind: str | None, kinds: tuple[str, ...], features: int, *, groups: int = 1, **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """Return the normalisation called ``kind``, one of ``kinds``; the identity for None."""
    if kind is None:
        return nnx.identity
    _check.one_of("norm", kind, kinds, otherwise="or None")
    if kind == "layer":
        return nnx.LayerNorm(features, **options)
    if kind == "batch":
        return BatchNorm(features, momentum=0.9, **options)
    return nnx.GroupNorm(features, num_groups=groups, **options)


Activation = Callable[[jax.Array], jax.Array]


class DenseResidual(nnx.Module):
    r"""One dense layer, :math:`y + \Delta t\, \sigma(W y + b)`, or with a hidden layer.

    With ``hidden``, its size: :math:`y + \Delta t\, (W_2\, \sigma(W_1 y + b_1) + b_2)`. With ``norm`` the right-hand side sees
    the normalised state: "layer" (over its last axis) or "batch" (over all other axes, see `BatchNorm`). Called as
    ``layer(y, t, dt)``, ``y`` of shape ``(..., width)``; ``activation`` is the elementwise :math:`\sigma`.

    Raises:
        ValueError: if ``norm`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.DenseResidual(8, hidden=16, norm="layer", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((4, 8), "float32"), 0.0, 0.1).shape
        (4, 8)
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int | None = None,
        activation: Activation = nnx.tanh,
        norm: str | None = None,
        dtype: DTypeLike | None = None,
        **options: Any,
    ):
        self.norm = make_norm(norm, ("layer", "batch"), width, **options)
        self.inner = nnx.Linear(width, width if hidden is None else hidden, dtype=dtype, **options)
        self.outer = nnx.identity if hidden is None else nnx.Linear(hidden, width, dtype=dtype, **options)
        self.activation, self.dtype = activation, dtype

    def __call__(self, y: jax.Array, t: jax.Array, dt: jax.Array) -> jax.Array:
        """Return the state at ``t + dt``. The right-hand side does not depend on ``t``."""
        return y + dt * _to_dtype_of(self.outer(self.activation(self.inner(self.norm(y)))), y, self.dtype)


class ConvResidual(nnx.Module):
    r"""One convolutional layer, :math:`y + \Delta t\, \sigma(K_2 * \sigma(K_1 * y + b_1) + b_2)`.

    The convolutions keep the size of the image (stride 1, zeros around it). Called as ``layer(y, t, dt)``, ``y`` of shape
    ``(batch, *space, channels)``.

    Args:
        channels: number of channels of the state.
        kernel: size of the kernel, one number for each axis of space.
        activation: elementwise function :math:`\sigma`.
        norm: normalises the result of each convolution: None, "layer" (over the channels of each point), "group" (over all
            points of one of ``groups`` groups of channels) or "batch" (over all points of all examples, see `BatchNorm`).
        groups: number of groups of channels, which must divide ``channels``.

    Raises:
        ValueError: if ``norm`` is unknown, or the groups do not divide the channels.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.ConvResidual(4, kernel=(3, 3, 3), norm="group", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 8, 8, 4), "float32"), 0.0, 0.1).shape
        (2, 8, 8, 8, 4)
    """

    def __init__(
        self,
        channels: int,
        *,
        kernel: Sequence[int] = (3, 3),
        activation: Activation = nnx.relu,
        norm: str | None = None,
        groups: int = 1,
        dtype: DTypeLike | None = None,
        **options: Any,
    ):
        conv = functools.partial(same_conv, channels, channels, kernel, dtype=dtype, **options)
        normal = functools.partial(make_norm, norm, _KINDS, channels, groups=groups, **options)
        self.conv1, self.norm1 = conv(), normal()
        self.conv2, self.norm2 = conv(), normal()
        self.activation, self.dtype = activation, dtype

    def __call__(self, y: jax.Array, t: jax.Array, dt: jax.Array) -> jax.Array:
        """Return the state at ``t + dt``. The right-hand side does not depend on ``t``."""
        hidden = self.activation(self.norm1(self.conv1(y)))
        return y + dt * _to_dtype_of(self.activation(self.norm2(self.conv2(hidden))), y, self.dtype)


def _to_dtype_of(x: jax.Array, y: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Return ``x`` in the dtype of the state ``y`` if products have a dtype of their own. Other differences are mistakes."""
    return x if dtype is None else x.astype(y.dtype)


_KINDS = ("layer", "group", "batch")  # of norms


class ConvTransition(nnx.Module):
    """Convolution at every ``factor``-th point, from ``(batch, *space, inputs)`` to ``(batch, *space / factor, channels)``.

    Computes ``activation(norm(K * y + b))``. ``kernel`` is the size of K, one number for each axis of space; ``norm`` is None,
    "layer", "group" or "batch", as for `ConvResidual`. Pool with a function between the blocks of a `Network`.

    Raises:
        ValueError: if ``norm`` is unknown, or ``factor`` is below 1.
    """

    def __init__(
        self,
        inputs: int,
        channels: int,
        *,
        kernel: Sequence[int] = (3, 3),
        factor: int = 2,
        norm: str | None = None,
        activation: Activation = nnx.relu,
        **options: Any,
    ):
        _check.integer("factor", factor, least=1)
        self.conv = nnx.Conv(inputs, channels, tuple(kernel), factor, **options)
        self.norm = make_norm(norm, _KINDS, channels, **options)
        self.activation = activation

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the state that enters the next block."""
        return self.activation(self.norm(self.conv(y)))
