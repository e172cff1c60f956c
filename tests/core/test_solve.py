"""The contract of `solve` beyond its numbers: purity, caching, stopping, settings, static structure."""

import dataclasses
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from launch import output
from networks import mesh
from problems import INJECT, dense_params, dense_state, dense_step
from products import layer as plain

import lp_jax

PARAMS, Y0 = dense_params(32, 4), dense_state(2, 4)


class Traces:
    """A step that counts how often it is traced."""

    def __init__(self):
        self.count = 0

    def __call__(self, y, layer):
        self.count += 1
        return dense_step(y, layer)


def test_numbers_do_not_retrace():
    """Tolerances, weights, states, times and data are arguments of the compiled program."""
    step = Traces()

    @jax.jit
    def gradient(params, y0, t1, solver):
        return jax.grad(lambda p: jnp.sum(lp_jax.solve(step, p, y0, t1=t1, solver=solver).y1 ** 2))(
            params
        )

    solver = lp_jax.MGRIT(coarsening=4, iterations=5, rtol=1e-3, c_weight=1.0, coarse_step=INJECT)
    gradient.trace(PARAMS, Y0, 1.0, solver)
    traced = step.count
    assert traced > 0
    for other in (
        dataclasses.replace(solver, rtol=1e-9),
        dataclasses.replace(solver, c_weight=0.9),
    ):
        gradient.trace(jax.tree.map(lambda x: 2 * x, PARAMS), -Y0, 3.0, other)
    assert step.count == traced
    gradient.trace(PARAMS, Y0, 1.0, dataclasses.replace(solver, iterations=4))
    assert step.count > traced


def test_eager_calls_compile_once():
    """Outside jit too, a second call with the same step and shapes only checks its arguments."""
    step = Traces()
    solver = lp_jax.MGRIT(coarsening=4, coarse_step=INJECT)
    lp_jax.solve(step, PARAMS, Y0, solver=solver)
    first = step.count
    step.count = 0
    lp_jax.solve(step, jax.tree.map(lambda x: x + 1, PARAMS), 2 * Y0, solver=solver)
    assert step.count <= 2 < first  # once per level, for the checks
    Unhashable = type("Unhashable", (Traces,), {"__hash__": None})
    found, wanted = (
        lp_jax.solve(each, PARAMS, Y0, solver=solver).y1 for each in (Unhashable(), step)
    )
    np.testing.assert_array_equal(found, wanted)  # compiles every time


def test_tolerances_stop_the_loop():
    cycles = lp_jax.MGRIT(iterations=8, coarse_step=INJECT)
    problem = lp_jax.Problem(dense_step, PARAMS, Y0)
    history = problem.solve(solver=cycles).stats.residual_norms
    assert history[0] == -1
    levels = lp_jax.multigrid.hierarchy(problem, cycles)

    def error(u):
        """Residuals at C-points, in sizes of the states that the cycle then leaves."""
        new, _ = cycles.improve(levels, u)
        r = np.abs(lp_jax.multigrid.residual(levels[0], u)).max(axis=0)
        size = np.maximum(np.abs(new).max(axis=0), np.abs(Y0))
        return new, float(np.sqrt(np.mean((r / size) ** 2)))

    u, errors = lp_jax.multigrid.cascade(levels), [-1.0]
    for _ in range(7):
        u, last = error(u)
        errors.append(last)
    for k in (3, 5):
        for tolerance in (
            {"atol": float(history[k - 1])},
            {"rtol": errors[k - 1] / errors[1]},
        ):
            tolerance = {name: value * (1 + 1e-9) for name, value in tolerance.items()}
            stats = lp_jax.solve(
                dense_step, PARAMS, Y0, solver=dataclasses.replace(cycles, **tolerance)
            ).stats
            assert int(stats.iterations) == k
            np.testing.assert_allclose(stats.residual_norms[:k], history[:k], rtol=1e-12)
            assert (stats.residual_norms[k:] == -1).all()


