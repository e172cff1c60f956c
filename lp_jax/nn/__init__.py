"""Flax NNX modules: layers of deep networks for `lp_jax.solve`, opening layers and closing layers.

A module that is one layer step, ``__call__(y, t, dt) -> y_next``, becomes a network of N layers by `stack` (a pure
function) or `LayerParallel` (a module). ``y`` is the state, ``t`` the time at which the layer starts and ``dt`` the time
that it spans, scalars in the units of ``t0`` and ``t1``.

All modules take ``rngs``, the source of their initial parameters, and ``param_dtype``, their dtype, which should be that of
the state. Some take ``dtype``, the dtype of their products; None means that of the state, which keeps its dtype. A model
that scans over its layers needs none of these: see `parallel`.

Modules of other libraries need two lines. Flax Linen, where ``block`` is a module that is one layer step:

    params = jax.vmap(lambda key: block.init(key, y0, 0.0, 1.0)["params"])(keys)
    step = lambda y, layer: block.apply({"params": layer.params}, y, layer.t, layer.dt)

Equinox, where ``make_layer(key)`` builds one layer:

    params, static = eqx.partition(eqx.filter_vmap(make_layer)(keys), eqx.is_array)
    step = lambda y, layer: eqx.combine(layer.params, static)(y, layer.t, layer.dt)

Define such a ``step`` once: `lp_jax.solve` recognises a program that it has compiled by the identity of the step.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
    import safetensors as _safetensors  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f'lp_jax.nn needs Flax and safetensors ({error}): pip install "lp_jax[nn]".'
    ) from error

from lp_jax.nn._convolution import convolve as convolve
from lp_jax.nn._export import load as load, save as save, unstack as unstack
from lp_jax.nn._layer_parallel import LayerParallel as LayerParallel, Spline as Spline
from lp_jax.nn._layers import (
    BatchNorm as BatchNorm,
    ConvOpening as ConvOpening,
    ConvResidual as ConvResidual,
    ConvTransition as ConvTransition,
    DenseClosing as DenseClosing,
    DenseOpening as DenseOpening,
    DenseResidual as DenseResidual,
    PoolClosing as PoolClosing,
    TokenClosing as TokenClosing,
    TokenOpening as TokenOpening,
)
from lp_jax.nn._network import Classifier as Classifier, Network as Network
from lp_jax.nn._recurrent import GRU as GRU, ParaGRU as ParaGRU, ParaLSTM as ParaLSTM
from lp_jax.nn._refine import coarsen as coarsen, refine as refine
from lp_jax.nn._stack import parallel as parallel, pipeline as pipeline, stack as stack
from lp_jax.nn._transformer import (
    DecoderLayer as DecoderLayer,
    EncoderDecoderLayer as EncoderDecoderLayer,
    EncoderLayer as EncoderLayer,
)
