"""A recurrent language model: the loss looks at every time step, and the time steps are the layers."""

import functools
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lp_jax

LENGTH, EMBEDDED, HIDDEN, BATCH, STEPS = 32, 8, 16, 16, 40


def unit(weights, h, x):
    """A minimal gated unit."""
    joint = jnp.concatenate([h, x], axis=1)
    z = jax.nn.sigmoid(joint @ weights["gate"])
    h = (1 - z) * h + z * jnp.tanh(joint @ weights["new"])
    return h, h


def loss(weights, text, solver):
    x = jnp.swapaxes(weights["embedding"][text[:, :-1]], 0, 1)
    _, states = lp_jax.scan(
        functools.partial(unit, weights), jnp.zeros((len(text), HIDDEN)), x, solver=solver
    )
    guesses = jax.nn.log_softmax(states @ weights["head"])
    return -jnp.mean(
        jnp.take_along_axis(guesses, jnp.swapaxes(text[:, 1:], 0, 1)[..., None], axis=-1)
    )


@functools.partial(jax.jit, static_argnums=2)
def trained(weights, batches, solver):
    """The mean loss of the first and of the last steps."""
    optimizer = optax.adam(2e-2)

    def step(state, text):
        value, gradient = jax.value_and_grad(loss)(state[0], text, solver)
        updates, slots = optimizer.update(gradient, state[1])
        return (optax.apply_updates(state[0], updates), slots), value

    _, losses = jax.lax.scan(step, (weights, optimizer.init(weights)), batches)
    return jnp.mean(losses[:4]), jnp.mean(losses[-8:])


@pytest.mark.usefixtures("standard_promotion")
def test_it_learns_as_by_a_scan(shared_data):
    """Characters of GUM, by Newton's method."""
    with gzip.open(next((shared_data / "gum").glob("*-train.conllu.gz")), "rt") as file:
        rows = [line.split("\t") for line in file]
    text = " ".join(word for number, word, *_ in (r for r in rows if r[0].isdecimal()))
    symbols, numbers = np.unique(list(text), return_inverse=True)
    windows = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    rng, joint = np.random.default_rng(0), HIDDEN + EMBEDDED
    shapes = {
        "embedding": (len(symbols), EMBEDDED),
        "gate": (joint, HIDDEN),
        "new": (joint, HIDDEN),
    }
    shapes["head"] = HIDDEN, len(symbols)
    weights = {
        name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5)
        for name, shape in shapes.items()
    }
    batches = windows[rng.choice(len(windows), (STEPS, BATCH))]
    newton = lp_jax.Newton(iterations=6, relaxations=8, batch_axes=1)
    (_, wanted), (first, last) = (
        trained(weights, batches, solver) for solver in (lp_jax.Serial(), newton)
    )
    assert last < 0.8 * first
    np.testing.assert_allclose(last, wanted, rtol=5e-3)
