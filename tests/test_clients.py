"""Models as other codes write them: one call is changed; ``Serial`` differs by rounding, the default by less than a hundredth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from problems import relative_error

import lp_jax
from lp_jax import nn

# the others have the default; test_linen_scan, test_scanned_models and test_scan hold such calls to the last digits
WITH_SERIAL = "vision transformer with dropout", "recurrent network over axis 1"


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class EncoderBlock(linen.Module):
    """Half of a vision transformer's block, with dropout, as Big Vision scans it."""

    @linen.compact
    def __call__(self, x, deterministic):
        y = linen.LayerNorm()(x)
        y = linen.MultiHeadDotProductAttention(num_heads=2)(y, y, deterministic=deterministic)
        x = x + linen.Dropout(0.1)(y, deterministic)
        return x, None


class Encoder(linen.Module):
    scan: object
    depth: int = 4

    @linen.compact
    def __call__(self, x, deterministic=False):
        x, _ = self.scan(
            linen.remat(EncoderBlock, static_argnums=(2,), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=linen.broadcast,
            length=self.depth,
        )(name="encoderblock")(x, deterministic)
        return linen.LayerNorm(name="encoder_norm")(x)


def vision_transformer():
    x, key = normal(0, (2, 9, 32)), jax.random.key(2)
    params = jax.jit(Encoder(linen.scan).init, static_argnums=2)(jax.random.key(1), x, True)
    return lambda scan: lambda params: jnp.mean(Encoder(scan).apply(params, x, rngs={"dropout": key}) ** 2 * x), params


class Group(linen.Module):
    """A pattern of two blocks, which is scanned, with its parent named in the call."""

    @linen.compact
    def __call__(self, x, positions):
        for name in ("local", "global"):
            x = x + 0.3 * linen.Dense(8, name=name)(jnp.tanh(linen.RMSNorm(name=f"{name}_norm")(x + positions)))
        return x, jnp.mean(x)


class Patterned(linen.Module):
    scan: object

    @linen.compact
    def __call__(self, x, positions):
        make = self.scan(
            Group,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(linen.broadcast,),
            length=5,
        )
        return make(name="blocks", parent=self)(x, positions)


def block_pattern():
    x, positions = normal(0, (3, 7, 8)), jnp.sin(jnp.arange(7.0))[:, None]
    params = jax.jit(Patterned(linen.scan).init)(jax.random.key(1), x, positions)

    def loss_by(scan):
        def loss(params):
            y, means = Patterned(scan).apply(params, x, positions)
            return jnp.sum(y**2) + jnp.sum(means)

        return loss

    return loss_by, params


class GRU(linen.Module):
    """A recurrent network over the second axis of (batch, time, features)."""

    scan: object

    @linen.compact
    def __call__(self, x):
        cell = self.scan(
            linen.GRUCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )(16)
        return cell(jnp.zeros((len(x), 16)), x)


def recurrent():
    x = normal(0, (3, 24, 5))
    params = jax.jit(GRU(linen.scan).init)(jax.random.key(1), x)

    def loss_by(scan):
        def loss(params):
            carry, outputs = GRU(scan).apply(params, x)
            return jnp.sum(carry**2) + jnp.mean(outputs**2)

        return loss

    return loss_by, params


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(10, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + 0.3 * self.dropout(nnx.gelu(self.linear(x)))


def scan_over_layers():
    """Layers made by ``nnx.vmap`` and applied by ``nnx.scan``, each with its dropout."""
    make = nnx.vmap(Block, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    layers = nnx.split_rngs(splits=5)(make)(nnx.Rngs(params=0, dropout=1))
    x = normal(0, (3, 10))
    graphdef, params, others = nnx.split(layers, nnx.Param, ...)

    def loss_by(scan):
        @scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return layer(x)

        return lambda params: jnp.sum(forward(nnx.merge(graphdef, params, jax.tree.map(jnp.copy, others)), x) ** 2)

    return loss_by, params


def linear_scan():
    """A diagonal linear recurrence with gates that depend on the input, over time."""
    x = normal(0, (40, 3, 8))

    def body(h, gated):
        decay, x = gated
        h = decay * h + jnp.sqrt(1 - decay**2) * x
        return h, h

    def loss(weights, scan):
        decay, x_in = jax.nn.sigmoid(x @ weights[0] + 2.0), x @ weights[1]
        last, all_h = scan(body, jnp.zeros((3, 8)), (decay, x_in))
        return jnp.sum(last**2) + jnp.mean(all_h**2)

    return lambda scan: functools.partial(loss, scan=scan), normal(1, (2, 8, 8)) / 3


def one_at_a_time():
    """A recurrent cell for one example, which ``jax.vmap`` takes over the batch."""
    x = normal(0, (4, 30, 3))

    def cell(weights, h, x):
        update, reset = jax.nn.sigmoid(weights[0] @ h + weights[1, :, :3] @ x), jax.nn.sigmoid(weights[2] @ h)
        return update * h + (1 - update) * jnp.tanh(weights[3] @ (reset * h) + weights[4, :, :3] @ x)

    def loss(weights, scan):
        def one(x):
            def body(h, x):
                return cell(weights, h, x), None

            return scan(body, jnp.zeros(8), x)[0]

        return jnp.sum(jax.vmap(one)(x) ** 2)

    return lambda scan: functools.partial(loss, scan=scan), normal(1, (5, 8, 8)) / 2


CLIENTS = {
    "vision transformer with dropout": (vision_transformer, linen.scan, nn.linen_scan),
    "block pattern with a parent": (block_pattern, linen.scan, nn.linen_scan),
    "recurrent network over axis 1": (recurrent, linen.scan, nn.linen_scan),
    "scan over layers": (scan_over_layers, nnx.scan, nn.scan),
    "linear recurrence": (linear_scan, jax.lax.scan, lp_jax.scan),
    "cell for one example": (one_at_a_time, jax.lax.scan, lp_jax.scan),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_one_call_is_changed(name):
    client, own, ours = CLIENTS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss_by, params = client()
        value, gradient = jax.jit(jax.value_and_grad(loss_by(own)))(params)
        solver, tolerance = (lp_jax.Serial(), 1e-6) if name in WITH_SERIAL else (None, 1e-2)
        loss = loss_by(functools.partial(ours, solver=solver))
        got, got_gradient = jax.jit(jax.value_and_grad(loss))(params)
        np.testing.assert_allclose(got, value, rtol=tolerance)
        assert relative_error(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient)) < tolerance
