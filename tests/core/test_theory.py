"""What theory says of a correct solver. None of these numbers comes from the library."""

import collections
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
    solved_loss_and_gradient,
)

import lp_jax
from lp_jax._arrays import _tree

COARSE_STEPS = {  # test_battery has the others
    "last": lp_jax.Rediscretize(params=lambda p: jax.tree.map(lambda x: x[-1], p)),
    "picard2": lp_jax.Picard(sweeps=2),
    "mgrit": lp_jax.MGRIT(levels=2, coarsening=2, iterations=1, coarse_step=INJECT),
}


def levels_of(solver, step, params, y0, t1=1.0):
    return lp_jax.multigrid.hierarchy(lp_jax.Problem(step, params, y0, t1=t1), solver)


def serial_states(step, params, y0, t1):
    """All states after layer 0, ..., N-1, by a hand-written scan."""
    n = jax.tree.leaves(params)[0].shape[0]

    def body(y, x):
        p, t, i = x
        y = step(y, lp_jax.Layer(p, None, None, t, jnp.asarray(t1 / n), i, 0))
        return y, y

    return jax.lax.scan(body, y0, (params, np.arange(n) * t1 / n, jnp.arange(n)))[1]


def squared(y):
    return jnp.sum(y**2)


# ---------------------------------------------------------------------------------------------- equality, termination


@pytest.mark.parametrize("coarse_step", COARSE_STEPS)
def test_serial_equality_at_convergence(coarse_step):
    n = 30
    params, y0 = dense_params(n, 4), dense_state(2, 4)
    hierarchy = {"levels": 3, "coarsening": (4, 2)} if coarse_step == "last" else {"levels": 2, "coarsening": 4}
    solver = lp_jax.MGRIT(iterations=n, coarse_step=COARSE_STEPS[coarse_step], atol=1e-15, **hierarchy)
    assert_serial(dense_step, params, y0, squared, solver, t1=4.0)


@pytest.mark.parametrize("relaxation, exact_per_cycle", [("F", 1), ("FCF", 2), ("FCFCF", 3)])
def test_finite_termination(relaxation, exact_per_cycle):
    """After k cycles k (FCF: 2k) C-points are exact, whatever the coarse step; before that they are not."""
    n, m, t1 = 32, 4, 8.0
    params, y0 = dense_params(n, 4, scale=2.0), dense_state(2, 4)
    solver = lp_jax.MGRIT(coarsening=m, relaxation=relaxation, coarse_step=INJECT, start="guess")
    levels = levels_of(solver, dense_step, params, y0, t1)
    exact = serial_states(dense_step, params, y0, t1)[m - 1 :: m]
    u, once = jnp.zeros_like(exact), jax.jit(lambda u: solver.improve(levels, u)[0])
    for k in range(1, math.ceil(n / m / exact_per_cycle) + 1):
        u = once(u)
        done = min(k * exact_per_cycle, n // m)
        error = np.abs(np.asarray(u) - exact).max(axis=(1, 2))
        assert error[:done].max() < 1e-12
        assert done == n // m or error[done:].min() > 1e-9


def test_termination_of_the_gradient():
    """N/m cycles of both solves give the exact gradient on a problem on which the coarse grid is useless."""
    n, m, t1 = 30, 4, 16.0
    params, y0 = dense_params(n, 4, scale=2.0), dense_state(2, 4)
    _, (g_params, g_y0, _) = serial_loss_and_gradient(dense_step, params, y0, squared, t1=t1)

    def gradient(cycles):
        solver = lp_jax.MGRIT(coarsening=m, iterations=cycles, coarse_step=INJECT, relaxation="F")
        return solved_loss_and_gradient(dense_step, params, y0, squared, t1=t1, solver=solver)[1]

    assert relative_error(gradient(2), (g_params, g_y0)) > 1e-2
    assert relative_error(gradient(math.ceil(n / m)), (g_params, g_y0)) < 1e-12


@pytest.mark.parametrize(
    "coarse_step, skip",
    [
        (lp_jax.Serial(), False),
        (lp_jax.Serial(checkpoint_every=3), True),
        (lp_jax.Picard(sweeps=4), False),
    ],
)
def test_exact_coarse_steps_converge_in_one_cycle(coarse_step, skip):
    solver = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=coarse_step, start="cascade" if skip else "guess")
    assert_serial(dense_step, dense_params(30, 4), dense_state(2, 4), squared, solver, t1=4.0)


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
    return transpose(levels[0], states, zero), *transpose_coarse(levels, lambda span: states[::span], zero)