@pytest.mark.parametrize(
    "solver", [lp_jax.MGRIT(iterations=3, relaxation="FCF"), lp_jax.Newton(batch_axes=1)]
)
def test_a_tolerance_below_zero_is_met_by_no_residual_not_even_zero(solver):
    """Calibration counts on it: layers that forget their state leave none after the first sweep."""
    solver = dataclasses.replace(solver, atol=-1.0)
    solution = lp_jax.solve(
        lambda y, layer: jnp.broadcast_to(layer.params[1], y.shape), PARAMS, Y0, solver=solver
    )
    assert solution.stats.residual_norms[solver.iterations - 1] == 0
    assert int(solution.stats.iterations) == solver.iterations > 1


def test_layer_fields():
    """What a step sees on each level: index, t, dt, level."""
    seen = {}

    def step(y, layer):
        note = lambda i, t, dt: seen.setdefault(layer.level, set()).add(  # noqa: E731
            (int(i), float(t), float(dt))
        )
        jax.debug.callback(note, layer.index, layer.t, layer.dt)
        return y + 0 * layer.params

    times = np.asarray([0.0, 1, 2, 4, 8, 16, 32, 64, 128])  # 7 of 8: the last interval is short
    solver = lp_jax.MGRIT(levels=3, coarsening=(3, 2), iterations=2, coarse_step=INJECT, at_once=1)
    lp_jax.solve(step, jnp.ones(8), jnp.ones(()), t1=times, solver=solver)
    jax.effects_barrier()
    dt = np.diff(times)
    assert seen[0] >= {(n, times[n], dt[n]) for n in range(8)}
    assert seen[1] >= {(0, 0.0, 4.0), (3, 4.0, 28.0), (6, 32.0, 96.0)}
    assert seen[2] >= {(0, 0.0, 32.0), (6, 32.0, 96.0)}


