"""Layers device after device, exactly: `lp_jax.pipeline` gives the numbers of ``jax.vmap``, and the relay those of a scan."""

import contextlib
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_scanned_models as models
from compiled import collectives, compiled
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from networks import mesh
from problems import relative_error

import lp_jax
from lp_jax import nn
from lp_jax._arrays import _tree

B, D, M = 3, 4, 3


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def total(tree):
    leaves = filter(_tree.inexact, jax.tree.leaves(tree))
    return sum(jnp.sum(jnp.sin(jnp.abs(x)).astype(float)) for x in leaves)


def numbers(f, *args, wrap=jax.jit, loss=total):
    """What ``f`` returns, and the gradients of all floating-point operands."""
    leaves, combine = _tree.partition(args)

    def run(leaves):
        out = f(*combine(leaves))
        return loss(out), out

    return wrap(jax.value_and_grad(run, has_aux=True))(leaves)


def devices(*shape, kind=AxisType.Auto):
    names = ("layers", "data")[: len(shape)]
    here = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=here)


def check(f, axes, args, comm, out_axes=0, rtol=1e-12, wrap=jax.jit, around=lambda f: f, **options):
    wanted = numbers(jax.vmap(f, axes, out_axes), *args)
    piped = lp_jax.pipeline(f, comm, in_axes=axes, out_axes=out_axes, **options)
    got = numbers(around(piped), *args, wrap=wrap)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for a, b in leaves:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert relative_error(a, b) < rtol or bool(jnp.all(a == b))


def block(y, w, b):
    return y + 0.3 * jnp.tanh(y @ w + b[None])


W, SHARED, X = normal(0, 7, D, D) / 2, normal(1, D), normal(2, M, B, D)


def dense(params, x):
    w, b = params
    return lax.scan(lambda y, w: (block(y, w, b), jnp.mean(y, -1)), x, w)


DENSE = dense, (None, 0), ((W, SHARED), X)
CASES = {}


def case(f):
    """A case: a function, ``in_axes``, and operands."""
    CASES[f.__name__] = f
    return f


@case
def operands_that_differ():
    """Of the layers, and of all layers: weights, numbers, masks and keys; those that do not differ; outputs not seen."""

    def f(common, own, x):
        def body(y, layer):
            (w, n), (v, mask, key) = layer
            new = block(y @ v, w, common["b"] * own["b"]) + 0.1 * n * y
            keep = jax.random.bernoulli(key, 0.7, y.shape) & mask[:, None]
            return y + jnp.where(keep, new - y, 0), {"n": n, "y": jnp.sum(new)}

        y, out = lax.scan(body, x, ((common["w"], common["n"]), own["layers"]))
        return y, out["n"], lax.stop_gradient(out["y"])

    masks = jnp.asarray(np.random.default_rng(3).integers(2, size=(M, 7, B)), bool)
    layers = normal(4, M, 7, D, D) / 2, masks, jax.random.split(jax.random.key(0), (M, 7))
    common = {"w": W, "b": SHARED, "n": jnp.arange(7.0)}
    return f, (None, 0, 0), (common, {"b": normal(5, M, D), "layers": layers}, X)


@case
def encoder_and_decoder():
    """From the last layer to the first one, a decoder that reads all states of the encoder, fewer layers than devices."""

    def f(params, x):
        first, second, b = params
        memory, states = lax.scan(lambda y, w: (new := block(y, w, b), new), x, first, reverse=True)
        read = jnp.mean(states, 0)
        return lax.scan(lambda y, w: (block(y + 0.1 * read, w, b), None), memory, second)[0]

    return f, (None, 0), ((W[:5], W[:3], SHARED), X)


@case
def recurrent():
    """All weights are shared, the inputs are the batch's."""

    def f(w, b, xs):
        cell = lambda h, x: (jnp.tanh(h @ w + x + b[None]), h)  # noqa: E731
        return lax.scan(cell, jnp.zeros((B, D)), xs)

    return f, (None, None, 1), (W[0], SHARED, normal(6, 7, M, B, D))