def test_picard_is_the_truncated_binomial():
    """Sweep s on u[n+1] = (1 + z) u[n] from the constant gives sum over j <= s of C(n, j) z^j, exactly."""
    n, z = 24, 0.3
    for sweeps in (1, 5, n):
        y1 = lp_jax.solve(linear_step, jnp.full(n, z * n), jnp.ones(()), solver=lp_jax.Picard(sweeps=sweeps)).y1
        np.testing.assert_allclose(y1, sum(math.comb(n, j) * z**j for j in range(sweeps + 1)), rtol=1e-13)


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
    "coarse_step, deep", [(INJECT, (1024, 4)), (lp_jax.Picard(sweeps=1), (256, 3))], ids=["inject", "sweep"]
)
def test_iterations_do_not_grow_with_depth(coarse_step, deep):
    counts = []
    for n, levels in ((64, 2), deep):  # the same 16 coarsest steps for both
        solver = lp_jax.MGRIT(levels=levels, coarsening=4, iterations=30, rtol=1e-8, coarse_step=coarse_step)
        result, *iterations = solved_both_ways(smooth_params(n), solver)
        assert int(result) == 0
        counts.append(tuple(map(int, iterations)))
    (forward, adjoint), (deep_forward, deep_adjoint) = counts
    assert deep_forward <= forward < 12
    assert deep_adjoint <= adjoint


def test_adjoint_dot_product():
    """<J dy, lam> = <dy, J^T lam>: J by forward-mode of a plain loop, J^T by the converged layer-parallel adjoint."""
    params, y0 = dense_params(30, 4), dense_state(2, 4)
    rng = np.random.default_rng(5)
    random_like = lambda tree: jax.tree.map(lambda x: rng.normal(size=x.shape), tree)  # noqa: E731
    dy, dp, lam = random_like(y0), random_like(params), random_like(y0)
    last = lambda p, y: serial_states(dense_step, p, y, 2.0)[-1]  # noqa: E731
    solver = lp_jax.MGRIT(levels=3, iterations=30, atol=1e-15, coarse_step=INJECT)

    @jax.jit
    def both(params, y0):
        _, tangent = jax.jvp(last, (params, y0), (dp, dy))
        _, pull = lp_jax.solve_vjp(dense_step, params, y0, t1=2.0, solver=solver)
        return tangent, pull(lam)[0]

    tangent, gradients = both(params, y0)
    left = np.vdot(tangent, lam)
    right = np.vdot(dy, gradients.y0) + sum(map(np.vdot, dp, gradients.params))
    assert abs(left - right) < 1e-12 * abs(left)


# ---------------------------------------------------------------------------------------------------- counted, not assumed


class Counter:
    """Counts evaluations and transposed evaluations of a layer, by level, as they happen."""

    def __init__(self):
        self.forward, self.adjoint = collections.Counter(), collections.Counter()

    def step(self, y, layer):
        level = layer.level

        @jax.custom_vjp
        def counted(y, p):
            jax.debug.callback(lambda _: self.forward.update([level]), y)
            return y + layer.dt * jnp.sin(p * y)

        def fwd(y, p):
            return counted(y, p), (y, p)

        def bwd(residuals, ct):
            y, p = residuals
            jax.debug.callback(lambda _: self.adjoint.update([level]), y)
            slope = layer.dt * jnp.cos(p * y)
            return ct * (1 + slope * p), ct * slope * y

        counted.defvjp(fwd, bwd)
        return counted(y, layer.params)

    def take(self):
        jax.effects_barrier()
        counts = dict(self.forward), dict(self.adjoint)
        self.forward.clear()
        self.adjoint.clear()
        return counts


