"""Windows one after the other under a tolerance, whose numbers are held against a loop in test_theory.py; and secant sweeps.

Secant sweeps take one slope for all layers, learned from the last two sweeps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import dense_params, dense_state, dense_step, relative_error as distance
from products import layer

import lp_jax
from lp_jax._levels._result import DONE, FELL_BACK, NOT_CONVERGED

N, D, BATCH = 50, 4, 3


@pytest.mark.parametrize("comm", [None, mesh(4)], ids=["one device", "four"])
def test_the_last_sweep_tells_whether_the_tolerance_is_met(comm):
    """Forward and adjoint; the serial states where it is not met and ``fallback`` is set."""
    problem = lp_jax.Problem(
        dense_step, dense_params(52, 4, scale=3.0), dense_state(2, 4), t1=4.0, comm=comm
    )
    exact = problem.replace(comm=None).solve(solver=lp_jax.Serial()).y1

    @jax.jit
    def results(rtol, atol):
        solvers = (
            lp_jax.Windowed(sweeps=9, windows=4, rtol=rtol, atol=atol, fallback=kept)
            for kept in (False, True)
        )
        (free, pull), (kept, _) = (problem.solve_vjp(solver=solver) for solver in solvers)
        return free, kept, pull(jnp.ones_like(free.y1))[1].result

    free, kept, adjoint = results(1e-4, 0.0)
    assert int(free.result) == int(kept.result) == int(adjoint) == DONE
    assert int(free.stats.iterations) == 9
    assert distance(free.y1, exact) < 1e-5
    free, kept, adjoint = results(0.0, 1e-30)
    assert (int(free.result), int(kept.result), int(adjoint)) == (
        NOT_CONVERGED,
        FELL_BACK,
        NOT_CONVERGED,
    )
    np.testing.assert_allclose(kept.y1, exact, rtol=1e-13)


# --- secant sweeps --------------------------------------------------------------------------------------------------


def contracting(y, layer):
    return dense_step(y, layer) - layer.dt * y


@functools.partial(jax.jit, static_argnames="comm")
def _solved(params, y0, t1, solver, comm):
    solution, pullback = lp_jax.solve_vjp(contracting, params, y0, t1=t1, solver=solver, comm=comm)
    return solution, *pullback(jnp.cos(solution.y1))


def solved(problem, solver, comm=None):
    """The solution, gradients and the adjoint's stats; one program for all tolerances."""
    return _solved(problem.params, problem.y0, problem.t1, solver, comm)


def decaying(layers=N, t1=8.0):
    """Layers that contract, each with weights of its own."""
    rng = np.random.default_rng(1)
    params = (
        jnp.asarray(rng.normal(size=(layers, D, D)) / 4),
        jnp.asarray(rng.normal(size=(layers, D))),
    )
    return lp_jax.Problem(contracting, params, jnp.asarray(rng.normal(size=(BATCH, D))), t1=t1)


def by_hand(step, y0, layers, sweeps):
    """Secant sweeps in NumPy, straight from the formulas: differences of states and of stepped states, and a loop.

    Each number of a state is measured by the root of its squares over the layers.
    """
    u = np.stack([y0] * (layers + 1))  # u[n] enters layer n; the last one leaves
    slope, before = 0.0, None
    for _ in range(sweeps):
        stepped = np.stack([step(n, u[n]) for n in range(layers)])
        if before is not None:
            d, answer = u[:-1] - before[0], stepped - before[1]
            size = np.sum(u[:-1] ** 2, axis=0)
            slope = float(np.clip(np.sum((answer - d) * d / size) / np.sum(d * d / size), -1, 0))
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
    states, slope = by_hand(
        lambda n, y: y + h * (np.tanh(y @ w[n] + b[n]) - y), np.asarray(problem.y0), N, 6
    )
    assert -1 <= slope < -0.05
    solution, gradients, _ = solved(problem, solver)
    np.testing.assert_allclose(solution.trajectory, states[1:], rtol=1e-12, atol=1e-13)
    # the adjoint is linearised at the states that entered the layers, and swept the same way
    jacobians = [1 - np.tanh(states[n] @ w[n] + b[n]) ** 2 for n in reversed(range(N))]
    lams, _ = by_hand(
        lambda n, lam: lam + h * ((lam * jacobians[n]) @ w[N - 1 - n].T - lam),
        np.cos(states[-1]),
        N,
        6,
    )
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
    assert (
        int(problem.solve(solver=lp_jax.Picard(sweeps=60, rtol=1e-3)).stats.iterations) > 7 * most
    )


def test_the_law_of_plain_sweeps_does_not_end_secant_sweeps():
    """Their errors fall late; by the law of plain sweeps the first ones would foretell a miss, and serial propagation."""
    rng = np.random.default_rng(0)
    inputs, w = (
        jnp.asarray(rng.normal(size=(64, 2, 4))),
        jnp.asarray(0.35 * rng.normal(size=(4, 4))),
    )
    step = lambda y, layer: jnp.tanh(layer.data + y @ layer.shared)  # noqa: E731
    problem = lp_jax.Problem(step, None, jnp.zeros((2, 4)), shared=w, data=inputs)
    stats = problem.solve(solver=lp_jax.Secant(sweeps=32, rtol=1e-3, fallback=True)).stats
    assert int(stats.result) == DONE and int(stats.iterations) < 20


def test_a_chain_that_does_not_contract_takes_as_many_sweeps_as_before():
    rng = np.random.default_rng(0)
    params, y0 = (
        jnp.asarray(rng.normal(size=(64, D, D)) / 2),
        jnp.asarray(rng.normal(size=(BATCH, D))),
    )
    problem = lp_jax.Problem(layer, params, y0, t1=2.0)
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


def test_an_adjoint_from_zeros_has_no_residual_on_slots_beyond_the_last_layer():
    """Three windows of 5 layers take 6 slots. The system is linear, so that its norms do not depend on the forward solver."""

    def norms(solver):
        _, pullback = lp_jax.solve_vjp(
            lambda y, layer: y + layer.dt * layer.params * y,
            jnp.ones(5),
            jnp.ones(()),
            solver=solver,
            adjoint_solver=lp_jax.Picard(sweeps=2),
            guess="zeros",
        )
        return pullback(jnp.ones(()))[1].residual_norms

    padded, whole = norms(lp_jax.Windowed(windows=3, sweeps=2)), norms(lp_jax.Picard(sweeps=2))
    np.testing.assert_allclose(padded, whole, rtol=1e-6)
