"""A window of sweeps that slides: to a tolerance, forward and adjoint, on one worker and on several."""

import dataclasses
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
    gradients, stats = pullback(jnp.cos(solution.y1))
    return solution, gradients, stats


def solved(problem, solver, comm=None):
    """One program for all tolerances."""
    return _solved(problem.params, problem.y0, problem.t1, solver, comm)


@pytest.mark.parametrize(("windows", "storage"), [(7, "states"), (50, "all")])
def test_the_tolerance_is_met_both_ways(windows, storage):
    """Also where windows do not divide the layers, and down to one layer at a time, which is serial propagation."""
    problem = network()
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    errors = []
    for rtol in (1e-3, 1e-6, 1e-9):
        solver = lp_jax.Picard(sweeps=40, windows=windows, rtol=rtol, storage=storage)
        solution, gradients, stats = solved(problem, solver)
        assert int(solution.result) == int(stats.result) == 0
        assert windows <= int(solution.stats.iterations) <= 39 * windows + 1
        errors += [distance(solution.y1, exact.y1), distance(gradients.params, gradient.params)]
        assert max(errors[-2:]) < rtol
    if windows == 50:
        assert max(errors) < 1e-14


def test_an_absolute_tolerance_and_one_that_is_not_met():
    problem = network()
    exact = problem.solve(solver=lp_jax.Serial())
    solution = problem.solve(solver=lp_jax.Picard(sweeps=40, windows=5, atol=1e-7))
    assert int(solution.result) == 0
    assert 0 < float(solution.stats.residual_norms[-1]) <= 1e-7
    few = lp_jax.Picard(sweeps=2, windows=5, rtol=1e-9)
    missed = problem.solve(solver=few)
    assert lp_jax.RESULTS[int(missed.result)].startswith("the residual norm did not come down")
    assert int(missed.stats.iterations) == 5 + 1
    with pytest.raises(RuntimeError):
        missed.raise_if_failed()
    kept = problem.solve(solver=lp_jax.Picard(sweeps=2, windows=5, rtol=1e-9, fallback=True))
    assert int(kept.result) == FELL_BACK
    np.testing.assert_allclose(kept.y1, exact.y1, rtol=1e-14)


def test_windows_converge_where_sweeps_over_all_layers_do_not():
    """A chain that contracts over a long time: residuals of sweeps over all of it grow by far more than ten."""
    problem = lp_jax.Problem(
        lambda y, x: y + x.dt * (x.data - y), None, jnp.ones(2), data=jnp.sin(jnp.arange(400.0)), t1=60.0
    )
    exact = problem.solve(solver=lp_jax.Serial())
    whole = problem.solve(solver=lp_jax.Picard(sweeps=60, rtol=1e-6, fallback=True))
    assert int(whole.result) == FELL_BACK
    solution = problem.solve(solver=lp_jax.Picard(sweeps=60, windows=20, rtol=1e-6))
    assert int(solution.result) == 0
    assert int(solution.stats.iterations) < 200
    assert distance(solution.y1, exact.y1) < 1e-6


def test_fewer_sweeps_than_one_window_after_the_other():
    """Converged layers make room at once: as exact as five sweeps of eight windows each, in fewer evaluations in a row."""
    problem = network(3.0, 128)
    exact = problem.solve(solver=lp_jax.Serial())
    fixed = problem.solve(solver=lp_jax.Picard(sweeps=5, windows=8))
    error = distance(fixed.y1, exact.y1)
    slid = problem.solve(solver=lp_jax.Picard(sweeps=40, windows=8, rtol=1e-3))
    assert distance(slid.y1, exact.y1) < 10 * error
    assert int(slid.stats.iterations) < 8 * 4 + 1


def test_some_of_a_window_at_once():
    """The same numbers to rounding."""
    solver = lp_jax.Picard(sweeps=40, windows=8, rtol=1e-8)
    (whole, *_), (some, *_) = (solved(network(), s) for s in (solver, dataclasses.replace(solver, at_once=3)))
    np.testing.assert_allclose(some.y1, whole.y1, rtol=1e-12)


def test_windows_on_several_devices():
    """One device after the other slides its own window; all of them know the sweeps and meet the tolerance."""
    problem = network(layers=52)
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    comm = mesh(4)
    solver = lp_jax.Picard(sweeps=40, windows=8, rtol=1e-6)
    solution, gradients, stats = solved(problem, solver, comm=comm)
    assert int(solution.result) == int(stats.result) == 0
    assert int(solution.stats.iterations) > 8
    assert distance(solution.y1, exact.y1) < 1e-6
    assert distance(gradients.params, gradient.params) < 1e-6


def test_it_compiles_once_for_all_tolerances_and_is_batched():
    problem = network()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def y1(y0, rtol):
        return problem.replace(y0=y0).solve(solver=lp_jax.Picard(sweeps=40, windows=5, rtol=rtol)).y1

    exact = problem.solve(solver=lp_jax.Serial()).y1
    errors = [distance(y1(problem.y0, jnp.asarray(rtol)), exact) for rtol in (1e-2, 1e-5, 1e-8)]
    assert errors[0] > errors[1] > errors[2]
    several = jax.vmap(lambda scale: y1(scale * problem.y0, jnp.asarray(1e-8)))(jnp.asarray([1.0, 0.5]))
    np.testing.assert_allclose(several[0], exact, rtol=1e-7)


def test_single_precision():
    problem = network(dtype=jnp.float32)
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    solution, gradients, stats = solved(problem, lp_jax.Picard(sweeps=40, windows=5, rtol=1e-8))
    assert int(solution.result) == int(stats.result) == 0
    assert distance(solution.y1, exact.y1) < 1e-5
    assert distance(gradients.params, gradient.params) < 1e-5


def test_a_planner_counts_what_was_taken():
    solver = lp_jax.Picard(sweeps=40, windows=8, rtol=1e-3)
    assert planning.with_effort(solver, 25) == lp_jax.Picard(sweeps=4, windows=8)
    assert "slides" in viz.describe(solver, 64).note


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"windows=4.*with a tolerance takes at least 2 sweeps; got sweeps=1"):
        lp_jax.Picard(sweeps=1, windows=4, rtol=1e-3)
