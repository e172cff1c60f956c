"""Secant sweeps: one slope for all layers, learned from the last two sweeps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import relative_error as distance

import lp_jax
from lp_jax._arrays import _tree

N, D, BATCH = 50, 4, 3


def gru(layers, h, units=16, batch=8, features=8, scale=1.0, dtype=float):
    """A GRU whose gates' outputs are stepped by ``h``, with weights as Flax draws them, times ``scale``."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, features + units, units)) * scale / np.sqrt(units), dtype)
    x = jnp.asarray(rng.normal(size=(layers, batch, features)), dtype)

    def step(y, layer):
        both = jnp.concatenate([layer.data, y], axis=-1)
        z, r = jax.nn.sigmoid(both @ layer.shared[0]), jax.nn.sigmoid(both @ layer.shared[1])
        new = jnp.tanh(jnp.concatenate([layer.data, r * y], axis=-1) @ layer.shared[2])
        return y + jnp.asarray(h, y.dtype) * z * (new - y)

    return lp_jax.Problem(step, None, jnp.zeros((batch, units), dtype), shared=w, data=x)


def decaying(layers=N):
    """Layers that contract, each with weights of its own."""
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.normal(size=(layers, D, D)) / 4), jnp.asarray(rng.normal(size=(layers, D)))

    def step(y, layer):
        w, b = layer.params
        return y + layer.dt * (jnp.tanh(y @ w + b[None]) - y)

    return lp_jax.Problem(step, params, jnp.asarray(rng.normal(size=(BATCH, D))), t1=8.0)


def solved(problem, solver, comm=None):
    @jax.jit
    def run(params, y0, shared, data):
        again = problem.replace(params=params, y0=y0, shared=shared, data=data, comm=comm)
        solution, pullback = again.solve_vjp(solver=solver)
        return solution, *pullback(jnp.cos(solution.y1))

    return run(problem.params, problem.y0, problem.shared, problem.data)


def by_hand(step, y0, layers, sweeps):
    """Secant sweeps in NumPy, straight from the formulas: differences of states and of stepped states, and a loop."""
    u = np.stack([y0] * (layers + 1))  # u[n] enters layer n; the last one leaves
    slope, before = 0.0, None
    for _ in range(sweeps):
        stepped = np.stack([step(n, u[n]) for n in range(layers)])
        if before is not None:
            d, answer = u[:-1] - before[0], stepped - before[1]
            slope = float(np.clip(np.sum((answer - d) * d) / np.sum(d * d), -1, 0))
        before = u[:-1], stepped
        new = [u[0]]
        for n in range(layers):
            new.append(stepped[n] + (1 + slope) * (new[n] - u[n]))
        u = np.stack(new)
    return u, slope


@pytest.mark.parametrize("sweeps", [1, 6])
def test_iterates_are_those_of_the_formulas(sweeps):
    problem = decaying()
    w, b = (np.asarray(x) for x in problem.params)
    h = 8.0 / N
    states, slope = by_hand(lambda n, y: y + h * (np.tanh(y @ w[n] + b[n]) - y), np.asarray(problem.y0), N, sweeps)
    assert sweeps == 1 or -1 <= slope < -0.05
    solution, gradients, _ = solved(problem, lp_jax.Picard(sweeps=sweeps, secant=True))
    np.testing.assert_allclose(solution.trajectory, states[1:], rtol=1e-12, atol=1e-13)

    jacobians = []  # the adjoint is linearised at the states that entered the layers, and swept the same way
    for n in range(N):
        inner = 1 - np.tanh(states[n] @ w[n] + b[n]) ** 2
        jacobians.append(inner)

    def transposed(n, lam):
        at = N - 1 - n
        return lam + h * ((lam * jacobians[at]) @ w[at].T - lam)

    lams, _ = by_hand(transposed, np.cos(states[-1]), N, sweeps)
    np.testing.assert_allclose(gradients.y0, lams[-1], rtol=1e-11, atol=1e-13)


def test_a_chain_that_contracts_takes_few_sweeps():
    """Plain sweeps take five times as many, or diverge first."""
    problem, most = gru(1024, 1 / 16), 14
    exact, gradient, _ = solved(problem, lp_jax.Serial())
    taught = lp_jax.Picard(sweeps=60, rtol=1e-3, secant=True)
    solution, gradients, stats = solved(problem, taught)
    assert int(solution.result) == int(stats.result) == 0
    assert int(solution.stats.iterations) <= most
    assert distance(solution.y1, exact.y1) < 1e-2
    assert distance(gradients.shared, gradient.shared) < 1e-2
    plain = lp_jax.solve(**vars(problem), solver=dataclasses.replace(taught, secant=False))
    assert int(plain.stats.iterations) > 2 * most


