"""States on another grid, and solves that start from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lp_jax


@pytest.mark.parametrize("count", [1, 3, 5, 10, 35])
def test_a_line_is_met(count):
    """States that are linear in time are the same line on any grid, and a grid that is contained is repeated."""
    y0 = {"a": jnp.ones(2), "b": jnp.zeros((), complex)}
    times = np.arange(1, 6) / 5
    trajectory = {"a": 1 + 3 * times[:, None] * np.ones(2), "b": 1j * times}
    found = jax.jit(lp_jax.interpolate, static_argnums=2)(y0, trajectory, count)
    there = np.arange(1, count + 1) / count
    np.testing.assert_allclose(found["a"], 1 + 3 * there[:, None] * np.ones(2), rtol=1e-14)
    np.testing.assert_allclose(found["b"], 1j * there, rtol=1e-14)


def runge_kutta(y, h):
    """A classical step of the Lorenz system."""

    def slope(y):
        x, y, z = y
        return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    k1 = slope(y)
    k2 = slope(y + h / 2 * k1)
    k3 = slope(y + h / 2 * k2)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3))


def test_newton_starts_from_a_coarse_solve():
    """From 64 interpolated steps it takes a few iterations; from the constant guess it leaves the range of numbers."""
    y0, time, steps = jnp.asarray([1.0, 1.0, 20.0]), 2.0, 512
    coarse = jax.lax.scan(lambda y, _: (runge_kutta(y, time / 64),) * 2, y0, length=64)[1]
    guess = lp_jax.interpolate(y0, coarse, steps)
    problem = lp_jax.Problem(lambda y, at: runge_kutta(y, at.dt), None, y0, data=jnp.zeros(steps), t1=time)
    solver = lp_jax.Newton(iterations=20, atol=1e-6, batch_axes=0)
    warm = problem.solve(solver=solver, guess=guess)
    assert int(warm.result) == 0
    assert int(warm.stats.iterations) <= 4
    exact = problem.solve(solver=lp_jax.Serial())
    np.testing.assert_allclose(warm.y1, exact.y1, rtol=1e-6)
    cold = problem.solve(solver=solver)
    assert int(cold.result) != 0


@pytest.mark.parametrize(
    ("solver", "count"),
    [(lp_jax.Picard(sweeps=30, rtol=1e-9), 48), (lp_jax.MGRIT(coarsening=4, iterations=20, rtol=1e-9), 12)],
)
def test_a_guess_from_fewer_layers_saves_iterations(solver, count):
    """And no other tolerance is needed where the guess is exact: what rounding leaves is done."""

    def problem(layers):
        return lp_jax.Problem(lambda y, x: y + x.dt * jnp.sin(3 * y), None, jnp.ones(4), data=jnp.zeros(layers))

    coarse = problem(24).solve(solver=lp_jax.Picard(sweeps=30, rtol=1e-12))
    cold = problem(48).solve(solver=solver)
    guess = lp_jax.interpolate(jnp.ones(4), coarse.trajectory, count)
    warm = problem(48).solve(solver=solver, guess=guess)
    assert int(warm.stats.iterations) <= int(cold.stats.iterations)
    if isinstance(solver, lp_jax.Picard):
        assert float(warm.stats.residual_norms[0]) < 0.1 * float(cold.stats.residual_norms[0])
    exact = problem(48).solve(solver=lp_jax.Picard(sweeps=48)).trajectory
    done = problem(48).solve(solver=solver, guess=exact[48 // count - 1 :: 48 // count])
    assert int(done.result) == 0
    assert int(done.stats.iterations) == 1


def test_what_is_refused():
    with pytest.raises(ValueError, match="count"):
        lp_jax.interpolate(jnp.ones(2), jnp.ones((3, 2)), 0)
    with pytest.raises(ValueError, match="states like y0"):
        lp_jax.interpolate(jnp.ones(2), jnp.ones((3, 4)), 6)
    with pytest.raises(ValueError, match="states like y0"):
        lp_jax.interpolate(jnp.ones(2), {"a": jnp.ones((3, 2))}, 6)
    with pytest.raises(ValueError, match="at least 1"):
        lp_jax.interpolate(jnp.ones(2), jnp.ones((0, 2)), 6)


def test_it_is_differentiated_and_batched():
    trajectory = jnp.arange(6.0).reshape(3, 2)
    f = jax.jit(jax.vmap(lambda y: lp_jax.interpolate(y, trajectory, 6)))
    assert f(jnp.ones((5, 2))).shape == (5, 6, 2)
    gradient = jax.jit(jax.grad(lambda y: jnp.sum(lp_jax.interpolate(y, trajectory, 6))))(jnp.zeros(2))
    np.testing.assert_allclose(gradient, [0.5, 0.5])