def cycle_cost(sizes, nu, cycles, skip):
    """Evaluations per level of ``cycles`` V-cycles and the final sweep.

    Per interval and cycle: m per CF-relaxation, m - 1 for F-relaxation, 1 for the residual, 1 for the coarse right-hand
    side (evaluated on the coarser level), and m - 1 to interpolate. On the finest level the interpolation is the next
    cycle's F-relaxation (or the final sweep's), and is done once. A skipped down-cycle costs m - 1 per interval, which on
    the finest level is again the next F-relaxation.
    """
    last = len(sizes) - 1
    cost = dict.fromkeys(range(len(sizes)), 0)
    cost[0] += sizes[0]  # the final sweep
    for cycle in range(cycles):
        cascade = skip and cycle == 0
        cost[last] += sizes[last]  # the coarsest solve
        for level in range(last):
            if level > 0:
                cost[level] += sizes[level] - sizes[level + 1]
            if not cascade:
                cost[level] += (nu[level] + 1) * sizes[level]
                cost[level + 1] += sizes[level + 1]
    return cost


def design_cost(sizes, m, nu, cycles, skip):
    """The design's formula, which interpolates to the F-points of the finest level and relaxes them again."""
    total = sizes[0] // m  # the closing C-relaxation
    for cycle in range(cycles):
        if skip and cycle == 0:
            total += sum((s // m) * (m - 1) for s in sizes[:-1]) + sizes[-1]
        else:
            total += sum((s // m) * (2 * (m - 1) + 2 + n * m) for s, n in zip(sizes[:-1], nu, strict=False)) + sizes[-1]
    return total


@pytest.mark.parametrize(
    "relaxation, skip, at_once",  # every pair of the last two
    [
        ("F", True, math.inf),
        ("F", False, 1),
        (("F", "FCF"), True, 1),
        ("FCF", False, math.inf),
    ],
)
def test_evaluation_counts(at_once, skip, relaxation):
    n, m, forward_cycles, adjoint_cycles = 64, 4, 3, 2
    sizes = [64, 16, 4]
    fields = {
        "levels": 3,
        "coarsening": m,
        "relaxation": relaxation,
        "start": "cascade" if skip else "guess",
        "coarse_step": INJECT,
    }
    solver, adjoint_solver = (
        lp_jax.MGRIT(iterations=k, at_once=at_once, **fields) for k in (forward_cycles, adjoint_cycles)
    )
    nu = [rule.count("C") for rule in (relaxation if isinstance(relaxation, tuple) else [relaxation] * 3)]
    nu += nu[-1:] * (3 - len(nu))
    counter = Counter()
    arguments = counter.step, jnp.ones(n), jnp.ones(())
    _, pull = lp_jax.solve_vjp(*arguments, solver=solver, adjoint_solver=adjoint_solver)
    forward, adjoint = counter.take()
    assert not adjoint
    assert forward == cycle_cost(sizes, nu, forward_cycles, skip)
    assert sum(forward.values()) <= design_cost(sizes, m, nu, forward_cycles, skip)

    pull(jnp.ones(()))
    linearised, adjoint = counter.take()
    expected = cycle_cost(sizes, nu, adjoint_cycles, skip)
    assert adjoint == expected
    # each transposed evaluation linearises its layer; F-points are recomputed once, or in every sweep over the finest level
    sweeps = 1 if at_once == math.inf else 1 + (adjoint_cycles - skip) * (nu[0] + 1)
    recomputed = sweeps * (sizes[0] - sizes[1])
    assert linearised == expected | {0: expected[0] + recomputed}


@pytest.mark.parametrize("storage", ["states", "all"])
def test_evaluation_counts_of_picard(storage):
    """What is kept is that of one evaluation more, after the last sweep."""
    n, sweeps = 40, 3
    counter = Counter()
    solver = lp_jax.Picard(sweeps=sweeps, storage=storage)
    _, pull = lp_jax.solve_vjp(counter.step, jnp.ones(n), jnp.ones(()), solver=solver)
    assert counter.take() == ({0: (sweeps + (storage == "all")) * n}, {})
    pull(jnp.ones(()))
    _, adjoint = counter.take()
    assert adjoint == {0: (sweeps + 1) * n}  # and one evaluation of every layer for the gradient


def test_storing_all_states_recomputes_none():
    solver = lp_jax.MGRIT(levels=2, coarsening=4, iterations=2, coarse_step=INJECT, storage="all", relaxation="F")
    counter = Counter()
    _, pull = lp_jax.solve_vjp(counter.step, jnp.ones(64), jnp.ones(()), solver=solver)
    assert counter.take()[0] == cycle_cost([64, 16], [0, 0], 2, True)
    pull(jnp.ones(()))
    linearised, adjoint = counter.take()
    assert linearised == adjoint == cycle_cost([64, 16], [0, 0], 2, True)


@pytest.mark.parametrize("n, adjoint, sweeps", [(32, False, 3), (32, True, 1), (29, False, 1), (29, True, 3)])
def test_picard_in_windows(n, adjoint, sweeps):
    """Sweeps over one window after the other, then one over all layers, by a loop over numbers."""
    windows, t1 = 4, 5.0
    span, h = math.ceil(n / windows), t1 / n
    a = np.random.default_rng(0).normal(size=n)
    chain = a[::-1] if adjoint else a
    if adjoint:  # windows are counted from the first layer: in a reversed chain the short one comes first
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
        _, pull = lp_jax.solve_vjp(linear_step, *arguments, t1=t1, solver=exact, adjoint_solver=solver)
        got = pull(jnp.ones(()))[0].y0
    else:
        solution = lp_jax.solve(linear_step, *arguments, t1=t1, solver=solver)
        got = solution.y1
        assert (solution.stats.residual_norms[:-1] == -1).all() and solution.stats.residual_norms[-1] > 0
    np.testing.assert_allclose(got, wanted, rtol=1e-13)


@pytest.mark.parametrize("storage", ["states", "all"])
def test_enough_sweeps_in_windows_are_exact(storage):
    """A window of k layers is exact after k sweeps; the last one goes over all of them."""
    solver = lp_jax.Windowed(sweeps=9, windows=4, storage=storage)
    assert_serial(dense_step, dense_params(30, 4, scale=3.0), dense_state(2, 4), squared, solver, t1=4.0)


@pytest.mark.parametrize(
    ("n", "reverse"),
    [(1, False), (1, True), (5, False), (5, True), (9, False), (16, True), (37, False), (60, True), (128, False)],
)
def test_prefix_sums(n, reverse):
    x, start = np.random.default_rng(0).uniform(size=(n, 3)), np.arange(3.0)
    order = slice(None, None, -1 if reverse else 1)
    wanted = np.cumsum(np.concatenate([start[None], x[order]]), axis=0)

    @jax.jit
    def sums(x, start):
        return *_tree.prefix_sums(x, start, reverse=reverse), _tree.total(x)

    for got, exact in zip(sums(x, start), (wanted[:-1][order], wanted[-1], x.sum(axis=0)), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-13)


def test_what_is_infinite_behind_stays_there():
    x = jnp.ones(40).at[20].set(jnp.inf)
    before, _ = _tree.prefix_sums(x, jnp.zeros(()), reverse=False)
    np.testing.assert_array_equal(before[:21], np.arange(21.0))
