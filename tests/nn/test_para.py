"""Cells whose numbers act on themselves alone: against loops in NumPy with every gate written out."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import mesh

import lp_jax
from lp_jax import nn

FEATURES, HIDDEN, BATCH = 3, 5, 2
CELLS = {"gru": nn.ParaGRU, "lstm": nn.ParaLSTM}
NEWTON = lp_jax.Newton(jacobian="diagonal", iterations=6)


def make(kind, hidden=HIDDEN, **options):
    return CELLS[kind](FEATURES, hidden, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options)


def sequences(steps, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, steps, FEATURES)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(kind, cell, x):
    """The hidden states of all times."""
    x, kernel, bias, a = (
        np.asarray(v) for v in (x, cell.kernel[...], cell.bias[...], cell.recurrent[...])
    )
    h = c = np.zeros((len(x), cell.hidden))
    found = []
    for n in range(x.shape[1]):
        first, second, third = np.split(x[:, n] @ kernel + bias, 3, axis=1)
        if kind == "gru":
            z, r = sigmoid(first + a[0] * h), sigmoid(second + a[1] * h)
            h = (1 - z) * h + z * np.tanh(third + a[2] * r * h)
        else:
            f = sigmoid(first + a[0] * h + a[3] * c)
            c = f * c + (1 - f) * np.tanh(third + a[2] * h)
            h = sigmoid(second + a[1] * h + a[4] * c) * np.tanh(c)
        found.append(h)
    return np.stack(found, axis=1)


@pytest.mark.parametrize(("kind", "steps"), [("gru", 37), ("lstm", 1), ("lstm", 37)])
def test_states_are_those_of_a_loop_with_every_gate(kind, steps):
    cell, x = make(kind), sequences(steps)
    wanted = by_hand(kind, cell, x)
    np.testing.assert_allclose(
        cell.solve(x, solver=NEWTON).aux.swapaxes(0, 1), wanted, rtol=1e-12, atol=1e-14
    )
    np.testing.assert_allclose(cell(x), wanted, rtol=1e-12, atol=1e-14)


def objective(cell, x, **solvers):
    solution = cell.solve(x, **solvers)
    return jnp.sum(jnp.sin(solution.aux)) + sum(jnp.sum(h**2) for h in jax.tree.leaves(solution.y1))


value_and_gradient = jax.jit(nnx.value_and_grad(objective, argnums=(0, 1)))


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_take_one_iteration(kind):
    """Of losses that look at all times."""
    cell, x = make(kind, solver=NEWTON), sequences(50)
    got, wanted = (
        jax.tree.leaves(value_and_gradient(c, x))
        for c in (cell, make(kind, solver=lp_jax.Serial()))
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", CELLS)
def test_an_iteration_takes_one_evaluation_for_each_state(kind):
    """Forward and adjoint, no loop over places; where there is one, test_newton counts what is evaluated."""
    cell, x = make(kind), sequences(8)

    def loops(solver):
        lowered = jax.jit(nnx.grad(functools.partial(objective, solver=solver))).lower(cell, x)
        return lowered.as_text().count("stablehlo.while")

    assert loops(lp_jax.Newton(jacobian="diagonal", iterations=2)) == loops(lp_jax.Picard(sweeps=2))


def test_four_iterations_at_the_start_whatever_the_length():
    cell, x = make("lstm", hidden=32), sequences(2048)

    @nnx.jit
    def solved(cell, x):
        four = cell.solve(x, solver=lp_jax.Newton(jacobian="diagonal", iterations=4)).aux
        return (
            cell.solve(x, solver=lp_jax.Serial()).aux,
            four,
            cell.solve(x, solver=NEWTON).stats.residual_norms,
        )

    exact, got, norms = map(np.asarray, solved(cell, x))
    assert np.max(np.abs(got - exact)) < 1e-6
    assert np.log(norms[4] / norms[3]) < 1.5 * np.log(
        norms[3] / norms[2]
    )  # the order of convergence


def test_over_devices():
    x = sequences(50)
    alone, spread = make("lstm", solver=NEWTON), make("lstm", solver=NEWTON, comm=mesh(3))
    wanted, got = value_and_gradient(alone, x), value_and_gradient(spread, x)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-12)
    chex.assert_trees_all_close(
        jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), rtol=1e-9, atol=1e-11
    )


def test_a_sequence_in_two_parts():
    cell, x = make("lstm", solver=lp_jax.Serial()), sequences(20)
    first = cell.solve(x[:, :10])
    rest = cell(x[:, 10:], first.y1)
    np.testing.assert_allclose(
        jnp.concatenate([first.aux.swapaxes(0, 1), rest], axis=1), cell(x), rtol=1e-13
    )