@case
def solves_and_scans():
    """`solve` with times, shared operands and data; `scan`; a module. A scan that is the same for all microbatches."""

    def f(params, x):
        w, b, times = params
        step = lambda y, layer: (  # noqa: E731
            y + layer.dt * jnp.tanh(y @ layer.params + layer.shared[None] + layer.data),
            layer.t * jnp.sum(y),
        )
        data = 0.1 * jnp.sum(x) * jnp.arange(7.0)
        found = lp_jax.solve(step, w, x, shared=b, data=data, t1=times, has_aux=True)
        y, _ = lp_jax.scan(lambda y, w: (block(y, w, b), None), found.y1, w, reverse=True)
        alike, _ = lax.scan(lambda y, w: (block(y, w, b), None), w[0], w)
        return y @ alike, found.aux

    times = jnp.cumsum(jnp.asarray([0, 1, 2, 1, 1, 3, 1, 1.0])) / 9
    return f, (None, 0), ((W, SHARED, times), X)


@case
def steps_within_steps():
    """Functions with derivatives of their own, branches, loops, calls and checkpoints, in the step and around the scan."""

    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, x), lambda x, g: (3 * g,))  # not the derivative: it must be used

    @jax.checkpoint
    def body(y, w):
        y = lax.cond(w[0, 0] > 0, lambda y: jnp.sin(y), lambda y: y, twice(y))
        y = y + 0.1 * jnp.asarray(lax.scan(lambda a, v: (jnp.cos(a + v[None]), a), y, w)[0])
        return jax.jit(jax.nn.relu)(y) + 0.1 * y, None

    def f(w, x):
        layers = jax.jit(lambda x: lax.scan(body, x, w)[0])
        counted = lax.fori_loop(0, 3, lambda n, i: i + n, 1)  # nothing to spread
        return jax.checkpoint(layers)(lax.cond(jnp.sum(x) > 0, layers, lambda x: 2 * x, x)), counted

    return f, (None, 0), (W, X)


@case
def a_carry_with_integers_and_keys():
    def body(carry, w):
        y, (n, key) = carry
        key, own = jax.random.split(key)
        return (block(y, w, SHARED) + 0.1 * n * jax.random.normal(own, y.shape), (n + 1, key)), n

    def f(w, x):
        return lax.scan(body, (x, (jnp.asarray(1.0), jax.random.key(1))), w)

    return f, (None, 0), (W, X)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("operands_that_differ", 3, {}),
        ("operands_that_differ", 2, {"checkpoint": True, "wrap": lambda f: f}),
        ("encoder_and_decoder", 4, {}),
        ("encoder_and_decoder", 1, {"wrap": lambda f: f}),
        ("recurrent", 2, {"checkpoint": True}),
        ("solves_and_scans", 3, {}),
        ("steps_within_steps", 2, {}),
        ("a_carry_with_integers_and_keys", 8, {"around": jax.checkpoint}),
    ],
)
def test_a_pipeline_is_a_vmap(name, size, options):
    f, axes, args = CASES[name]()
    check(f, axes, args, mesh(size), **options)


def test_one_sweep_is_none():
    """What is compared with `jax.vmap` differs from it if layers are solved by other means."""
    f, axes, args = DENSE
    swept = lp_jax.parallel(f, solver=lp_jax.Picard(sweeps=1), comm=mesh(2))
    exact, once = (numbers(jax.vmap(g, axes), *args) for g in (f, swept))
    assert min(map(relative_error, jax.tree.leaves(once), jax.tree.leaves(exact))) > 1e-3


def test_axes_and_structures():
    def f(tree, x, *, scale):
        (y, z), means = lax.scan(
            lambda y, w: ((block(y[0], w, y[1]), 0.9 * y[1]), jnp.mean(y[0])),
            (x["x"], tree["b"]),
            tree["w"],
        )
        return {"y": scale * y}, [z, means]

    args = {"w": W, "b": SHARED}, {"x": jnp.moveaxis(X, 0, 1), "other": jnp.arange(2.0)}
    axes, out_axes = ({"w": None, "b": None}, {"x": -2, "other": None}), ({"y": 1}, -1)

    def with_scale(mapped):
        return lambda *args: mapped(*args, scale=jnp.arange(1.0, 1 + M))

    wanted, got = (
        numbers(with_scale(mapped), *args)
        for mapped in (
            jax.vmap(f, axes, out_axes),
            lp_jax.pipeline(f, mesh(2), in_axes=axes, out_axes=out_axes),
        )
    )
    assert relative_error(got, wanted) < 1e-12
    assert got[0][1][0]["y"].shape == (B, M, D)


