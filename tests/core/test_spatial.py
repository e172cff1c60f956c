"""Spatial coarsening: transfers against matrices written down in NumPy, and solves on grids against serial ones."""

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


def along(u, axis, matrix):
    return np.moveaxis(np.tensordot(matrix, u, (1, axis)), 0, axis)


def state(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {f"leaf{i}": jnp.asarray(rng.normal(size=shape)) for i, shape in enumerate(shapes)}


SHAPES = {
    1: [(2, 7, 3), (1, 6, 1), (3, 1, 2), (2, 2, 1)],
    2: [(2, 5, 6, 3), (1, 1, 8, 1), (4, 7, 2)],
    3: [(2, 3, 4, 5, 2), (1, 2, 2, 2, 1)],
}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transfers_are_their_matrices_and_transposes(dims):
    fine = state(*SHAPES[dims])

    @jax.jit
    def everything(fine):
        restrict, prolong = lp_jax.spatial(dims)
        prolong = prolong.fit(fine)
        coarse = restrict(fine)
        (to_fine,) = jax.linear_transpose(restrict, fine)(coarse)
        (to_coarse,) = jax.linear_transpose(prolong, coarse)(fine)
        return coarse, prolong(coarse), to_fine, to_coarse

    got = everything(fine)
    for name, u in fine.items():
        axes = range(u.ndim - 1 - dims, u.ndim - 1)
        rs, ps = zip(*(matrices(u.shape[axis]) for axis in axes), strict=True)

        def apply(matrices, u, axes=axes):
            return functools.reduce(lambda u, item: along(u, *item), zip(axes, matrices, strict=True), u)

        coarse = apply(rs, np.asarray(u))
        transposed = apply([r.T for r in rs], coarse), apply([p.T for p in ps], np.asarray(u))
        for a, b in zip(got, (coarse, apply(ps, coarse), *transposed), strict=True):
            np.testing.assert_allclose(a[name], b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 9])
