"""Sweeps over a window that slides, and secant sweeps: one slope for all layers, learned from the last two sweeps.

Windows one after the other are held against a loop over numbers in test_theory.py.
"""

import functools

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


def contracting(y, layer):
    return dense(y, layer) - layer.dt * y


@functools.partial(jax.jit, static_argnames=("step", "comm"))
def _solved(step, params, y0, t1, solver, comm):
    solution, pullback = lp_jax.solve_vjp(step, params, y0, t1=t1, solver=solver, comm=comm)
    return solution, *pullback(jnp.cos(solution.y1))


def solved(problem, solver, comm=None):
    """The solution, gradients and the adjoint's stats; one program for all tolerances."""
    return _solved(problem.step, problem.params, problem.y0, problem.t1, solver, comm)


# --- windows --------------------------------------------------------------------------------------------------------


def network(t1=6.0, layers=N):
    rng = np.random.default_rng(0)
    w, b, y0 = (jnp.asarray(rng.normal(size=shape)) for shape in ((layers, D, D), (layers, D), (BATCH, D)))
    return lp_jax.Problem(dense, (w, 0.1 * b), y0, t1=t1)


def errors(problem, comm=None, **fields):
    """The larger relative error of the last state and of the gradient, and the number of sweeps."""
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    solution, gradients, stats = solved(problem, lp_jax.Windowed(sweeps=40, **fields), comm)
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


def test_a_batch():
    problem, solver = network(), lp_jax.Windowed(sweeps=40, windows=5, rtol=1e-8, at_once=3)
    several = jax.vmap(lambda scale: problem.replace(y0=scale * problem.y0).solve(solver=solver).y1)(
        jnp.asarray([0.5, 1.0])
    )
    np.testing.assert_allclose(several[1], problem.solve(solver=lp_jax.Serial()).y1, rtol=1e-7)


def test_a_planner_counts_what_was_taken():
    solver = lp_jax.Windowed(sweeps=40, windows=8, rtol=1e-3)
    assert planning.with_effort(solver, 25) == lp_jax.Windowed(sweeps=4, windows=8)
    assert "slides" in viz.describe(solver, 64).note


# --- secant sweeps --------------------------------------------------------------------------------------------------


def decaying(layers=N, t1=8.0):
    """Layers that contract, each with weights of its own."""
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.normal(size=(layers, D, D)) / 4), jnp.asarray(rng.normal(size=(layers, D)))
    return lp_jax.Problem(contracting, params, jnp.asarray(rng.normal(size=(BATCH, D))), t1=t1)


def by_hand(step, y0, layers, sweeps):
    """Secant sweeps in NumPy, straight from the formulas: differences of states and of stepped states, and a loop."""
    u = np.stack([y0] * (layers + 1))  # u[n] enters layer n; the last one leaves
    slope, before = 0.0, None
    for _ in range(sweeps):
        stepped = np.stack([step(n, u[n]) for n in range(layers)])
        if before is not None:
            d, answer = u[:-1] - before[0], stepped - before[1]
            slope = float(np.clip(np.sum((answer - d) * d) / np.sum(d * d), -1, 0))
        before = u[:-1], stepped
        new = [u[0]]
        for n in range(layers):
            new.append(stepped[n] + (1 + slope) * (new[n] - u[n]))
        u = np.stack(new)
    return u, slope


def test_iterates_are_those_of_the_formulas():
    """Forward and adjoint; some layers at once and a batch of solves give the same numbers."""
    problem, solver, h = decaying(), lp_jax.Secant(sweeps=6), 8.0 / N
    w, b = (np.asarray(x) for x in problem.params)
    states, slope = by_hand(lambda n, y: y + h * (np.tanh(y @ w[n] + b[n]) - y), np.asarray(problem.y0), N, 6)
    assert -1 <= slope < -0.05
    solution, gradients, _ = solved(problem, solver)
    np.testing.assert_allclose(solution.trajectory, states[1:], rtol=1e-12, atol=1e-13)
    # the adjoint is linearised at the states that entered the layers, and swept the same way
    jacobians = [1 - np.tanh(states[n] @ w[n] + b[n]) ** 2 for n in reversed(range(N))]
    lams, _ = by_hand(lambda n, lam: lam + h * ((lam * jacobians[n]) @ w[N - 1 - n].T - lam), np.cos(states[-1]), N, 6)
    np.testing.assert_allclose(gradients.y0, lams[-1], rtol=1e-11, atol=1e-13)

    some, others, _ = solved(problem, lp_jax.Secant(sweeps=6, at_once=7))
    assert distance(some.y1, solution.y1) < 1e-14
    assert distance(others.params, gradients.params) < 1e-13
    batch = jax.vmap(lambda y0: problem.replace(y0=y0).solve(solver=solver).y1)(problem.y0[None])
    np.testing.assert_allclose(batch[0], solution.y1, rtol=1e-13)


def test_a_chain_that_contracts_takes_few_sweeps():
    """Plain sweeps take seven times as many."""
    problem, most = decaying(200, 16.0), 6
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    solution, gradients, stats = solved(problem, lp_jax.Secant(sweeps=60, rtol=1e-3))
    assert int(solution.result) == int(stats.result) == 0
    assert int(solution.stats.iterations) <= most
    assert max(distance(solution.y1, exact.y1), distance(gradients.params, gradient.params)) < 1e-4
    assert int(problem.solve(solver=lp_jax.Picard(sweeps=60, rtol=1e-3)).stats.iterations) > 7 * most


def test_a_chain_that_does_not_contract_takes_as_many_sweeps_as_before():
    rng = np.random.default_rng(0)
    params, y0 = jnp.asarray(rng.normal(size=(64, D, D)) / 2), jnp.asarray(rng.normal(size=(BATCH, D)))
    problem = lp_jax.Problem(lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params), params, y0, t1=2.0)
    solvers = (kind(sweeps=40, rtol=1e-8) for kind in (lp_jax.Picard, lp_jax.Secant))
    plain, secant = (int(problem.solve(solver=solver).stats.iterations) for solver in solvers)
    assert abs(plain - secant) <= 1


def test_the_same_numbers_where_devices_hold_no_layer():
    """test_mesh.py has devices that slots pad."""
    problem, solver = decaying(3), lp_jax.Secant(sweeps=6, atol=1e-6)
    one, gradient, stats = solved(problem, solver)
    several, gradients, others = solved(problem, solver, comm=mesh(4))
    np.testing.assert_allclose(several.y1, one.y1, rtol=1e-12)
    assert distance(gradients.params, gradient.params) < 1e-12
    for a, b in ((one.stats, several.stats), (stats, others)):
        assert int(a.iterations) == int(b.iterations)
        np.testing.assert_allclose(a.residual_norms, b.residual_norms, rtol=1e-6, atol=1e-12)
