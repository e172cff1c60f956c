"""Steps over a mesh that hold programs, close over values or constrain places: JAX's types hold the mesh they were traced on."""

import contextlib
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import relative_error

import lp_jax

BLOCKS, ROWS, WIDTH = 4, 4, 8
X = np.random.default_rng(0).normal(size=(4, ROWS, WIDTH))
W = 0.3 * np.random.default_rng(1).normal(size=(BLOCKS, WIDTH, WIDTH))
EXACT, ONCE = lp_jax.Picard(sweeps=BLOCKS), lp_jax.Picard(sweeps=1)
CYCLES = lp_jax.MGRIT(coarsening=2, iterations=2)  # exact with two intervals
MESHES = {
    "1 x 2": ((2,), ("layers",)),  # two layers each
    "1 x 4": ((4,), ("layers",)),
    "2 x 2": ((2, 2), ("layers", "data")),
}


def devices(name, kind=AxisType.Auto):
    shape, names = MESHES[name]
    some = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=some)


def put(mesh, tree, *axes):
    spec = PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))
    return jax.device_put(tree, NamedSharding(mesh, spec))


def scanned(body):
    """A loss of stacked parameters and a batch."""

    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, w: (body(w, x), None), x, params)[0] ** 2)

    return loss


def assert_solved(loss, params, x, mesh, solvers=(EXACT, EXACT)):
    """The gradient is that of ``lax.scan``, in every call; that of one sweep is not, so a solver was at work."""
    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    placed = put(mesh, params, "layers"), put(mesh, x, "data")

    def error(solver):
        solved = lp_jax.parallel(loss, solver=solver, comm=mesh)
        got = jax.jit(jax.grad(solved, argnums=(0, 1)))(*placed)
        return relative_error(jax.device_get(got), jax.device_get(wanted))

    assert max(map(error, solvers)) < 1e-12
    assert error(ONCE) > 1e-6


# --- masked attention --------------------------------------------------------------------------------------------------


def split(make, *axes):
    """Arrays of modules stacked over the blocks, in double precision, and a function that makes a module of one block's."""
    stack = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), BLOCKS))
    arrays, rest = eqx.partition(stack, eqx.is_inexact_array)
    return jax.tree.map(lambda x: x.astype(float), arrays), lambda one: eqx.combine(one, rest)


def of_linen():
    module = linen.MultiHeadDotProductAttention(2, dtype=float, param_dtype=float)
    params = jax.vmap(lambda key: module.init(key, X, X))(jax.random.split(jax.random.key(0), 4))
    return params, lambda w, x: module.apply(w, x, x, mask=linen.make_causal_mask(x[..., 0]))


def of_nnx():
    def make(key):
        options = {"decode": False, "dtype": float, "param_dtype": float}
        return nnx.MultiHeadAttention(2, WIDTH, rngs=nnx.Rngs(key), **options)

    stack = nnx.vmap(make)(jax.random.split(jax.random.key(0), BLOCKS))
    graph, params, rest = nnx.split(stack, nnx.Param, ...)
    rest = jax.tree.map(lambda x: x[0], rest)

    def call(w, x):
        return nnx.merge(graph, w, rest)(x, mask=nnx.make_causal_mask(x[..., 0]))

    return params, call


