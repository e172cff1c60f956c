"""Opening and closing layers of a transformer: from tokens to states, from states to logits."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax import _check


class TokenOpening(nnx.Module):
    """Sum of the embeddings of tokens and positions, from ``(batch, length)`` integers to ``(batch, length, width)``.

    Several integers may describe a token (a word and its ending, for example): ``(batch, length, columns)``. Each column
    has an embedding.

    Args:
        sizes: number of different values; a sequence has one number for each column.
        width: size of the state at each position.
        max_length: largest number of positions.
        param_dtype: dtype of the parameters, and of the state.
        rngs: source of the initial parameters.

    Raises:
        ValueError: when called, if there are more than ``max_length`` positions, or another number of columns.
        TypeError: when called, if the tokens are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> opening = nn.TokenOpening(65, 16, max_length=128, rngs=nnx.Rngs(0))
        >>> opening(jnp.zeros((2, 10), "int32")).shape
        (2, 10, 16)
    """

    def __init__(
        self,
        sizes: int | Sequence[int],
        width: int,
        *,
        max_length: int,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.columns = None if isinstance(sizes, int) else len(sizes)
        self.max_length = _check.integer("max_length", max_length, least=1)

        def embed(size: int) -> nnx.Embed:
            return nnx.Embed(size, width, param_dtype=param_dtype, rngs=rngs)

        self.tokens = nnx.List([embed(size) for size in ([sizes] if isinstance(sizes, int) else sizes)])
        self.positions = embed(max_length)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the state that enters the first layer."""
        shape = ("batch", "length") if self.columns is None else ("batch", "length", self.columns)
        if tokens.ndim != len(shape) or (self.columns is not None and tokens.shape[-1] != self.columns):
            raise ValueError(f"tokens must have the shape ({', '.join(map(str, shape))}); got {tokens.shape}.")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers; got {tokens.dtype}.")
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"the network was built for sequences of at most {self.max_length} positions; got {length}. Cut them, or "
                f"build it with max_length={length}."
            )
        columns = [tokens] if self.columns is None else [tokens[..., c] for c in range(self.columns)]
        y = sum(embedding(column) for embedding, column in zip(self.tokens, columns, strict=True))
        return y + self.positions.embedding[None, :length]


class TokenClosing(nnx.Module):
    """Layer norm and a dense layer at each position, from ``(batch, length, width)`` to ``(batch, length, classes)``.

    Args:
        width: size of the state at each position.
        classes: number of logits.
        param_dtype: dtype of the parameters; that of the state.
        rngs: source of the initial parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> closing = nn.TokenClosing(16, 17, rngs=nnx.Rngs(0))
        >>> closing(jnp.ones((2, 10, 16), "float32")).shape
        (2, 10, 17)
    """

    def __init__(self, width: int, classes: int, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, param_dtype=param_dtype, rngs=rngs)
        self.linear = nnx.Linear(width, classes, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the logits."""
        return self.linear(self.norm(y))
