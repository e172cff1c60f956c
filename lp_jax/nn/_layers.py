r"""Residual, opening and closing layers.

Residual layers are steps of an ODE, :math:`y_{n+1} = y_n + \Delta t\, f(y_n)`.

Their initial parameters are those of `nnx.Linear` and `nnx.Conv`: kernels LeCun normal, biases zero. Nothing needs to
be scaled with the depth. Each layer adds ``dt`` times a term of the state's size, so ``t1`` decides how far the state
moves, and the number of layers does not. End times of 1 to 4 are usual.

References:
    He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016; Haber, Ruthotto, "Stable
    architectures for deep neural networks", Inverse Problems 34 (2018); Guenther, Ruthotto, Schroder, Cyr, Gauger,
    "Layer-parallel training of deep residual neural networks", SIAM J. Math. Data Sci. 2 (2020).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    """Return the normalisation called ``kind``; the identity for None."""
    if kind is None:
        return nnx.identity
    _check.one_of("norm", kind, kinds, otherwise="or None")
    if kind == "layer":
        return nnx.LayerNorm(features, **options)
    if kind == "batch":
        return BatchNorm(features, momentum=0.9, **options)
    return nnx.GroupNorm(features, num_groups=groups, **options)


Activation = Callable[[jax.Array], jax.Array]
CONV_NORMS = ("layer", "group", "batch")


class DenseResidual(nnx.Module):
    r"""One dense layer, :math:`y + \Delta t\, \sigma(W y + b)`, or with a hidden layer.

    With ``hidden``, its size: :math:`y + \Delta t\, (W_2\, \sigma(W_1 y + b_1) + b_2)`. With ``norm`` the right-hand side sees
    the normalised state: "layer" (over its last axis) or "batch" (over all other axes, see `BatchNorm`). ``y`` is
    ``(..., width)``; ``activation`` is the elementwise :math:`\sigma`.

    Raises:
        ValueError: if ``norm`` is unknown.
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

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=dtype, **options)

        self.norm = make_norm(norm, ("layer", "batch"), width, **options)
        self.inner = linear(width, width if hidden is None else hidden)
        self.outer = nnx.identity if hidden is None else linear(hidden, width)
        self.activation = activation

    def __call__(self, y: jax.Array, t: jax.Array, dt: jax.Array) -> jax.Array:
        # With a dtype of products other than the state's, the term is cast back,
        # so that every layer returns the dtype that it got.
        f = self.outer(self.activation(self.inner(self.norm(y))))
        return y + dt * f.astype(y.dtype)


class ConvResidual(nnx.Module):
    r"""Two convolutions of stride 1, :math:`y + \Delta t\, \sigma(K_2 * \sigma(K_1 * y + b_1) + b_2)`.

    ``y`` is ``(batch, *space, channels)``, and ``kernel`` the size of K, one number for each axis of space. ``norm`` normalises
    the result of each convolution: None, "layer" (over the channels of each point), "group" (over all points of one of
    ``groups`` groups of channels) or "batch" (over all points of all examples, see `BatchNorm`).

    Raises:
        ValueError: if ``norm`` is unknown, or the groups do not divide the channels.
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
        normal = functools.partial(make_norm, norm, CONV_NORMS, channels, groups=groups, **options)
        self.conv1 = conv()
        self.norm1 = normal()
        self.conv2 = conv()
        self.norm2 = normal()
        self.activation = activation

    def __call__(self, y: jax.Array, t: jax.Array, dt: jax.Array) -> jax.Array:
        # The shapes stay (batch, *space, channels) all through.
        hidden = self.activation(self.norm1(self.conv1(y)))
        f = self.activation(self.norm2(self.conv2(hidden)))
        return y + dt * f.astype(y.dtype)


class ConvTransition(nnx.Module):
    """``activation(norm(K * y + b))`` at every ``factor``-th point, to a state of ``(batch, *space / factor, channels)``.

    ``kernel`` and ``norm`` are as for `ConvResidual`. Pool with a function between the blocks of a `Network`.

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
        self.norm = make_norm(norm, CONV_NORMS, channels, **options)
        self.activation = activation

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.activation(self.norm(self.conv(y)))


class DenseOpening(nnx.Module):
    """Dense opening layer, ``activation(W x + b)`` of the flattened input, ``(..., *shape)`` to ``(..., width)``.

    Raises:
        ValueError: when called, if the input has another shape.
    """

    def __init__(
        self, shape: Sequence[int], width: int, *, activation: Activation = nnx.tanh, **options: Any
    ):
        self.shape = tuple(shape)
        self.linear = nnx.Linear(math.prod(self.shape), width, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.linear(_flatten(x, self.shape)))


