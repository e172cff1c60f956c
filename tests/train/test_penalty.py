"""The depth penalty, beside the residual norms that a solver finds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import BatchNormed, assert_close, normal

import lp_jax
from lp_jax import nn, train

LAYERS, WIDTH = 10, 3
PARAMS, X = {"w": normal((LAYERS, WIDTH, WIDTH)), "b": normal((LAYERS, WIDTH), 2)}, normal((5, WIDTH), 3)


def step(y, layer):
    return y + layer.dt * jnp.tanh(y @ layer.params["w"] + layer.params["b"][None]) * (1 + layer.t)


def problem(params, step=step, x=X, **options):
    return lp_jax.Problem(step, params, x, t1=2.0, **options)


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
    sweeps = 3
    wanted = jax.jit(jax.value_and_grad(lambda params: by_hand(params, sweeps, 1e-6)))(PARAMS)
    penalty = functools.partial(train.depth_penalty, sweeps=sweeps, rtol=1e-6)
    got = jax.jit(jax.value_and_grad(lambda params: penalty(problem(params))))(PARAMS)
    assert wanted[0] > 1
    assert_close(got, wanted, rtol=1e-11)


def test_it_is_zero_where_the_sweeps_converge():
    """And counts the decades above the tolerance from there on."""
    norms = problem(PARAMS).solve(solver=lp_jax.Picard(sweeps=4)).stats.residual_norms
    reached = float(norms[-1] / norms[0])

    def gradient(rtol):
        penalty = lambda params: train.depth_penalty(problem(params), sweeps=4, rtol=rtol)  # noqa: E731
        return jax.device_get(jax.jit(jax.value_and_grad(penalty))(PARAMS))

    value, slope = gradient(1.01 * reached)
    assert value == 0 and not any(x.any() for x in slope.values())
    assert_close(gradient(reached / 100)[0], np.asarray(2.0), rtol=1e-12)


def test_two_devices_give_the_same_numbers():
    """Of an explicit mesh, which asks more than another."""
    devices = jax.make_mesh((2,), ("layers",), devices=jax.devices()[:2])

    def gradient(comm):
        penalty = lambda p: train.depth_penalty(problem(p, comm=comm), sweeps=3, rtol=1e-5)  # noqa: E731
        return jax.jit(jax.value_and_grad(penalty))(PARAMS)

    assert_close(gradient(lp_jax.MeshComm(devices)), gradient(None), rtol=1e-12)


def test_layers_that_do_not_look_at_the_state_have_none():
    constant = lambda y, layer: y + layer.params["b"][None]  # noqa: E731
    still = lambda y, layer: y * (1 + layer.params["b"][0])  # noqa: E731
    for each, x in ((constant, X), (still, 0 * X)):
        penalty = lambda p, each=each, x=x: train.depth_penalty(problem(p, each, x), sweeps=3)  # noqa: E731
        value, gradient = jax.device_get(jax.jit(jax.value_and_grad(penalty))(PARAMS))
        assert value == 0 and not any(x.any() for x in gradient.values())


def classifier(trunk):
    rngs = nnx.Rngs(0)
    return nn.Classifier(nn.DenseOpening((4,), 5, rngs=rngs), trunk, nn.DenseClosing((5,), 3, rngs=rngs))


def penalty(problem):
    return 0.5 * train.depth_penalty(problem, sweeps=3, rtol=1e-8)


@pytest.mark.usefixtures("standard_promotion")
def test_a_classifier_adds_it_to_its_loss():
    """And takes the running statistics of the solve."""
    model, serial = classifier(nn.LayerParallel(BatchNormed, 6, t1=2.0, rngs=nnx.Rngs(0))), lp_jax.Serial()
    batch = normal((7, 4)), np.arange(7) % 3
    plain, params = train.classification(model)
    penalised, _ = train.classification(model, penalty=penalty)

    @jax.jit
    def losses(params):
        both = plain(params, batch, serial, None), penalised(params, batch, serial, None)
        return both, penalty(model.trunk.problem(model.opening(batch[0])))

    ((loss, info), (more, other)), added = jax.device_get(losses(params))
    assert more > loss + 0.1
    assert_close(more, loss + added)
    assert_close(other.replace, info.replace)


def test_bad_input():
    with pytest.raises(ValueError, match="sweeps must be"):
        train.depth_penalty(problem(PARAMS), sweeps=1)
    with pytest.raises(ValueError, match="rtol must lie between 0 and 1; got 0"):
        train.depth_penalty(problem(PARAMS), sweeps=2, rtol=0)
    blocks = nn.Network(nn.LayerParallel(lambda rngs: nn.DenseResidual(5, rngs=rngs), 6, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="must be a LayerParallel; got Network"):
        train.classification(classifier(blocks), penalty=penalty)
