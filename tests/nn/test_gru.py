"""Recurrent networks: against a plain loop with every gate written out; over devices in test_nn.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from recurrent import (
    BATCH,
    FEATURES,
    HIDDEN,
    LENGTHS,
    STEPS,
    TARGET,
    UNITS,
    X,
    assert_close,
    loop,
    make,
    weights,
)

import lp_jax
from lp_jax import nn

EXACT = lp_jax.MGRIT(coarsening=4, iterations=3, at_once=math.inf, storage="all")  # three intervals


def loss(gru, x, lengths, solver):
    y1 = gru.solve(x if lengths is None else (x, lengths), solver=solver).y1
    return sum(jnp.sum(h * target) for h, target in zip(y1, TARGET, strict=True))


LOOP = jax.jit(jax.value_and_grad(loop, argnums=(0, 1)), static_argnums=2)


@pytest.mark.parametrize(
    ("solver", "implicit"), [(lp_jax.Serial(), False), (EXACT, True)], ids=["explicit", "implicit"]
)
def test_states_and_gradients_are_those_of_a_loop_with_every_gate(solver, implicit):
    gru, lengths = make(implicit), LENGTHS if implicit else None
    value, got = jax.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(gru, X, lengths, solver)
    wanted_value, wanted = LOOP(weights(gru), X, implicit, lengths)
    assert_close((weights(got[0]), got[1]), wanted)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-12)


@pytest.mark.parametrize(("at_once", "together"), [(math.inf, STEPS), (1, 4), (6, 6)])
def test_the_weight_gradient_is_one_contraction(at_once, together):
    """Over all times and examples, without a step evaluated again: nothing but cotangents is multiplied by weights there."""
    solver = lp_jax.MGRIT(coarsening=4, iterations=3, storage="all", at_once=at_once)
    text = jax.jit(nnx.grad(loss)).lower(make(True), X, None, solver).as_text()
    products = [line.rstrip() for line in text.splitlines() if "dot_general" in line]
    formed = [line for line in products if line.endswith(f"-> tensor<{3 * HIDDEN}x{HIDDEN}xf64>")]
    assert len(formed) == 2 * UNITS - 1
    many = f"tensor<{together}x{BATCH}x{HIDDEN}xf64>"
    assert all(f"{many}) ->" in line for line in formed), formed
    passed_down = [line for line in products if line.endswith(f"-> {many}")]
    assert len(passed_down) == UNITS - 1  # from the cotangents of a unit to those of the one below


def test_a_recurrent_step_with_a_gradient_of_its_own():
    """One that nothing can transpose again."""

    @jax.custom_vjp
    def clipped(h):
        return jnp.tanh(h)

    clipped.defvjp(
        lambda h: (jnp.tanh(h), h),
        lambda h, bar: (jnp.clip(bar, -10.0, 10.0) * (1 - jnp.tanh(h) ** 2),),
    )

    def step(y, layer):
        w, x = layer.shared, layer.data
        return y + layer.dt * clipped(y @ w + x @ w[:FEATURES])

    def solved(w, solver):
        given = {"shared": w, "data": jnp.swapaxes(X, 0, 1), "solver": solver}
        return jnp.sum(lp_jax.solve(step, None, jnp.ones((BATCH, HIDDEN)), **given).y1 * TARGET[0])

    w = jnp.asarray(np.random.default_rng(6).normal(size=(HIDDEN, HIDDEN)))
    gradient = jax.jit(jax.grad(solved))
    stored = lp_jax.MGRIT(coarsening=4, iterations=3, storage="all")
    assert_close(gradient(w, stored), gradient(w, lp_jax.Serial()))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda rngs: nn.GRU(0, 4, rngs=rngs), ValueError, "features must be at least 1; got 0"),
        (lambda rngs: nn.GRU(3, 4, units=1.5, rngs=rngs), TypeError, "units must be an integer"),
        (
            lambda rngs: nn.GRU(3, 4, solver="MGRIT", rngs=rngs),
            TypeError,
            "solver must be a solver",
        ),
        (lambda rngs: nn.ParaLSTM(3, 0, rngs=rngs), ValueError, "hidden must be at least 1; got 0"),
        (
            lambda rngs: nn.ParaGRU(3, 4, rngs=rngs)(jnp.ones((2, 7))),
            ValueError,
            r"ParaGRU takes .* got \(2, 7\)",
        ),
        (
            lambda rngs: nn.GRU(3, 4, rngs=rngs)(jnp.ones((2, 8, 5), "float32")),
            ValueError,
            r"sequences of 3 features, \(batch, time, 3\); got \(2, 8, 5\)",
        ),
        (
            lambda rngs: nn.GRU(3, 4, rngs=rngs)(
                (jnp.ones((2, 8, 3), "float32"), jnp.ones(3, int))
            ),
            ValueError,
            r"lengths must be 2 integers, one for each sequence; got int64\[3\]",
        ),
    ],
)
def test_bad_input_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build(nnx.Rngs(0))
