"""Restarts: where forward and adjoint solves begin, and where they ended, are arrays."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import F64, mesh, normal
from problems import INJECT, dense_params, dense_state, dense_step, serial_loss_and_gradient

import lp_jax
from lp_jax import MGRIT, Newton, Picard, Serial, Windowed, nn

LAYERS = 30  # no factor below divides them
PARAMS, Y0 = dense_params(LAYERS, 4), dense_state(3, 4)
COTANGENT = dense_state(3, 4) ** 2
SOLVERS = {  # and workers
    "3 levels": (MGRIT(levels=3, coarsening=4, iterations=2, relaxation="FCF"), 3),
    "sweeps": (Picard(sweeps=3), 3),
    "Newton": (Newton(batch_axes=1), 1),
    "Newton, shared": (Newton(jacobian="shared"), 3),
    "serial": (Serial(checkpoint_every=4), 1),
}


@functools.cache
def exact():
    """Cotangents of the states that enter the layers: the gradient with respect to what is added to each."""

    def step(y, layer):
        params, added = layer.params
        return dense_step(y + added, layer._replace(params=params))

    params = PARAMS, jnp.zeros((LAYERS, *Y0.shape))
    ((_, found), *_) = serial_loss_and_gradient(
        step, params, Y0, lambda y1: jnp.vdot(y1, COTANGENT)
    )[1]
    return found


@functools.partial(jax.jit, static_argnames="comm")
def solve_vjp(adjoint_solver, adjoint_guess=None, solver=Serial(), comm=None):
    _, pullback = lp_jax.solve_vjp(
        dense_step,
        PARAMS,
        Y0,
        solver=solver,
        adjoint_solver=adjoint_solver,
        adjoint_guess=adjoint_guess,
        comm=comm,
    )
    return pullback(COTANGENT)


@pytest.mark.parametrize("name", SOLVERS)
def test_from_the_solution_nothing_is_left_to_do(name):
    adjoint_solver, workers = SOLVERS[name]
    guess = exact()[:: adjoint_solver.resolve(LAYERS).stride(LAYERS)]
    comm = None if workers == 1 else mesh(workers)
    gradients, stats = solve_vjp(adjoint_solver, guess, comm=comm, solver=Picard(sweeps=LAYERS))
    chex.assert_trees_all_close(gradients[:2], solve_vjp(Serial())[0][:2], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(gradients.adjoint_trajectory, guess, rtol=1e-11, atol=1e-13)
    assert (stats.residual_norms < 1e-12).all()


def test_sweeps_go_on_where_they_ended():
    solver = Picard(sweeps=2)
    first, _ = solve_vjp(Picard(sweeps=2), solver=solver)
    second, _ = solve_vjp(Picard(sweeps=1), first.adjoint_trajectory, solver=solver)
    at_once, _ = solve_vjp(Picard(sweeps=3), solver=solver)
    chex.assert_trees_all_close(second, at_once, rtol=1e-13, atol=1e-15)
    assert float(jnp.abs(second.adjoint_trajectory - exact()).max()) < 1e-3


def test_the_gradient_of_a_guess_is_the_next_one():
    solver, comm = MGRIT(coarsening=4, iterations=1, coarse_step=INJECT), mesh(3)
    start = jnp.zeros((8, *Y0.shape))

    def loss(params, guess):
        options = {
            "solver": Serial(),
            "adjoint_solver": solver,
            "adjoint_guess": guess,
            "comm": comm,
        }
        return jnp.vdot(lp_jax.solve(dense_step, params, Y0, **options).y1, COTANGENT)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    got = gradient(PARAMS, start)
    wanted, stats = solve_vjp(solver, start)
    chex.assert_trees_all_close(
        got, (wanted.params, wanted.adjoint_trajectory), rtol=1e-12, atol=1e-14
    )
    assert stats.residual_norms.shape == (1,)  # no down-cycle was skipped
    for _ in range(8):  # a cycle makes another interval exact, and there are eight
        start = gradient(PARAMS, start)[1]
    np.testing.assert_allclose(start, exact()[::4], rtol=1e-11)


def test_a_scan_and_modules_take_guesses():
    def body(y, w):
        return y + 0.1 * jnp.tanh(y @ w), None

    w, y = 0.3 * np.asarray(normal((10, 4, 4))), normal((2, 4))
    solver = Picard(sweeps=1)

    def after(run, guess, rounds):
        gradient = jax.jit(jax.grad(lambda g: jnp.sum(run(g) ** 2)))
        for _ in range(rounds):
            guess = gradient(guess)
        return guess

    def scanned(guess):
        return lp_jax.scan(body, y, w, solver=Serial(), adjoint_solver=solver, adjoint_guess=guess)[
            0
        ]

    first = after(scanned, np.zeros((10, 2, 4)), 11)[0]
    wanted = jax.jit(jax.grad(lambda y: jnp.sum(jax.lax.scan(body, y, w)[0] ** 2)))(y)
    np.testing.assert_allclose(first, wanted, rtol=1e-10)

    layer = lambda rngs: nn.DenseResidual(4, rngs=rngs, param_dtype=F64)  # noqa: E731
    trunk, gru = (
        nn.LayerParallel(layer, 10, rngs=nnx.Rngs(0)),
        nn.GRU(3, 4, rngs=nnx.Rngs(0), param_dtype=F64),
    )
    network = nn.Network(trunk, lambda y: 2 * y, trunk)

    def through(guesses):
        return network.solve(y, solver=Serial(), adjoint_solver=solver, adjoint_guess=guesses).y1

    guesses = after(through, [np.zeros((10, 2, 4))] * 2, 21)  # ten layers, then the ten before them
    wanted = jax.jit(jax.grad(lambda y: jnp.sum(network.solve(y, solver=Serial()).y1 ** 2)))(y)
    np.testing.assert_allclose(guesses[0][0], wanted, rtol=1e-10)

    @jax.jit
    def first_residual(model, at):
        trajectory = model.solve(at, solver=Picard(sweeps=12)).trajectory
        return model.solve(at, solver=solver, guess=trajectory).stats.residual_norms[0]

    assert first_residual(network, y) < 1e-12
    assert first_residual(gru, normal((2, 12, 3))) < 1e-12


def test_guesses_that_do_not_fit_are_refused():
    for solver, guess, words in (
        (MGRIT(coarsening=4), (30, 3, 4), "adjoint_guess.*float64.8,3,4.*float64.30,3,4"),
        (Picard(), (30, 2, 4), "adjoint_guess.*float64.30,3,4.*float64.30,2,4"),
        (Windowed(windows=2), (30, 3, 4), "guess.*windows=2"),
    ):
        with pytest.raises(ValueError, match=words):
            solve_vjp(solver, jnp.zeros(guess))