class ConvOpening(nnx.Module):
    """Convolutional opening layer, ``activation(K * x + b)``, ``(batch, *space, inputs)`` to ``(batch, *space, channels)``.

    ``kernel`` is the size of K, one number for each axis of space.
    """

    def __init__(
        self,
        inputs: int,
        channels: int,
        *,
        kernel: Sequence[int] = (3, 3),
        activation: Activation = nnx.relu,
        **options: Any,
    ):
        self.conv = same_conv(inputs, channels, kernel, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.conv(x))


class DenseClosing(nnx.Module):
    """Dense closing layers, from the flattened state, ``(..., *shape)``, to logits, ``(..., classes)``.

    ``hidden`` is the size of a hidden layer with the elementwise ``activation``; None for one dense layer without it.

    Raises:
        ValueError: when called, if the state has another shape.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        hidden: int | None = None,
        activation: Activation = nnx.relu,
        **options: Any,
    ):
        self.shape = tuple(shape)
        width = math.prod(self.shape)
        sizes = (width, classes) if hidden is None else (width, hidden, classes)
        self.layers = nnx.List([nnx.Linear(m, n, **options) for m, n in itertools.pairwise(sizes)])
        self.activation = activation

    def __call__(self, y: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        x = _flatten(y, self.shape)
        for linear in hidden:
            x = self.activation(linear(x))
        return last(x)


class PoolClosing(nnx.Module):
    """Mean over space and a dense layer, from ``(..., *space, channels)`` to logits, ``(..., classes)``.

    ``shape`` is ``(*space, channels)``; a call may have other sizes of space.
    """

    def __init__(self, shape: Sequence[int], classes: int, **options: Any):
        *space, channels = shape
        # The axes count from the end, so that any number of batch axes may lead.
        self.space = tuple(range(-1 - len(space), -1))
        self.linear = nnx.Linear(channels, classes, **options)

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.linear(jnp.mean(y, axis=self.space))


def _flatten(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return ``(..., *shape)`` as ``(..., size)``; refuse arrays of another shape."""
    batch = x.ndim - len(shape)
    if x.shape[max(batch, 0) :] != shape:
        wanted = ", ".join(["...", *map(str, shape)])
        raise ValueError(
            f"The layer was built with shape={shape}, for arrays of shape ({wanted}); got "
            f"{x.shape}."
        )
    return jnp.reshape(x, (*x.shape[:batch], math.prod(shape)))


class TokenOpening(nnx.Module):
    """Sum of the embeddings of tokens and positions, from ``(batch, length)`` integers to ``(batch, length, width)``.

    Several integers may describe a token (a word and its ending, for example): ``(batch, length, columns)``. Each column
    has an embedding. ``sizes`` is the number of different values, or a sequence of one for each column.

    Raises:
        ValueError: when called, if there are more than ``max_length`` positions, or another number of columns.
        TypeError: when called, if the tokens are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> opening = nn.TokenOpening(65, 16, max_length=128, rngs=nnx.Rngs(0))
        >>> y = opening(jnp.zeros((2, 10), "int32"))
        >>> y.shape, nn.TokenClosing(16, 17, rngs=nnx.Rngs(0))(y).shape
        ((2, 10, 16), (2, 10, 17))
    """

    def __init__(self, sizes: int | Sequence[int], width: int, *, max_length: int, **options: Any):
        self.columns = np.shape(sizes)
        self.max_length = _check.integer("max_length", max_length, least=1)
        columns = np.atleast_1d(sizes).tolist()
        self.tokens = nnx.List([nnx.Embed(size, width, **options) for size in columns])
        self.positions = nnx.Embed(max_length, width, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if tokens.ndim < 2 or tokens.shape[2:] != self.columns:
            wanted = ", ".join(map(str, ("batch", "length", *self.columns)))
            raise ValueError(f"tokens must have the shape ({wanted}); got {tokens.shape}.")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers; got {tokens.dtype}.")
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"the network was built for sequences of at most {self.max_length} positions; got "
                f"{length}. Cut them, or build it with max_length={length}."
            )
        columns = tokens.reshape(*tokens.shape[:2], len(self.tokens))
        y = sum(embedding(columns[..., c]) for c, embedding in enumerate(self.tokens))
        # The table has max_length rows, and a shorter sequence takes the first ones.
        return y + self.positions.embedding[None, :length]


class TokenClosing(nnx.Module):
    """Layer norm and a dense layer at each position, from ``(batch, length, width)`` to ``(batch, length, classes)``."""

    def __init__(self, width: int, classes: int, **options: Any):
        self.norm = nnx.LayerNorm(width, **options)
        self.linear = nnx.Linear(width, classes, **options)

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.linear(self.norm(y))