def test_a_chain_that_does_not_contract_takes_as_many_as_before():
    rng = np.random.default_rng(0)
    params, y0 = jnp.asarray(rng.normal(size=(64, D, D)) / 2), jnp.asarray(rng.normal(size=(BATCH, D)))
    step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)  # noqa: E731
    problem = lp_jax.Problem(step, params, y0, t1=2.0)
    counts = [
        int(lp_jax.solve(**vars(problem), solver=lp_jax.Picard(sweeps=40, rtol=1e-8, secant=s)).stats.iterations)
        for s in (False, True)
    ]
    assert abs(counts[0] - counts[1]) <= 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_low_precision_keeps_its_dtype(dtype):
    problem = gru(64, 1 / 8, dtype=dtype)
    solution = lp_jax.solve(**vars(problem), solver=lp_jax.Picard(sweeps=12, secant=True))
    assert solution.y1.dtype == dtype
    exact = lp_jax.solve(**vars(problem), solver=lp_jax.Serial())
    error = distance(solution.y1.astype(float), exact.y1.astype(float))
    assert error < 10 * float(jnp.finfo(dtype).eps) * 64**0.5


def test_some_layers_at_once_and_a_batch_of_solves():
    problem = decaying()
    whole, gradient, _ = solved(problem, lp_jax.Picard(sweeps=5, secant=True))
    some, gradients, _ = solved(problem, lp_jax.Picard(sweeps=5, secant=True, at_once=7))
    assert distance(some.y1, whole.y1) < 1e-14
    assert distance(gradients.params, gradient.params) < 1e-13
    one = lambda y0: lp_jax.solve(**(vars(problem) | {"y0": y0}), solver=lp_jax.Picard(sweeps=5, secant=True)).y1  # noqa: E731
    np.testing.assert_allclose(jax.vmap(one)(problem.y0[None])[0], whole.y1, rtol=1e-13)


@pytest.mark.parametrize(("layers", "devices", "rtol"), [(50, 4, 1e-6), (3, 4, None)])
def test_the_same_numbers_on_several_devices(layers, devices, rtol):
    """Also where slots pad the last device, or devices hold no layer."""
    problem, solver = decaying(layers), lp_jax.Picard(sweeps=20 if rtol else 6, secant=True, rtol=rtol)
    one, gradient, stats = solved(problem, solver)
    several, gradients, others = solved(problem, solver, comm=mesh(devices))
    np.testing.assert_allclose(several.y1, one.y1, rtol=1e-12)
    assert distance(gradients.params, gradient.params) < 1e-12
    for a, b in ((one.stats, several.stats), (stats, others)):
        assert int(a.iterations) == int(b.iterations)
        np.testing.assert_allclose(a.residual_norms, b.residual_norms, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "reverse"), [(n, i % 2 == 1) for i, n in enumerate((0, 1, 7, 8, 15, 16, 17, 64, 71, 513))]
)
def test_sums_that_decay(n, reverse):
    x, start = np.random.default_rng(n).normal(size=(n, 3)), np.arange(1.0, 4.0)
    sums = jax.jit(lambda x, start, factor: _tree.prefix_sums(x, start, reverse=reverse, factor=factor))
    before, last = sums(x, start, 0.9)
    total, found = start, []
    for one in x[:: -1 if reverse else 1]:
        found.append(total)
        total = 0.9 * total + one
    np.testing.assert_allclose(last, total, rtol=1e-13)
    np.testing.assert_allclose(before, np.reshape(found[:: -1 if reverse else 1], (n, 3)), rtol=1e-12, atol=1e-14)


def test_refusals():
    with pytest.raises(ValueError, match=r"sweeps over all layers; got windows=2"):
        lp_jax.Picard(sweeps=3, windows=2, secant=True)
    coarse = lp_jax.MGRIT(coarse_step=lp_jax.Picard(sweeps=2, secant=True))
    with pytest.raises(ValueError, match="leave secant out"):
        lp_jax.solve(**vars(decaying()), solver=coarse)
