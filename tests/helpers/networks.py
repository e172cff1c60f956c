"""Small pieces that the tests of Flax modules share."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lp_jax
from lp_jax import nn

F64 = jnp.float64


def normal(shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def assert_close(got, wanted, rtol=1e-12):
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=rtol)


def dense_classifier(
    layers=4, layer=None, *, inputs=3, width=5, outputs=2, t1=2.0, dtype=F64, **options
):
    """A network of dense residual layers, or of those that are given."""
    rngs, make = nnx.Rngs(0), functools.partial(nn.DenseResidual, width, param_dtype=dtype)
    return nn.Classifier(
        nn.DenseOpening((inputs,), width, param_dtype=dtype, rngs=rngs),
        nn.LayerParallel(
            layer or (lambda rngs: make(rngs=rngs)), layers, t1=t1, rngs=rngs, **options
        ),
        nn.DenseClosing((width,), outputs, param_dtype=dtype, rngs=rngs),
    )


def mesh(size=4, **settings):
    """The first ``size`` devices in a row."""
    auto = jax.sharding.AxisType.Auto
    return lp_jax.MeshComm(
        jax.make_mesh((size,), ("layers",), axis_types=(auto,), devices=jax.devices()[:size]),
        **settings,
    )


class BatchNormed(nnx.Module):
    """y + dt * tanh(norm(y W + b)), a layer with running statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)
        self.norm = nn.BatchNorm(5, momentum=0.9, param_dtype=F64, rngs=rngs)

    def __call__(self, y, t, dt):
        return y + dt * nnx.tanh(self.norm(self.linear(y)))