@pytest.mark.parametrize(
    ("solver", "backend"),  # test_cost has a loop of cycles
    [
        (lp_jax.Picard(sweeps=3), "cpu"),
        (lp_jax.Picard(sweeps=9, rtol=1e-3), "gpu"),
        (lp_jax.MGRIT(iterations=2, storage="all", coarsest=lp_jax.Picard(sweeps=2)), "gpu"),
    ],
    ids=str,
)
def test_no_program_copies_all_parameters(monkeypatch, solver, backend):
    """As loops and as batches: sweeps read a layer's weights where they are."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    @jax.jit
    def gradient(params, y0):
        step = Traces()  # new: what was traced for the other backend is not used
        return jax.grad(lambda p: jnp.sum(lp_jax.solve(step, p, y0, solver=solver).y1 ** 2))(params)

    params = dense_params(24, 5)
    text = compiled(gradient.lower(params, dense_state(3, 5))).as_text()
    moved = re.findall(r"= f64\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    assert params[0].size not in {math.prod(map(int, shape.split(","))) for shape in moved}


def test_the_core_needs_jax_alone():
    """Importing the package imports none of the extras."""
    extras = {"flax", "optax", "orbax", "rich", "matplotlib", "sklearn"}
    code = f"import sys, lp_jax; print(sorted({extras} & set(sys.modules)))"
    assert output(sys.executable, "-c", code).strip() == "[]"


CALLS = {
    "argument 'tol'. Did you mean rtol": lambda w, y: lp_jax.MGRIT(tol=1e-3),
    "argument 'iterations'. Did you mean sweeps": lambda w, y: lp_jax.Picard(iterations=3),
    "argument 'sweeps'. Did you mean iterations": lambda w, y: lp_jax.Newton(sweeps=3),
    "Name it: sweeps=4": lambda w, y: lp_jax.Picard(4),
    "Name it: solver=MGRIT": lambda w, y: lp_jax.solve(plain, w, y, lp_jax.MGRIT()),
    "argument 'sovler'. Did you mean solver": lambda w, y: lp_jax.solve(
        plain, w, y, sovler=lp_jax.MGRIT()
    ),
    "argument 'T'. Did you mean t1": lambda w, y: lp_jax.solve(plain, w, y, T=2.0),
    "argument 'lenght'. Did you mean length": lambda w, y: lp_jax.scan(plain, y, w, lenght=8),
    "Problem has no argument 'times'": lambda w, y: lp_jax.solve_vjp(plain, w, y, times=2),
    "params and y0 seem to be exchanged": lambda w, y: lp_jax.solve(plain, y, w),
    "step must be a function": lambda w, y: lp_jax.solve(w, plain, y),
    "problem must be a lp_jax.Problem": lambda w, y: lp_jax.plan(plain),
    "rtol must be a number": lambda w, y: lp_jax.Picard(rtol=True),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_is_told_what_may_be_meant(message):
    with pytest.raises(TypeError, match=message):
        CALLS[message](jnp.ones((8, 4, 4)), jnp.ones((5, 4)))


def test_subpackages_come_with_the_package():
    for name in ("nn", "train", "viz", "data", "planning"):
        assert getattr(lp_jax, name).__name__ == f"lp_jax.{name}"
    with pytest.raises(AttributeError, match="no attribute 'layers'"):
        lp_jax.layers  # noqa: B018


def test_a_problem_with_something_replaced_is_checked_anew():
    problem = lp_jax.Problem(dense_step, PARAMS, Y0, t1=2.0)
    assert problem.replace(t1=1.0).t1 == 1.0 and problem.t1 == 2.0
    assert problem.comm.size == 1 and problem.replace(comm=None).comm == problem.comm
    assert problem.replace(params=jax.tree.map(lambda x: x[:8], PARAMS)).layers == 8
    with pytest.raises(TypeError, match="y0 has dtype int"):
        problem.replace(y0=jnp.arange(4))
    with pytest.raises(TypeError, match="Did you mean params"):
        problem.replace(parms=PARAMS)


# --- states on another grid, and solves that start from them ----------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5, 10, 35])
def test_interpolation_meets_a_line(count):
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
    [
        (lp_jax.Picard(sweeps=30, rtol=1e-9), 48),
        (lp_jax.MGRIT(coarsening=4, iterations=20, rtol=1e-9), 12),
    ],
)
def test_a_guess_from_fewer_layers_saves_iterations(solver, count):
    """And no other tolerance is needed where the guess is exact: what rounding leaves is done."""

    def problem(layers):
        return lp_jax.Problem(
            lambda y, x: y + x.dt * jnp.sin(3 * y), None, jnp.ones(4), data=jnp.zeros(layers)
        )

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
def test_interpolation_that_is_refused(trajectory, count, message):
    with pytest.raises(ValueError, match=message):
        lp_jax.interpolate(jnp.ones(2), trajectory, count)


@pytest.mark.parametrize("comm", [None, mesh(4)], ids=["device", "mesh"])
@pytest.mark.parametrize("solver", [None, lp_jax.Serial(), lp_jax.MGRIT(iterations=16)], ids=repr)
def test_a_problem_without_parameters_says_its_number_of_steps(solver, comm):
    """Layers see their times and their numbers; the limit is the loop's, forward and back."""

    def step(y, layer):
        return y + layer.dt * (layer.t - y) + 0.01 * layer.data.astype(y.dtype)

    def loss(y0):
        problem = lp_jax.Problem(step, None, y0, t1=2.0, steps=32, comm=comm)
        same = problem.replace(t1=jnp.asarray(2.0))
        return jnp.sum(same.solve(solver=solver).y1), same.layers

    def loop(y0):
        y, dt = y0, 2.0 / 32
        for n in range(32):
            y = y + dt * (n * dt - y) + 0.01 * n
        return jnp.sum(y)

    (value, layers), gradient = jax.value_and_grad(loss, has_aux=True)(Y0)
    wanted, wanted_gradient = jax.value_and_grad(loop)(Y0)
    assert layers == 32
    # 32 steps of one size add up some ten roundings of double precision
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-12)
