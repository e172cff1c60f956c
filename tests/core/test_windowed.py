"""Sweeps over a window that slides: to a tolerance, forward and adjoint, on one worker and on several.

Windows one after the other are held against a loop over numbers in test_theory.py.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import relative_error as distance

import lp_jax
from lp_jax import planning, viz
from lp_jax._levels._result import FELL_BACK

N, D, BATCH = 50, 4, 3


def dense(y, layer):
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b[None])


def network(t1=6.0, layers=N, dtype=float):
    rng = np.random.default_rng(0)
    w, b, y0 = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((layers, D, D), (layers, D), (BATCH, D)))
    return lp_jax.Problem(dense, (w, jnp.asarray(0.1, dtype) * b), y0, t1=t1)


@functools.partial(jax.jit, static_argnames="comm")
def _solved(params, y0, t1, solver, comm):
    solution, pullback = lp_jax.solve_vjp(dense, params, y0, t1=t1, solver=solver, comm=comm)
    return solution, *pullback(jnp.cos(solution.y1))


def errors(problem, comm=None, **fields):
    """Relative errors of the last state and of the gradient, and the number of sweeps; one program for all tolerances."""
    arguments = problem.params, problem.y0, problem.t1
    exact, gradient, _ = _solved(*arguments, lp_jax.Serial(), None)
    solution, gradients, stats = _solved(*arguments, lp_jax.Windowed(sweeps=40, **fields), comm)
    assert int(solution.result) == int(stats.result) == 0
    of_gradient = distance(gradients.params, gradient.params)
    return max(distance(solution.y1, exact.y1), of_gradient), int(solution.stats.iterations)


@pytest.mark.parametrize(("windows", "storage"), [(7, "states"), (50, "all")])
def test_the_tolerance_is_met_both_ways(windows, storage):
    """Also where windows do not divide the layers, and down to one layer at a time, which is serial propagation."""
    for rtol in (1e-3, 1e-6, 1e-9):
        error, sweeps = errors(network(), windows=windows, rtol=rtol, storage=storage)
        assert windows <= sweeps <= 39 * windows + 1
        assert error < (1e-14 if windows == N else rtol)


def test_windows_on_several_devices():
    """One device after the other slides its own window; all of them know the sweeps and meet the tolerance."""
    error, sweeps = errors(network(layers=52), mesh(4), windows=8, rtol=1e-6)
    assert error < 1e-6 and sweeps > 8


def test_single_precision():
    assert errors(network(dtype=jnp.float32), windows=5, rtol=1e-8)[0] < 1e-5


def test_an_absolute_tolerance_and_one_that_is_not_met():
    problem = network()
    solution = problem.solve(solver=lp_jax.Windowed(sweeps=40, windows=5, atol=1e-7))
    assert int(solution.result) == 0
    assert 0 < float(solution.stats.residual_norms[-1]) <= 1e-7
    missed = problem.solve(solver=lp_jax.Windowed(sweeps=2, windows=5, rtol=1e-9))
    assert lp_jax.RESULTS[int(missed.result)].startswith("the residual norm did not come down")
    assert int(missed.stats.iterations) == 5 + 1
    kept = problem.solve(solver=lp_jax.Windowed(sweeps=2, windows=5, rtol=1e-9, fallback=True))
    assert int(kept.result) == FELL_BACK
    np.testing.assert_allclose(kept.y1, problem.solve(solver=lp_jax.Serial()).y1, rtol=1e-14)


def test_windows_converge_where_sweeps_over_all_layers_do_not():
    """A chain that contracts over a long time: residuals of sweeps over all of it grow by far more than ten."""
    problem = lp_jax.Problem(
        lambda y, x: y + x.dt * (x.data - y), None, jnp.ones(2), data=jnp.sin(jnp.arange(400.0)), t1=60.0
    )
    whole = problem.solve(solver=lp_jax.Picard(sweeps=60, rtol=1e-6, fallback=True))
    assert int(whole.result) == FELL_BACK
    solution = problem.solve(solver=lp_jax.Windowed(sweeps=60, windows=20, rtol=1e-6))
    assert int(solution.result) == 0
    assert int(solution.stats.iterations) < 200
    assert distance(solution.y1, problem.solve(solver=lp_jax.Serial()).y1) < 1e-6


def test_fewer_sweeps_than_one_window_after_the_other():
    """Converged layers make room at once: as exact as five sweeps of eight windows each, in fewer evaluations in a row."""
    problem = network(3.0, 128)
    exact = problem.solve(solver=lp_jax.Serial())
    fixed = problem.solve(solver=lp_jax.Windowed(sweeps=5, windows=8))
    slid = problem.solve(solver=lp_jax.Windowed(sweeps=40, windows=8, rtol=1e-3))
    assert distance(slid.y1, exact.y1) < 10 * distance(fixed.y1, exact.y1)
    assert int(slid.stats.iterations) < 8 * 4 + 1


def test_one_program_for_all_tolerances_some_of_a_window_at_once_and_a_batch():
    problem = network()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def y1(y0, rtol):
        return problem.replace(y0=y0).solve(solver=lp_jax.Windowed(sweeps=40, windows=5, rtol=rtol)).y1

    exact, rtols = problem.solve(solver=lp_jax.Serial()).y1, (1e-2, 1e-5, 1e-8)
    found = [y1(problem.y0, jnp.asarray(rtol)) for rtol in rtols]
    first, second, third = (distance(y, exact) for y in found)
    assert first > second > third
    several = jax.vmap(lambda scale: y1(scale * problem.y0, jnp.asarray(1e-8)))(jnp.asarray([1.0, 0.5]))
    np.testing.assert_allclose(several[0], exact, rtol=1e-7)
    some = problem.solve(solver=lp_jax.Windowed(sweeps=40, windows=5, rtol=1e-8, at_once=3)).y1
    np.testing.assert_allclose(some, found[-1], rtol=1e-12)


def test_a_planner_counts_what_was_taken():
    solver = lp_jax.Windowed(sweeps=40, windows=8, rtol=1e-3)
    assert planning.with_effort(solver, 25) == lp_jax.Windowed(sweeps=4, windows=8)
    assert "slides" in viz.describe(solver, 64).note
