"""A tolerance looks at each component of the state by its own size: units, channels and examples of unlike size.

Steps are rewritten for a state in other units, ``z = D y``. As D holds powers of two, every number scales without rounding,
so iterations and results have to be equal, and the states equal to the last bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import dense_params, dense_state, dense_step, relative_error

import lp_jax
from lp_jax import planning
from lp_jax._levels._result import DONE, FELL_BACK, NON_FINITE, NOT_CONVERGED, NOT_FALLING

N, BATCH, D = 24, 3, 4
TOLERANCE = {"rtol": 1e-5}
SOLVERS = {
    "Picard": lp_jax.Picard(sweeps=20, **TOLERANCE),
    "Picard, by chunks": lp_jax.Picard(sweeps=20, at_once=5, **TOLERANCE),
    "Picard, fallback": lp_jax.Picard(sweeps=4, fallback=True, **TOLERANCE),
    "Picard, fixed": lp_jax.Picard(sweeps=2),
    "Secant": lp_jax.Secant(sweeps=20, **TOLERANCE),
    "Windowed": lp_jax.Windowed(sweeps=6, windows=4, **TOLERANCE),
    "MGRIT": lp_jax.MGRIT(iterations=6, **TOLERANCE),
    "MGRIT, 3 levels, FCF": lp_jax.MGRIT(
        levels=3, coarsening=2, iterations=12, relaxation="FCF", start="guess", **TOLERANCE
    ),
    "Newton": lp_jax.Newton(iterations=8, batch_axes=1, **TOLERANCE),
    "Newton, diagonal": lp_jax.Newton(
        iterations=24, jacobian="diagonal", batch_axes=1, **TOLERANCE
    ),
    "Newton, shared": lp_jax.Newton(iterations=24, jacobian="shared", **TOLERANCE),
}


def in_units(units):
    """The step on states ``units * y``."""
    return lambda z, layer: dense_step(z / units, layer) * units


def solved(units, solver, comm=None, t1=2.0):
    """States and gradients in the units of the original step, iterations and results forward and adjoint."""
    params, y0 = dense_params(N, D), dense_state(BATCH, D)

    def run(params, y0):
        solution, pullback = lp_jax.solve_vjp(
            in_units(units), params, y0 * units, t1=t1, solver=solver, comm=comm
        )
        gradient, adjoint = pullback(jnp.cos(solution.y1 / units) / units)
        states = solution.y1 / units, gradient.params, gradient.y0 * units
        return states, (
            solution.stats.iterations,
            adjoint.iterations,
            solution.result,
            adjoint.result,
        )

    states, numbers = jax.jit(run)(params, y0)
    return states, tuple(map(int, numbers))


def units_of(name):
    """Powers of two from 1e-6 to 1e6, of every number of the state; a mean over examples needs equal ones."""
    rng = np.random.default_rng(0)
    shape = (1, D) if "shared" in name else (BATCH, D)
    return jnp.asarray(2.0 ** rng.integers(-20, 21, shape))


@pytest.mark.parametrize("name", SOLVERS)
def test_units_change_nothing(name):
    one, wanted = solved(jnp.ones((1, 1)), SOLVERS[name])
    other, got = solved(units_of(name), SOLVERS[name])
    assert got == wanted
    assert relative_error(other, one) < 1e-13
    if SOLVERS[name].has_tolerance and not SOLVERS[name].fallback:
        assert wanted[2:] == (DONE, DONE)


@pytest.mark.parametrize("name", ["Picard", "MGRIT"])
def test_units_change_nothing_over_a_mesh(name):
    one, wanted = solved(jnp.ones((1, 1)), SOLVERS[name])
    other, got = solved(units_of(name), SOLVERS[name], comm=mesh(4))
    assert got == wanted
    assert relative_error(other, one) < 1e-11


def test_whether_residuals_rise_does_not_depend_on_units():
    """A few sweeps of a network on which they diverge at first."""
    solver = lp_jax.Picard(sweeps=3)
    _, wanted = solved(jnp.ones((1, 1)), solver, t1=60.0)
    _, got = solved(units_of(""), solver, t1=60.0)
    assert got == wanted and wanted[3] == NOT_FALLING


# --- inputs that were wrong with the result "done as asked" --------------------------------------------------------------


def orbit(y, layer):
    """A length of 7e6 m, a speed of 7.5e3 m/s and a temperature that is 1 K away from the surroundings."""
    x, v, kelvin = y
    warmed = layer.params * (v / 7.5e3) ** 2 - 0.02 * kelvin
    return y + layer.dt * jnp.array([v, -8.0 * x / 7e6, warmed])


@pytest.mark.parametrize(
    "solver",
    [
        lp_jax.Picard(sweeps=64, rtol=1e-3, fallback=True),
        lp_jax.Newton(iterations=32, rtol=1e-3, fallback=True),
        lp_jax.MGRIT(iterations=32, rtol=1e-3, fallback=True),
    ],
)
def test_metres_seconds_and_kelvin_in_one_array(solver):
    def loss(params, y0, solver):
        return lp_jax.solve(orbit, params, y0, t1=600.0, solver=solver).y1[2] ** 2

    given = jnp.full(64, 0.05), jnp.array([7e6, 7.5e3, 1.0])
    exact = jax.grad(loss, (0, 1))(*given, lp_jax.Serial())
    found = jax.jit(lp_jax.value_and_grad(lambda *given: loss(*given, solver), (0, 1)))(*given)
    assert {int(found[2].forward), int(found[2].adjoint)} <= {DONE, FELL_BACK}
    for got, wanted in zip(found[1], exact, strict=True):
        assert relative_error(got, wanted) < 2e-2


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("size", "outlier"), [(1e3, False), (3e3, False), (1e5, True), (1e6, True)]
)
def test_one_large_channel_and_one_large_example(size, outlier):
    """As in trained transformers, where the gradient of the other numbers counts; by the default as for an H200."""
    layers, width = 64, 16
    rng = np.random.default_rng(82 if outlier else 76)
    w = rng.normal(size=(layers, width, width)) / 4
    b, y0 = 0.3 * rng.normal(size=(layers, width)), rng.normal(size=(4, width))
    push = np.zeros((layers, width))
    if outlier:
        y0[0] *= size
    else:  # nothing reads the first channel, and the second layer writes it
        w[:, 0], push[1, 0] = 0, size
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), ((w, b, push), y0))

    def loss(arrays, scan):
        def body(y, layer):
            w, b, push = layer
            return y + (5 if outlier else 6) / layers * jnp.tanh(y @ w + b) + push, None

        y1, _ = scan(body, arrays[1], arrays[0])
        return jnp.sum(jnp.tanh(y1[1:] if outlier else y1[:, 1:]) ** 2)

    exact = jax.grad(lambda arrays: loss(arrays, jax.lax.scan))(arrays)
    with planning.assume("H200"):
        _, gradient, results = jax.jit(lp_jax.value_and_grad(lambda a: loss(a, lp_jax.scan)))(
            arrays
        )
    assert (int(results.forward), int(results.adjoint)) == (DONE, DONE)  # sweeps, and not the scan
    for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
        assert 0 < relative_error(got, wanted) < 5e-3


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("fallback", [True, False])
def test_no_tolerance_is_relative_to_what_overflowed(fallback):
    """The first iterations overflow; then residuals are finite, and far from those of the solution."""
    keys = jax.random.split(jax.random.key(0), 3)
    growth = jnp.exp(jnp.linspace(0, 3.7, 64))[:, None, None]
    weights = (
        jax.random.normal(keys[0], (64, 32, 64)) / 32**0.5,
        jax.random.normal(keys[1], (64, 64, 32)) / 8 * growth,
    )
    x = jax.random.normal(keys[2], (4, 32))

    def step(y, layer):  # a pre-norm residual stream
        normed = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        return y + jax.nn.gelu(normed @ layer.params[0]) @ layer.params[1]

    solver = lp_jax.Newton(iterations=20, rtol=1e-3, batch_axes=1, fallback=fallback)
    solution = jax.jit(lambda w: lp_jax.solve(step, w, x, solver=solver))(weights)
    first, *later = solution.stats.residual_norms
    assert jnp.isinf(first) and any(norm >= 0 and jnp.isfinite(norm) for norm in later)
    exact = lp_jax.solve(step, weights, x, solver=lp_jax.Serial()).y1
    if int(solution.result) == DONE:  # by how numbers are rounded
        assert relative_error(solution.y1, exact) < 1e-2
    elif fallback:
        assert int(solution.result) == FELL_BACK and relative_error(solution.y1, exact) == 0
    else:
        assert int(solution.result) in (NOT_CONVERGED, NON_FINITE)


@pytest.mark.parametrize("size", [1e-200, 1e200])
@pytest.mark.parametrize("name", ["Picard", "MGRIT", "Newton", "Secant"])
def test_squares_of_states_may_overflow_and_vanish(name, size):
    """States are in range, and the squares of their residuals are not; one component stays of order one."""
    units = jnp.asarray(np.where(np.arange(D) % 2, size, 1.0))[None]
    one, wanted = solved(jnp.ones((1, 1)), SOLVERS[name])
    other, got = solved(units, SOLVERS[name])
    assert got == wanted
    assert relative_error(other, one) < 1e-4


def test_sweeps_that_are_not_finite_are_told():
    solver = lp_jax.Picard(sweeps=3, rtol=1e-3)
    weights, y0 = jnp.full((8, 1, 1), 1e300), jnp.ones((1, 1))
    solve = lambda solver: lp_jax.solve(  # noqa: E731
        lambda y, layer: y @ layer.params, weights, y0, solver=solver
    )
    assert int(solve(solver).result) == NON_FINITE
    assert int(solve(dataclasses.replace(solver, atol=1e-3)).result) == NON_FINITE
