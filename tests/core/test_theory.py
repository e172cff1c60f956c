"""What theory says of a correct solver. None of these numbers comes from the library."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    INJECT,
    assert_serial,
    dense_params,
    dense_state,
    dense_step,
    relative_error,
    serial_loss_and_gradient,
)

import lp_jax
from lp_jax._arrays import _tree


def levels_of(solver, step, params, y0, t1=1.0):
    return lp_jax.multigrid.hierarchy(lp_jax.Problem(step, params, y0, t1=t1), solver)


# ---------------------------------------------------------------------------------------------- equality, termination


@pytest.mark.parametrize("relaxation, exact_per_cycle", [("F", 1), ("FCF", 2), ("FCFCF", 3)])
def test_finite_termination(relaxation, exact_per_cycle):
    """After k cycles k (FCF: 2k) C-points are exact, whatever the coarse step; before that they are not."""
    n, m, t1 = 32, 4, 8.0
    params, y0 = dense_params(n, 4, scale=2.0), dense_state(2, 4)
    solver = lp_jax.MGRIT(coarsening=m, relaxation=relaxation, coarse_step=INJECT, start="guess")
    levels = levels_of(solver, dense_step, params, y0, t1)
    _, states = jax.lax.scan(
        lambda y, p: (y + t1 / n * jnp.tanh(y @ p[0] + p[1][None]),) * 2, y0, params
    )
    exact = states[m - 1 :: m]
    u, once = jnp.zeros_like(exact), jax.jit(lambda u: solver.improve(levels, u)[0])
    for k in range(1, math.ceil(n / m / exact_per_cycle) + 1):
        u = once(u)
        done = min(k * exact_per_cycle, n // m)
        error = np.abs(np.asarray(u) - exact).max(axis=(1, 2))
        assert error[:done].max() < 1e-12
        assert done == n // m or error[done:].min() > 1e-9


@pytest.mark.parametrize(
    "adjoint, enough",
    [
        (lambda k: lp_jax.Picard(sweeps=k), 12),
        (
            lambda k: lp_jax.MGRIT(
                coarsening=3, relaxation="F", coarse_step=INJECT, start="guess", iterations=k
            ),
            3,
        ),
    ],
    ids=["sweeps", "cycles"],
)
def test_finite_termination_of_the_adjoint_with_sources(adjoint, enough):
    """Of 12 layers 12 sweeps; of 4 intervals 3 cycles, as the loss gives the cotangent that enters the last one."""
    arguments, t1 = (dense_params(12, 4, scale=2.0), dense_state(2, 4)), 8.0

    step = lambda y, layer: (dense_step(y, layer), jnp.sin(y))  # noqa: E731

    def loss(y1, aux):
        return jnp.sum(y1**3) + jnp.sum(aux**2)

    def value(params, y0, solver):
        given = {"t1": t1, "solver": lp_jax.Serial(), "adjoint_solver": solver, "has_aux": True}
        solution = lp_jax.solve(step, params, y0, **given)
        return loss(solution.y1, solution.aux)

    gradient = jax.jit(jax.grad(value, argnums=(0, 1)), static_argnums=2)
    _, (*exact, _) = serial_loss_and_gradient(step, *arguments, loss, t1=t1, has_aux=True)
    few, all_of_them = (
        relative_error(gradient(*arguments, adjoint(k)), exact) for k in (enough - 1, enough)
    )
    assert all_of_them < 1e-14 and few > 1e-11


@pytest.mark.parametrize(
    "coarse_step, skip",
    [
        (lp_jax.Serial(), False),
        (lp_jax.Serial(checkpoint_every=3), True),
        (lp_jax.Picard(sweeps=4), False),
        (lp_jax.Newton(iterations=4, batch_axes=1), False),
    ],
)
def test_exact_coarse_steps_converge_in_one_cycle(coarse_step, skip):
    solver = lp_jax.MGRIT(
        coarsening=4, iterations=1, coarse_step=coarse_step, start="cascade" if skip else "guess"
    )
    assert_serial(
        dense_step, dense_params(30, 4), dense_state(2, 4), lambda y: jnp.sum(y**2), solver, t1=4.0
    )


# -------------------------------------------------------------------------------------------------- convergence theory


def linear_step(y, layer):
    return (1 + layer.dt * layer.params) * y


@pytest.mark.parametrize(
    "m, z, relaxation, printed",
    [
        (4, -0.05, "F", 0.07246),
        (4, -0.05, "FCF", 0.05900),
        (4, -0.20, "F", 0.26200),
        (4, -0.20, "FCF", 0.10732),
        (8, -0.20, "F", 1.91943),
        (8, -0.20, "FCF", 0.32203),
    ],
)
@pytest.mark.parametrize("adjoint", [False, True])
def test_two_level_bound(m, z, relaxation, printed, adjoint):
    """The error propagator of one two-level cycle on u[n+1] = (1 + z) u[n], in the infinity norm over C-points.

    |a^m - b| (1 - |b|^(Nc-1)) / (1 - |b|) with a = 1 + z, b = 1 + m z; for FCF times |a|^m, Nc - 2 in place of Nc - 1
    (Dobrev, Kolev, Petersson, Schroder, "Two-level convergence theory for MGRIT", SIAM J. Sci. Comput. 39, 2017).
    """
    intervals = 32
    n = m * intervals
    a, b = 1 + z, 1 + m * z
    bound = abs(a**m - b) * (1 - abs(b) ** (intervals - 1)) / (1 - abs(b))
    if relaxation == "FCF":
        bound = abs(a) ** m * abs(a**m - b) * (1 - abs(b) ** (intervals - 2)) / (1 - abs(b))
    assert abs(bound - printed) < 1e-5

    solver = lp_jax.MGRIT(coarsening=m, relaxation=relaxation, coarse_step=INJECT, start="guess")
    columns = propagator(solver, jnp.full(n, z * n), intervals=intervals, adjoint=adjoint)
    assert abs(np.abs(columns).sum(axis=0).max() - bound) < 1e-13


@functools.partial(jax.jit, static_argnames=("intervals", "adjoint"))
def propagator(solver, params, *, intervals, adjoint):
    """Its columns: with u[0] = 0 the solution is 0, so that a guess is its own error."""
    levels = levels_of(solver, linear_step, params, jnp.zeros(()))
    if adjoint:
        levels = transposed(levels, jnp.zeros(params.size))
    return jax.vmap(lambda e: solver.improve(levels, e)[0])(jnp.eye(intervals))


def transposed(levels, states):
    from lp_jax._programs._adjoint import transpose, transpose_coarse

    zero = jnp.zeros(())
    return transpose(levels[0], states, zero), *transpose_coarse(
        levels, lambda span: states[::span], zero
    )


def test_picard_is_the_truncated_binomial():
    """Sweep s on u[n+1] = (1 + z) u[n] from the constant gives sum over j <= s of C(n, j) z^j, exactly."""
    n, z = 24, 0.3
    for sweeps in (1, 5, n):
        y1 = lp_jax.solve(
            linear_step, jnp.full(n, z * n), jnp.ones(()), solver=lp_jax.Picard(sweeps=sweeps)
        ).y1
        np.testing.assert_allclose(
            y1, sum(math.comb(n, j) * z**j for j in range(sweeps + 1)), rtol=1e-13
        )


def smooth_params(n, width=4):
    """Weights that are samples of one function of t, whatever N."""
    t = (np.arange(n) + 0.5) / n
    rng = np.random.default_rng(3)
    modes = rng.normal(size=(3, width, width)) / np.sqrt(width)
    basis = np.stack([np.ones(n), np.sin(2 * t), np.cos(3 * t)], axis=1)
    return np.einsum("nk,kij->nij", basis, modes), np.tile(rng.normal(size=width), (n, 1))


@jax.jit
def solved_both_ways(params, solver):
    solution, pull = lp_jax.solve_vjp(dense_step, params, dense_state(2, 4), t1=2.0, solver=solver)
    _, adjoint = pull(solution.y1)
    return solution.result, solution.stats.iterations, adjoint.iterations


@pytest.mark.parametrize(
    "coarse_step, deep",
    [(INJECT, (1024, 4)), (lp_jax.Picard(sweeps=1), (256, 3))],
    ids=["inject", "sweep"],
)
def test_iterations_do_not_grow_with_depth(coarse_step, deep):
    counts = []
    for n, levels in ((64, 2), deep):  # the same 16 coarsest steps for both
        solver = lp_jax.MGRIT(
            levels=levels, coarsening=4, iterations=30, rtol=1e-8, coarse_step=coarse_step
        )
        result, *iterations = solved_both_ways(smooth_params(n), solver)
        assert int(result) == 0
        counts.append(tuple(map(int, iterations)))
    (forward, adjoint), (deep_forward, deep_adjoint) = counts
    assert deep_forward <= forward < 12
    assert deep_adjoint <= adjoint


# ---------------------------------------------------------------------------------------------- sweeps in windows


@pytest.mark.parametrize(
    "n, adjoint, sweeps", [(32, False, 3), (32, True, 1), (29, False, 1), (29, True, 3)]
)
def test_picard_in_windows(n, adjoint, sweeps):
    """Sweeps over one window after the other, then one over all layers, by a loop over numbers."""
    windows, t1 = 4, 5.0
    span, h = math.ceil(n / windows), t1 / n
    a = np.random.default_rng(0).normal(size=n)
    chain = a[::-1] if adjoint else a
    if (
        adjoint
    ):  # windows are counted from the first layer: in a reversed chain the short one comes first
        edges = [0, *range(n - span * (windows - 1), n + 1, span)]
    else:
        edges = [*range(0, n, span), n]
    y, states = 1.0, []
    for begin, end in itertools.pairwise(edges):
        points = entries = np.full(end - begin, y)
        for _ in range(sweeps - 1):
            points = y + np.cumsum(h * chain[begin:end] * entries)
            entries = np.concatenate([[y], points[:-1]])
        states += list(points)
        y = points[-1]
    entries = np.concatenate([[1.0], states[:-1]])
    wanted = 1.0 + np.sum(h * chain * entries)

    solver = lp_jax.Windowed(sweeps=sweeps, windows=windows)
    arguments = jnp.asarray(a), jnp.ones(())
    if adjoint:
        exact = lp_jax.Serial()
        _, pull = lp_jax.solve_vjp(
            linear_step, *arguments, t1=t1, solver=exact, adjoint_solver=solver
        )
        got = pull(jnp.ones(()))[0].y0
    else:
        solution = lp_jax.solve(linear_step, *arguments, t1=t1, solver=solver)
        got = solution.y1
        assert (solution.stats.residual_norms[:-1] == -1).all() and solution.stats.residual_norms[
            -1
        ] > 0
    np.testing.assert_allclose(got, wanted, rtol=1e-13)


@pytest.mark.parametrize(
    ("n", "reverse", "factor"),
    [
        *(
            (n, back, 1.0)
            for n, back in [(0, False), (1, True), (5, False), (9, True), (37, False), (128, True)]
        ),
        *(
            (n, back, 0.9)
            for n, back in [
                (0, False),
                (7, True),
                (16, False),
                (71, True),
                (512, False),
                (513, True),
            ]
        ),
    ],
)
def test_prefix_sums(n, reverse, factor):
    """Of numbers, and of those whose sum decays from step to step."""
    x, start = np.random.default_rng(n).uniform(size=(n, 3)), np.arange(3.0)
    order = slice(None, None, -1 if reverse else 1)
    wanted = [start]
    for one in x[order]:
        wanted.append(factor * wanted[-1] + one)

    @jax.jit
    def sums(x, start):
        given = {} if factor == 1 else {"factor": jnp.asarray(factor)}
        return *_tree.prefix_sums(x, start, reverse=reverse, **given), _tree.total(x)

    exact = np.reshape(wanted[:-1][order], (n, 3)), wanted[-1], x.sum(axis=0)
    for got, exactly in zip(sums(x, start), exact, strict=True):
        np.testing.assert_allclose(got, exactly, rtol=1e-12)


def test_what_is_infinite_behind_stays_there():
    x = jnp.ones(40).at[20].set(jnp.inf)
    before, _ = _tree.prefix_sums(x, jnp.zeros(()), reverse=False)
    np.testing.assert_array_equal(before[:21], np.arange(21.0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_squares_of_small_dtypes_neither_overflow_nor_vanish(dtype):
    for size in (2.0**10, 2.0**-14):
        tree = {"a": jnp.full(4, size, dtype), "b": jnp.zeros(3, dtype)}
        products = _tree.inner_by_component(tree, tree)
        assert _tree.sum_of_squares(tree) == 4 * size**2 and products["a"] == 4 * size**2
