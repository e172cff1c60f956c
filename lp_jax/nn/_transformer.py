r"""Transformer layers as steps of an ODE, pre-norm.

With self-attention SA, cross-attention CA to a memory, and a layer norm LN for each,

.. math::
    \varphi_1 = SA \circ LN, \quad \varphi_2 = MLP \circ LN, \quad \varphi_3 = CA \circ LN,

a layer is :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`, or with a memory
:math:`y + h\, (\varphi_1(y) + \varphi_3(u) + \varphi_2(u + \varphi_3(u)))` where :math:`u = y + \varphi_1(y)`. With
:math:`h = 1` (``t1`` equal to the number of layers) these are the layers of a standard pre-norm transformer.

States are ``(batch, length, width)``.

References:
    Vaswani et al., "Attention is all you need", NeurIPS 2017; Xiong et al., "On layer normalization in the transformer
    architecture", ICML 2020; Radford et al., "Language models are unsupervised multitask learners", 2019 (``depth``).
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from lp_jax._arrays import _check

Mask = jax.Array | None
"""Visible positions, ``(batch, length)``; None for all."""

Key = jax.Array | None
"""The random key of a call; None without dropout."""


Linear = Callable[[int, int], nnx.Linear]
Norm = Callable[[int], nnx.LayerNorm]


class Attention(nnx.Module):
    """Multi-head attention of a normalised state to itself or to a memory, with query, key and value in one product."""

    def __init__(
        self,
        width: int,
        heads: int,
        norm: Norm,
        linear: Linear,
        projection: Linear,
        cross: bool = False,
    ):
        if width % _check.integer("heads", heads, least=1):
            raise ValueError(f"heads must divide the width, {width}; got {heads}.")
        self.heads = heads
        self.norm = norm(width)
        if cross:
            # The memory is a state, too, and has a layer norm of its own.
            self.norm_memory = norm(width)
            self.query = linear(width, width)
            self.key_value = linear(width, 2 * width)
        else:
            self.query_key_value = linear(width, 3 * width)
        self.out = projection(width, width)

    def __call__(
        self,
        y: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: Mask = None,
        causal: bool = False,
    ) -> jax.Array:
        """Return the term to add to the state; ``mask`` is of the memory if there is one, ``(batch, other length)``."""
        if memory is None:
            q, k, v = jnp.split(self.query_key_value(self.norm(y)), 3, axis=-1)
        else:
            q = self.query(self.norm(y))
            k, v = jnp.split(self.key_value(self.norm_memory(memory)), 2, axis=-1)
        # Heads become an axis: (batch, length, heads, width / heads), as `jax.nn.dot_product_attention` wants it.
        q, k, v = (x.reshape(*x.shape[:-1], self.heads, -1) for x in (q, k, v))
        # A mask of positions becomes (batch, heads, queries, keys): all heads and all queries see the same positions.
        visible = None if mask is None else mask[:, None, None, :]
        # The test is on the dtype of q, because the products may have another dtype than the state.
        attend = _attend_in_double if q.dtype == jnp.float64 else jax.nn.dot_product_attention
        out = attend(q, k, v, mask=visible, is_causal=causal)
        return self.out(out.reshape(*out.shape[:-2], -1)).astype(y.dtype)


class FeedForward(nnx.Module):
    """Two dense layers at each position of the normalised state, GELU between them."""

    def __init__(self, width: int, hidden: int, norm: Norm, linear: Linear, projection: Linear):
        self.norm = norm(width)
        self.inner = linear(width, hidden)
        self.outer = projection(hidden, width)

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.outer(nnx.gelu(self.inner(self.norm(y)))).astype(y.dtype)


class TransformerLayer(nnx.Module):
    """Base of the transformer layers: their parts, and the right-hand sides of encoder and decoder."""

    cross: ClassVar[bool] = True  # whether the layer attends to a memory

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        depth: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        # the terms that all layers add to the state sum up to the size of one term
        scale = 1.0 if depth is None else ((3 if self.cross else 2) * depth) ** -0.5
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        # `variance_scaling` takes a factor of the variance, so the scale of the projections enters squared.
        scaled = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
        norm = functools.partial(nnx.LayerNorm, param_dtype=param_dtype, rngs=rngs)
        make = norm, linear, functools.partial(linear, kernel_init=scaled)
        self.attention = Attention(width, heads, *make)
        if self.cross:
            self.cross_attention = Attention(width, heads, *make, cross=True)
        self.feed_forward = FeedForward(width, hidden or 4 * width, *make)
        self.dropout = nnx.Dropout(dropout)

    def rhs(
        self,
        y: jax.Array,
        mask: Mask,
        key: Key,
        *,
        causal: bool = True,
        memory: jax.Array | None = None,
        memory_mask: Mask = None,
    ) -> jax.Array:
        """Return the right-hand side of an encoder, or with a memory that of a decoder."""
        parts = 2 if memory is None else 3
        keys = iter((None,) * parts if key is None else jax.random.split(key, parts))
        # These are the terms of the head of this module: phi_1(y), then phi_3(u) and phi_2 of the state with all terms so far.
        attended = self.attention(y, mask=mask, causal=causal)
        terms = self.dropout(attended, rngs=next(keys))
        if memory is not None:
            remembered = self.cross_attention(y + terms, memory, mask=memory_mask)
            terms += self.dropout(remembered, rngs=next(keys))
        return terms + self.dropout(self.feed_forward(y + terms), rngs=next(keys))


def _attend_in_double(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: Mask, is_causal: bool
) -> jax.Array:
    """Compute attention in double precision; `jax.nn.dot_product_attention` always uses single precision."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    visible = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if is_causal:
        visible = visible & jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
    return jnp.einsum(
        "bhqk,bkhd->bqhd",
        jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min)),
        v,
    )


