r"""Transformer layers as steps of an ODE, pre-norm.

With self-attention SA, cross-attention CA to a memory, and LN a layer norm of each one's own,

.. math::
    \varphi_1 = SA \circ LN, \quad \varphi_2 = MLP \circ LN, \quad \varphi_3 = CA \circ LN,

a layer is :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`, or with a memory
:math:`y + h\, (\varphi_1(y) + \varphi_3(u) + \varphi_2(u + \varphi_3(u)))` where :math:`u = y + \varphi_1(y)`. With
:math:`h = 1` (``t1`` equal to the number of layers) these are the layers of a standard pre-norm transformer.

States are ``(batch, length, width)``. Parameters of a projection that adds to the state may start smaller the deeper the
network is: ``depth``.

References:
    Vaswani et al., "Attention is all you need", NeurIPS 2017; Xiong et al., "On layer normalization in the transformer
    architecture", ICML 2020; Radford et al., "Language models are unsupervised multitask learners", 2019 (the initial
    scale of projections).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lp_jax import _check


class Attention(nnx.Module):
    """Multi-head attention of a normalised state to itself, or to a normalised memory, with a projection after it.

    Args:
        width: size of the state; ``heads`` must divide it.
        heads: number of heads.
        cross: whether it attends to a memory.
        scale: of the initial projection.
        dtype: what products are computed in; None is the dtype of the state.
        param_dtype: dtype of the parameters.
        rngs: source of the initial parameters.
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
        """What is to be added to the state.

        Args:
            y: ``(batch, length, width)``.
            memory: ``(batch, other length, width)``, where the module attends to one.
            mask: which positions of the memory, or of ``y``, are seen, ``(batch, other length)``; None for all.
            causal: whether a position sees itself and those before it only.
        """
        if memory is None:
            q, k, v = jnp.split(self.query_key_value(self.norm(y)), 3, axis=-1)
        else:
            q = self.query(self.norm(y))
            k, v = jnp.split(self.key_value(self.norm_memory(memory)), 2, axis=-1)
        q, k, v = (x.reshape(*x.shape[:-1], self.heads, -1) for x in (q, k, v))
        seen = None if mask is None else mask[:, None, None, :]
        attend = _attend_in_double if q.dtype == jnp.float64 else jax.nn.dot_product_attention
        out = attend(q, k, v, mask=seen, is_causal=causal)
        return self.out(out.reshape(*out.shape[:-2], -1)).astype(y.dtype)


class FeedForward(nnx.Module):
    """Two dense layers at each position of the normalised state, GELU between them.

    Args:
        width: size of the state.
        hidden: size between.
        scale: of the initial second kernel.
        dtype: what products are computed in; None is the dtype of the state.
        param_dtype: dtype of the parameters.
        rngs: source of the initial parameters.
    """

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
        """What is to be added to the state."""
        return self.outer(nnx.gelu(self.inner(self.norm(y)))).astype(y.dtype)


class EncoderLayer(nnx.Module):
    r"""Self-attention and dense layers, :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`.

    With ``causal`` it is the layer of a decoder without an encoder, as language models have. What all layers share is the
    padding mask, ``(batch, length)``, True where there is a token: ``trunk(y, shared=mask)``.

    Args:
        width: size of the state at each position.
        heads: number of heads, which must divide ``width``.
        hidden: size of the hidden dense layer; None is four times the width.
        causal: whether a position sees itself and those before it only.
        split: attention and dense layers as two steps of time h each, one after the other,
            :math:`u = y + h \varphi_1(y)`, then :math:`u + h \varphi_2(u)`.
        dropout: rate at which what is added to the state is dropped, in training; needs a ``key`` per call.
        depth: number of layers of the network whose projections then start by :math:`1 / \sqrt{2\, depth}` smaller.
        dtype: what products are computed in, `jax.numpy.bfloat16`, say; the state keeps its dtype.
        param_dtype: dtype of the parameters; that of the state.
        rngs: source of the initial parameters.

    Raises:
        ValueError: for heads that do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.EncoderLayer(16, heads=4, rngs=nnx.Rngs(0))
        >>> mask = jnp.arange(10)[None] < jnp.asarray([10, 7])[:, None]
        >>> layer(jnp.ones((2, 10, 16), "float32"), 0.0, 1.0, shared=mask).shape
        (2, 10, 16)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        causal: bool = False,
        split: bool = False,
        dropout: float = 0.0,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"scale": _projection_scale(depth, 2), "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = Attention(width, heads, **options)
        self.feed_forward = FeedForward(width, hidden or 4 * width, **options)
        self.dropout = nnx.Dropout(dropout)
        self.causal, self.split = causal, split

    def __call__(
        self,
        y: jax.Array,
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The state at ``t + dt``. The right-hand side does not depend on ``t``."""
        keys = _keys(key, 2)
        attended = self.dropout(self.attention(y, mask=shared, causal=self.causal), rngs=keys[0])
        if self.split:
            y = y + dt * attended
            return y + dt * self.dropout(self.feed_forward(y), rngs=keys[1])
        return y + dt * (attended + self.dropout(self.feed_forward(y + attended), rngs=keys[1]))


