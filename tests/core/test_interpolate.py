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


@pytest.mark.parametrize(
    ("trajectory", "count", "message"),
    [
        (jnp.ones((3, 2)), 0, "count"),
        (jnp.ones((3, 4)), 6, "states like y0"),
        ({"a": jnp.ones((3, 2))}, 6, "states like y0"),
        (jnp.ones((0, 2)), 6, "at least 1"),
    ],
)
def test_what_is_refused(trajectory, count, message):
    with pytest.raises(ValueError, match=message):
        lp_jax.interpolate(jnp.ones(2), trajectory, count)
