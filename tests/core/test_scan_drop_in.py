"""`lp_jax.scan` with `Serial` takes what ``jax.lax.scan`` takes, and returns the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lp_jax

XS = jnp.arange(4.0)
BODIES = {
    "a Python number returned": (lambda c, x: (1.0, c * x), 0.5, XS),
    "no carry": (lambda c, x: (None, 2 * x), None, XS),
    "an empty carry": (lambda c, x: ((), 2 * x), (), XS),
    "a counter": (lambda c, x: (c + 1, x * c.astype(x.dtype)), jnp.int32(0), XS),
    "a flag": (lambda c, x: (~c, jnp.where(c, x, 0.0)), jnp.asarray(True), XS),
    "a key": (lambda c, x: (jax.random.split(c)[0], jax.random.normal(c) + x), jax.random.key(0), XS),
    "a counter beside numbers": (lambda c, x: ((c[0] + 1, c[1] * x), c), (jnp.int32(0), jnp.ones(2)), XS[:, None]),
    "a counter that is an index": (
        lambda c, x: ((c[0] + 1, c[1].at[c[0]].add(x)), x),
        (jnp.int32(0), jnp.zeros(5)),
        XS,
    ),
    "a counter beside a linear system": (
        lambda c, x: ((c[0] + 1, jnp.linalg.solve(jnp.eye(3) * (2.0 + x), c[1])), x),
        (jnp.int32(0), jnp.ones(3)),
        XS,
    ),
    "a gradient in the body": (
        lambda c, x: ((c[0] + 1, c[1] - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w[c[0]] * x)))(c[1])), x),
        (jnp.int32(0), jnp.ones(4)),
        XS,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_carries(name):
    body, init, xs = BODIES[name]
    wanted, got = lax.scan(body, init, xs), lp_jax.scan(body, init, xs, solver=lp_jax.Serial())
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("solver", [None, lp_jax.Newton()], ids=["default", "Newton"])
def test_a_carry_with_nothing_to_solve_for_is_the_same_with_any_solver(solver):
    body, init, xs = BODIES["a counter"]
    np.testing.assert_array_equal(lp_jax.scan(body, init, xs, solver=solver)[1], lax.scan(body, init, xs)[1])


def test_training_by_adam_with_integer_labels():
    """A counter in the optimizer's state, and the gradient of an index in the body."""
    optimizer = optax.adam(1e-2)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(8, 16, 4)), rng.integers(3, size=(8, 16))
    params = jnp.zeros((4, 3))

    def body(carry, batch):
        params, state = carry
        x, labels = batch

        def loss_of(params):
            return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(x @ params, labels))

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), loss

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        start = params, optimizer.init(params)
        (wanted, _), losses = lax.scan(body, start, (x, labels))
        for solver in (lp_jax.Serial(), None):
            (got, state), ours = lp_jax.scan(body, start, (x, labels), solver=solver)
            np.testing.assert_allclose(got, wanted, rtol=1e-2)
            np.testing.assert_allclose(ours, losses, rtol=1e-3)
            assert state[0].count == 8


@pytest.mark.parametrize(
    "options", [{"unroll": 2}, {"unroll": True}, {"_split_transpose": True}, {"length": jnp.int32(4)}]
)
def test_arguments_of_lax_scan(options):
    body = lambda c, x: (c + jnp.sin(x), c)  # noqa: E731
    wanted = lax.scan(body, 0.0, XS, **options)
    for solver in (lp_jax.Serial(), lp_jax.Picard(sweeps=4)):
        np.testing.assert_allclose(lp_jax.scan(body, 0.0, XS, solver=solver, **options)[1], wanted[1], rtol=1e-14)


def test_lengths_that_are_none():
    def scan(length):
        return lp_jax.scan(lambda c, x: (c, None), 0.0, None, length)

    with pytest.raises(ValueError, match="length must be at least 0; got -1"):
        scan(-1)
    with pytest.raises(TypeError, match=r"length must be an integer.*got 4.0"):
        scan(4.0)
    with pytest.raises(TypeError, match="length must be an integer that is known when scan is traced"):
        jax.jit(scan)(4)


WEAK = {
    "one input reaches all": lambda c, x: (tuple(a + x for a in c), c[0]),
    "one carry stays": lambda c, x: ((c[0] + x, c[1] * x, 0.5 * c[2]), x),
    "two inputs meet late": lambda c, x: ((c[0] * x, c[0], c[1]), x),
    "round about": lambda c, x: ((c[1] + 1, c[2], c[0] + x), x),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_are_taken_and_refused_alike(name):
    """Python numbers in the carry take their dtype from the body, once."""
    xs = jnp.ones(4, jnp.float16)

    def dtypes(scan):
        try:
            return [x.dtype for x in jax.tree.leaves(scan(WEAK[name], (0.0, 0.0, 0.0), xs))]
        except TypeError as error:
            return re.findall(r"float\d+\[\]", str(error))

    got, wanted = dtypes(lambda *a: lp_jax.scan(*a, solver=lp_jax.Serial())), dtypes(lax.scan)
    assert got == wanted != []


def test_integers_that_follow_from_the_state():
    """One layer after another, as the default and `Serial` are; another solver cannot know them."""

    def body(c, x):
        y = c[0] + 0.1 * jnp.sin(x)
        return (y, c[1] + jnp.int32(y > 0.5)), c[1]

    start = jnp.zeros(()), jnp.int32(0)
    wanted = lax.scan(body, start, XS)
    for solver in (None, lp_jax.Serial()):
        jax.tree.map(np.testing.assert_array_equal, lp_jax.scan(body, start, XS, solver=solver), wanted)
    with pytest.raises(TypeError, match="body computes it from floating-point leaves"):
        lp_jax.scan(body, start, XS, solver=lp_jax.Picard(sweeps=3))


def test_positions_of_arguments_are_those_of_a_scan():
    body = (lambda c, x: (c + x, None)), jnp.zeros(()), XS
    np.testing.assert_array_equal(lp_jax.scan(*body, None, True, 2, False)[0], lax.scan(*body, None, True, 2, False)[0])
    assert lp_jax.scan(lambda c, _: (c + 1, None), 0.0, length=3)[0] == 3
