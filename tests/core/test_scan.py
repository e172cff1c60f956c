"""`lp_jax.scan` against ``jax.lax.scan``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from networks import mesh
from problems import INJECT

import lp_jax
from lp_jax._arrays import _at_once

RNG = np.random.default_rng(0)
CLOSED_OVER = jnp.asarray(RNG.normal(size=(3, 3)))


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def trees(carry, x):
    """A carry of a tuple and a dict, ys of every kind, an array closed over."""
    a, other = carry
    k = other["k"]
    new = a + 0.1 * jnp.tanh(a @ x["w"] + k)
    return (new, {"k": 0.9 * k + 0.1 * jnp.sin(a @ CLOSED_OVER)}), {"o": new * k, "i": 3, "positive": a > 0, "n": None}


def counting(carry, x):
    """A counter and a key in the carry: both go their way without the state."""
    y, number, key = carry
    key, now = jax.random.split(key)
    kept = jax.random.bernoulli(now, 0.7, y.shape).astype(y.dtype)
    slope = jnp.cos(y * x + 0.1 * number.astype(y.dtype)) @ CLOSED_OVER
    return (y + 0.1 * slope * kept, number + 1, key), (y, number, now)


@jax.checkpoint
def checkpointed(y, w):
    return y + 0.1 * jnp.tanh(y @ w), None


@jax.tree_util.register_pytree_with_keys_class
class Converting:
    """A carry whose class makes arrays of its fields, so that it can hold neither None nor shapes."""

    def __init__(self, y, steps):
        self.y, self.steps = jnp.asarray(y), jnp.asarray(steps)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key("y"), self.y), (key("steps"), self.steps)], None

    @classmethod
    def tree_unflatten(cls, _, fields):
        return cls(*fields)


def converting(c, w):
    return Converting(c.y + 0.1 * jnp.tanh(w * c.y), c.steps + 1), c.y.sum()


def sparse(c, x):
    y, m = c
    flags = {"indices_sorted": m.indices_sorted, "unique_indices": m.unique_indices}
    return (y + 0.1 * jnp.tanh(m @ y), BCOO((0.9 * m.data + 0.1 * x, m.indices), shape=m.shape, **flags)), None


BODIES = {
    "trees": (trees, lambda n: ((normal(2, 3), {"k": normal(2, 3)}), {"w": normal(n, 3, 3)})),
    "counting": (counting, lambda n: ((normal(3), jnp.int32(0), jax.random.key(1)), normal(n, 3))),
    "nothing scanned over": (lambda y, _: (y + 0.05 * jnp.sin(y), y.sum()), lambda n: (normal(3), None)),
    "checkpointed": (checkpointed, lambda n: (normal(2, 3), normal(n, 3, 3))),
    "weak type": (lambda c, x: ((0.9 * c[0] + x, c[1]), c[0]), lambda n: ((0.0, jax.random.key(1)), normal(n))),
    "a class that converts": (converting, lambda n: (Converting(normal(3), 0), normal(n, 3))),
    "sparse": (sparse, lambda n: ((normal(3), BCOO.fromdense(jnp.eye(3))), normal(n, 3))),
    "integers": (
        lambda y, i: (y + 0.1 * jnp.sin(y) * (1 + i % 3).astype(y.dtype), i),
        lambda n: (normal(3), jnp.arange(n)),
    ),
}


def is_inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def everything(scan, body, operands, n, reverse):
    """The carry, the ys, and the gradient of a loss that sees all of them, by all that goes in."""
    leaves, structure = jax.tree.flatten(operands)

    def loss(inexact):
        values = iter(inexact)
        init, xs = jax.tree.unflatten(structure, [next(values) if is_inexact(x) else x for x in leaves])
        out = scan(body, init, xs, n, reverse)
        seen = [x for x in jax.tree.leaves(out) if is_inexact(x)]
        return sum((1 + k) * jnp.sum(jnp.sin(x)) for k, x in enumerate(seen)), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))([x for x in leaves if is_inexact(x)])


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_same(got, wanted, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(bits(a), bits(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "n", "reverse"),
    [
        ("trees", 13, False),
        ("trees", 16, True),
        ("trees", 0, False),
        ("counting", 7, True),
        ("nothing scanned over", 1, False),
        ("checkpointed", 16, True),
        ("weak type", 13, False),
        ("integers", 7, True),
        ("a class that converts", 7, True),
        ("sparse", 8, False),
    ],
)
def test_the_results_are_those_of_lax_scan(monkeypatch, name, n, reverse):
    body, make = BODIES[name]
    operands = make(n)
    wanted = everything(jax.lax.scan, body, operands, n, reverse)

    def found(solver):
        return everything(functools.partial(lp_jax.scan, solver=solver), body, operands, n, reverse)

    # sweeps and cycles take turns with the lengths; both on 16 layers of trees
    sweeps, cycles = lp_jax.Picard(sweeps=16), lp_jax.MGRIT(iterations=5)
    for solver in (sweeps,) if n == 7 else (sweeps, cycles) if (name, n) == ("trees", 16) else (cycles,):
        assert_same(found(solver), wanted, 1e-13)
    if name == "trees" and n == 13:
        assert_same(found(lp_jax.Serial()), wanted, 1e-14)
    # written out, products and sums of several layers are fused, and round otherwise; one at a time, to the last bit
    monkeypatch.setattr(_at_once, "CPU", dataclasses.replace(_at_once.CPU, unroll_bytes=0))
    assert_same(found(lp_jax.Serial()), wanted, 0)


def test_layers_over_devices():
    body, make = BODIES["counting"]
    operands = make(13)

    def scan(*arguments):
        return lp_jax.scan(*arguments, solver=lp_jax.MGRIT(iterations=4), comm=mesh(8))

    wanted = everything(jax.lax.scan, body, operands, 13, False)
    assert_same(everything(scan, body, operands, 13, False), wanted, 1e-13)


def test_what_is_scanned_is_a_problem_like_any_other():
    problem = lp_jax.scanned(lambda y, x: (0.9 * y + x, y), normal(3), normal(16, 3), reverse=True)
    solution = problem.solve(solver=lp_jax.Picard(sweeps=3))
    assert solution.stats.residual_norms.shape == (3,)
    assert problem.layers == 16
    flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
    machine = lp_jax.planning.Machine(at_once=(1, 1024), **flat)
    assert lp_jax.plan(problem, machine=machine, solvers=[lp_jax.Picard(sweeps=3)]).best.error < 1e-2


def test_a_guess_restarts_a_scan():
    body, operands = lambda y, w: (y + 0.1 * jnp.tanh(y @ w), None), (normal(2, 3), normal(16, 3, 3))
    solver = lp_jax.MGRIT(iterations=1)
    exact, _ = jax.lax.scan(body, *operands)
    cold, _ = lp_jax.scan(body, *operands, solver=solver)
    trajectory = lp_jax.scanned(body, *operands).solve(solver=lp_jax.MGRIT(iterations=4)).trajectory
    warm, _ = lp_jax.scan(body, *operands, solver=solver, guess=trajectory)
    assert jnp.abs(warm - exact).max() < 1e-12 < jnp.abs(cold - exact).max()


W = jnp.zeros((8, 3))
INJECTED, MEANS = ({"coarse_step": INJECT}, {"levels": 3, "coarse_step": lp_jax.Rediscretize(params="mean")})
NO_DT = r"=.* knows no dt: take coarse_step=Picard\(sweeps=1\)"


@pytest.mark.parametrize(
    ("body", "init", "xs", "options", "error", "message"),
    [
        (lambda y, w: (y + w, None), W[0], W, {"solver": lp_jax.MGRIT(**INJECTED)}, ValueError, f"solver{NO_DT}"),
        (
            lambda y, w: (y + w, None),
            W[0],
            W,
            {"adjoint_solver": lp_jax.MGRIT(**MEANS)},
            ValueError,
            f"adjoint_solver{NO_DT}",
        ),
        (lambda y, w: y + w, W[0], W, {}, TypeError, "body must return a pair"),
        (lambda y, w: (y[None], w), W[0], W, {}, TypeError, r"body .* leaf carry went in as float64\[3\]"),
        (lambda y, w: ((y, y), w), W[0], W, {}, TypeError, "body must return a state like the one it got"),
        (lambda y, w: (y, w), W[0], (W, W[:5]), {}, ValueError, r"one number of layers; .*'xs\[1\]': 5"),
        (lambda y, w: (y, w), W[0], W, {"length": 7}, ValueError, "length=7"),
        (lambda y, w: (y, w), W[0], None, {}, ValueError, "xs without arrays"),
        (lambda y, w: (y, w), W[0], {"a": 1.0}, {}, ValueError, r"xs\['a'\] is a scalar"),
        (
            lambda c, w: ({"y": c["y"] + w, "hits": c["hits"] + (c["y"] > 0).sum()}, None),
            {"y": W[0], "hits": jnp.int64(0)},
            W,
            {"solver": lp_jax.Picard(sweeps=3)},
            TypeError,
            r"init\['hits'\] has dtype int64, and body computes it from floating-point leaves",
        ),
    ],
)
def test_what_is_refused(body, init, xs, options, error, message):
    with pytest.raises(error, match=message):
        lp_jax.scan(body, init, xs, **options)