SHARDED = {
    "data": (PartitionSpec(), PartitionSpec(None, "data")),
    "fsdp": (PartitionSpec(None, "data"), PartitionSpec(None, "data")),
    "tensor parallel": (PartitionSpec(None, None, "data"), PartitionSpec()),
}


@pytest.mark.parametrize("name", SHARDED)
def test_another_axis_of_the_mesh(name):
    """For examples, and for weights; the outputs where the caller wants them."""
    where, (weights, batch) = devices(2, 2), SHARDED[name]
    (w, b), x = DENSE[2]
    w, x = (w[:6], x[:, :2])
    args = (
        (jax.device_put(w, NamedSharding(where, weights)), b),
        jax.device_put(x, NamedSharding(where, batch)),
    )
    context = jax.set_mesh(where) if name == "fsdp" else contextlib.nullcontext()
    with context:
        check(dense, (None, 0), args, where, checkpoint=name == "data")
    if name == "data":
        spread = NamedSharding(where, PartitionSpec("layers"))
        piped = lp_jax.pipeline(dense, where, in_axes=(None, 0))
        gradient = jax.grad(lambda params, x: total(piped(params, x)))
        rest = NamedSharding(where, PartitionSpec())
        placed = jax.jit(gradient, out_shardings=(spread, rest))(*args)
        assert placed[0].sharding.spec == PartitionSpec("layers")
        assert relative_error(placed, gradient(*args)) < 1e-12


@pytest.mark.parametrize("inside", [False, True])
def test_explicit_axes(inside):
    """The default of `jax.make_mesh`: types of the results hold the places of the batch."""
    where = devices(2, 2, kind=AxisType.Explicit)
    (w, b), x = DENSE[2]

    def rectified(params, x):  # with a rule for derivatives, which knows the types of its trace
        w, b = params
        return lax.scan(lambda y, w: (y + jax.nn.relu(y @ w + b[None]), jnp.mean(y, -1)), x, w)

    (f, axes), put = (
        DENSE[:2],
        lambda x, *spec: jax.device_put(x, NamedSharding(where, PartitionSpec(*spec))),
    )
    args = (put(w), put(b)), put(x[:, :2], None, "data")
    if not inside:
        return check(f, axes, args, where)
    with jax.set_mesh(where):
        check(f, axes, args, where)
        check(rectified, axes, args, where, checkpoint=True)
        y, _ = jax.jit(lp_jax.pipeline(f, where, in_axes=axes))(*args)
        assert jax.typeof(y).sharding.spec == PartitionSpec(None, "data", None)


def test_half_precision():
    f, axes, args = DENSE
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args)
    check(f, axes, half, mesh(2), rtol=2e-2)


def test_products_with_hessians():
    f, axes, args = DENSE

    def product(mapped):
        gradient = jax.grad(lambda args: total(mapped(*args)))
        return jax.jit(lambda args: jax.jvp(gradient, (args,), (args,)))(args)

    wanted = product(jax.vmap(f, axes))
    assert relative_error(product(lp_jax.pipeline(f, mesh(3), in_axes=axes)), wanted) < 1e-12


def test_reverse_mode_twice():
    """It is refused over several devices, with what to do."""
    f, axes, args = DENSE

    def product(size):
        piped = lp_jax.pipeline(f, mesh(size), in_axes=axes)
        gradient = jax.grad(lambda args: total(piped(*args)))
        return jax.grad(lambda args: total(gradient(args)))

    with pytest.raises(ValueError, match=r"Reverse mode was applied twice .* over a mesh"):
        jax.eval_shape(product(2), args)
    exact = jax.grad(
        lambda args: total(jax.grad(lambda args: total(jax.vmap(f, axes)(*args)))(args))
    )
    assert relative_error(product(1)(args), exact(args)) < 1e-12


def test_a_second_call_compiles_nothing_and_donated_arrays_are_free():
    f, axes, (params, x) = DENSE
    loss = lambda params, x: total(lp_jax.pipeline(f, mesh(2), in_axes=axes)(params, x))  # noqa: E731
    update = jax.jit(
        lambda params, x: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x)),
        donate_argnums=0,
    )
    params = update(jax.tree.map(jnp.array, params), x)
    for _ in range(2):
        given, params, before = params, update(params, x), update._cache_size()
    assert update._cache_size() == before
    exact = jax.grad(lambda params: total(jax.vmap(f, axes)(params, x)))
    wanted = DENSE[2][0]
    for _ in range(3):
        wanted = jax.tree.map(lambda p, g: p - 0.1 * g, wanted, exact(wanted))
    assert relative_error(params, wanted) < 1e-12
    assert given[0].is_deleted()