def test_constants_and_linear_functions_are_kept_and_no_error_grows(n):
    """P R is symmetric with eigenvalues in [0, 1]."""
    restrict, prolong = lp_jax.spatial(1)
    x, points = np.arange(float(n)).reshape(1, n, 1), jnp.eye(n)[:, :, None]  # a batch of unit vectors
    prolong = prolong.fit(points)
    transferred = jax.jit(
        lambda: (restrict(jnp.ones_like(x)), restrict(x), prolong(x[:, ::2]), prolong(restrict(points)))
    )
    ones, coarse, fine, pr = (np.asarray(y)[..., 0] for y in transferred())
    np.testing.assert_array_equal(ones, np.ones((1, (n + 1) // 2)))
    np.testing.assert_allclose(coarse[0, 1:-1], 2.0 * np.arange((n + 1) // 2)[1:-1], rtol=1e-15)
    np.testing.assert_array_equal(fine[0, : n - 1], np.arange(n - 1.0))
    np.testing.assert_allclose(pr, pr.T, atol=1e-15)
    np.testing.assert_allclose(pr.sum(axis=0), 1, rtol=1e-15)
    eigenvalues = np.linalg.eigvalsh(pr)
    assert eigenvalues.min() > -1e-15 and eigenvalues.max() < 1 + 1e-14


def test_dtypes_are_kept_and_pairs_are_equal():
    restrict, prolong = lp_jax.spatial(2)
    for dtype in ("bfloat16", "float32", "complex128"):
        u = jnp.ones((2, 4, 6, 1), dtype)
        there_and_back = jax.jit(lambda u: prolong(restrict(u)))(u)
        np.testing.assert_array_equal(there_and_back.astype("complex128"), np.ones(u.shape))
        assert there_and_back.dtype == u.dtype
    assert lp_jax.spatial(2) == lp_jax.spatial(2) != lp_jax.spatial(3) and hash(make(1)) == hash(make(1))


# ------------------------------------------------------------------------------------------------------------------- solves

NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
SIZES = {1: (2, 9, 2), 2: (2, 6, 5, 2), 3: (1, 5, 4, 3, 2)}
LAYERS = 8


def convolve(y, layer):
    dims = y.ndim - 2
    out = jax.lax.conv_general_dilated(y, layer.params, (1,) * dims, "SAME", dimension_numbers=NUMBERS[dims])
    return y + layer.dt * jnp.tanh(out)


def problem(dims):
    rng = np.random.default_rng(dims)
    kernels = rng.normal(size=(LAYERS, *(3,) * dims, 2, 2)) / np.sqrt(2 * 3**dims)
    return jnp.asarray(kernels), *(jnp.asarray(rng.normal(size=SIZES[dims])) for _ in range(2))


def make(dims, **fields):
    """Four intervals, one of which becomes exact in each cycle."""
    settings = {"levels": 3, "coarsening": 2, "iterations": 5, "relaxation": "FCF", "coarse_step": INJECT}
    return lp_jax.MGRIT(**(settings | {"spatial": lp_jax.spatial(dims)} | fields))


def loss(target, y):
    return jnp.sum((y - target) ** 2)


def gradient(params, y0, target, solver, comm=None):
    to_target = functools.partial(loss, target)
    return solved_loss_and_gradient(convolve, params, y0, to_target, t1=4.0, solver=solver, comm=comm)


def serial(params, y0, target):
    value, (*gradient, _) = serial_loss_and_gradient(convolve, params, y0, functools.partial(loss, target), t1=4.0)
    return value, tuple(gradient)


@functools.cache
def serial_of(dims):
    return serial(*problem(dims))


VARIANTS = {
    "V": {},
    "over devices": {"workers": 4},
    "batched": {"at_once": math.inf},
    "all stored": {"storage": "all"},
    "below the first level": {"relaxation": ("F", "FCF"), "below": True},
    "picard": {"coarse_step": lp_jax.Picard(sweeps=1)},
    "W": {"cycle": "W", "start": "guess"},
}


@pytest.mark.parametrize(("dims", "variant"), [(1, name) for name in VARIANTS] + [(2, "V"), (3, "V")])
def test_the_gradient_is_the_serial_one(dims, variant):
    fields = dict(VARIANTS[variant])
    pair, levels, workers = lp_jax.spatial(dims), 2 if dims == 3 else 3, fields.pop("workers", 1)
    solver = make(dims, levels=levels, spatial=(None, pair) if fields.pop("below", False) else pair, **fields)
    (value, got), (wanted, exact) = gradient(*problem(dims), solver, mesh(workers)), serial_of(dims)
    assert abs(value - wanted) < 1e-12 * wanted
    assert relative_error(got, exact) < 1e-10


def smooth_problem(n=16):
    """Kernels that blur, and a state and a target of long waves."""
    rng = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(n) / n, np.arange(n) / n, indexing="ij")
    waves = np.stack([np.cos(np.pi * (a * x + b * y)) for a in range(3) for b in range(3)], -1)
    weights = np.outer([1, 2, 1], [1, 2, 1]) / 16
    kernels = weights[:, :, None, None] * rng.normal(size=(LAYERS, 1, 1, 2, 2))
    return jnp.asarray(kernels), *(jnp.asarray((waves @ rng.normal(size=(9, 2)))[None]) for _ in range(2))


def test_smooth_states_lose_little_and_rough_ones_all():
    """Two cycles: where states vary smoothly in space the gradient is as good as without coarsening in space."""

    def error(arrays, exact, pair):
        return relative_error(gradient(*arrays, make(2, levels=2, iterations=2, spatial=pair))[1], exact)

    smooth, full = smooth_problem(), lp_jax.spatial(2)
    exact = serial(*smooth)[1]
    injection = lambda u: u[:, ::2, ::2], full[1].fit(jnp.zeros((1, 16, 16, 2)))
    without, weighted, injected = (error(smooth, exact, pair) for pair in (None, full, injection))
    assert weighted < min(1.1 * without, injected)
    assert (
        error(problem(2), serial_of(2)[1], full) > 0.3
    )  # random kernels on noise: the coarse grid knows nothing of it


def decay(y, layer):
    return (1 - layer.dt) * y


@pytest.mark.parametrize("n", [6, 7])
def test_f_relaxation_alone_does_not_converge(n):
    """The first C-point's error is multiplied by I - P R in every cycle; with FCF it is gone after the first."""
    y0 = jnp.asarray(np.random.default_rng(3).normal(size=(1, n, 1)))

    def norms(relaxation, pair):
        fields = {"levels": 2, "coarsening": 4, "min_coarse": 1, "start": "guess", "relaxation": relaxation}
        solver = make(1, spatial=pair, **fields)
        solution = lp_jax.solve(decay, None, y0, data=jnp.zeros(4), solver=solver, guess="zeros")
        return np.asarray(solution.stats.residual_norms)

    r, p = matrices(n)
    error, wanted = (1 - 1 / 4) ** 4 * np.asarray(y0)[0, :, 0], []
    for _ in range(5):
        wanted.append(np.linalg.norm(error))
        error = error - p @ (r @ error)
    np.testing.assert_allclose(norms("F", lp_jax.spatial(1)), wanted, rtol=1e-12)
    assert wanted[-1] > 0.05 * wanted[0]
    if n == 6:
        assert norms("FCF", lp_jax.spatial(1)).max() < 1e-15
        assert norms("F", None)[1:].max() < 1e-15


def test_coarse_convolutions_run_on_a_share_of_the_points():
    """Points that convolutions are evaluated at, by level: 1/4 per evaluation on each level."""

    def points(pair):
        found = collections.defaultdict(set)

        def step(y, layer):
            found[layer.level].add(y.shape[1:3])
            return convolve(y, layer)

        solver = make(2, levels=3, iterations=2, spatial=pair)
        jax.eval_shape(lambda y: lp_jax.solve(step, problem(2)[0], y, solver=solver).y1, jnp.ones((1, 9, 8, 2)))
        return found

    assert points(None) == {level: {(9, 8)} for level in range(3)}
    assert points(lp_jax.spatial(2)) == {0: {(9, 8)}, 1: {(5, 4)}, 2: {(3, 2)}}
    assert points((None, lp_jax.spatial(2))) == {0: {(9, 8)}, 1: {(9, 8)}, 2: {(5, 4)}}
