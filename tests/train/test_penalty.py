"""The depth penalty, beside the residual norms that a solver finds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import BatchNormed, assert_close, dense_classifier, normal

import lp_jax
from lp_jax import nn, train

LAYERS, WIDTH = 10, 3
PARAMS, X = (
    {"w": normal((LAYERS, WIDTH, WIDTH)), "b": normal((LAYERS, WIDTH), 2)},
    normal((5, WIDTH), 3),
)


def step(y, layer):
    return y + layer.dt * jnp.tanh(y @ layer.params["w"] + layer.params["b"][None]) * (1 + layer.t)


@functools.partial(jax.jit, static_argnames=("sweeps", "rtol", "step", "comm"))
@jax.value_and_grad
def penalty_and_gradient(params, sweeps, rtol=1e-3, x=X, step=step, comm=None):
    return train.depth_penalty(
        lp_jax.Problem(step, params, x, t1=2.0, comm=comm), sweeps=sweeps, rtol=rtol
    )


def by_hand(params, sweeps, rtol):
    """The same numbers, layer by layer."""
    h = 2.0 / LAYERS

    def increment(n, y):
        return h * jnp.tanh(y @ params["w"][n] + params["b"][n][None]) * (1 + n * h)

    states, norms, before = [X] * LAYERS, [], [jnp.zeros_like(X)] * LAYERS
    for _ in range(sweeps):
        now = [increment(n, y) for n, y in enumerate(states)]
        norms.append(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(now, before, strict=True))))
        states, before = [X + sum(now[:n]) for n in range(LAYERS)], now
    return jnp.maximum(0.0, jnp.log10(norms[-1] / (rtol * norms[0])))


def test_value_and_gradient_are_those_of_a_loop():
    """On one device, and on two of an explicit mesh, which asks more than another."""
    wanted = jax.jit(jax.value_and_grad(lambda params: by_hand(params, 3, 1e-6)))(PARAMS)
    assert wanted[0] > 1
    comms = None, lp_jax.MeshComm(jax.make_mesh((2,), ("layers",), devices=jax.devices()[:2]))
    one, two = (penalty_and_gradient(PARAMS, 3, 1e-6, comm=comm) for comm in comms)
    assert_close(one, wanted, rtol=1e-11)
    assert_close(two, one, rtol=1e-12)


def test_it_is_zero_where_the_sweeps_converge():
    """And counts the decades above the tolerance from there on."""
    norms = lp_jax.solve(
        step, PARAMS, X, t1=2.0, solver=lp_jax.Picard(sweeps=4)
    ).stats.residual_norms
    reached = float(norms[-1] / norms[0])
    value, slope = penalty_and_gradient(PARAMS, 4, 1.01 * reached)
    assert value == 0 and not any(x.any() for x in slope.values())
    assert_close(penalty_and_gradient(PARAMS, 4, reached / 100)[0], jnp.asarray(2.0), rtol=1e-12)


def test_layers_that_do_not_look_at_the_state_have_none():
    constant = lambda y, layer: y + layer.params["b"][None]  # noqa: E731
    still = lambda y, layer: y * (1 + layer.params["b"][0])  # noqa: E731
    for each, x in ((constant, X), (still, 0 * X)):
        value, slope = penalty_and_gradient(PARAMS, 3, x=x, step=each)
        assert value == 0 and not any(x.any() for x in slope.values())


def penalty(problem):
    return 0.5 * train.depth_penalty(problem, sweeps=3, rtol=1e-8)


@pytest.mark.usefixtures("standard_promotion")
def test_a_classifier_adds_it_to_its_loss_and_training_lowers_both():
    """Running statistics are those of the solve."""
    model, serial, optimizer = dense_classifier(6, BatchNormed), lp_jax.Serial(), optax.adam(1e-2)
    batch = normal((7, 3)), np.arange(7) % 2
    plain, params = train.classification(model)
    penalised, _ = train.classification(model, penalty=penalty)

    @jax.jit
    def losses(params):
        return plain(params, batch, serial, None), penalised(params, batch, serial, None)

    (loss, info), (more, other) = losses(params)
    added = jax.jit(lambda x: penalty(model.trunk.problem(model.opening(x))))(batch[0])
    assert added > 0.1
    assert_close(more, loss + added)
    assert_close(other.replace, info.replace)

    step_fn, state = (
        train.make_train_step(penalised, optimizer),
        train.init_state(params, optimizer),
    )
    for _ in range(30):
        state, _ = step_fn(state, batch, serial, None)
    (loss_after, _), (more_after, _) = losses(state.params)
    assert loss_after < 0.9 * loss and more_after - loss_after < added - 0.5


def test_bad_input():
    refused = {
        "sweeps must be": {"sweeps": 1},
        "rtol must lie between 0 and 1; got 0": {"sweeps": 2, "rtol": 0},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            penalty_and_gradient(PARAMS, **options)
    model = dense_classifier()
    model.trunk = nn.Network(model.trunk)
    with pytest.raises(TypeError, match="must be a LayerParallel; got Network"):
        train.classification(model, penalty=penalty)
