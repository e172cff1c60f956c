"""Losses that look at what every layer returns beside its state: the adjoint with sources."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from networks import mesh
from problems import INJECT, relative_error, serial_loss_and_gradient

import lp_jax
from lp_jax import MGRIT, Newton, Picard, Serial, Windowed

N, WIDTH, BATCH = 13, 4, 3
RNG = np.random.default_rng(0)
PARAMS = (
    jnp.asarray(RNG.normal(size=(N, WIDTH, WIDTH)) / 2),
    jnp.asarray(RNG.normal(size=(N, WIDTH))),
)
SHARED = jnp.asarray(RNG.normal(size=WIDTH))
Y0 = jnp.asarray(RNG.normal(size=(BATCH, WIDTH)))
TARGET = jnp.asarray(RNG.normal(size=(N, BATCH, WIDTH)))


def step(y, layer):
    w, b = layer.params
    z = jnp.tanh(y @ w + (b * layer.shared)[None])
    aux = {
        "out": jnp.sin(y) * z,
        "number": layer.index,
        "norm": jnp.mean(z**2) * jnp.sum(w**2),
        "unseen": z,
    }
    return y + layer.dt * z, aux


def loss_of(y1, aux, last=1.0):
    return last * jnp.sum(y1**2) + jnp.mean((aux["out"] - TARGET) ** 2) + 0.1 * jnp.sum(aux["norm"])


def loss(params, y0, shared, solver, adjoint_solver=None, last=1.0, comm=None):
    how = {"solver": solver, "adjoint_solver": adjoint_solver, "comm": comm}
    solution = lp_jax.solve(step, params, y0, shared=shared, t1=2.0, has_aux=True, **how)
    return loss_of(solution.y1, solution.aux, last)


@functools.cache
def exact_gradient(last=1.0):
    loss = functools.partial(loss_of, last=last)
    return serial_loss_and_gradient(step, PARAMS, Y0, loss, t1=2.0, shared=SHARED, has_aux=True)[1]


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
    "F-cycles": MGRIT(
        levels=3, coarsening=2, iterations=7, cycle="F", start="guess", coarse_step=INJECT
    ),
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


@pytest.mark.parametrize("solver", [Serial(), Picard(sweeps=N)], ids=["serial", "sweeps"])
def test_integer_outputs_have_a_cotangent_of_their_own_kind(solver):
    def outputs(params):
        solution = lp_jax.solve(step, params, Y0, shared=SHARED, solver=solver, has_aux=True)
        return solution.aux["norm"], solution.aux["number"]

    _, pull = jax.vjp(outputs, PARAMS)
    (got,) = pull((jnp.ones(N), np.zeros(N, jax.dtypes.float0)))
    (wanted,) = jax.vjp(lambda p: outputs(p)[0], PARAMS)[1](jnp.ones(N))
    assert relative_error(got, wanted) == 0


def test_one_state_per_interval_stays_one_state_per_interval():
    """Temporaries of a gradient whose loss sees one number per layer, or none."""
    width, layers = 8, 256
    arguments = jnp.zeros((layers, width, width), "float32"), jnp.zeros((512, width), "float32")

    def emitting(y, layer):
        y = y + layer.dt * jnp.tanh(y @ layer.params)
        return y, jnp.sum(y**2)

    def loss(params, y0, seen):
        solution = lp_jax.solve(
            emitting, params, y0, solver=MGRIT(coarsening=16, at_once=1), has_aux=True
        )
        return jnp.sum(solution.y1) + (jnp.sum(solution.aux) if seen else 0)

    gradient, states = jax.jit(jax.grad(loss), static_argnums=2), 4 * 512 * width * layers
    programs = [compiled(gradient.lower(*arguments, seen)) for seen in (True, False)]
    with_outputs, without = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert with_outputs < without + states / 8 < states


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint], ids=range(4)
)
@pytest.mark.parametrize("solver", [Serial(), MGRIT()], ids=["serial", "cycles"])
def test_the_gradient_of_a_trajectory_is_refused(solver, transform):
    def solve(params):
        return lp_jax.solve(lambda y, layer: y * layer.params, params, jnp.ones(()), solver=solver)

    def loss(params, seen):
        solution = transform(solve)(params)
        return jnp.sum(solution.y1) + (jnp.sum(solution.trajectory) if seen else 0)

    params = jnp.ones((2, 8)) if transform is jax.vmap else jnp.ones(8)
    assert jax.grad(loss)(params, False).shape == params.shape
    with pytest.raises(
        ValueError, match=r"Solution.trajectory is a restart value .* return them as aux"
    ):
        jax.grad(loss)(params, True)


def test_a_restart_from_a_trajectory_is_differentiated():
    def loss(params, solver, guess="constant"):
        if guess == "trajectory":
            guess = lp_jax.solve(
                step, params, Y0, shared=SHARED, solver=solver, has_aux=True
            ).trajectory
        given = {"shared": SHARED, "solver": solver, "guess": guess}
        return jnp.sum(lp_jax.solve(step, params, Y0, has_aux=True, **given).y1)

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    assert (
        relative_error(
            gradient(PARAMS, MGRIT(iterations=5), "trajectory"), gradient(PARAMS, Serial())
        )
        < 1e-12
    )
