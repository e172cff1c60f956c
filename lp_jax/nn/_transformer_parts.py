"""Parts of transformer layers: attention, dense layers, and the layers' right-hand sides."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax import _check


class Attention(nnx.Module):
    """Multi-head attention of a normalised state to itself, or to a normalised memory, and a projection.

    Not `nnx.MultiHeadAttention`: query, key and value are one product here, three there.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        cross: bool = False,
        scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if width % _check.integer("heads", heads, least=1):
            raise ValueError(f"heads must divide the width, {width}; got {heads}.")
        self.heads = heads
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(width, param_dtype=param_dtype, rngs=rngs)
        if cross:
            self.norm_memory = nnx.LayerNorm(width, param_dtype=param_dtype, rngs=rngs)
            self.query, self.key_value = nnx.Linear(width, width, **options), nnx.Linear(width, 2 * width, **options)
        else:
            self.query_key_value = nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, kernel_init=_scaled(scale), **options)

    def __call__(
        self,
        y: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        causal: bool = False,
    ) -> jax.Array:
        """Return the term to add to the state; ``mask`` is of the memory if there is one, ``(batch, other length)``."""
        if memory is None:
            q, k, v = jnp.split(self.query_key_value(self.norm(y)), 3, axis=-1)
        else:
            q = self.query(self.norm(y))
            k, v = jnp.split(self.key_value(self.norm_memory(memory)), 2, axis=-1)
        q, k, v = (x.reshape(*x.shape[:-1], self.heads, -1) for x in (q, k, v))
        visible = None if mask is None else mask[:, None, None, :]
        attend = _attend_in_double if q.dtype == jnp.float64 else jax.nn.dot_product_attention
        out = attend(q, k, v, mask=visible, is_causal=causal)
        return self.out(out.reshape(*out.shape[:-2], -1)).astype(y.dtype)


class FeedForward(nnx.Module):
    """Two dense layers at each position of the normalised state, GELU between them."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(width, param_dtype=param_dtype, rngs=rngs)
        self.inner = nnx.Linear(width, hidden, **options)
        self.outer = nnx.Linear(hidden, width, kernel_init=_scaled(scale), **options)

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return the term to add to the state."""
        return self.outer(nnx.gelu(self.inner(self.norm(y)))).astype(y.dtype)


class TransformerLayer(nnx.Module):
    """Base of the transformer layers: their parts, and the right-hand sides of encoder and decoder."""

    cross: ClassVar[bool]  # whether the layer attends to a memory

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        # the terms that all layers add to the state sum up to the size of one term
        scale = 1.0 if depth is None else ((3 if self.cross else 2) * depth) ** -0.5
        options = {"scale": scale, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = Attention(width, heads, **options)
        if self.cross:
            self.cross_attention = Attention(width, heads, cross=True, **options)
        self.feed_forward = FeedForward(width, hidden or 4 * width, **options)
        self.dropout = nnx.Dropout(dropout)

    def encoder_rhs(
        self, y: jax.Array, mask: jax.Array | None, key: jax.Array | None, *, causal: bool = False
    ) -> jax.Array:
        """Return the right-hand side of an encoder."""
        keys = split_key(key, 2)
        attended = self.dropout(self.attention(y, mask=mask, causal=causal), rngs=keys[0])
        return attended + self.dropout(self.feed_forward(y + attended), rngs=keys[1])

    def decoder_rhs(
        self,
        y: jax.Array,
        memory: jax.Array,
        memory_mask: jax.Array | None,
        mask: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """Return the right-hand side of a decoder."""
        keys = split_key(key, 3)
        attended = self.dropout(self.attention(y, mask=mask, causal=True), rngs=keys[0])
        u = y + attended
        remembered = self.dropout(self.cross_attention(u, memory, mask=memory_mask), rngs=keys[1])
        return attended + remembered + self.dropout(self.feed_forward(u + remembered), rngs=keys[2])


def split_key(key: jax.Array | None, count: int) -> Any:
    """Return ``count`` keys, or as many times None for None."""
    return (None,) * count if key is None else jax.random.split(key, count)


def _attend_in_double(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None, is_causal: bool
) -> jax.Array:
    """Do what `jax.nn.dot_product_attention` does, which computes in single precision whatever it gets."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    visible = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if is_causal:
        visible = visible & jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min)), v)


def _scaled(scale: float) -> nnx.Initializer:
    return nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