def test_codes_of_solves_inside():
    """Also in a function that is jitted itself."""
    f, axes, args = DENSE
    f = jax.jit(f)
    loss = lambda *args: total(lp_jax.pipeline(f, mesh(2), in_axes=axes)(*args))  # noqa: E731
    value, gradient, results = jax.jit(lp_jax.value_and_grad(loss))(*args)
    wanted = jax.value_and_grad(lambda *args: total(jax.vmap(f, axes)(*args)))(*args)
    assert relative_error((value, gradient), wanted) < 1e-12
    assert (int(results.forward), int(results.adjoint)) == (0, 0)


def test_codes_of_solves_in_a_jitted_part():
    """Of `parallel`, which brings the array that counts into the part's program."""
    f, _, (params, x) = DENSE
    solver = lp_jax.Picard(sweeps=1, rtol=1e-3)
    loss = lambda *args: total(lp_jax.parallel(jax.jit(f), solver=solver)(*args))  # noqa: E731
    _, _, results = lp_jax.value_and_grad(loss)(params, x[0])
    assert "did not come down to the tolerance" in lp_jax.RESULTS[int(results.forward)]


def test_a_solver_that_is_named_is_used():
    """It is mapped, and the layers around it are a pipeline."""
    once = lp_jax.Picard(sweeps=1)

    def f(solver, params, x):
        w, b = params
        y, _ = lp_jax.scan(lambda y, w: (block(y, w, b), None), x, w, solver=solver)
        return dense(params, y)

    _, axes, args = DENSE
    wanted, exact = (numbers(jax.vmap(functools.partial(f, s), axes), *args) for s in (once, None))
    got = numbers(lp_jax.pipeline(functools.partial(f, once), mesh(2), in_axes=axes), *args)
    assert relative_error(got, wanted) < 1e-12
    assert relative_error(got, exact) > 1e-3


@jax.custom_vjp
def own_derivative(w, x):
    return lax.scan(lambda y, w: (y * w, None), x, w)[0]


own_derivative.defvjp(lambda w, x: (own_derivative(w, x), (w, x)), lambda kept, g: kept)


def printing(w, x):
    def body(y, w):
        jax.debug.print("{}", w)
        return y * w, None

    return lax.scan(body, x, w)[0]


def scanned(w, x):
    return jnp.sum(lax.scan(lambda y, w: (y * w, None), x, w)[0])


