"""A recurrent language model: the loss looks at every time step, and the time steps are the layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lp_jax
from lp_jax import data

LENGTH, EMBEDDED, HIDDEN, BATCH, STEPS = 32, 8, 16, 16, 40


def unit(weights, h, x):
    """A gated recurrent unit."""
    joint = jnp.concatenate([h, x], axis=1)
    r, z = jnp.split(jax.nn.sigmoid(joint @ weights["gates"] + weights["bias"][None]), 2, axis=1)
    new = jnp.tanh(jnp.concatenate([r * h, x], axis=1) @ weights["new"])
    h = z * h + (1 - z) * new
    return h, h


def initial(seed, classes):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {
        "embedding": (classes, EMBEDDED),
        "gates": (HIDDEN + EMBEDDED, 2 * HIDDEN),
        "new": (HIDDEN + EMBEDDED, HIDDEN),
        "head": (HIDDEN, classes),
    }
    weights = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return weights | {"bias": jnp.zeros(2 * HIDDEN)}


def loss(weights, text, solver):
    x = jnp.swapaxes(weights["embedding"][text[:, :-1]], 0, 1)
    _, states = lp_jax.scan(functools.partial(unit, weights), jnp.zeros((len(text), HIDDEN)), x, solver=solver)
    guesses = jax.nn.log_softmax(states @ weights["head"])
    return -jnp.mean(jnp.take_along_axis(guesses, jnp.swapaxes(text[:, 1:], 0, 1)[..., None], axis=-1))


@functools.partial(jax.jit, static_argnums=(1, 2))
def trained(batches, classes, solver, seed):
    """The mean loss of the last steps."""
    optimizer = optax.adam(2e-2)
    weights = initial(seed, classes)

    def step(state, text):
        weights, slots = state
        value, gradient = jax.value_and_grad(loss)(weights, text, solver)
        updates, slots = optimizer.update(gradient, slots)
        return (optax.apply_updates(weights, updates), slots), value

    _, losses = jax.lax.scan(step, (weights, optimizer.init(weights)), batches)
    return jnp.mean(losses[:4]), jnp.mean(losses[-8:])


@pytest.mark.usefixtures("standard_promotion")
def test_it_learns_as_by_a_scan(shared_data):
    """Characters of GUM, by Newton's method."""
    dataset = data.characters(sorted((shared_data / "gum").glob("*-train.conllu*")), length=LENGTH + 1)
    windows, classes = dataset.train_x, dataset.classes
    chosen = np.random.default_rng(0).choice(len(windows), (STEPS, BATCH))
    newton = lp_jax.Newton(iterations=6, relaxations=8, batch_axes=1)
    (_, wanted), (first, last) = (trained(windows[chosen], classes, solver, 0) for solver in (lp_jax.Serial(), newton))
    assert last < 0.8 * first
    np.testing.assert_allclose(last, wanted, rtol=5e-3)