class DecoderLayer(nnx.Module):
    r"""Causal self-attention, attention to a memory, and dense layers.

    :math:`y + h\, (\varphi_1(y) + \varphi_3(u) + \varphi_2(u + \varphi_3(u)))` with :math:`u = y + \varphi_1(y)`. What all
    layers share is ``(memory, memory_mask, mask)``: the memory ``(batch, other length, width)``, which is differentiated,
    and which of its positions, and of the state's, are seen; None for all.

    Args:
        width: size of the state, and of the memory, at each position.
        heads: number of heads, which must divide ``width``.
        hidden: size of the hidden dense layer; None is four times the width.
        dropout: as for `EncoderLayer`.
        depth: as for `EncoderLayer`, with :math:`1 / \sqrt{3\, depth}`.
        dtype: as for `EncoderLayer`.
        param_dtype: as for `EncoderLayer`.
        rngs: source of the initial parameters.

    Raises:
        ValueError: for heads that do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.DecoderLayer(16, heads=4, rngs=nnx.Rngs(0))
        >>> y, memory = jnp.ones((2, 10, 16), "float32"), jnp.ones((2, 7, 16), "float32")
        >>> layer(y, 0.0, 1.0, shared=(memory, None, None)).shape
        (2, 10, 16)
    """

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
        options = {"scale": _projection_scale(depth, 3), "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = Attention(width, heads, **options)
        self.cross_attention = Attention(width, heads, cross=True, **options)
        self.feed_forward = FeedForward(width, hidden or 4 * width, **options)
        self.dropout = nnx.Dropout(dropout)

    def __call__(
        self,
        y: jax.Array,
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: tuple[jax.Array, jax.Array | None, jax.Array | None],
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The state at ``t + dt``. The right-hand side does not depend on ``t``."""
        memory, memory_mask, mask = shared
        return y + dt * _decoded(self, y, memory, memory_mask, mask, key)


class EncoderDecoderLayer(nnx.Module):
    r"""A layer of an encoder and decoder that are solved as one network.

    The state is ``(x, y)``, encoder and decoder, ``(batch, length, width)`` each. Of all layers the first
    ``encoder_layers`` move x as `EncoderLayer` does; the others leave it as it is and move y as `DecoderLayer` does, x its
    memory. What all layers share is ``(mask of x, mask of y)``, or None. All layers have the parameters of both; encoder
    layers do not use those of the cross-attention.

    Args:
        width: size of the state at each position.
        heads: number of heads, which must divide ``width``.
        encoder_layers: how many of the layers are the encoder's.
        hidden: size of the hidden dense layer; None is four times the width.
        dropout: as for `EncoderLayer`.
        depth: as for `EncoderLayer`, with :math:`1 / \sqrt{3\, depth}`.
        dtype: as for `EncoderLayer`.
        param_dtype: as for `EncoderLayer`.
        rngs: source of the initial parameters.

    Raises:
        ValueError: for heads that do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> make = lambda rngs: nn.EncoderDecoderLayer(16, heads=4, encoder_layers=6, rngs=rngs)
        >>> trunk = nn.LayerParallel(make, 12, t1=12.0, rngs=nnx.Rngs(0))
        >>> x, y = trunk((jnp.ones((2, 7, 16), "float32"), jnp.ones((2, 10, 16), "float32")))
        >>> x.shape, y.shape
        ((2, 7, 16), (2, 10, 16))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        encoder_layers: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"scale": _projection_scale(depth, 3), "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = Attention(width, heads, **options)
        self.cross_attention = Attention(width, heads, cross=True, **options)
        self.feed_forward = FeedForward(width, hidden or 4 * width, **options)
        self.dropout = nnx.Dropout(dropout)
        self.encoder_layers = encoder_layers

    def __call__(
        self,
        state: tuple[jax.Array, jax.Array],
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: tuple[jax.Array | None, jax.Array | None] | None = None,
        key: jax.Array | None = None,
        index: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The state at ``t + dt``. The right-hand side depends on the layer's number alone, not on ``t``."""
        (x, y), (x_mask, y_mask) = state, (None, None) if shared is None else shared

        def encode() -> tuple[jax.Array, jax.Array]:
            keys = _keys(key, 2)
            attended = self.dropout(self.attention(x, mask=x_mask), rngs=keys[0])
            return x + dt * (attended + self.dropout(self.feed_forward(x + attended), rngs=keys[1])), y

        def decode() -> tuple[jax.Array, jax.Array]:
            return x, y + dt * _decoded(self, y, x, x_mask, y_mask, key)

        return lax.cond(index < self.encoder_layers, encode, decode)


def _decoded(
    layer: DecoderLayer | EncoderDecoderLayer,
    y: jax.Array,
    memory: jax.Array,
    memory_mask: jax.Array | None,
    mask: jax.Array | None,
    key: jax.Array | None,
) -> jax.Array:
    """Right-hand side of a decoder layer."""
    keys = _keys(key, 3)
    attended = layer.dropout(layer.attention(y, mask=mask, causal=True), rngs=keys[0])
    u = y + attended
    remembered = layer.dropout(layer.cross_attention(u, memory, mask=memory_mask), rngs=keys[1])
    return attended + remembered + layer.dropout(layer.feed_forward(u + remembered), rngs=keys[2])


def _attend_in_double(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None, is_causal: bool
) -> jax.Array:
    """`jax.nn.dot_product_attention`, which is of single precision whatever it is given."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if is_causal:
        seen = seen & jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min)), v)


def _keys(key: jax.Array | None, count: int) -> Any:
    return (None,) * count if key is None else jax.random.split(key, count)


def _scaled(scale: float) -> nnx.Initializer:
    return nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")


def _projection_scale(depth: int | None, per_layer: int) -> float:
    """Such that the terms that all layers add to the state sum up to the size of one."""
    return 1.0 if depth is None else (per_layer * depth) ** -0.5