REFUSED = {
    "gradient": (jax.grad(scanned), (None, 0), "Take the gradient of the pipeline"),
    "effects": (printing, (None, 0), "side effects. Take that out of the scan"),
    "no axis": (scanned, None, r"Give it the axis as for jax.vmap"),
    "derivative": (own_derivative, (None, 0), "a derivative of its own. Take that out of the scan"),
    "no scan": (lambda w, x: x * w[0], (None, 0), "without a scan.*Stack the equal blocks"),
    "integers": (
        lambda w, x: lax.scan(lambda c, w: ((c[0] * w, jnp.int32(jnp.sum(c[0]))), None), (x, 1), w),
        (None, 0),
        "Return it as y instead",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_pipeline_is_said(name):
    f, axes, said = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=said):
        lp_jax.pipeline(f, mesh(2), in_axes=axes)(jnp.ones(4), jnp.ones((M, 2)))


# Models of other libraries


def linen_model():
    """Dropout has its keys, of every microbatch and layer."""
    params = models.vision_transformer()[2]
    apply = lambda params, x, key: models.Encoder().apply(params, x, False, rngs={"dropout": key})  # noqa: E731
    keys = jax.random.split(jax.random.key(1), M)
    return lp_jax.pipeline, apply, (None, 0, 0), (params, normal(0, M, 2, 9, 8), keys)


def nnx_model():
    """Blocks that are computed again, and names of axes."""
    apply = lambda model, x: model(x)  # noqa: E731
    return nn.pipeline, apply, (None, 0), (models.Stack(0), normal(0, M, 2, models.WIDTH))


def equinox_model():
    params, static = eqx.partition(models.EquinoxModel(jax.random.key(0)), eqx.is_array)
    apply = lambda params, x: jax.vmap(eqx.combine(params, static))(x)  # noqa: E731
    return lp_jax.pipeline, apply, (None, 0), (params, normal(0, M, 2, models.WIDTH))


def module_of_layers():
    """`nn.LayerParallel`, its layers in the pipeline."""
    trunk = nn.LayerParallel(
        lambda rngs: nn.DenseResidual(D, param_dtype=float, rngs=rngs), 5, rngs=nnx.Rngs(0)
    )
    return nn.pipeline, lambda trunk, x: trunk(x), (None, 0), (trunk, X)


def haliax_model():
    haliax = pytest.importorskip("haliax", reason="Haliax is not installed")
    layers, width, out = (haliax.Axis(*each) for each in (("layers", 7), ("e", D), ("out", D)))

    def apply(w, x):
        step = lambda y, w: y + 0.1 * haliax.tanh(haliax.dot(y, w, axis=width).rename({"out": "e"}))  # noqa: E731
        y = haliax.named(x, (haliax.Axis("batch", B), width))
        return haliax.fold(step, layers)(y, haliax.named(w, (layers, width, out))).array

    return lp_jax.pipeline, apply, (None, 0), (W, X)


@pytest.mark.filterwarnings("ignore:jax.core:DeprecationWarning")  # in Haliax
@pytest.mark.usefixtures("free_promotion")
@pytest.mark.parametrize(
    "model", [linen_model, nnx_model, equinox_model, module_of_layers, haliax_model]
)
def test_models_of_other_libraries(model):
    pipeline, f, axes, (params, *args) = model()

    def run(mapped):
        loss = lambda params: total(mapped(params, *args))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    got, wanted = (
        run(mapped) for mapped in (pipeline(f, mesh(2), in_axes=axes), jax.vmap(f, axes))
    )
    assert relative_error(got, wanted) < 1e-12


class Network(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.opening = nnx.Linear(D, D, param_dtype=float, rngs=rngs)
        self.norm = nn.BatchNorm(D, param_dtype=float, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.counts = nnx.Variable(jnp.zeros(())), False
        make = lambda key: nnx.Linear(D, D, param_dtype=float, rngs=nnx.Rngs(key))  # noqa: E731
        self.layers = nnx.vmap(make)(jax.random.split(rngs.params(), 5))

    def __call__(self, x, key=None):
        if self.counts:
            self.calls[...] += 1
        y = self.norm(self.dropout(self.opening(x), rngs=key))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(y, layer):
            return y + 0.1 * nnx.tanh(layer(y))

        return jnp.mean((forward(y, self.layers) @ self.opening.kernel.T) ** 2)


@pytest.mark.usefixtures("free_promotion")
def test_modules_are_shared_by_all_microbatches():
    """Their gradient goes outside. With keys as an argument there is dropout."""
    keys = jax.random.split(jax.random.key(1), M)
    call = lambda module, x, key: module(x, key)  # noqa: E731
    module = Network()
    module.norm.use_running_average = True
    piped = nn.pipeline(call, mesh(2), in_axes=(None, 0, 0))

    def one_by_one(module, *args):
        return jnp.stack([call(module, *one) for one in zip(*args, strict=True)])

    mean = lambda f: lambda module, x, keys: f(module, x, keys).mean()  # noqa: E731
    got, wanted = (
        nnx.jit(nnx.value_and_grad(mean(f)))(module, X, keys) for f in (piped, one_by_one)
    )
    assert relative_error(got, wanted) < 1e-12
    assert not jnp.all(piped(module, X, keys) == piped(module, X, keys[::-1]))


@pytest.mark.usefixtures("free_promotion")
@pytest.mark.parametrize("what", ["statistics", "streams", "a variable"])
def test_a_module_that_changes_is_refused(what):
    module = Network()
    module.norm.use_running_average = what != "statistics"
    module.dropout.deterministic = what != "streams"
    module.counts = what == "a variable"
    piped = nn.pipeline(lambda module, x: module(x), mesh(2), in_axes=(None, 0))
    with pytest.raises(
        ValueError, match=r"changes a module.* Call module.eval\(\) before; pass keys"
    ):
        piped(module, X)


# Memory and messages


def wide(checkpoint=False, count=M, size=2, n=8):
    width, axes = 32, (None, 0)

    def f(w, x):
        return jnp.mean(lax.scan(lambda y, w: (jnp.tanh(jnp.tanh(y) @ w), None), x, w)[0])

    piped = lp_jax.pipeline(f, devices(size), in_axes=axes, checkpoint=checkpoint)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.mean(piped(w, x))))
    place = NamedSharding(devices(size), PartitionSpec("layers"))
    w = jax.ShapeDtypeStruct((n, width, width), float, sharding=place)
    return gradient.lower(w, jax.ShapeDtypeStruct((count, 16, width), float))


@pytest.mark.usefixtures("optimised")
def test_memory():
    """A device keeps what its layers keep, for each microbatch; or the states that enter it. No gradient of weights does it."""
    for checkpoint in (False, True):
        text = wide(checkpoint, count=5).as_text()
        assert not re.findall("tensor<(?:5x(?:1x)?[48]|[48]x5)x32x32xf64>", text)
        assert "x4x32x32xf64>" in text or "<4x32x32xf64>" in text
    few, many, again = (
        compiled(lowered).memory_analysis().temp_size_in_bytes
        for lowered in (wide(count=4), wide(count=24), wide(True, count=24))
    )
    # states for each microbatch; a layer keeps its own, two arrays of each tanh, and the cotangent of the product
    grown = (many - few) / (20 * 16 * 32 * 8)
    assert 4 * 4 < grown < 4 * 9
    assert again < 0.3 * many


def test_messages():
    """One state in each turn, M + P - 1 turns each way, and no weights."""
    sent = collectives(compiled(wide(count=5, size=4)))
    assert sent == {("collective-permute", "f64[16,32]"): 2 * (5 + 4 - 1)}


# The relay


class Counted:
    """Layers that count their evaluations, their transposes, and the gradients of their weights."""

    def __init__(self):
        self.counts = dict.fromkeys(("layers", "states", "weights"), 0)

    def product(self, y, w):
        def counted(kind, x):
            self.counts[kind] += 1
            return x

        def pass_on(kind, x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(
                functools.partial(counted, kind), shape, x, vmap_method="sequential"
            )

        @jax.custom_vjp
        def product(y, w):
            return pass_on("layers", y @ w)

        product.defvjp(
            lambda y, w: (product(y, w), (y, w)),
            lambda kept, g: (pass_on("states", g @ kept[1].T), pass_on("weights", kept[0].T @ g)),
        )
        return product(y, w)


@pytest.mark.parametrize(("how", "workers"), [("relay", 3), ("pipeline", 2), ("checkpoint", 2)])
def test_every_layer_is_evaluated_once(how, workers):
    """And transposed once, for the state and for the weights; with ``checkpoint``, evaluated twice."""
    layers, w = Counted(), W[:6]

    def f(scan, w, x):
        return jnp.sum(
            scan(lambda y, w: (y + 0.3 * jnp.tanh(layers.product(y, w)), None), x, w)[0] ** 2
        )

    if how == "relay":
        scan = functools.partial(lp_jax.scan, solver=lp_jax.Serial(), comm=mesh(workers))
        loss, x = functools.partial(f, scan), X[0]
    else:
        g = functools.partial(f, lax.scan)
        piped = lp_jax.pipeline(g, mesh(workers), in_axes=(None, 0), checkpoint=how == "checkpoint")
        loss, x = lambda w, x: jnp.sum(piped(w, x)), X
    jax.block_until_ready(jax.jit(jax.grad(loss))(w, x))
    times = 6 * (1 if how == "relay" else M)
    evaluated = times * (2 if how == "checkpoint" else 1)
    assert layers.counts == {"layers": evaluated, "states": times, "weights": times}


def test_the_relay_has_the_gradient_of_a_scan():
    """To the last bit or the one before, whatever is in the step; of outputs, weights and what the step closes over."""
    f, _, (w, x) = steps_within_steps()
    (w, b), x = DENSE[2][0], x[0]

    def relayed(f, *args):
        layers = lambda scan: scan.length > 3  # noqa: E731
        g = lp_jax.parallel(f, solver=lp_jax.Serial(), comm=mesh(3), where=layers)
        return numbers(g, *args), numbers(f, *args)

    for g, args in ((f, (w, x)), (dense, ((w, b), x))):
        got, wanted = relayed(g, *args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_max_ulp(a, b, 8) if jnp.issubdtype(a.dtype, float) else None
