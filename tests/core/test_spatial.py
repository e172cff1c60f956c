"""Spatial coarsening: solves on grids against serial ones, with transfers written down as matrices."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import INJECT, relative_error, serial_loss_and_gradient, solved_loss_and_gradient

import lp_jax


def matrices(n):
    """R and P of one axis, entry by entry."""
    k = (n + 1) // 2
    p = np.zeros((n, k))
    for i in range(n):
        if i % 2 == 0:
            p[i, i // 2] = 1
        else:
            p[i, i // 2] += 1 / 2
            p[i, min(i // 2 + 1, k - 1)] += 1 / 2
    return p.T / p.sum(axis=0)[:, None], p


@functools.cache
def pair(dims):
    """Full weighting and linear interpolation along each axis of space; grids have odd numbers of points."""

    def restrict(u):
        for axis in range(1, 1 + dims):
            u = along(u, axis, matrices(u.shape[axis])[0])
        return u

    def prolong(v):
        for axis in range(1, 1 + dims):
            v = along(v, axis, matrices(2 * v.shape[axis] - 1)[1])
        return v

    return restrict, prolong


def along(u, axis, matrix):
    return jnp.moveaxis(jnp.tensordot(matrix, u, (1, axis)), 0, axis)


NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
SIZES = {1: (2, 9, 2), 2: (2, 9, 5, 2), 3: (1, 5, 5, 3, 2)}
LAYERS = 8


def convolve(y, layer):
    dims = y.ndim - 2
    out = jax.lax.conv_general_dilated(
        y, layer.params, (1,) * dims, "SAME", dimension_numbers=NUMBERS[dims]
    )
    return y + layer.dt * jnp.tanh(out)


def problem(dims):
    rng = np.random.default_rng(dims)
    kernels = rng.normal(size=(LAYERS, *(3,) * dims, 2, 2)) / np.sqrt(2 * 3**dims)
    return jnp.asarray(kernels), *(jnp.asarray(rng.normal(size=SIZES[dims])) for _ in range(2))


def make(dims, **fields):
    """Four intervals, one of which becomes exact in each cycle."""
    settings = {
        "levels": 3,
        "coarsening": 2,
        "iterations": 5,
        "relaxation": "FCF",
        "coarse_step": INJECT,
    }
    return lp_jax.MGRIT(**(settings | {"spatial": pair(dims)} | fields))


def loss(target, y):
    return jnp.sum((y - target) ** 2)


def gradient(params, y0, target, solver, comm=None):
    to_target = functools.partial(loss, target)
    return solved_loss_and_gradient(
        convolve, params, y0, to_target, t1=4.0, solver=solver, comm=comm
    )


@functools.cache
def serial_of(dims):
    params, y0, target = problem(dims)
    value, (*gradient, _) = serial_loss_and_gradient(
        convolve, params, y0, functools.partial(loss, target), t1=4.0
    )
    return value, tuple(gradient)


VARIANTS = {
    "V": {},
    "over devices": {"workers": 4},
    "batched": {"at_once": math.inf},
    "all stored": {"storage": "all"},
    "below the first level": {"relaxation": ("F", "FCF"), "below": True},
    "picard": {"coarse_step": lp_jax.Picard(sweeps=1)},
    "W": {"cycle": "W", "start": "guess"},
}


@pytest.mark.parametrize(
    ("dims", "variant"), [(1, name) for name in VARIANTS] + [(2, "V"), (3, "V")]
)
def test_the_gradient_is_the_serial_one(dims, variant):
    fields = dict(VARIANTS[variant])
    halve, levels, workers = pair(dims), 2 if dims == 3 else 3, fields.pop("workers", 1)
    solver = make(
        dims,
        levels=levels,
        spatial=(None, halve) if fields.pop("below", False) else halve,
        **fields,
    )
    (value, got), (wanted, exact) = gradient(*problem(dims), solver, mesh(workers)), serial_of(dims)
    assert abs(value - wanted) < 1e-12 * wanted
    assert relative_error(got, exact) < 1e-10


def test_f_relaxation_alone_does_not_converge(n=7):
    """The first C-point's error is multiplied by I - P R in every cycle; with FCF it is gone after the first."""
    y0 = jnp.asarray(np.random.default_rng(3).normal(size=(1, n, 1)))

    def norms(relaxation, halve):
        fields = {
            "levels": 2,
            "coarsening": 4,
            "min_coarse": 1,
            "start": "guess",
            "relaxation": relaxation,
        }
        solver = make(
            1, spatial=halve, coarse_step=lp_jax.Rediscretize(lambda p: p), **fields
        )  # of no parameters
        decay = lambda y, layer: (1 - layer.dt) * y  # noqa: E731
        solution = lp_jax.solve(decay, None, y0, data=jnp.zeros(4), solver=solver, guess="zeros")
        return np.asarray(solution.stats.residual_norms)

    r, p = matrices(n)
    error, wanted = (1 - 1 / 4) ** 4 * np.asarray(y0)[0, :, 0], []
    for _ in range(5):
        wanted.append(np.linalg.norm(error))
        error = error - p @ (r @ error)
    np.testing.assert_allclose(norms("F", pair(1)), wanted, rtol=1e-12)
    assert wanted[-1] > 0.05 * wanted[0]
    assert norms("FCF", pair(1)).max() < 1e-15
    assert norms("F", None)[1:].max() < 1e-15


def test_coarse_convolutions_run_on_a_share_of_the_points():
    """Points that convolutions are evaluated at, by level: 1/4 per evaluation on each level."""

    def points(halve):
        found = collections.defaultdict(set)

        def step(y, layer):
            found[layer.level].add(y.shape[1:3])
            return convolve(y, layer)

        solver = make(2, levels=3, iterations=2, spatial=halve)
        jax.eval_shape(
            lambda y: lp_jax.solve(step, problem(2)[0], y, solver=solver).y1, jnp.ones((1, 9, 5, 2))
        )
        return found

    assert points(None) == {level: {(9, 5)} for level in range(3)}
    assert points(pair(2)) == {0: {(9, 5)}, 1: {(5, 3)}, 2: {(3, 2)}}
    assert points((None, pair(2))) == {0: {(9, 5)}, 1: {(9, 5)}, 2: {(5, 3)}}


def test_a_step_may_close_over_other_values_for_another_shape_of_the_state():
    """A level of both solvers has two shapes, if only one of them coarsens in space."""
    params, y0 = jnp.linspace(0.5, 1, 16), jnp.linspace(-1, 1, 16).reshape(2, 8)
    halve = lambda u: (u[:, ::2] + u[:, 1::2]) / 2, lambda v: jnp.repeat(v, 2, axis=1)
    plain = lp_jax.MGRIT(coarsening=2, levels=2, iterations=2)
    solvers = lp_jax.MGRIT(coarsening=2, levels=2, iterations=2, spatial=halve), plain

    def gradient(scale, forward, adjoint):
        def step(y, layer):
            scaled = scale * y if y.shape[1] == 8 else y
            return y + layer.dt * jnp.tanh(layer.params * scaled)

        def loss(params):
            options = {"solver": forward, "adjoint_solver": adjoint}
            return jnp.sum(lp_jax.solve(step, params, y0, **options).y1 ** 2)

        return jax.grad(loss)(params)

    for pair in (solvers, solvers[::-1]):
        traced = jax.jit(gradient, static_argnums=(1, 2))(1.5, *pair)  # the scale is a traced value
        # jitted and not, the compiler sums in two orders
        np.testing.assert_allclose(traced, gradient(1.5, *pair), rtol=1e-13, atol=1e-15)
