"""Flax modules: the same numbers as a loop over layers, and good manners under NNX's and JAX's transformations."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from architectures import NAMES, assert_same, everything
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from networks import F64, BatchNormed, assert_close, mesh, normal
from problems import INJECT, relative_error
from test_convolution import plain as convolved

import lp_jax
from lp_jax import nn

LAYERS = 6
EXACT = lp_jax.MGRIT(
    coarsening=2, iterations=3, coarse_step=INJECT
)  # three intervals: exact after three cycles


def dense(rngs, **options):
    return nn.DenseResidual(5, param_dtype=F64, rngs=rngs, **options)


def conv(rngs, **options):
    return nn.ConvResidual(4, param_dtype=F64, rngs=rngs, **options)


assert_close = functools.partial(assert_close, rtol=1e-11)


def loop(make, params, y):
    """The network as a plain loop over modules that know nothing of stacks."""
    graphdef, state = nnx.split(make(nnx.Rngs(99)))

    def body(y, x):
        n, weights = x
        layer = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), weights))
        return layer(y, n / LAYERS, 1 / LAYERS), None

    return jax.lax.scan(body, y, (jnp.arange(float(LAYERS)), jax.tree.leaves(params)))[0]


def normalised(y, axes):
    return (y - y.mean(axes, keepdims=True)) / np.sqrt(y.var(axes, keepdims=True) + 1e-6)


def test_dense_residual_is_its_formula(standard_promotion):
    y, dt = np.asarray(normal((3, 5))), 0.25
    layer = dense(nnx.Rngs(0))
    w, b = np.asarray(layer.inner.kernel[...]), np.asarray(normal((5,), 3))
    layer.inner.bias[...] = jnp.asarray(b)
    assert_close(layer(y, 0.0, dt), y + dt * np.tanh(y @ w + b))

    layer = dense(nnx.Rngs(0), hidden=7, norm="layer", activation=nnx.relu)
    inner, outer = (np.asarray(part.kernel[...]) for part in (layer.inner, layer.outer))
    assert_close(layer(y, 0.0, dt), y + dt * np.maximum(normalised(y, 1) @ inner, 0.0) @ outer)


@pytest.mark.parametrize(("kernel", "norm"), [((5,), None), ((3, 3), "group"), ((3, 1, 3), None)])
def test_conv_residual_is_its_formula(kernel, norm, standard_promotion):
    y, dt = np.asarray(normal((2, *(6, 5, 4)[: len(kernel)], 4))), 0.25
    layer = conv(nnx.Rngs(0), kernel=kernel, norm=norm, groups=2, activation=nnx.tanh)

    def norm_of(y):
        if norm == "group":
            return normalised(
                y.reshape(*y.shape[:-1], 2, 2), (*range(1, y.ndim - 1), y.ndim)
            ).reshape(y.shape)
        return y

    first, second = (np.asarray(conv.kernel[...]) for conv in (layer.conv1, layer.conv2))
    hidden = np.tanh(norm_of(convolved(y, first)))
    assert_close(nnx.jit(layer)(y, 0.0, dt), y + dt * np.tanh(norm_of(convolved(hidden, second))))


def test_conv_residual_reproduces_the_golden_network(golden):
    data, solver = np.load(golden / "conv_torchbraid.npz"), lp_jax.MGRIT(coarsening=4, iterations=8)
    make = lambda rngs: nn.ConvResidual(3, param_dtype=F64, rngs=rngs)  # noqa: E731
    trunk = nn.LayerParallel(make, 32, solver=solver, rngs=nnx.Rngs(0))
    for number, layer in ((1, trunk.layers.conv1), (2, trunk.layers.conv2)):
        layer.kernel[...] = jnp.asarray(data[f"w{number}"].transpose(0, 3, 4, 2, 1))  # OIHW to HWIO
        layer.bias[...] = jnp.asarray(data[f"b{number}"])
    y0, target = (jnp.asarray(data[name].transpose(0, 2, 3, 1)) for name in ("x0", "target"))

    def loss(trunk, y0):
        y1 = trunk(y0)
        return 0.5 * jnp.sum((y1 - target) ** 2), y1

    (by_layers, by_input), y1 = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(trunk, y0)
    assert_close(y1, data["exact_y"].transpose(0, 2, 3, 1), rtol=1e-12)
    assert_close(by_input, data["exact_gx"].transpose(0, 2, 3, 1))
    for number in (1, 2):
        got = by_layers["layers"][f"conv{number}"]
        assert_close(got["kernel"][...], data[f"exact_g_w{number}"].transpose(0, 3, 4, 2, 1))
        assert_close(got["bias"][...], data[f"exact_g_b{number}"])


def make_trunk(**options):
    settings = {"solver": EXACT, "rngs": nnx.Rngs(0)} | options
    return nn.LayerParallel(settings.pop("make", dense), LAYERS, **settings)


def test_layer_parallel_is_solve_on_its_stack():
    trunk = make_trunk(t0=0.5, t1=2.0)
    step, params = nn.stack(dense, LAYERS, rngs=nnx.Rngs(0))
    y = normal((3, 5))
    wanted = lp_jax.solve(step, params, y, t0=0.5, t1=2.0, solver=EXACT)
    assert_close(trunk(y), wanted.y1, rtol=0)
    got = trunk.solve(y)
    assert_close(got.stats.residual_norms, wanted.stats.residual_norms, rtol=0)
    again = lp_jax.MGRIT(coarsening=2, iterations=1, start="guess")
    assert float(trunk.solve(y, solver=again, guess=got.trajectory).stats.residual_norms[0]) < 1e-12
    assert float(trunk.solve(y, solver=again, guess="zeros").stats.residual_norms[0]) > 1e-2


class Shared(nnx.Module):
    """A block with a parameter that it uses twice, statistics and a random stream."""

    def __init__(self, rngs, rate=0.5):
        self.inner = self.again = nnx.Linear(4, 4, rngs=rngs, param_dtype="float64")
        self.norm = nn.BatchNorm(4, rngs=rngs, param_dtype="float64")
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, y):
        return y + 0.1 * self.dropout(self.norm(self.again(nnx.tanh(self.inner(y)))))


@pytest.mark.parametrize("kind", [list, tuple, nnx.List])
def test_blocks_of_a_python_loop_are_stacked(kind):
    """A scan over them is the loop, and is solved; `unstack` gives the blocks back."""
    blocks = kind([Shared(nnx.Rngs(seed)) for seed in range(6)])
    stacked, y = nn.stack(blocks), normal((3, 4))
    assert stacked.inner is stacked.again and stacked.inner.kernel.shape == (6, 4, 4)
    scan = nnx.scan(lambda y, block: block(y), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    with jax.numpy_dtype_promotion("standard"):  # of Flax' norm
        found = nn.parallel(scan, solver=lp_jax.Picard(sweeps=6))(y, stacked)
        for block in blocks:
            y = block(y)
    assert_close(found, y, rtol=1e-12)
    assert_close(stacked.norm.mean[...], jnp.stack([block.norm.mean[...] for block in blocks]))
    for block, again in zip(blocks, nn.unstack(stacked), strict=True):
        jax.tree.map(
            np.testing.assert_array_equal, nnx.state(block, nnx.Param), nnx.state(again, nnx.Param)
        )


def test_blocks_that_differ_are_not_stacked():
    assert nn.stack([{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}])["w"].shape == (2, 3)
    with pytest.raises(ValueError, match="numbers of their arrays only"):
        nn.stack([Shared(nnx.Rngs(0)), Shared(nnx.Rngs(0), rate=0.1)])


class Clock(nnx.Module):
    """y + dt * t * w"""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (), F64))

    def __call__(self, y, t, dt):
        return y + dt * t * self.w[...]


@pytest.mark.parametrize("container", [tuple, jnp.asarray])
def test_layers_see_the_times_of_a_nonuniform_grid(container):
    grid = np.linspace(0.0, 2.0, LAYERS + 1) ** 2
    trunk = make_trunk(make=Clock, t1=container(grid.tolist()))
    wanted = np.sum(np.diff(grid) * grid[:-1] * np.asarray(trunk.layers.w[...]))
    assert_close(trunk(jnp.zeros((), F64)), wanted)


def test_overriding_the_solver_overrides_the_adjoint_too():
    rough = lp_jax.MGRIT(coarsening=2, iterations=1, coarse_step=lp_jax.Identity())
    trunk = make_trunk(solver=rough, adjoint_solver=rough, t1=4.0)
    y = normal((3, 5))

    def gradient(**solvers):
        loss = lambda trunk: jnp.sum(trunk.solve(y, **solvers).y1 ** 2)  # noqa: E731
        value, gradient = nnx.jit(nnx.value_and_grad(loss))(trunk)
        return float(value), np.asarray(nnx.to_pure_dict(gradient)["layers"]["inner"]["kernel"])

    wanted, exact = gradient(solver=lp_jax.Serial(), adjoint_solver=lp_jax.Serial())
    error = lambda value: abs(value - wanted) / wanted  # noqa: E731
    distance = lambda g: np.linalg.norm(g - exact)  # noqa: E731

    rough_value, rough_gradient = gradient()
    assert error(rough_value) > 1e-3 and distance(rough_gradient) > 1e-2
    value, got = gradient(solver=lp_jax.Serial())
    assert error(value) < 1e-12 and distance(got) < 1e-10
    value, better = gradient(adjoint_solver=EXACT)
    assert value == rough_value
    assert distance(better) < distance(rough_gradient)
    value, got = gradient(solver=EXACT, adjoint_solver=rough)
    assert error(value) < 1e-12 and distance(got) > 1e-2


def test_settings_are_static_and_parameters_are_the_only_state():
    tolerant = lp_jax.MGRIT(
        iterations=9, rtol=jnp.asarray(1e-9), coarse_step=lp_jax.Picard(sweeps=1)
    )
    trunk = make_trunk(
        solver=tolerant, adjoint_solver=lp_jax.MGRIT(c_weight=1.3), t1=np.float32(2.0)
    )
    graphdef, state = nnx.split(trunk)
    assert {type(value) for _, value in nnx.to_flat_state(state)} == {nnx.Param}
    assert all(x.shape[0] == LAYERS for x in jax.tree.leaves(state))
    alike = make_trunk(
        solver=tolerant, adjoint_solver=lp_jax.MGRIT(c_weight=1.3), t1=2.0, rngs=nnx.Rngs(7)
    )
    assert nnx.graphdef(alike) == graphdef and hash(nnx.graphdef(alike)) == hash(graphdef)
    assert nnx.graphdef(make_trunk(solver=lp_jax.MGRIT(iterations=9, rtol=1e-8))) != graphdef

    y = normal((3, 5))
    trunk.solver = lp_jax.Serial()  # settings may be replaced
    assert int(trunk.solve(y).stats.iterations) == 0
    assert_close(trunk(y), nnx.merge(graphdef, state)(y), rtol=1e-9)


class Tied(nnx.Module):
    """Antisymmetric, y + dt * tanh(y K - K^T y): one kernel under two names."""

    def __init__(self, rngs):
        self.one = nnx.Linear(5, 5, use_bias=False, param_dtype=F64, rngs=rngs)
        self.parts = nnx.List([self.one, nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)])
        self.kernel = self.one.kernel

    def __call__(self, y, t, dt):
        first, second = self.parts
        return second(y) + dt * nnx.tanh(first(y) - y @ self.kernel[...].T)


def test_parameters_that_a_layer_shares_with_itself_stay_one():
    trunk, y = make_trunk(make=Tied), normal((3, 5))
    params = nnx.to_pure_dict(nnx.state(trunk.layers))
    assert len(jax.tree.leaves(params)) == 3
    wanted = jax.jit(jax.grad(lambda params: jnp.sum(loop(Tied, params, y))))(params)
    got = nnx.jit(nnx.grad(lambda trunk: jnp.sum(trunk(y))))(trunk)
    assert_close(nnx.to_pure_dict(got)["layers"], wanted)


def make_classifier(rngs, **options):
    return nn.Classifier(
        nn.DenseOpening((4, 4, 1), 5, param_dtype=F64, rngs=rngs),
        make_trunk(rngs=rngs, **options),
        nn.DenseClosing((5,), 3, hidden=6, param_dtype=F64, rngs=rngs),
    )


class Placed(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.inner = nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

    def __call__(self, y, t, dt):
        return y + dt * self.inner(y)


def test_places_of_stacked_parameters_are_those_of_nnx_vmap():
    axes = (AxisType.Auto,) * 2
    with jax.set_mesh(
        jax.make_mesh((1, 2), ("layers", "model"), axis_types=axes, devices=jax.devices()[:2])
    ):
        trunk = nn.LayerParallel(Placed, 8, rngs=nnx.Rngs(0))
        make = nnx.vmap(
            Placed, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"}
        )
        stacked = nnx.split_rngs(splits=8)(make)(nnx.Rngs(0))
        spec = nnx.get_partition_spec(nnx.state(trunk))["layers"]["inner"]["kernel"].get_value()
        assert spec == PartitionSpec("layers", None, "model")
        assert spec == nnx.get_partition_spec(nnx.state(stacked))["inner"]["kernel"].get_value()
        assert trunk(jnp.ones((2, 4), "float32")).shape == (2, 4)


def test_classifier_composes_opening_trunk_and_closing():
    model, x = make_classifier(nnx.Rngs(0)), normal((7, 4, 4, 1))
    kernels = jax.device_get(nnx.to_pure_dict(nnx.state(model), lambda x: x[...]))
    wanted = np.tanh(np.reshape(x, (7, 16)) @ kernels["opening"]["linear"]["kernel"])
    for w, b in zip(
        *(kernels["trunk"]["layers"]["inner"][name] for name in ("kernel", "bias")), strict=True
    ):
        wanted = wanted + np.tanh(wanted @ w + b) / LAYERS
    first, last = (np.asarray(layer.kernel[...]) for layer in model.closing.layers)
    wanted = np.maximum(wanted @ first, 0.0) @ last
    assert_close(model(x), wanted)
    logits, solution = model.solve(x, solver=lp_jax.Serial())
    assert_close(logits, wanted)
    assert solution.y1.shape == (7, 5) and int(solution.stats.iterations) == 0


def test_training_with_an_nnx_optimizer(standard_promotion):
    model = make_classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x, labels = normal((9, 4, 4, 1)), jnp.arange(9) % 3

    @nnx.jit
    def train_step(model, optimizer):
        loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(  # noqa: E731
            model(x), labels
        ).mean()
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(train_step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]


def test_conv_opening_and_pool_closing():
    opening = nn.ConvOpening(1, 4, param_dtype=F64, rngs=nnx.Rngs(0))
    closing = nn.PoolClosing((6, 5, 4), 3, param_dtype=F64, rngs=nnx.Rngs(1))
    x = np.asarray(normal((2, 6, 5, 1)))
    y = np.maximum(convolved(x, np.asarray(opening.conv.kernel[...])), 0.0)
    assert_close(opening(x), y)
    assert_close(closing(jnp.asarray(y)), y.mean((1, 2)) @ np.asarray(closing.linear.kernel[...]))


class Counted(nnx.Module):
    """A layer that counts how often it is traced."""

    traces = 0

    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)

    def __call__(self, y, t, dt):
        type(self).traces += 1
        return y + dt * nnx.tanh(self.linear(y))


def traced(call):
    before = Counted.traces
    jax.block_until_ready(call())
    return Counted.traces - before


def test_modules_built_alike_share_a_program_and_a_compiled_step_does_not_trace_again():
    (step, _), (again, _) = (nn.stack(Counted, LAYERS, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    assert (
        step == again
        and hash(step) == hash(again)
        and step != nn.stack(dense, LAYERS, rngs=nnx.Rngs(0))[0]
    )
    trunk, y = make_trunk(make=Counted), normal((3, 5))

    @nnx.jit
    def gradient(trunk, y, solver=None):
        return nnx.value_and_grad(lambda trunk: jnp.sum(trunk.solve(y, solver=solver).y1 ** 2))(
            trunk
        )

    assert traced(lambda: gradient(trunk, y)) > 0
    trunk.layers.linear.kernel[...] *= 2
    assert traced(lambda: gradient(trunk, 2 * y)) == 0
    assert traced(lambda: gradient(make_trunk(make=Counted, rngs=nnx.Rngs(5)), y)) == 0
    # a tolerance given to the call is a number like any other
    assert traced(lambda: gradient(trunk, y, lp_jax.MGRIT(rtol=1e-3))) > 0
    assert traced(lambda: gradient(trunk, y, lp_jax.MGRIT(rtol=1e-6))) == 0


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5)
        self.linear = nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)

    def __call__(self, y, t, dt, *, key=None):
        return y + dt * self.dropout(nnx.tanh(self.linear(y)), rngs=key)


def test_dropout_masks_depend_on_key_and_layer_alone():
    trunk, y = make_trunk(make=Dropped), normal((3, 5))
    keys = jax.random.split(jax.random.key(3), LAYERS)
    kept = np.asarray(jax.jit(jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3, 5))))(keys))
    wanted = np.asarray(y)
    for keep, kernel in zip(kept, np.asarray(trunk.layers.linear.kernel[...]), strict=True):
        wanted = wanted + np.where(keep, 2 * np.tanh(wanted @ kernel), 0.0) / LAYERS

    @nnx.jit
    def run(trunk, y, keys, solver):
        solved = lambda trunk: trunk.solve(y, data=keys, solver=solver).y1  # noqa: E731
        return nnx.grad(lambda trunk: (jnp.sum(y1 := solved(trunk)), y1), has_aux=True)(trunk)

    (gradient, got), (exact, serial) = (
        run(trunk, y, keys, solver) for solver in (EXACT, lp_jax.Serial())
    )
    assert_close(got, wanted)
    assert_close(serial, wanted)
    assert_close(gradient, exact)
    others = jax.random.split(jax.random.key(4), LAYERS)
    assert np.abs(run(trunk, y, others, EXACT)[1] - wanted).max() > 1e-3

    trunk.eval()
    assert_close(trunk(y), make_trunk(make=Counted)(y), rtol=0)


def test_one_key_for_a_call_gives_every_layer_its_own():
    trunk, y, key = make_trunk(make=Dropped), normal((3, 5)), jax.random.key(3)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(LAYERS))
    assert_close(trunk(y, key=key), trunk(y, data=keys), rtol=1e-14)
    assert np.abs(trunk(y, key=key) - np.asarray(trunk(y, key=jax.random.key(4)))).max() > 1e-3
    with pytest.raises(ValueError, match="data and key were both given"):
        trunk(y, data=keys, key=key)


@pytest.mark.usefixtures("free_promotion")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_the_number_of_devices(name):
    """Masks of dropout, running statistics, values, gradients; over MPI ranks in test_mpi.py."""
    assert_same(everything(name, mesh()), everything(name))


class Driven(nnx.Module):
    """Takes data and a key, each by its name."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (5,), F64))

    def __call__(self, y, t, dt, *, data=None, key=None):
        noise = jnp.zeros((5,), F64) if key is None else jax.random.normal(key, (5,), F64)
        return y + dt * (self.w[...] * data + noise)[None]