def of_jax():
    def call(w, x):
        heads = (x @ w).reshape(*x.shape[:2], 2, WIDTH // 2)
        mask = jnp.tril(jnp.ones((ROWS, ROWS), bool))[None, None]
        return jax.nn.dot_product_attention(heads, heads, heads, mask=mask).reshape(x.shape)

    return jnp.asarray(W), call


def of_equinox():
    params, module = split(lambda key: eqx.nn.MultiheadAttention(2, WIDTH, key=key))
    mask = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    return params, lambda w, x: jax.vmap(lambda x: module(w)(x, x, x, mask=mask))(x)


def of_haliax():
    haliax = pytest.importorskip("haliax", reason="Haliax is not installed")
    at, seen, size = (haliax.Axis(*each) for each in (("at", ROWS), ("seen", ROWS), ("e", WIDTH)))

    def one(w, x):
        q = haliax.named(x @ w, (at, size))
        k = haliax.named(x, (seen, size))
        causal = haliax.nn.attention.causal_mask(at, seen)
        return haliax.nn.attention.dot_product_attention(seen, size, q, k, k, mask=causal).array

    return jnp.asarray(W), lambda w, x: jax.vmap(lambda x: one(w, x))(x)


ATTENTION = {
    "linen": of_linen,
    "nnx": of_nnx,
    "jax": of_jax,
    "equinox": of_equinox,
    "haliax": of_haliax,
}


@pytest.mark.filterwarnings("ignore:jax.core:DeprecationWarning")  # in Haliax
@pytest.mark.usefixtures("free_promotion")
@pytest.mark.parametrize("shape", ["1 x 4", "2 x 2"])
@pytest.mark.parametrize("library", ATTENTION)
def test_masked_attention(library, shape):
    params, attend = ATTENTION[library]()
    tolerance_of_float32 = library == "jax"  # which sums in single precision
    loss = scanned(lambda w, x: x + 0.5 * attend(w, x))
    if not tolerance_of_float32:
        assert_solved(loss, params, jnp.asarray(X), devices(shape))
        return
    single = jax.tree.map(lambda x: x.astype(jnp.float32), (params, jnp.asarray(X)))
    wanted = jax.jit(jax.grad(loss))(*single)
    for solver, again in ((ONCE, False), (EXACT, False), (EXACT, True)):
        solved = lp_jax.parallel(loss, solver=solver, comm=devices(shape))
        error = relative_error(jax.jit(jax.grad(solved))(*single), wanted)
        assert error > 1e-4 if solver is ONCE else error < 1e-5, again


# --- other programs within a step --------------------------------------------------------------------------------------


@jax.custom_vjp
def steep(x):
    return jnp.sin(x)


steep.defvjp(lambda x: (steep(x), x), lambda x, g: (1.5 * g * jnp.cos(x),))


def layer(w, x):
    return x + 0.1 * jnp.tanh(x @ w)


def halved(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, x))[1]


def linear(w, x):
    flat = x.reshape(-1, WIDTH)
    return jnp.linalg.solve(jnp.eye(WIDTH) + 0.1 * w, flat.T).T.reshape(x.shape)


