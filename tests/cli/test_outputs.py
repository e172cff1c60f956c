"""Losses that look at what every layer returns beside its state: the adjoint with sources."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from networks import mesh
from problems import INJECT, relative_error

import lp_jax
from lp_jax import MGRIT, Newton, Picard, Serial, Windowed

N, WIDTH, BATCH = 13, 4, 3
RNG = np.random.default_rng(0)
PARAMS = (jnp.asarray(RNG.normal(size=(N, WIDTH, WIDTH)) / 2), jnp.asarray(RNG.normal(size=(N, WIDTH))))
SHARED = jnp.asarray(RNG.normal(size=WIDTH))
Y0 = jnp.asarray(RNG.normal(size=(BATCH, WIDTH)))
TARGET = jnp.asarray(RNG.normal(size=(N, BATCH, WIDTH)))


def step(y, layer):
    w, b = layer.params
    z = jnp.tanh(y @ w + (b * layer.shared)[None])
    aux = {"out": jnp.sin(y) * z, "number": layer.index, "norm": jnp.mean(z**2) * jnp.sum(w**2), "unseen": z}
    return y + layer.dt * z, aux


def loss_of(y1, aux, last=1.0):
    return last * jnp.sum(y1**2) + jnp.mean((aux["out"] - TARGET) ** 2) + 0.1 * jnp.sum(aux["norm"])


def loss(params, y0, shared, solver, adjoint_solver=None, last=1.0, comm=None):
    how = {"solver": solver, "adjoint_solver": adjoint_solver, "comm": comm}
    solution = lp_jax.solve(step, params, y0, shared=shared, t1=2.0, has_aux=True, **how)
    return loss_of(solution.y1, solution.aux, last)


def scanned_loss(params, y0, shared, last=1.0):
    """The same by ``lax.scan``, with a Layer made by hand."""
    t, dt = jnp.linspace(0, 2.0, N + 1)[:-1], jnp.full(N, 2.0 / N)

    def body(y, x):
        params, t, dt, index = x
        return step(y, lp_jax.Layer(params, shared, None, t, dt, index, 0))

    return loss_of(*jax.lax.scan(body, y0, (params, t, dt, jnp.arange(N))), last)


@functools.cache
def exact_gradient(last=1.0):
    return jax.jit(jax.grad(scanned_loss, argnums=(0, 1, 2)))(PARAMS, Y0, SHARED, last)


gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=(3, 4, 6))

EXACT = {
    "serial": Serial(),
    "checkpoints": Serial(checkpoint_every=4),
    "sweeps": Picard(sweeps=N),
    "sweeps, states kept": Picard(sweeps=N, storage="states"),
    "windows": Windowed(sweeps=N, windows=3),
    "Newton": Newton(iterations=8, batch_axes=1),
    "Newton, shared": Newton(jacobian="shared", iterations=16),
    "Newton, states kept": Newton(iterations=8, batch_axes=1, storage="states"),
    "looped": MGRIT(iterations=5, at_once=1, coarse_step=lp_jax.Identity()),
    "batched, all kept": MGRIT(iterations=5, at_once=math.inf, storage="all"),
    "F-cycles": MGRIT(levels=3, coarsening=2, iterations=7, cycle="F", start="guess", coarse_step=INJECT),
    "trajectory": MGRIT(iterations=5, coarse_step=Picard(sweeps=1, around="trajectory")),
}
WORKERS = {"batched, all kept": 8, "F-cycles": 3, "windows": 8, "serial": 3}


@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_the_scan(name):
    for last in (1.0, 0.0):  # with the last state, and of the outputs alone
        found = gradient(PARAMS, Y0, SHARED, EXACT[name], None, last)
        assert relative_error(found, exact_gradient(last)) < 1e-12
    if name not in WORKERS:
        return
    spread = gradient(PARAMS, Y0, SHARED, EXACT[name], None, last, mesh(WORKERS[name]))
    assert relative_error(spread, found) < 1e-14  # the number of devices changes nothing


def test_cycles_make_the_layers_before_the_last_one_exact_interval_by_interval():
    """Finite termination: from an exact forward solve, k cycles with F-relaxation leave k + 1 intervals exact."""
    layers, m = 24, 4
    params = jnp.asarray(RNG.normal(size=(layers, WIDTH, WIDTH)))
    weight = jnp.asarray(RNG.normal(size=(layers, WIDTH)))

    def loss(params, adjoint_solver):
        def emitting(y, layer):
            y = y + layer.dt * jnp.tanh(y @ layer.params)
            return y, y**2

        given = {"solver": Serial(), "adjoint_solver": adjoint_solver}
        solution = lp_jax.solve(emitting, params, Y0[0], t1=3.0, has_aux=True, **given)
        return jnp.sum(weight * solution.aux)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    exact = np.asarray(gradient(params, Serial()))
    for k in (1, 3):
        adjoint = MGRIT(coarsening=m, iterations=k, relaxation="F", start="guess", coarse_step=INJECT)
        errors = np.max(np.abs(gradient(params, adjoint) - exact), axis=(1, 2)).reshape(-1, m).max(axis=1)
        assert errors[-k - 1 :].max() < 1e-13
        assert errors[0] > 1e-7


def test_the_number_of_iterations_does_not_grow_with_the_number_of_layers():
    def iterations(layers):
        t = np.linspace(0, 1, layers)
        params = jnp.asarray(np.sin(3 * t)[:, None, None] * np.eye(3) + np.cos(t)[:, None, None])

        def emitting(y, layer):
            y = y + layer.dt * jnp.tanh(layer.params @ y)
            return y, y

        solver = MGRIT(iterations=20, rtol=1e-8, start="guess")
        solution, pullback = lp_jax.solve_vjp(
            emitting, params, jnp.arange(3.0), solver=Serial(), adjoint_solver=solver, has_aux=True
        )
        _, stats = pullback(jnp.zeros(3), jnp.asarray(np.cos(solution.aux) / layers))
        return int(stats.iterations)

    counts = [iterations(layers) for layers in (64, 1024)]
    assert max(counts) <= counts[0] <= 8


def test_pullback_and_tangent_agree():
    """The dot test, <a, J v> = <J^T a, v>, with the tangent of the scan."""
    directions = jax.tree.map(lambda x: RNG.normal(size=x.shape), (PARAMS, Y0))

    def outputs(params, y0):
        solution = lp_jax.solve(step, params, y0, shared=SHARED, solver=Serial(), has_aux=True)
        return solution.y1, solution.aux["out"], solution.aux["norm"]

    tangent = jax.jit(lambda *at: jax.jvp(outputs, at, directions)[1])(PARAMS, Y0)
    cotangent = jax.tree.map(lambda x: RNG.normal(size=x.shape), tangent)

    @jax.jit
    def gradients(params, y0):
        solver = MGRIT(iterations=5)
        _, pullback = lp_jax.solve_vjp(step, params, y0, shared=SHARED, solver=solver, has_aux=True)
        aux = {"out": cotangent[1], "number": None, "norm": cotangent[2], "unseen": None}
        found = pullback(cotangent[0], aux)[0]
        return found.params, found.y0

    def dot(a, b):
        return sum(np.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    np.testing.assert_allclose(dot(gradients(PARAMS, Y0), directions), dot(cotangent, tangent), rtol=1e-12)


@pytest.mark.parametrize("solver", [Serial(), Picard(sweeps=N)], ids=["serial", "sweeps"])
def test_integer_outputs_have_a_cotangent_of_their_own_kind(solver):
    def outputs(params):
        solution = lp_jax.solve(step, params, Y0, shared=SHARED, solver=solver, has_aux=True)
        return solution.aux["norm"], solution.aux["number"]

    _, pull = jax.vjp(outputs, PARAMS)
    (got,) = pull((jnp.ones(N), np.zeros(N, jax.dtypes.float0)))
    (wanted,) = jax.vjp(lambda p: outputs(p)[0], PARAMS)[1](jnp.ones(N))
    assert relative_error(got, wanted) == 0


def aux_of(width, layers, *, seen):
    """Bytes of temporaries of a gradient whose loss sees one number per layer, or none."""

    def emitting(y, layer):
        y = y + layer.dt * jnp.tanh(y @ layer.params)
        return y, jnp.sum(y**2)

    def loss(params, y0):
        solution = lp_jax.solve(emitting, params, y0, solver=MGRIT(coarsening=16, at_once=1), has_aux=True)
        return jnp.sum(solution.y1) + (jnp.sum(solution.aux) if seen else 0)

    arguments = jnp.zeros((layers, width, width), "float32"), jnp.zeros((512, width), "float32")
    program = compiled(jax.jit(jax.grad(loss)).lower(*arguments))
    return program.memory_analysis().temp_size_in_bytes


def test_one_state_per_interval_stays_one_state_per_interval():
    width, layers = 8, 256
    states = 4 * 512 * width * layers
    assert aux_of(width, layers, seen=True) < aux_of(width, layers, seen=False) + states / 8 < states


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint], ids=range(4))
@pytest.mark.parametrize("solver", [Serial(), MGRIT()], ids=["serial", "cycles"])
def test_the_gradient_of_a_trajectory_is_refused(solver, transform):
    def solve(params):
        return lp_jax.solve(lambda y, layer: y * layer.params, params, jnp.ones(()), solver=solver)

    def loss(params, *, part):
        solution = transform(solve)(params)
        return jnp.sum({"y1": solution.y1, "both": solution.y1 + jnp.sum(solution.trajectory)}[part])

    params = jnp.ones((2, 8))
    params = params if transform is jax.vmap else params[0]
    assert jax.grad(loss)(params, part="y1").shape == params.shape
    with pytest.raises(ValueError, match=r"Solution.trajectory is a restart value .* return them as aux"):
        jax.grad(functools.partial(loss, part="both"))(params)


def test_a_restart_from_a_trajectory_is_differentiated():
    def solved(params, solver, guess):
        return lp_jax.solve(step, params, Y0, shared=SHARED, solver=solver, guess=guess, has_aux=True)

    def twice(params):
        solver = MGRIT(iterations=5)
        return jnp.sum(solved(params, solver, solved(params, solver, "constant").trajectory).y1)

    def once(params):
        return jnp.sum(solved(params, Serial(), "constant").y1)

    got, wanted = (jax.jit(jax.grad(loss))(PARAMS) for loss in (twice, once))
    assert relative_error(got, wanted) < 1e-12