def test_a_layer_may_take_data_and_a_key():
    trunk, y, key = make_trunk(make=Driven), normal((3, 5)), jax.random.key(3)
    data, w = np.asarray(normal((LAYERS, 5), 2)), np.asarray(trunk.layers.w[...])
    draw = jax.jit(jax.vmap(lambda n: jax.random.normal(jax.random.fold_in(key, n), (5,), F64)))
    noise = np.asarray(draw(jnp.arange(LAYERS)))
    assert_close(trunk(y, data=data), np.asarray(y) + np.mean(w * data, 0))
    assert_close(trunk(y, data=data, key=key), np.asarray(y) + np.mean(w * data + noise, 0))
    step, params = nn.stack(Driven, LAYERS, rngs=nnx.Rngs(0))
    assert_close(
        lp_jax.solve(step, params, y, data=data, solver=EXACT).y1, trunk(y, data=data), rtol=0
    )


ONES, NO_WORD = jnp.ones((3, 5)), r"but DenseResidual\.__call__ has no such keyword"


class Attending(nnx.Module):
    """Sees what all layers share, and its own number."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, param_dtype=F64, rngs=rngs)

    def __call__(self, y, t, dt, *, shared, index):
        memory, mask = shared
        return y + dt * jnp.where(
            mask, nnx.tanh(self.linear(y) + memory) * (1 + index % 3).astype(y.dtype), 0.0
        )


def test_layers_get_what_they_share_and_their_index():
    trunk, y, memory, mask = (
        make_trunk(make=Attending),
        normal((3, 5)),
        normal((3, 5), 7),
        normal((3, 5), 8) > 0,
    )

    def plain(linear, y, memory):
        for n in range(LAYERS):
            inside = y @ linear["kernel"][n] + linear["bias"][n][None] + memory
            y = y + jnp.where(mask, jnp.tanh(inside) * (1 + n % 3), 0.0) / LAYERS
        return jnp.sum(y**2)

    linear = nnx.to_pure_dict(nnx.state(trunk.layers))["linear"]
    wanted = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(linear, y, memory)

    def loss(trunk, y, memory):
        return jnp.sum(trunk(y, shared=(memory, mask)) ** 2)

    got = nnx.jit(nnx.grad(loss, argnums=(0, 1, 2)))(trunk, y, memory)
    assert_close((nnx.to_pure_dict(got[0])["layers"]["linear"], *got[1:]), wanted)
    step, params = nn.stack(Attending, LAYERS, rngs=nnx.Rngs(0))
    pure = lp_jax.solve(step, params, y, shared=(memory, mask), solver=EXACT)
    assert_close(pure.y1, trunk(y, shared=(memory, mask)), rtol=0)


def test_running_statistics_come_from_the_final_sweep(standard_promotion):
    trunk, y, target = make_trunk(make=BatchNormed), normal((8, 5)), normal((8, 5), 2)
    kernel, bias = (
        np.asarray(x[...]) for x in (trunk.layers.linear.kernel, trunk.layers.linear.bias)
    )

    def loop(kernel, y):
        means, variances = [], []
        for n in range(LAYERS):
            z = y @ kernel[n] + bias[n][None]
            mean, var = z.mean(0, keepdims=True), z.var(0, keepdims=True)
            y = y + jnp.tanh((z - mean) / jnp.sqrt(var + 1e-5)) / LAYERS
            means.append(0.1 * mean)
            variances.append(0.9 + 0.1 * var)
        return jnp.sum((y - target) ** 2), (jnp.concatenate(means), jnp.concatenate(variances))

    gradient = nnx.jit(nnx.grad(lambda trunk, y: jnp.sum((trunk(y) - target) ** 2)))(trunk, y)
    by_hand, (means, variances) = jax.device_get(
        jax.jit(jax.grad(loop, has_aux=True))(jnp.asarray(kernel), y)
    )
    assert_close(gradient["layers"]["linear"]["kernel"][...], by_hand, rtol=1e-10)
    norm = trunk.layers.norm
    assert_close((norm.mean[...], norm.var[...]), (means, variances), rtol=1e-12)

    trunk.eval()
    u = np.asarray(y)
    for n in range(LAYERS):
        u = (
            u
            + np.tanh((u @ kernel[n] + bias[n] - means[n]) / np.sqrt(variances[n] + 1e-5)) / LAYERS
        )
    assert_close(jax.jit(trunk)(y), u)  # closed over by jit: nothing may change in it
    assert_close(norm.mean[...], means, rtol=1e-12)
    trunk.train()
    trunk(y)
    assert np.abs(norm.mean[...] - means).max() > 1e-3


class StoredKeys(BatchNormed):
    def __init__(self, rngs):
        self.norm = nnx.Dropout(0.5, rngs=rngs)


class Constant(BatchNormed):
    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, rngs=rngs)
        self.frequencies = jnp.arange(5.0)


STATISTICS = r"norm.mean \(BatchStat\), norm.var \(BatchStat\)\..*use nn.LayerParallel"
KEYS = r"norm.rngs.count \(RngCount\), norm.rngs.key \(RngKey\)\..*nnx.Dropout\(rate\) without rngs"
CONSTANT = r"frequencies \(.*\)\..*make it an nnx.Param, or compute it in __call__"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda rngs: nn.stack(dense, 0, rngs=rngs),
            ValueError,
            "num_layers must be at least 1; got 0",
        ),
        (
            lambda rngs: nn.stack(dense, 4, rngs=0),
            TypeError,
            r"rngs must be an nnx.Rngs, like nnx.Rngs\(0\); got 0",
        ),
        (
            lambda rngs: nn.stack(lambda rngs: nnx.tanh, 4, rngs=rngs),
            TypeError,
            "must build an nnx.Module; got",
        ),
        (lambda rngs: nn.stack(BatchNormed, 4, rngs=rngs), ValueError, STATISTICS),
        (lambda rngs: nn.stack(StoredKeys, 4, rngs=rngs), ValueError, KEYS),
        (lambda rngs: make_trunk(make=StoredKeys), ValueError, KEYS),
        (lambda rngs: nn.stack(Constant, 4, rngs=rngs), ValueError, CONSTANT),
        (
            lambda rngs: make_trunk(solver=lp_jax.MGRIT),
            TypeError,
            "solver must be a solver.*not MGRIT",
        ),
        (
            lambda rngs: make_trunk()(ONES, data=jnp.arange(LAYERS)),
            TypeError,
            rf"data was given, {NO_WORD}.*data=None",
        ),
        (lambda rngs: make_trunk()(ONES, shared=ONES), TypeError, f"shared was given, {NO_WORD}"),
        (
            lambda rngs: make_trunk(make=Dropped)(ONES, data=jnp.arange(LAYERS + 1)),
            ValueError,
            "leading length",
        ),
        (
            lambda rngs: dense(rngs, norm="group"),
            ValueError,
            "norm must be 'layer' or 'batch', or None",
        ),
        (
            lambda rngs: conv(rngs, norm="instance"),
            ValueError,
            "'group' or 'batch', or None; got 'instance'",
        ),
        (lambda rngs: conv(rngs, norm="group", groups=3), ValueError, "groups"),
        (
            lambda rngs: nn.DenseOpening((8, 8), 5, rngs=rngs)(ONES),
            ValueError,
            r"shape \(\.\.\., 8, 8\); got \(3, 5\)",
        ),
    ],
)
def test_bad_input_is_refused(build, error, message):
    with pytest.raises(error, match=message), jax.numpy_dtype_promotion("standard"):
        build(nnx.Rngs(0))


def test_linen_modules_in_two_lines():
    linen = pytest.importorskip("flax.linen")

    class Residual(linen.Module):
        @linen.compact
        def __call__(self, y, t, dt):
            return y + dt * linen.tanh(linen.Dense(y.shape[-1], param_dtype=F64, name="dense")(y))

    block, y0 = Residual(), normal((3, 5))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = jax.vmap(lambda key: block.init(key, y0, 0.0, 1.0)["params"])(keys)
    step = lambda y, layer: block.apply({"params": layer.params}, y, layer.t, layer.dt)  # noqa: E731

    y = y0
    for kernel in params["dense"]["kernel"]:
        y = y + jnp.tanh(y @ kernel) / LAYERS
    assert_close(lp_jax.solve(step, params, y0, solver=EXACT).y1, y)


@pytest.mark.parametrize("library", ["flax", "safetensors"])
def test_without_its_libraries_the_extra_is_named(library, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] == library or name.startswith("lp_jax.nn")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r'pip install "lp_jax\[nn\]"'):
        importlib.import_module("lp_jax.nn")


LOW = {
    "encoder": (lambda rngs, dtype: nn.EncoderLayer(32, 4, dtype=dtype, rngs=rngs), (2, 8, 32)),
    "dense": (
        lambda rngs, dtype: nn.DenseResidual(32, hidden=16, norm="layer", dtype=dtype, rngs=rngs),
        (4, 32),
    ),
    "conv": (  # smooth: rounding switches ReLUs, three in a thousand, which alone is 5 % of a gradient
        lambda rngs, dtype: nn.ConvResidual(6, activation=nnx.tanh, dtype=dtype, rngs=rngs),
        (2, 8, 8, 6),
    ),
}


@pytest.mark.usefixtures("standard_promotion")  # attention's gradient mixes dtypes
@pytest.mark.parametrize("name", LOW)
def test_products_in_bfloat16_and_a_state_in_float32(name):
    """The state keeps its dtype, the error is that of products rounded to eight bits, forward and in the gradient."""
    make, shape = LOW[name]
    y = np.asarray(normal(shape), np.float32)
    serial = lp_jax.Serial()
    trunks = [
        make_trunk(make=functools.partial(make, dtype=dtype), solver=serial)
        for dtype in (None, jnp.bfloat16)
    ]
    text = jax.jit(trunks[1]).lower(y).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("bf16" in line for line in products)

    def gradient(trunk):
        loss = lambda trunk: (jnp.sum((y1 := trunk(y)) ** 2), y1)  # noqa: E731
        gradient, y1 = nnx.jit(nnx.grad(loss, has_aux=True))(trunk)
        return jax.tree.leaves(jax.device_get(gradient)), y1

    (wanted, exact), (got, rounded) = map(gradient, trunks)
    assert rounded.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in got)
    assert 1e-4 < relative_error(rounded - y, exact - y) < 2e-2
    assert relative_error(got, wanted) < 2e-2
