"""Counting products in programs: on loops whose counts are plain, and on solvers whose counts are formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from problems import INJECT
from products import cost, layer, training_step
from test_theory import cycle_cost

import lp_jax

W, X = jnp.eye(4), jnp.ones(4)
UNIT = 2 * 4 * 4


def of(f):
    return cost(f, W, X, unit=UNIT)


def looped(f):
    """Six turns of a loop."""
    return lambda w, x: jax.lax.scan(lambda carry, _: f(w, carry), x, None, length=6)[0]


two_chains = lambda w, x: looped(lambda w, c: ((w @ (w @ c[0]), w @ c[1]), None))(w, (x, x))  # noqa: E731
COUNTED = {
    "in a row": (lambda w, x: w @ (w @ (w @ x)), 3, 3),
    "side by side": (lambda w, x: w @ x + w.T @ x, 2, 1),
    "a batch": (lambda w, x: jnp.sum(jax.vmap(lambda v: w @ v)(jnp.stack([x] * 5))), 5, 1),
    "none": (lambda w, x: x, 0, 0),
    "fori_loop": (lambda w, x: jax.lax.fori_loop(0, 9, lambda i, y: w @ y, x), 9, 9),
    "map": (lambda w, x: jax.lax.map(lambda v: w @ v, jnp.stack([x] * 7)), 7, 1),
    "scan": (lambda w, x: jax.lax.scan(lambda y, v: (w @ (y + w @ v), None), x, jnp.stack([x] * 7))[0], 14, 8),
    "loops in a loop": (looped(lambda w, y: (jax.lax.fori_loop(0, 5, lambda j, y: w @ y, y), None)), 30, 30),
    "two chains": (two_chains, 18, 12),
    "the short one": (lambda w, x: two_chains(w, x)[1], 6, 6),
    "outputs that nobody reads": (looped(lambda w, y: (w @ y, w @ (w @ y))), 6, 6),
    "branches": (lambda w, x: jax.lax.cond(x[0] > 0, lambda v: w @ (w @ v), lambda v: w @ v, x), 2, 2),
    "jit": (jax.jit(lambda w, x: (w @ x, w @ (w @ x))), 3, 2),
}
"""A function of a matrix and a vector, its products, and those that wait for each other."""


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_counted_as_by_hand(name):
    f, work, depth = COUNTED[name]
    assert of(f) == (work, depth)


def test_loops_of_unknown_length_are_refused():
    with pytest.raises(ValueError, match="leave tolerances out"):
        of(lambda w, x: jax.lax.while_loop(lambda y: y[0] < 10, lambda y: w @ y + 1, x))


@pytest.mark.parametrize(
    ("solver", "work", "depth"),
    [
        # a product forward, and two backward, one of which nothing waits for
        (lp_jax.Serial(), 3, 2 * 64),
        # forward and adjoint sweeps, one batch each; between them layers are evaluated again; after them, the gradient
        (lp_jax.Picard(sweeps=3), 3 + 1 + 3 + 1, 2 * (3 + 1)),
        # without what is kept, they are evaluated again for every adjoint sweep
        (lp_jax.Picard(sweeps=3, storage="states"), 3 + 4 + 3 + 1, 2 * (3 + 1)),
    ],
)
def test_a_training_step(solver, work, depth):
    assert training_step(64, solver) == (work * 64, depth)


@pytest.mark.parametrize(("relaxation", "cycles"), [("F", 1), ("FCF", 3)])
def test_cycles_forward(relaxation, cycles):
    """Work is what test_theory.py counts; in a row are the coarsest level, and m - 1 fine layers; the final sweep is m."""
    n, m = 64, 4
    solver = lp_jax.MGRIT(coarsening=m, iterations=cycles, relaxation=relaxation, coarse_step=INJECT)
    found = cost(lambda w, x: lp_jax.solve(layer, w, x, solver=solver).y1, jnp.stack([W] * n), X, unit=UNIT)
    assert found.work == sum(cycle_cost([64, 16], [relaxation.count("C")] * 2, cycles, True).values())
    assert cycles > 1 or found.depth == n / m + m


NEWTON = lp_jax.Newton(iterations=4, batch_axes=1)


@pytest.mark.parametrize(
    ("forward", "adjoint", "same"),
    [
        (NEWTON, NEWTON.for_adjoint(), {"batch_axes": 0}),
        (lp_jax.Newton(jacobian="diagonal", iterations=4, batch_axes=1), lp_jax.Picard(sweeps=2), {"batch_axes": 0}),
    ],
)
def test_a_layer_of_one_example_costs_a_product(forward, adjoint, same):
    """Whether its axis of examples is named or not."""
    assert training_step(64, forward, adjoint) == training_step(64, dataclasses.replace(forward, **same), adjoint)
