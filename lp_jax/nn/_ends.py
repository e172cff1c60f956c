"""Opening layers, from an input or tokens to a state, and closing layers, from a state to logits.

Their options are those of their parts, `nnx.Linear` for example: ``rngs``, ``param_dtype``.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax._arrays import _check
from lp_jax.nn._convolution import same_conv
from lp_jax.nn._residual import Activation


class DenseOpening(nnx.Module):
    """Dense opening layer, ``activation(W x + b)`` of the flattened input, ``(..., *shape)`` to ``(..., width)``.

    Raises:
        ValueError: when called, if the input has another shape.
    """

    def __init__(self, shape: Sequence[int], width: int, *, activation: Activation = nnx.tanh, **options: Any):
        self.shape = tuple(shape)
        self.linear = nnx.Linear(math.prod(self.shape), width, **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the state that enters the first layer."""
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
        """Return the state that enters the first layer."""
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
        sizes = [math.prod(self.shape), *([] if hidden is None else [hidden]), classes]
        self.layers = nnx.List([nnx.Linear(m, n, **options) for m, n in itertools.pairwise(sizes)])
        self.activation = activation

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the logits."""
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
        self.space = tuple(range(-1 - len(space), -1))
        self.linear = nnx.Linear(channels, classes, **options)

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the logits."""
        return self.linear(jnp.mean(y, axis=self.space))


def _flatten(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    batch = x.ndim - len(shape)
    if x.shape[max(batch, 0) :] != shape:
        wanted = ", ".join(["...", *map(str, shape)])
        raise ValueError(f"The layer was built with shape={shape}, for arrays of shape ({wanted}); got {x.shape}.")
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
        self.columns = () if isinstance(sizes, int) else (len(sizes),)
        self.max_length = _check.integer("max_length", max_length, least=1)
        columns = [sizes] if isinstance(sizes, int) else sizes
        self.tokens = nnx.List([nnx.Embed(size, width, **options) for size in columns])
        self.positions = nnx.Embed(max_length, width, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the state that enters the first layer."""
        if tokens.ndim < 2 or tokens.shape[2:] != self.columns:
            wanted = ", ".join(map(str, ("batch", "length", *self.columns)))
            raise ValueError(f"tokens must have the shape ({wanted}); got {tokens.shape}.")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers; got {tokens.dtype}.")
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"the network was built for sequences of at most {self.max_length} positions; got {length}. Cut them, or "
                f"build it with max_length={length}."
            )
        columns = [tokens[..., c] for c in range(len(self.tokens))] if self.columns else [tokens]
        y = sum(embedding(column) for embedding, column in zip(self.tokens, columns, strict=True))
        return y + self.positions.embedding[None, :length]


class TokenClosing(nnx.Module):
    """Layer norm and a dense layer at each position, from ``(batch, length, width)`` to ``(batch, length, classes)``."""

    def __init__(self, width: int, classes: int, **options: Any):
        self.norm = nnx.LayerNorm(width, **options)
        self.linear = nnx.Linear(width, classes, **options)

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the logits."""
        return self.linear(self.norm(y))
