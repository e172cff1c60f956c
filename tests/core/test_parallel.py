"""`lp_jax.parallel`: scans inside any function, solved; all else as it was."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import relative_error

import lp_jax
from lp_jax import planning

N, WIDTH = 12, 4
SERIAL = lp_jax.Serial()
EXACT = lp_jax.Picard(sweeps=N)  # as many sweeps as layers
W = 0.3 * np.random.default_rng(0).normal(size=(N, WIDTH, WIDTH))
X = np.random.default_rng(1).normal(size=(3, WIDTH))


def body(y, w):
    return y + jnp.tanh(y @ w), jnp.sum(y)


def plain(w, x):
    return lax.scan(body, x, w)


def total(out):
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))


def solved(f, *args, **options):
    """Programs of solves in ``f``, and whether scans outside of them are left."""
    return str(jax.make_jaxpr(lp_jax.parallel(f, solver=EXACT, **options))(*args)).count(
        "custom_vjp_call"
    )


def same(f, *args, solver=EXACT, tolerance=1e-12, **options):
    """Value and gradient of ``f`` and of its parallel form, under jit; returns those of the latter."""
    wanted = jax.jit(jax.value_and_grad(lambda *args: total(f(*args)), argnums=(0, 1)))(*args)
    wrapped = lp_jax.parallel(f, solver=solver, **options)
    got = jax.jit(jax.value_and_grad(lambda *args: total(wrapped(*args)), argnums=(0, 1)))(*args)
    assert relative_error(got, wanted) < tolerance
    return got


@jax.custom_vjp
def own_gradient(w, x):
    return plain(w, x)[0]


own_gradient.defvjp(
    lambda w, x: (own_gradient(w, x), (w, x)), lambda res, g: (res[0] * 2, res[1] * 3)
)


def in_a_while(w, x):
    return lax.while_loop(lambda c: c[1] < 2, lambda c: (plain(w, c[0])[0], c[1] + 1), (x, 0))[0]


PROGRAMS = {
    "a scan": (plain, 1),
    "two": (lambda w, x: plain(w, plain(w, x)[0]), 2),
    "reversed": (lambda w, x: lax.scan(body, x, w, reverse=True), 1),
    "no steps": (lambda w, x: lax.scan(body, x, w[:0]), 0),
    "a loop without reverse mode": (in_a_while, 1),
    "jit": (jax.jit(plain, inline=True), 1),
    "checkpoint": (jax.checkpoint(lambda w, x: jax.jit(plain)(w, x)), 1),
    "step with checkpoint": (lambda w, x: lax.scan(jax.checkpoint(body), x, w), 1),
    "a condition": (
        lambda w, x: lax.cond(x[0, 0] > 0, plain, lambda w, x: (2 * x, w[:, 0, 0]), w, x),
        1,
    ),
    "fori_loop": (lambda w, x: lax.fori_loop(0, N, lambda i, y: body(y, w[i])[0], x), 1),
    "vmap outside": (lambda w, x: jax.vmap(plain, (None, 0))(w, x), 1),
    "a sum over the batch": (
        lambda w, x: jax.vmap(functools.partial(averaged, w), axis_name="batch")(x),
        1,
    ),
    "a scan within the step": (
        lambda w, x: lax.scan(
            lambda y, w: (lax.scan(lambda y, v: (y + 0.1 * v[None], None), y, w)[0], None), x, w
        ),
        1,
    ),
    "a counter outside": (
        lambda w, x: lax.scan(lambda i, w: (i + 1, plain(w, x)), 0, jnp.stack([w, w]))[1],
        1,
    ),
}


def averaged(w, x):
    return lax.scan(lambda y, w: (y + jnp.tanh(y @ w) - lax.pmean(y, "batch"), None), x, w)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_scans_are_found_wherever_they_stand(name):
    f, number = PROGRAMS[name]
    assert solved(f, W, X) == number
    if f is in_a_while:
        np.testing.assert_allclose(lp_jax.parallel(f, solver=EXACT)(W, X), f(W, X), rtol=1e-12)
    else:
        same(f, W, X)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (own_gradient, "derivative of its own"),
        (
            lambda w, x: lax.scan(
                lambda y, w: (jax.debug.callback(lambda: None), body(y, w))[1], x, w
            ),
            "side effects",
        ),
        (lambda w, x: (lax.scan(lambda i, w: (i + 1, w), 0, w), x), "no floating-point"),
        (
            lambda w, x: lax.scan(
                lambda c, w: ((body(c[0], w)[0], jnp.int32(c[0][0, 0])), None), (x, jnp.int32(0)), w
            )[0][0],
            "int32",
        ),
    ],
    ids=["own gradient", "callback", "integers", "integers from floats"],
)
def test_what_cannot_be_solved_is_left_as_it_is(f, why):
    with pytest.warns(UserWarning, match=rf"leaves a scan as it is, .*test_parallel.py.*: .*{why}"):
        count = solved(f, W, X)
    assert count == (1 if f is own_gradient else 0)  # its own, which stays
    for options in ({}, {"where": lambda scan: False}):  # nobody asked for more
        np.testing.assert_array_equal(total(lp_jax.parallel(f, **options)(W, X)), total(f(W, X)))
    found = lp_jax.scans(f, solver=EXACT)(W, X)
    assert [why in one.takes for one in found] == ([] if f is own_gradient else [True])
    assert f is own_gradient or found[0].takes.startswith("left as it is")


def in_a_loop(blocks, x):
    for w in blocks:
        x = x + 0.1 * jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("options", [{"solver": EXACT}, {"comm": jax.make_mesh((1,), ("layers",))}])
def test_a_loop_without_a_scan_is_said_once(options):
    """However often it is traced, with what to do: the recipe is solved."""
    blocks, gradient = list(W), jax.grad(lp_jax.parallel(in_a_loop, **options))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for x in (X, X[:1]):
            got = jax.jit(gradient)(blocks, x)
    (text,) = (str(one.message) for one in found)
    assert "in_a_loop" in text and "Stack the equal blocks" in text and "nn.stack" in text
    jax.grad(lp_jax.parallel(in_a_loop))(blocks, X)  # the default is silent

    def stacked(blocks, x):
        blocks = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
        step = lambda x, w: (x + 0.1 * jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(lax.scan(step, x, blocks)[0] ** 2)

    assert solved(stacked, blocks, X[:1]) == 1
    again = jax.jit(jax.grad(lp_jax.parallel(stacked, solver=EXACT)))(blocks, X[:1])
    assert relative_error(again, got) < 1e-12


def test_a_solver_of_where_that_is_not_used_is_said():
    f = lambda w, x: lax.scan(lambda i, w: (i + 1, jnp.sum(w)), 0, w)[1]  # noqa: E731
    with pytest.warns(UserWarning, match="no floating-point"):
        lp_jax.parallel(f, where=lambda scan: EXACT)(W, X)


@pytest.mark.parametrize("solver", [None, SERIAL, EXACT])
def test_a_solve_keeps_its_own_solver(solver):
    """One sweep would give other numbers. A solve that has its pullback is no gradient to warn of."""

    def step(y, layer):
        return body(y, layer.params)[0]

    def f(w):
        return total(lp_jax.solve(step, w, X, solver=solver).y1)

    def with_pullback(w):
        solution, pullback = lp_jax.solve_vjp(step, w, X, solver=solver)
        return total(pullback(solution.y1)[0].params)

    once = lp_jax.Picard(sweeps=1)
    swept = lp_jax.parallel(lambda w: total(plain(w, X)[0]), solver=once)
    assert relative_error(swept(W), f(W)) > 1e-2
    for each in (f, jax.grad(f), with_pullback):
        np.testing.assert_array_equal(lp_jax.parallel(each, solver=once)(W), each(W))


def test_the_default_leaves_what_nothing_is_faster_than():
    """To the bit, and differentiable in forward mode."""
    got = jax.jit(jax.value_and_grad(lambda w: total(lp_jax.parallel(plain)(w, X))))(W)
    wanted = jax.jit(jax.value_and_grad(lambda w: total(plain(w, X))))(W)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    jax.jvp(lambda w: lp_jax.parallel(plain)(w, X)[0], (W,), (W,))
    (one,) = lp_jax.scans(plain)(W, X)
    assert one.takes == "left as it is: nothing is faster" and 0 < one.seconds < 1e-3


def test_the_default_solves_where_that_is_faster():
    rng = np.random.default_rng(0)
    deep = jnp.asarray(rng.normal(size=(4096, 8, 8)) / 3, jnp.float32)
    (one,) = lp_jax.scans(thin)(deep)
    assert "Picard" in one.takes and one.problem.layers == 4096
    assert relative_error(jax.grad(lp_jax.parallel(thin))(deep), jax.grad(thin)(deep)) < 1e-2


def thin(w):
    step = jnp.float32(1 / len(w))
    return jnp.sum(
        lax.scan(lambda y, w: (y + step * jnp.tanh(y @ w), None), jnp.ones((4, 8), w.dtype), w)[0]
        ** 2
    )


def test_where_sees_each_scan_and_picks():
    seen = []

    def f(w, x):
        with jax.named_scope("first"):
            y = plain(w, x)[0]
        return lax.scan(body, y, w[:5], reverse=True)[0]

    def where(scan):
        seen.append(scan)
        return scan.length > 5 and (SERIAL, SERIAL)

    assert solved(f, W, X, where=where) == 0  # a serial scan is differentiated by JAX
    first, second = seen[:2]
    assert (first.length, first.reverse, first.name) == (N, False, "first")
    assert (second.length, second.reverse, second.name) == (5, True, "")
    assert first.flops == 2 * 3 * WIDTH**2 and first.carry[0].shape == (3, WIDTH)
    assert "test_parallel.py" in first.source and "(plain)" in first.source
    for choice in (True, EXACT, (EXACT, EXACT)):
        assert solved(f, W, X, where=lambda scan, choice=choice: choice) == 2
    table = str(lp_jax.scans(f, where=lambda scan: scan.length > 5)(W, X))
    assert len(table.splitlines()) == 2 and "where(scan) is False" in table


def test_a_prediction_says_what_it_assumes():
    def loss(weights):
        body = lambda y, w: (y + jnp.tanh(y @ w) / 100, None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, jnp.ones((8, 64), weights.dtype), weights)[0])

    weights = jax.ShapeDtypeStruct((512, 64, 64), jnp.float32)
    found = []
    with planning.assume("H200"):
        jax.eval_shape(lambda w: found.append(lp_jax.scans(loss)(w)), weights)
    (one,) = found[0]
    assert one.takes.startswith("Picard") and one.scan_seconds > one.seconds > 0
    said = f"predicted if 5 sweeps forward and 3 back are enough, {1e3 * one.scan_seconds:.3g} ms for the scan"
    assert str(found[0]).endswith(said)


def test_a_function_jitted_already_keeps_its_name_donation_and_shardings():
    named = jax.jit(plain, donate_argnums=1, keep_unused=True)
    (before,), (after,) = (
        [e for e in jax.make_jaxpr(f)(W, X).eqns if e.primitive.name in ("jit", "pjit")]
        for f in (named, lp_jax.parallel(named, solver=EXACT))
    )
    changed = {key for key in before.params if str(before.params[key]) != str(after.params[key])}
    assert changed == {"jaxpr"} and after.params["name"] == "plain"
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,))
    spread = jax.device_put(np.concatenate([X, X])[:4], NamedSharding(mesh, PartitionSpec("batch")))
    with jax.set_mesh(mesh):
        out = jax.jit(lp_jax.parallel(plain, solver=EXACT))(jnp.asarray(W), spread)[0]
    assert jax.typeof(out).sharding.spec == jax.typeof(spread).sharding.spec
    np.testing.assert_allclose(out, plain(W, np.concatenate([X, X])[:4])[0], rtol=1e-12)


@pytest.mark.parametrize("checked", [True, False])
def test_a_step_that_sums_over_devices_within_a_shard_map(checked):
    """Its result is the same on every device, and so is that of `lp_jax.scan` and of `parallel`, gradients too."""
    mesh, spec = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,)), PartitionSpec
    specs = {
        "in_specs": (spec(None, None, "model"), spec()),
        "out_specs": spec(),
        "check_vma": checked,
    }

    def step(y, w):
        return y + lax.psum(jax.jit(jnp.tanh)(y @ w) @ w.T, "model"), None

    def split(w, x):
        return lax.scan(step, x, w)[0]

    f = jax.shard_map(split, mesh=mesh, **specs)
    assert solved(f, W, X) == 1
    same(f, W, X)
    by_hand = jax.shard_map(
        lambda w, x: lp_jax.scan(step, x, w, solver=EXACT)[0], mesh=mesh, **specs
    )
    a, b = (jax.jit(jax.grad(lambda w, f=f: total(f(w, X))))(W) for f in (by_hand, f))
    np.testing.assert_allclose(a, b, rtol=1e-10)
    whole = jax.grad(
        lambda w: total(lax.scan(lambda y, w: (y + jnp.tanh(y @ w) @ w.T, None), X, w)[0])
    )(W)
    np.testing.assert_allclose(a, whole, rtol=1e-10)  # on one device


def looped(y, w):
    return lax.fori_loop(0, 3, lambda i, y: y + jnp.tanh(y @ w @ w.T), y)


def until(y, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, looped(c[1], w)), (0, y))[1]


LAYERS_OF_PROGRAMS = {
    "scan": looped,
    "while": until,
    "switch": lambda y, w: lax.cond(w[0, 0] > 0, looped, lambda y, w: jnp.sin(y), y, w),
    "checkpoint": jax.checkpoint(looped),
}


@pytest.mark.parametrize("name", LAYERS_OF_PROGRAMS)
def test_a_layer_with_programs_within_it_within_a_shard_map(name):
    """The batch is divided, and the weights are not: within a solve both differ between devices."""
    layer, spec = LAYERS_OF_PROGRAMS[name], PartitionSpec
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))

    def network(w, x):
        return lax.scan(lambda y, w: (y + 0.1 * layer(y, w), None), x, w)[0]

    four = np.concatenate([X, X])[:4]
    results = {}
    for kind, f in {"solved": lp_jax.parallel(network, solver=EXACT), "plain": network}.items():
        options = {"mesh": mesh, "in_specs": (spec(), spec("batch")), "out_specs": spec("batch")}
        spread = jax.jit(jax.shard_map(f, **options))
        results[kind] = [spread(W, four)]
        if name != "while":  # has no gradient
            results[kind].append(jax.jit(jax.grad(lambda w, f=spread: total(f(w, four))))(W))
    for a, b in zip(*results.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)  # sweeps end at their last digits


@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_with_a_sharding_constraint(inside):
    """Layers over one axis of a mesh, the batch over another; also inside ``jax.set_mesh``."""
    mesh = jax.make_mesh((2, 2), ("layers", "batch"), axis_types=(AxisType.Auto,) * 2)
    batch = NamedSharding(mesh, PartitionSpec("batch"))

    def constrained(w, x):
        def step(y, w):
            return lax.with_sharding_constraint(y + 0.1 * jnp.tanh(y @ w @ w.T), batch), None

        return lax.scan(step, x, w)[0]

    four = np.concatenate([X, X])[:4]
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        assert "Picard" in lp_jax.scans(constrained, solver=EXACT, comm=mesh)(W, four)[0].takes
        same(constrained, W, four, comm=mesh)


def test_scopes_and_places_are_kept():
    def f(w, x):
        with jax.named_scope("network"):
            return jnp.sin(plain(w, x)[0])

    text = jax.jit(lp_jax.parallel(f, solver=EXACT)).lower(W, X).as_text(debug_info=True)
    assert "network/sin" in text and "test_parallel.py" in text


def train(gradient, w):
    return lax.scan(lambda w, _: (w - 0.1 * gradient(w), None), w, None, length=2)[0]


@pytest.mark.parametrize(
    "inner",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w: lax.cond(w[0, 0, 0] < 9, f, lambda w: 0.0, w),
    ],
    ids=["plain", "jit", "checkpoint", "cond"],
)
@pytest.mark.parametrize("loop", [lambda f, w: f(w), train], ids=["gradient", "training"])
def test_a_function_that_takes_a_gradient_says_where_to_go(inner, loop):
    f = functools.partial(loop, jax.grad(inner(lambda w: total(plain(w, X)))))
    with pytest.warns(UserWarning, match=r"jax.grad\(lp_jax.parallel\(loss\)\)"):
        got = jax.jit(lp_jax.parallel(f, solver=EXACT))(W)
        assert solved(f, W) == 0  # neither way, nor the training's own scan
    np.testing.assert_allclose(got, jax.jit(f)(W), rtol=1e-12)


def test_arguments_that_are_no_arrays_are_constants():
    def f(w, x, *, train, name):
        return plain(w, x)[0] if train and name == "a" else x

    np.testing.assert_allclose(
        lp_jax.parallel(f, solver=EXACT)(W, X, train=True, name="a"), plain(W, X)[0], rtol=1e-12
    )
    results = lp_jax.parallel(lambda x: (x, jnp.array(True), 1.0))(X)
    assert all(isinstance(x, jax.Array) for x in results)  # what the program holds as numbers, too
    with pytest.raises(TypeError, match="solver must be a solver"):
        lp_jax.parallel(f, solver=3)
    stretched = lp_jax.MGRIT(coarse_step=lp_jax.Rediscretize())
    for options in ({"solver": stretched}, {"where": lambda scan: stretched}):
        with pytest.raises(ValueError, match="longer dt"):  # not left as it is, without a word
            lp_jax.parallel(plain, **options)(W, X)


@pytest.mark.parametrize(
    "solver", [EXACT, None, lp_jax.MGRIT(), lp_jax.Newton(iterations=N, batch_axes=1)]
)
def test_symbolic_dimensions(solver):
    """A program exported once for all sizes of the batch."""
    (batch,) = jax.export.symbolic_shape("batch")
    f = jax.jit(lambda x: jax.grad(lambda x: total(lp_jax.scan(body, x, W, solver=solver)[0]))(x))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((batch, WIDTH), X.dtype))
    np.testing.assert_allclose(exported.call(X), f(X), rtol=1e-10)


def test_an_axis_of_a_vmap_is_explained():
    def loss(w):
        step = lambda y, w: (y @ w - lax.pmean(y, "a"), None)  # noqa: E731
        return total(jax.vmap(lambda x: lp_jax.scan(step, x, w, solver=EXACT)[0], axis_name="a")(X))

    with pytest.raises(NameError, match=r"lp_jax\.parallel"):
        jax.grad(loss)(W)