PROGRAMS = {
    "loops": lambda w, x: lax.map(
        lambda x: lax.scan(lambda x, k: (layer(k * w, x), None), x, jnp.arange(1.0, 3.0))[0], x
    ),
    "calls": lambda w, x: lax.cond(
        w[0, 0] > 0, jax.checkpoint(jax.jit(layer)), lambda w, x: layer(-w, x), w, x
    ),
    "rules": lambda w, x: x + 0.1 * jax.nn.relu(x @ w) + 0.1 * jax.jit(steep)(x @ w),
    "inverse": lambda w, x: layer(w, x) + 0.1 * linear(w, x) + lax.stop_gradient(halved(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_within_a_step(name):
    """By sweeps, which keep what a linearised step needs, and by cycles, which linearise again."""
    loss = scanned(PROGRAMS[name])
    assert_solved(loss, jnp.asarray(W), jnp.asarray(X), devices("2 x 2"), (EXACT, CYCLES))


@pytest.mark.parametrize("shape", ["1 x 2", "2 x 2"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_constraints_of_places(shape, within):
    """Of axes that are the compiler's; where none is, they say nothing, in layers that JAX batches either.

    A user's own shard_map over another axis works, too.
    """
    mesh = devices(shape)
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names[1:] or None))

    def body(w, x):
        x = within(lambda x: lax.with_sharding_constraint(layer(w, x), place))(x)
        if "data" not in mesh.axis_names:
            return x
        return x + 0.1 * jax.shard_map(
            lambda x: x - lax.pmean(x, "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )(x)

    assert_solved(scanned(body), jnp.asarray(W), jnp.asarray(X), mesh, (EXACT, CYCLES))
    if shape == "1 x 2":
        solved = lp_jax.solve(lambda y, at: body(at.params, y), W, X, solver=EXACT, comm=mesh).y1
        np.testing.assert_allclose(solved, lax.scan(lambda x, w: (body(w, x), None), X, W)[0])


@pytest.mark.parametrize(
    ("axes", "within", "kind", "solver"),
    [
        (("layers", "data"), False, AxisType.Auto, lp_jax.Picard(sweeps=5)),
        (("data", "layers"), True, AxisType.Explicit, lp_jax.Picard(sweeps=5)),
        (("layers", "data"), True, AxisType.Auto, lp_jax.Picard(sweeps=5)),
        (("layers", "data"), False, AxisType.Explicit, lp_jax.MGRIT(coarsening=2, iterations=3)),
    ],
)
def test_a_solve_within_a_step_over_another_axis(axes, within, kind, solver):
    """Each over two devices, which hold unlike numbers of layers."""
    mesh = devices("2 x 2", kind)
    operands = W[:3], jnp.linspace(0.1, 1.0, 5 * WIDTH).reshape(5, WIDTH), X[0, 0]

    def loss(scan, scan_within, weights, scales, x):
        def body(x, w):
            x = scan_within(lambda x, v: (x + 0.1 * jnp.sin(x * v), None), x, scales)[0]
            return layer(w, x), None

        return jnp.sum(scan(body, x, weights)[0] ** 2)

    wanted = jax.value_and_grad(functools.partial(loss, lax.scan, lax.scan), (0, 1, 2))(*operands)

    def error(solver):
        scans = [
            functools.partial(lp_jax.scan, solver=solver, comm=lp_jax.MeshComm(mesh, axis))
            for axis in axes
        ]
        gradient = jax.jit(jax.value_and_grad(functools.partial(loss, *scans), (0, 1, 2)))
        with jax.set_mesh(mesh) if within else contextlib.nullcontext():
            found = gradient(*operands)
        return relative_error(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(wanted))

    assert error(solver) < 1e-13
    assert error(ONCE) > 1e-6


# --- values that a step closes over ------------------------------------------------------------------------------------


def around(name, f):
    """Transformations around a solve; all give the gradient, or the value."""
    return {
        "jit of grad": jax.jit(jax.grad(f)),
        "grad of jit": jax.grad(jax.jit(f)),
        "checkpoint": jax.grad(jax.checkpoint(f)),
        "scan": jax.grad(
            lambda b: lax.scan(lambda c, s: (c + f(b * s), None), 0.0, jnp.ones(2))[0]
        ),
        "vmap": lambda b: jax.vmap(f)(jnp.stack([b, b]))[0],
        "cond": lambda b: lax.cond(True, f, lambda b: 0.0, b),
    }[name]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "name", ["jit of grad", "grad of jit", "checkpoint", "scan", "vmap", "cond"]
)
def test_values_that_are_closed_over_within_set_mesh(kind, name):
    mesh, y0 = devices("2 x 2", kind), jnp.asarray(X[0])

    def loss(b, solver, comm):
        def step(y, at):
            return y + at.dt * jax.nn.relu(y @ at.params + b)

        return jnp.sum(lp_jax.solve(step, W, y0, solver=solver, comm=comm).y1)

    b = jnp.linspace(-1, 1, WIDTH)[None]
    wanted = jax.device_get(around(name, lambda b: loss(b, lp_jax.Serial(), None))(b))
    others = {"cond": (CYCLES,), "jit of grad": (CYCLES, lp_jax.Serial(), None)}
    for solver in others.get(name, ()) + (EXACT,) * (name != "cond"):
        with jax.set_mesh(mesh):
            got = around(name, lambda b, solver=solver: loss(b, solver, mesh))(b)
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def normed(w, x):
    """A norm, whose program says where its results are; a branch of each layer, which JAX evaluates for all at once."""
    x = x + 0.1 * jax.nn.logsumexp(x @ w, axis=-1, keepdims=True)
    x = x / (1 + jnp.linalg.norm(x, axis=-1, keepdims=True))
    x = (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-3)
    again = jax.checkpoint(
        lambda w, x: lax.scan(lambda x, k: (layer(k * w, x), None), x, jnp.ones(1))[0]
    )
    return lax.cond(w[0, 0] > 0, layer, lambda w, x: again(-w, jax.nn.relu(x)), w, x)


@pytest.mark.parametrize("context", [jax.set_mesh, contextlib.nullcontext], ids=["within", "out"])
def test_explicit_axes_of_a_batch(context):
    """Their types are those of the user's program, and nothing of the solve's; outside of jax.set_mesh, too."""
    mesh = devices("2 x 2", AxisType.Explicit)
    wanted = jax.jit(jax.grad(scanned(normed), argnums=(0, 1)))(W, X)
    placed = put(mesh, W), put(mesh, X, "data")

    def error(solver):
        solved = lp_jax.parallel(scanned(normed), solver=solver, comm=mesh)
        got = jax.jit(jax.grad(solved, argnums=(0, 1)))(*placed)
        return relative_error(jax.device_get(got), jax.device_get(wanted))

    with context(mesh):
        assert max(map(error, (EXACT, EXACT, CYCLES))) < 1e-12
        assert error(ONCE) > 1e-6


def test_constants_of_a_scan_within_set_mesh():
    """Numbers that the layers share, traced; placed ones that the step closes over, which are no tracers."""
    mesh = devices("2 x 2")
    b = put(mesh, jnp.linspace(-1, 1, WIDTH))

    def loss(params, x):
        shared = jnp.sin(params[0, 0])
        return scanned(lambda w, x: layer(w, x + 0.1 * (b + shared)[None, None]))(params, x)

    with jax.set_mesh(mesh):
        assert_solved(loss, jnp.asarray(W), jnp.asarray(X), mesh, (EXACT,))


# --- a user's shard_map, and sums of low precision ---------------------------------------------------------------------


def test_a_checked_shard_map_over_some_of_the_axes():
    mesh, spec = devices("2 x 2"), PartitionSpec("data")

    def loss(solve, w, x):
        of_share = lambda x: solve(lambda x, w: (layer(w, x), None), x, w)[0]  # noqa: E731
        share = jax.shard_map(
            of_share, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}
        )
        return jnp.mean(share(x) ** 2)

    run = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    wanted = run(lax.scan, W, X)
    for solver in (EXACT, CYCLES):
        got = run(lambda *args, solver=solver: lp_jax.scan(*args, solver=solver), W, X)
        assert relative_error(got, wanted) < 1e-12


def test_devices_that_a_step_waits_for_take_as_many_turns():
    """Each has its part of a cotangent, which meets the tolerance in its own iteration: else a sum would wait for ever."""
    shape = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def loss(solver, w):
        def share(up, down):
            def body(c, w):
                return c + 0.2 * lax.psum(jnp.tanh(c @ w[0]) @ w[1], "model"), None

            return jnp.sum(lp_jax.scan(body, X[0], (up, down), solver=solver)[0] ** 2)

        columns, rows = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
        both = jax.shard_map(share, mesh=shape, in_specs=(columns, rows), out_specs=PartitionSpec())
        return both(w, w)

    # the devices' parts differ by far, or they would take equally many turns by chance
    deep = jnp.asarray(np.concatenate([W, W, W])) * jnp.geomspace(1e-6, 1, WIDTH)[None, None]
    gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
    for iterations in (64, 3):  # the latter falls back
        solver = lp_jax.Picard(sweeps=iterations, rtol=1e-9, fallback=True)
        got = jax.jit(jax.grad(lambda w, solver=solver: loss(solver, w)))(deep)
        assert relative_error(got, gradient(lp_jax.Serial(), deep)) < 1e-7


def test_sums_of_bfloat16_over_one_of_two_axes():
    """XLA ends the process on a CPU that sums bfloat16 there; and the sums of gradients are more exact in single precision."""
    b, w, y0 = (jnp.ones(shape, jnp.bfloat16) for shape in ((3,), (4, 3, 3), (2, 3)))

    def loss(b, w, y0, comm):
        step = lambda y, at: y + 0.1 * jnp.tanh(y @ (at.params / 3) + (at.shared + b)[None])  # noqa: E731
        return jnp.sum(lp_jax.solve(step, w, y0, shared=b, solver=EXACT, comm=comm).y1)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    wanted, got = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), gradient(b, w, y0, comm))
        for comm in (None, devices("2 x 2"))
    )
    assert relative_error(got, wanted) < 2e-2


@pytest.mark.parametrize("solver", [EXACT, lp_jax.Serial()], ids=["sweeps", "relay"])
def test_products_with_hessians_of_arrays_without_a_place(solver):
    """On explicit axes such arrays are resharded within the solve, which has to be differentiable in both modes."""
    mesh = devices("1 x 2", AxisType.Explicit)
    x = jnp.asarray(X[0])

    def product(scan):
        def loss(w):
            return jnp.sum(jnp.sin(scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, w)[0]))

        return jax.jit(lambda w: jax.jvp(jax.grad(loss), (w,), (jnp.ones_like(w),))[1])

    solved = functools.partial(lp_jax.scan, solver=solver, comm=mesh)
    with jax.set_mesh(mesh):
        got = product(solved)(jnp.asarray(W))
    assert relative_error(jax.device_get(got), product(lax.scan)(jnp.asarray(W))) < 1e-12