class EncoderLayer(TransformerLayer):
    r"""Self-attention and dense layers, :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`.

    All layers share the padding mask, ``(batch, length)``, True where there is a token: ``trunk(y, shared=mask)``.

    Args:
        width: size of the state at each position.
        heads: number of heads, which must divide ``width``.
        hidden: size of the hidden dense layer; None is four times the width.
        causal: whether a position sees only itself and earlier positions, as in a language model.
        dropout: rate of dropout of the terms that are added to the state, in training; needs a ``key`` for each call.
        depth: number of layers of the network, whose projections then start smaller by :math:`1 / \sqrt{2\, depth}`.

    Raises:
        ValueError: if the heads do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer, decoder = (make(16, heads=4, rngs=nnx.Rngs(0)) for make in (nn.EncoderLayer, nn.DecoderLayer))
        >>> y, mask = jnp.ones((2, 10, 16), "float32"), jnp.arange(10)[None] < jnp.asarray([10, 7])[:, None]
        >>> memory = layer(y, 0.0, 1.0, shared=mask)
        >>> decoder(y, 0.0, 1.0, shared=(memory, mask, None)).shape
        (2, 10, 16)
    """

    cross = False

    def __init__(self, width: int, heads: int, *, causal: bool = False, **options: Any):
        super().__init__(width, heads, **options)
        self.causal = causal

    def __call__(
        self,
        y: jax.Array,
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: Mask = None,
        key: Key = None,
    ) -> jax.Array:
        return y + dt * self.rhs(y, shared, key, causal=self.causal)


class DecoderLayer(TransformerLayer):
    r"""Causal self-attention, attention to a memory, and dense layers.

    All layers share ``(memory, memory_mask, mask)``: the memory ``(batch, other length, width)``, and the visible positions of
    the memory and of the state, ``(batch, length)`` each; None for all. Arguments and errors are those of `EncoderLayer`,
    without ``causal``; projections start smaller by :math:`1 / \sqrt{3\, depth}`.
    """

    def __call__(
        self,
        y: jax.Array,
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: tuple[jax.Array, Mask, Mask],
        key: Key = None,
    ) -> jax.Array:
        memory, memory_mask, mask = shared
        return y + dt * self.rhs(y, mask, key, memory=memory, memory_mask=memory_mask)


class EncoderDecoderLayer(TransformerLayer):
    """Layer of an encoder and a decoder that are solved as one network.

    The state is ``(x, y)``, encoder and decoder, ``(batch, length, width)`` each. The first ``encoder_layers`` layers
    move x as `EncoderLayer` does. The others leave x unchanged and move y as `DecoderLayer` does, with x as the memory.
    All layers share ``(mask of x, mask of y)``, or None. Each layer has the parameters of both kinds; the encoder's do
    not use those of the cross-attention. The other arguments, and errors, are those of `DecoderLayer`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> make = lambda rngs: nn.EncoderDecoderLayer(16, heads=4, encoder_layers=6, rngs=rngs)
        >>> trunk = nn.LayerParallel(make, 12, t1=12.0, rngs=nnx.Rngs(0))
        >>> x, y = trunk((jnp.ones((2, 7, 16), "float32"), jnp.ones((2, 10, 16), "float32")))
    """

    def __init__(self, width: int, heads: int, *, encoder_layers: int, **options: Any):
        super().__init__(width, heads, **options)
        self.encoder_layers = encoder_layers

    def __call__(
        self,
        state: tuple[jax.Array, jax.Array],
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: tuple[Mask, Mask] | None = None,
        key: Key = None,
        index: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        x, y = state
        x_mask, y_mask = (None, None) if shared is None else shared
        # All layers of a stack share one program, so the kind of a layer is decided by its number when it runs.
        return lax.cond(
            index < self.encoder_layers,
            lambda: (x + dt * self.rhs(x, x_mask, key, causal=False), y),
            lambda: (x, y + dt * self.rhs(y, y_mask, key, memory=x, memory_mask=x_mask)),
        )
