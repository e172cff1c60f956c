"""One network of each kind, and one with all that could differ from worker to worker: dropout, running statistics, masks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import recurrent
import test_transformer as transformer
from flax import nnx
from networks import normal

import conftest  # noqa: F401  (float64, before arrays are made)
import lp_jax
from lp_jax import nn

LAYERS = 6
SOLVER = lp_jax.Picard(sweeps=2)


class Restless(nnx.Module):
    """With running statistics, dropout, and a masked memory if there is one."""

    def __init__(self, rngs, param_dtype=jnp.float32):
        self.norm = nn.BatchNorm(6, momentum=0.5, param_dtype=param_dtype, rngs=rngs)
        self.linear = nnx.Linear(6, 6, param_dtype=param_dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)

    def __call__(self, y, t, dt, *, shared=None, key=None):
        if shared is not None:
            memory, mask = shared
            y = y + dt * jnp.where(mask, memory, 0)
        return y + dt * self.dropout(nnx.tanh(self.linear(self.norm(y))), rngs=key)


NAMES = ("decoder", "batch norm", "gru")


def everything(name, comm=None):
    """Of a network what belongs to its layers, leaves ``(layers, ...)``, and what every worker has."""
    options = {"solver": SOLVER, "comm": comm}
    if name == "gru":
        gru = recurrent.make(True, **options)
        value, (of_gru, of_x) = nnx.jit(nnx.value_and_grad(recurrent_loss, argnums=(0, 1)))(
            gru, recurrent.X
        )
        return jax.tree.map(np.asarray, ({}, (value, nnx.to_pure_dict(of_gru), of_x)))
    if name == "decoder":
        make, y, memory = transformer.decoder, transformer.Y, transformer.MEMORY
        masks = transformer.OTHER_MASK, transformer.MASK
    else:
        make, y, memory = (
            functools.partial(Restless, param_dtype=jnp.float64),
            normal((4, 6)),
            normal((4, 6), 2),
        )
        masks = (jnp.asarray(np.arange(24).reshape(4, 6) % 3 > 0),)
    trunk = nn.LayerParallel(make, LAYERS, rngs=nnx.Rngs(0), **options)
    value, (of_trunk, *of_all) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1, 2)))(
        trunk, y, memory, masks
    )
    statistics = nnx.to_pure_dict(nnx.state(trunk.layers, nnx.BatchStat))
    return jax.tree.map(np.asarray, ((nnx.to_pure_dict(of_trunk), statistics), (value, of_all)))


def loss(trunk, y, memory, masks):
    return jnp.sum(trunk.solve(y, shared=(memory, *masks), key=jax.random.key(7)).y1 ** 2)


def recurrent_loss(gru, x):
    return sum(
        jnp.sum(h * t) for h, t in zip(gru((x, recurrent.LENGTHS)), recurrent.TARGET, strict=True)
    )


assert_same = functools.partial(
    chex.assert_trees_all_close, rtol=1e-12, atol=1e-13
)  # but for the order of sums
