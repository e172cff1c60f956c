"""The depth penalty, beside a loop over layers written out."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from networks import BatchNormed, assert_close, normal

import lp_jax
from lp_jax import nn, train

LAYERS, WIDTH = 10, 3
PARAMS, X = {"w": normal((LAYERS, WIDTH, WIDTH)), "b": normal((LAYERS, WIDTH), 2)}, normal((5, WIDTH), 3)
SERIAL = lp_jax.Serial()


def step(y, layer):
    return y + layer.dt * jnp.tanh(y @ layer.params["w"] + layer.params["b"][None]) * (1 + layer.t)


def problem(params, **options):
    return lp_jax.Problem(step, params, X, t1=2.0, **options)


def by_hand(params, every):
    """The same numbers, layer by layer."""
    h, u = 2.0 / LAYERS, [X]

    def increment(n, y):
        return h * jnp.tanh(y @ params["w"][n] + params["b"][n][None]) * (1 + n * h)

    for n in range(LAYERS):
        u.append(u[-1] + increment(n, u[-1]))
    parts = []
    for n in range(0, LAYERS, every):
        end = min(n + every, LAYERS)
        swept = u[n] + sum(increment(i, u[n]) for i in range(n, end))
        parts.append(jnp.sum((swept - u[end]) ** 2) / jnp.sum(u[end] ** 2))
    return sum(parts) / len(parts)


@pytest.mark.parametrize("every", [2, 4, 30])
def test_value_and_gradient_are_those_of_a_loop(every):
    wanted = jax.jit(jax.value_and_grad(lambda params: by_hand(params, every)))(PARAMS)
    got = jax.jit(
        jax.value_and_grad(lambda params: train.depth_penalty(problem(params), every=every, solver=SERIAL)[0])
    )(PARAMS)
    assert wanted[0] > 1e-4
    assert_close(got, wanted, rtol=1e-11)


@pytest.mark.parametrize("explicit", [False, True])
def test_two_devices_give_the_same_numbers(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = jax.make_mesh((2,), ("layers",), axis_types=(kind,), devices=jax.devices()[:2])
    solver = lp_jax.Picard(sweeps=3)

    def loss(params, comm):
        penalty, solution = train.depth_penalty(problem(params, comm=comm), every=4, solver=solver)
        return penalty + jnp.mean(solution.y1**2)

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_close(gradient(PARAMS, lp_jax.MeshComm(devices)), gradient(PARAMS, None), rtol=1e-12)


def test_layers_that_do_not_look_at_the_state_have_none():
    constant = lambda y, layer: y + layer.params["b"][None]  # noqa: E731
    value, gradient = jax.value_and_grad(lambda p: train.depth_penalty(lp_jax.Problem(constant, p, X))[0])(PARAMS)
    assert value < 1e-30 and float(jnp.abs(gradient["b"]).max()) < 1e-15


def test_states_of_zeros_have_a_penalty_of_zero():
    still = lambda y, layer: y * (1 + layer.params["b"][0])  # noqa: E731
    value, gradient = jax.value_and_grad(lambda p: train.depth_penalty(lp_jax.Problem(still, p, 0 * X))[0])(PARAMS)
    assert value == 0 and bool(jnp.isfinite(gradient["b"]).all())


@pytest.mark.usefixtures("standard_promotion")
def test_the_solution_is_that_of_the_problem():
    """Its aux too, which layers with running statistics have."""
    trunk = nn.LayerParallel(BatchNormed, 6, t1=2.0, rngs=nnx.Rngs(0))
    y = normal((4, 5))
    penalty, solution = train.depth_penalty(trunk.problem(y), solver=SERIAL)
    wanted = lp_jax.solve(**vars(trunk.problem(y)), solver=SERIAL)
    assert penalty > 0
    assert_close((solution.y1, solution.aux), (wanted.y1, wanted.aux))


def test_training_against_it_lowers_it():
    """A few steps down its gradient, and one sweep over the blocks is nearer to the states."""
    params = PARAMS
    gradient = jax.jit(jax.value_and_grad(lambda p: train.depth_penalty(problem(p), solver=SERIAL)[0]))
    first, _ = gradient(params)
    for _ in range(5):
        params = jax.tree.map(lambda p, g: p - g, params, gradient(params)[1])
    assert gradient(params)[0] < 0.9 * first


def test_bad_input():
    with pytest.raises(ValueError, match="every must be"):
        train.depth_penalty(problem(PARAMS), every=1)


def classifier(trunk):
    rngs = nnx.Rngs(0)
    return nn.Classifier(nn.DenseOpening((4,), 5, rngs=rngs), trunk, nn.DenseClosing((5,), 3, rngs=rngs))


@pytest.mark.usefixtures("standard_promotion")
def test_a_classifier_adds_it_to_its_loss():
    """And takes the running statistics of the solve."""
    model = classifier(nn.LayerParallel(BatchNormed, 6, t1=2.0, rngs=nnx.Rngs(0)))
    batch = normal((7, 4)), jnp.arange(7) % 3
    plain, params = train.classification(model)
    penalised, _ = train.classification(model, penalty=0.5)
    (loss, info), (more, other) = plain(params, batch, SERIAL, None), penalised(params, batch, SERIAL, None)
    penalty, _ = train.depth_penalty(model.trunk.problem(model.opening(batch[0])), solver=SERIAL)
    assert_close(more, loss + 0.5 * penalty)
    assert_close(other.replace, info.replace)


def test_a_classifier_of_several_blocks_has_no_single_penalty():
    trunk = nn.Network(nn.LayerParallel(lambda rngs: nn.DenseResidual(5, rngs=rngs), 6, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="must be a LayerParallel; got Network"):
        train.classification(classifier(trunk), penalty=0.5)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        train.classification(classifier(trunk), penalty=-1)
