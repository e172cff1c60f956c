"""`lp_jax.scan` against ``jax.lax.scan``."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from problems import INJECT

import lp_jax
from lp_jax._choice import _processor

RNG = np.random.default_rng(0)
CLOSED_OVER = jnp.asarray(RNG.normal(size=(3, 3)))


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def trees(carry, x):
    """A carry of a tuple and a dict, ys of every kind, an array closed over."""
    a, other = carry
    k = other["k"]
    new = a + 0.1 * jnp.tanh(a @ x["w"] + k)
    return (new, {"k": 0.9 * k + 0.1 * jnp.sin(a @ CLOSED_OVER)}), {
        "o": new * k,
        "i": 3,
        "positive": a > 0,
        "n": None,
    }


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
    return (
        y + 0.1 * jnp.tanh(m @ y),
        BCOO((0.9 * m.data + 0.1 * x, m.indices), shape=m.shape, **flags),
    ), None


BODIES = {
    "trees": (trees, lambda n: ((normal(2, 3), {"k": normal(2, 3)}), {"w": normal(n, 3, 3)})),
    "counting": (counting, lambda n: ((normal(3), jnp.int32(0), jax.random.key(1)), normal(n, 3))),
    "nothing scanned over": (
        lambda y, _: (y + 0.05 * jnp.sin(y), y.sum()),
        lambda n: (normal(3), None),
    ),
    "checkpointed": (checkpointed, lambda n: (normal(2, 3), normal(n, 3, 3))),
    "weak type": (
        lambda c, x: ((0.9 * c[0] + x, c[1]), c[0]),
        lambda n: ((0.0, jax.random.key(1)), normal(n)),
    ),
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
        init, xs = jax.tree.unflatten(
            structure, [next(values) if is_inexact(x) else x for x in leaves]
        )
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
    for solver in (
        (sweeps,) if n == 7 else (sweeps, cycles) if (name, n) == ("trees", 16) else (cycles,)
    ):
        assert_same(found(solver), wanted, 1e-13)
    if name == "trees" and n == 13:
        assert_same(found(lp_jax.Serial()), wanted, 1e-14)
    # written out, products and sums of several layers are fused, and round otherwise; one at a time, to the last bit
    monkeypatch.setattr(_processor.Processor, "serial_unroll", lambda self, layer: 1)
    assert_same(found(lp_jax.Serial()), wanted, 0)


def test_a_guess_restarts_a_scan():
    body, operands = (
        lambda y, w: (y + 0.1 * jnp.tanh(y @ w), None),
        (normal(2, 3), normal(16, 3, 3)),
    )
    solver = lp_jax.MGRIT(iterations=1)
    exact, _ = jax.lax.scan(body, *operands)
    cold, _ = lp_jax.scan(body, *operands, solver=solver)
    trajectory = lp_jax.scanned(body, *operands).solve(solver=lp_jax.MGRIT(iterations=4)).trajectory
    warm, _ = lp_jax.scan(body, *operands, solver=solver, guess=trajectory)
    assert jnp.abs(warm - exact).max() < 1e-12 < jnp.abs(cold - exact).max()


# --- `Serial` takes what ``jax.lax.scan`` takes, and returns the same ---------------------------------------------------

XS, ZERO = jnp.arange(4.0), jnp.int32(0)


def follows(c, x):
    """An integer that follows from the state."""
    y = c[0] + 0.1 * jnp.sin(x)
    return (y, c[1] + jnp.int32(y > 0.5)), c[1]


@jax.jit
def prints(c, x):
    """A counter beside a rule of derivatives, and printing of the state, in calls and branches; an inner scan swaps flags."""
    jax.debug.callback(lambda y: None, c[0])
    pair = jax.custom_jvp(lambda y, i: (0.1 * jnp.sin(y), i + 1))
    pair.defjvp(lambda p, t: (pair(*p), (0.1 * jnp.cos(p[0]) * t[0], t[1])))
    change, i = pair(c[0], c[1])
    (y, *flags), _ = jax.lax.scan(
        lambda d, _: ((0.9 * d[0], d[2], d[1]), None), (c[0] + change * x, *c[2:]), length=3
    )
    return (y, jax.lax.cond(x > 1, lambda y, i: i + 1, lambda y, i: i, y, i), *flags), i


DROP_IN = {
    "a counter beside printing": (
        prints,
        (jnp.ones(()), jnp.int32(0), jnp.asarray(True), jnp.asarray(False)),
        XS,
    ),
    "a Python number returned": (lambda c, x: (1.0, c * x), 0.5, XS),
    "no carry": (lambda c, x: (None, 2 * x), None, XS),
    "an empty carry": (lambda c, x: ((), 2 * x), (), XS),
    "a counter": (lambda c, x: (c + 1, x * c.astype(x.dtype)), jnp.int32(0), XS),
    "a flag": (lambda c, x: (~c, jnp.where(c, x, 0.0)), jnp.asarray(True), XS),
    "a key": (
        lambda c, x: (jax.random.split(c)[0], jax.random.normal(c) + x),
        jax.random.key(0),
        XS,
    ),
    "a counter beside numbers": (
        lambda c, x: ((c[0] + 1, c[1] * x), c),
        (jnp.int32(0), jnp.ones(2)),
        XS[:, None],
    ),
    "a counter that is an index": (
        lambda c, x: ((c[0] + 1, c[1].at[c[0]].add(x)), x),
        (ZERO, jnp.zeros(5)),
        XS,
    ),
    "a counter beside a linear system": (
        lambda c, x: ((c[0] + 1, jnp.linalg.solve(jnp.eye(3) * (2.0 + x), c[1])), x),
        (ZERO, jnp.ones(3)),
        XS,
    ),
    "a gradient in the body": (
        lambda c, x: (
            (c[0] + 1, c[1] - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w[c[0]] * x)))(c[1])),
            x,
        ),
        (jnp.int32(0), jnp.ones(4)),
        XS,
    ),
    "an integer from the state": (follows, (jnp.zeros(()), jnp.int32(0)), XS),
}


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        *((name, lp_jax.Serial()) for name in DROP_IN),
        (
            "an integer from the state",
            None,
        ),  # the default is serial here; another solver cannot know it
        ("a counter beside printing", lp_jax.Newton(iterations=4)),
        *(("a counter", solver) for solver in (None, lp_jax.Newton())),  # nothing to solve for
    ],
)
def test_carries(name, solver):
    body, init, xs = DROP_IN[name]
    tolerance = 1e-6 if isinstance(solver, lp_jax.Newton) else 0
    assert_same(lp_jax.scan(body, init, xs, solver=solver), jax.lax.scan(body, init, xs), tolerance)


@pytest.mark.parametrize(
    "options",
    [{"unroll": 2}, {"unroll": True}, {"_split_transpose": True}, {"length": jnp.int32(4)}],
)
def test_arguments_of_lax_scan(options):
    body = lambda c, x: (c + jnp.sin(x), c)  # noqa: E731
    wanted = jax.lax.scan(body, 0.0, XS, **options)
    for solver in (lp_jax.Serial(), lp_jax.Picard(sweeps=4)):
        np.testing.assert_allclose(
            lp_jax.scan(body, 0.0, XS, solver=solver, **options)[1], wanted[1], rtol=1e-14
        )
    by_position = body, jnp.zeros(()), XS, None, True, 2, False
    np.testing.assert_array_equal(lp_jax.scan(*by_position)[1], jax.lax.scan(*by_position)[1])


WEAK = {
    "one input reaches all": lambda c, x: (tuple(a + x for a in c), c[0]),
    "one carry stays": lambda c, x: ((c[0] + x, c[1] * x, 0.5 * c[2]), x),
    "two inputs meet late": lambda c, x: ((c[0] * x, c[0], c[1]), x),
    "round about": lambda c, x: ((c[1] + 1, c[2], c[0] + x), x),
    "a clock": lambda c, x: ((c[0] + 0.1, c[1] + c[0] * x, c[2] * 0.5), c[0] * x),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_are_taken_and_refused_alike(name):
    """Python numbers in the carry take their dtype from the body, once, or stay weakly typed there and afterwards."""
    xs = jnp.ones(4, jnp.float16)

    def dtypes(scan):
        try:
            carry, ys = scan(WEAK[name], (0.0, 0.0, 0.0), xs)
            return [ys.dtype, *((x.dtype, x.weak_type) for x in carry)]
        except TypeError as error:
            return re.findall(r"float\d+\[\]", str(error))

    got, wanted = dtypes(lambda *a: lp_jax.scan(*a, solver=lp_jax.Serial())), dtypes(jax.lax.scan)
    assert got == wanted != []


# --- what is refused ---------------------------------------------------------------------------------------------------

W = jnp.zeros((8, 3))
INJECTED = {"solver": lp_jax.MGRIT(coarse_step=INJECT)}
MEANS = {"adjoint_solver": lp_jax.MGRIT(levels=3, coarse_step=lp_jax.Rediscretize(params="mean"))}
NO_DT = r"=.* knows no dt: take coarse_step=Picard\(sweeps=1\)"


@pytest.mark.parametrize(
    ("body", "init", "xs", "options", "error", "message"),
    [
        (lambda y, w: (y + w, None), W[0], W, INJECTED, ValueError, f"solver{NO_DT}"),
        (lambda y, w: (y + w, None), W[0], W, MEANS, ValueError, f"adjoint_solver{NO_DT}"),
        (lambda y, w: y + w, W[0], W, {}, TypeError, "body output must be a pair"),
        (
            lambda y, w: (y[None], w),
            W[0],
            W,
            {},
            TypeError,
            r"The input carry y has type float64\[3\]",
        ),
        (lambda y, w: ((y, y), w), W[0], W, {}, TypeError, "must have the same pytree structure"),
        (
            lambda y, w: (y, w),
            W[0],
            (W, W[:5]),
            {},
            ValueError,
            "different leading axis sizes: 8, 5",
        ),
        (lambda y, w: (y, w), W[0], W, {"length": 7}, ValueError, "`length` argument of 7"),
        (
            lambda y, w: (y, w),
            W[0],
            None,
            {"length": -1},
            ValueError,
            "length must be at least 0; got -1",
        ),
        (lambda y, w: (y, w), W[0], None, {}, ValueError, "`length` not provided"),
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


def test_a_length_is_known_when_a_scan_is_traced():
    with pytest.raises(TypeError, match="`length` argument to `scan` expects a concrete `int`"):
        jax.jit(lambda length: lp_jax.scan(lambda c, x: (c, None), 0.0, None, length))(4)
