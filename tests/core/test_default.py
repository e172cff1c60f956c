"""Sweeps to a tolerance, and serial propagation where they miss it: what the default takes where it can win."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import F64, dense_classifier
from problems import relative_error
from products import layer

import lp_jax
from lp_jax import train
from lp_jax._choice._fastest import SWEEPS
from lp_jax._levels._result import DONE, FELL_BACK, NOT_CONVERGED


def test_a_pre_norm_network_at_its_start():
    """48 blocks as Flax initialises them: h = 1, nothing scaled down."""
    keys, draw = (
        jax.random.split(jax.random.key(0), 3),
        jax.nn.initializers.lecun_normal(batch_axis=0),
    )
    weights, x = (
        (draw(keys[0], (48, 64, 256)), draw(keys[1], (48, 256, 64))),
        jax.random.normal(keys[2], (16, 64)),
    )

    def block(x, w):
        return x + jax.nn.gelu(jax.nn.standardize(x) @ w[0]) @ w[1], None

    def gradient(*solvers):
        given = dict(zip(("solver", "adjoint_solver"), solvers, strict=False))
        return jax.jit(jax.grad(lambda w: jnp.mean(jnp.sin(lp_jax.scan(block, x, w, **given)[0]))))(
            weights
        )

    assert 1e-12 < relative_error(gradient(*SWEEPS), gradient(lp_jax.Serial())) < 2e-3


@jax.jit
def both_ways(params, y0, solver):
    solution, pullback = lp_jax.solve_vjp(layer, params, y0, t1=3.0, solver=solver)
    gradients, stats = pullback(jnp.cos(solution.y1))
    return (solution.y1, gradients.params), solution.trajectory, (solution.stats, stats)


PARAMS, Y0 = (
    jnp.asarray(np.random.default_rng(5).normal(size=shape)) for shape in ((22, 6, 6), (3, 6))
)


@pytest.mark.parametrize(
    "solver",
    [
        lp_jax.Picard(sweeps=2, rtol=1e-10, fallback=True),
        lp_jax.Picard(sweeps=2, rtol=1e-10, fallback=True, at_once=4),
        lp_jax.MGRIT(iterations=3, rtol=1e-10, fallback=True),
        lp_jax.MGRIT(
            iterations=1, rtol=1e-10, fallback=True
        ),  # a skipped down-cycle measures nothing
        lp_jax.MGRIT(
            iterations=2, rtol=1e-10, fallback=True, storage="all", coarse_step=lp_jax.Identity()
        ),
        lp_jax.Newton(iterations=1, rtol=1e-14, fallback=True, batch_axes=1),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_any_solver_may_fall_back(solver):
    """From 22 layers, which no interval divides."""
    got, trajectory, stats = both_ways(PARAMS, Y0, solver)
    wanted, states, _ = both_ways(PARAMS, Y0, lp_jax.Serial())
    assert relative_error(got, wanted) < 1e-13
    forward, adjoint = (int(each.result) for each in stats)
    assert forward == FELL_BACK and adjoint in (
        FELL_BACK,
        DONE,
    )  # one iteration of Newton is enough
    stride = solver.stride(22)
    np.testing.assert_allclose(
        trajectory[:-1], states[stride - 1 :: stride][: len(trajectory) - 1], rtol=1e-13
    )


def test_a_leaf_that_the_first_sweep_leaves_as_it_is():
    """A pendulum that starts at rest moves in the second sweep, which is not a sign of divergence."""
    step = lambda y, x: (y[0] + x.dt * y[1], y[1] - x.dt * x.params * jnp.sin(y[0]))  # noqa: E731
    problem = lp_jax.Problem(step, jnp.ones(64), (jnp.ones(2), jnp.zeros(2)))
    solution = problem.solve(solver=lp_jax.Picard(sweeps=24, rtol=1e-3, fallback=True))
    assert int(solution.result) == DONE and int(solution.stats.iterations) <= 7
    assert relative_error(solution.y1, problem.solve(solver=lp_jax.Serial()).y1) < 1e-3


def test_a_batch_by_vmap_falls_back_where_one_must():
    weights = jnp.stack([0.1 * jnp.eye(4), 8.0 * jnp.eye(4)]).astype(F64)

    def run(weight, solver):
        step = lambda y, layer: y + layer.dt * jnp.sin(layer.shared @ y)  # noqa: E731
        data = jnp.zeros((32, 1))

        def loss(weight):
            solution = lp_jax.solve(
                step, None, jnp.ones(4), shared=weight, data=data, t1=8.0, solver=solver
            )
            return jnp.sum(solution.y1), solution.result

        return jax.grad(loss, has_aux=True)(weight)

    got, codes = jax.jit(jax.vmap(functools.partial(run, solver=SWEEPS[0])))(weights)
    wanted, _ = jax.jit(jax.vmap(functools.partial(run, solver=lp_jax.Serial())))(weights)
    assert list(codes) == [DONE, FELL_BACK]
    assert relative_error(got[0], wanted[0]) < 1e-2 and relative_error(got[1], wanted[1]) < 1e-12


def test_falling_back_is_no_failure():
    step = lambda y, layer: 2.0 * y  # noqa: E731
    solution = lp_jax.solve(step, jnp.zeros(32), jnp.ones((), F64), solver=SWEEPS[0])
    assert solution.result == FELL_BACK and float(solution.raise_if_failed().y1) == 2.0**32
    assert "one after another" in lp_jax.RESULTS[int(solution.result)] and "result=2" in repr(
        solution
    )


def test_training_without_a_solver_takes_what_the_model_was_built_with():
    """And the default of `solve` where it was built with none; nothing is faster on eight layers."""

    def trained(built_with, solver=None):
        loss_fn, params = train.classification(
            dense_classifier(8, dtype=jnp.float32, solver=built_with)
        )
        step_fn, state = (
            train.make_train_step(loss_fn, optax.sgd(0.1)),
            train.init_state(params, optax.sgd(0.1)),
        )
        return step_fn(
            state, (jnp.ones((4, 3), jnp.float32), jnp.zeros(4, jnp.int32)), solver, None
        )[1].loss

    one_cycle = lp_jax.MGRIT(iterations=1, coarse_step=lp_jax.Rediscretize())
    assert trained(None) == trained(one_cycle, lp_jax.Serial()) != trained(one_cycle)


def test_a_start_that_diverges_does_not_make_its_own_tolerance():
    """Explicit coarse steps of a stiff equation: the first norm is 1e20 or so, and a millionth of it is no tolerance."""
    rates = 10 * jnp.linspace(1.0, 40.0, 16) ** 2
    problem = lp_jax.Problem(
        lambda y, layer: y / (1 + layer.dt * rates), None, jnp.ones(16), data=jnp.zeros(128), t1=1.0
    )
    exact = problem.solve(solver=lp_jax.Serial()).y1
    for fallback, code in ((False, NOT_CONVERGED), (True, FELL_BACK)):
        solver = lp_jax.MGRIT(iterations=8, rtol=1e-6, relaxation="FCF", fallback=fallback)
        solution = problem.solve(solver=solver)
        assert float(solution.stats.residual_norms[1]) > 1e6
        assert int(solution.result) == code
    np.testing.assert_allclose(solution.y1, exact, rtol=1e-12, atol=1e-300)
