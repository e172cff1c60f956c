r"""Transformer layers as steps of an ODE, pre-norm.

With self-attention SA, cross-attention CA to a memory, and a layer norm LN for each,

.. math::
    \varphi_1 = SA \circ LN, \quad \varphi_2 = MLP \circ LN, \quad \varphi_3 = CA \circ LN,

a layer is :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`, or with a memory
:math:`y + h\, (\varphi_1(y) + \varphi_3(u) + \varphi_2(u + \varphi_3(u)))` where :math:`u = y + \varphi_1(y)`. With
:math:`h = 1` (``t1`` equal to the number of layers) these are the layers of a standard pre-norm transformer.

States are ``(batch, length, width)``. With ``depth``, the projections that add to the state start smaller in deeper
networks.

References:
    Vaswani et al., "Attention is all you need", NeurIPS 2017; Xiong et al., "On layer normalization in the transformer
    architecture", ICML 2020; Radford et al., "Language models are unsupervised multitask learners", 2019 (the initial
    scale of projections).
"""

from typing import Any

import jax
from jax import lax

from lp_jax.nn._transformer_parts import TransformerLayer, split_key


class EncoderLayer(TransformerLayer):
    r"""Self-attention and dense layers, :math:`y + h\, (\varphi_1(y) + \varphi_2(y + \varphi_1(y)))`.

    With ``causal`` it is the layer of a language model. All layers share the padding mask, ``(batch, length)``, True
    where there is a token: ``trunk(y, shared=mask)``.

    Args:
        width: size of the state at each position.
        heads: number of heads, which must divide ``width``.
        hidden: size of the hidden dense layer; None is four times the width.
        causal: whether a position sees only itself and earlier positions.
        split: attention and dense layers as two steps of time h each, one after the other,
            :math:`u = y + h \varphi_1(y)`, then :math:`u + h \varphi_2(u)`.
        dropout: rate of dropout of the terms that are added to the state, in training; needs a ``key`` for each call.
        depth: number of layers of the network; its projections start smaller by :math:`1 / \sqrt{2\, depth}`. None for
            projections of the usual size.
        dtype: dtype of the products, for example `jax.numpy.bfloat16`; the state keeps its own. None is the state's.
        param_dtype: dtype of the parameters; that of the state.
        rngs: source of the initial parameters.

    Raises:
        ValueError: if the heads do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.EncoderLayer(16, heads=4, rngs=nnx.Rngs(0))
        >>> mask = jnp.arange(10)[None] < jnp.asarray([10, 7])[:, None]
        >>> layer(jnp.ones((2, 10, 16), "float32"), 0.0, 1.0, shared=mask).shape
        (2, 10, 16)
    """

    cross = False

    def __init__(self, width: int, heads: int, *, causal: bool = False, split: bool = False, **options: Any):
        super().__init__(width, heads, **options)
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
        """Return the state at ``t + dt``. The right-hand side does not depend on ``t``."""
        if not self.split:
            return y + dt * self.encoder_rhs(y, shared, key, causal=self.causal)
        keys = split_key(key, 2)
        y = y + dt * self.dropout(self.attention(y, mask=shared, causal=self.causal), rngs=keys[0])
        return y + dt * self.dropout(self.feed_forward(y), rngs=keys[1])


class DecoderLayer(TransformerLayer):
    r"""Causal self-attention, attention to a memory, and dense layers.

    :math:`y + h\, (\varphi_1(y) + \varphi_3(u) + \varphi_2(u + \varphi_3(u)))` with :math:`u = y + \varphi_1(y)`. All layers
    share ``(memory, memory_mask, mask)``: the memory ``(batch, other length, width)``, which is differentiated, and the
    visible positions of the memory and of the state, ``(batch, length)`` each; None for all.

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
        ValueError: if the heads do not divide the width.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layer = nn.DecoderLayer(16, heads=4, rngs=nnx.Rngs(0))
        >>> y, memory = jnp.ones((2, 10, 16), "float32"), jnp.ones((2, 7, 16), "float32")
        >>> layer(y, 0.0, 1.0, shared=(memory, None, None)).shape
        (2, 10, 16)
    """

    cross = True

    def __call__(
        self,
        y: jax.Array,
        t: jax.Array,
        dt: jax.Array,
        *,
        shared: tuple[jax.Array, jax.Array | None, jax.Array | None],
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the state at ``t + dt``. The right-hand side does not depend on ``t``."""
        memory, memory_mask, mask = shared
        return y + dt * self.decoder_rhs(y, memory, memory_mask, mask, key)


class EncoderDecoderLayer(TransformerLayer):
    r"""Layer of an encoder and a decoder that are solved as one network.

    The state is ``(x, y)``, encoder and decoder, ``(batch, length, width)`` each. The first ``encoder_layers`` layers
    move x as `EncoderLayer` does. The others leave x unchanged and move y as `DecoderLayer` does, with x as the memory.
    All layers share ``(mask of x, mask of y)``, or None. Each layer has the parameters of both kinds; the encoder's do
    not use those of the cross-attention.

    Args:
        width: size of the state at each position.
        heads: number of heads, which must divide ``width``.
        encoder_layers: number of layers that are the encoder's.
        hidden: size of the hidden dense layer; None is four times the width.
        dropout: as for `EncoderLayer`.
        depth: as for `EncoderLayer`, with :math:`1 / \sqrt{3\, depth}`.
        dtype: as for `EncoderLayer`.
        param_dtype: as for `EncoderLayer`.
        rngs: source of the initial parameters.

    Raises:
        ValueError: if the heads do not divide the width.

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

    cross = True

    def __init__(self, width: int, heads: int, *, encoder_layers: int, **options: Any):
        super().__init__(width, heads, **options)
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
        """Return the state at ``t + dt``. The right-hand side depends on the layer's number, and not on ``t``."""
        (x, y), (x_mask, y_mask) = state, (None, None) if shared is None else shared

        def encode() -> tuple[jax.Array, jax.Array]:
            return x + dt * self.encoder_rhs(x, x_mask, key), y

        def decode() -> tuple[jax.Array, jax.Array]:
            return x, y + dt * self.decoder_rhs(y, x, x_mask, y_mask, key)

        return lax.cond(index < self.encoder_layers, encode, decode)
