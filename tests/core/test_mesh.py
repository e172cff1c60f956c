"""Layers over the devices of a mesh: the numbers do not depend on how many there are, and little crosses between them."""

import collections
import contextlib
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_battery as battery
from compiled import collectives, compiled
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from networks import mesh
from problems import INJECT, dense_params, dense_state, dense_step, relative_error

import lp_jax
from lp_jax import nn, train

SWEEPS, MEAN = lp_jax.Picard(sweeps=3), lp_jax.Rediscretize(params="mean")
HALVES = lp_jax.Rediscretize(params=lambda p: jax.tree.map(lambda x: 0.5 * (x[0] + x[-1]), p))

SOLVERS = {
    "3 levels": lp_jax.MGRIT(levels=3, coarsening=(4, 2), iterations=3, coarse_step=INJECT),
    "FCF": lp_jax.MGRIT(  # all that is kept; sweeps on the coarsest level
        iterations=3,
        relaxation="FCF",
        start="guess",
        c_weight=1.2,
        coarse_step=MEAN,
        coarsest=SWEEPS,
        storage="all",
    ),
    "trajectory": lp_jax.MGRIT(
        iterations=3, coarse_step=lp_jax.Picard(sweeps=2, around="trajectory")
    ),
    "identity": lp_jax.MGRIT(iterations=3, start="guess", coarse_step=lp_jax.Identity()),
    "W": lp_jax.MGRIT(  # with a user's rule
        levels=3,
        coarsening=2,
        iterations=1,
        relaxation="F",
        cycle="W",
        start="guess",
        coarse_step=HALVES,
        at_once=math.inf,
    ),
    "Picard": SWEEPS,
    "falls back": lp_jax.Picard(sweeps=2, rtol=1e-12, fallback=True),
    "cycles fall back": lp_jax.MGRIT(
        coarsening=2, iterations=2, rtol=1e-12, fallback=True
    ),  # by Picard's coarse steps
    "windows": lp_jax.Windowed(sweeps=3, windows=3),
    "secant": lp_jax.Secant(sweeps=4),
    "Newton": lp_jax.Newton(iterations=3, relaxations=2, batch_axes=0),
    "Newton, shared": lp_jax.Newton(jacobian="shared", iterations=3, batch_axes=0),
    "serial": lp_jax.Serial(),
    "serial checkpointed": lp_jax.Serial(checkpoint_every=5),
    "tolerance": lp_jax.MGRIT(iterations=20, rtol=1e-9, coarse_step=INJECT),
}


def everything(solver, comm, adjoint=None, operands=None):
    """All that a solve and its pullback give, on the battery's network of 22 layers, which nothing divides."""
    params, y0, shared, data = operands or battery.operands()

    def run(params, y0, shared, data):
        solution, pullback = lp_jax.solve_vjp(
            battery.step,
            params,
            y0,
            shared=shared,
            data=data,
            t1=2.0,
            solver=solver,
            adjoint_solver=adjoint,
            comm=comm,
        )
        gradients, stats = pullback(jax.grad(battery.loss_of)(solution.y1))
        gradients = (gradients.params, gradients.y0, gradients.shared, gradients.data["x"])
        return solution.y1, solution.trajectory, gradients, (solution.stats, solution.result, stats)

    return jax.jit(run)(params, y0, shared, data)


def assert_same(got, wanted):
    for a, b in zip(got[:-1], wanted[:-1], strict=True):
        assert relative_error(a, b) < 1e-12
    for a, b in zip(jax.tree.leaves(got[-1]), jax.tree.leaves(wanted[-1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # norms of differences


@functools.cache
def on_one_device(name):
    return everything(SOLVERS[name], None)


WORKERS = dict(zip(SOLVERS, itertools.cycle((8, 3, 2)), strict=False)) | {
    "tolerance": 1
}  # others have one, too


@pytest.mark.parametrize(("name", "workers"), WORKERS.items())
def test_no_solver_depends_on_the_number_of_devices(name, workers):
    """W-cycles ask most of the coarsest level, so there the devices work in turn."""
    comm = mesh(workers, sequential="relay" if name == "W" else "gather")
    assert_same(everything(SOLVERS[name], comm), on_one_device(name))


@pytest.mark.parametrize(
    ("name", "workers"), [("Picard", None), ("windows", 3), ("Newton", 3), ("FCF", 3)]
)
def test_layers_at_once_give_the_numbers_of_layers_one_after_another(monkeypatch, name, workers):
    """What an accelerator runs: sweeps are batches there, and sums are taken in groups."""
    wanted = on_one_device(name)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(lp_jax.MeshComm, "platform", "gpu")
    assert_same(everything(SOLVERS[name], workers and mesh(workers)), wanted)


@pytest.mark.parametrize("workers", [None, 2])
def test_forward_and_adjoint_may_coarsen_differently(workers):
    """Runs are aligned to both: 12 layers here. Six and four intervals: exact after as many cycles."""
    solver, adjoint = (
        lp_jax.MGRIT(iterations=k, coarsening=m, coarse_step=INJECT) for m, k in ((4, 6), (6, 4))
    )
    y1, _, wanted, _ = on_one_device("serial")
    got, _, gradients, _ = everything(solver, workers and mesh(workers), adjoint)
    assert relative_error((got, gradients), (y1, wanted)) < 1e-12


@pytest.mark.parametrize(
    "solver",  # exact on 13 layers, by finite termination
    [
        lp_jax.Serial(),
        lp_jax.Picard(sweeps=13),
        lp_jax.Newton(iterations=13, batch_axes=1),
        lp_jax.MGRIT(coarsening=2, iterations=8, storage="all"),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_gradients_of_all_that_devices_share_are_those_of_a_scan(solver):
    """Parameters, the state that enters, and values that all devices have, closed over or not; no device's part twice."""

    def loss(arrays, devices):
        params, y0, data, scale, offset = arrays

        def step(y, layer):
            return y + layer.dt * jnp.tanh(
                y @ layer.params * layer.shared + (layer.data + offset)[None]
            )

        if devices:
            given = {"shared": scale, "data": data, "t1": 2.0, "solver": solver, "comm": mesh(4)}
            return jnp.sum(lp_jax.solve(step, params, y0, **given).y1 ** 2)

        def body(y, x):
            return step(y, lp_jax.Layer(x[0], scale, x[1], None, 2.0 / 13, None, 0)), None

        return jnp.sum(jax.lax.scan(body, y0, (params, data))[0] ** 2)

    (params, data), y0 = dense_params(13, 4), dense_state(3, 4)
    arrays = params, y0, data, jnp.asarray(0.7), jnp.linspace(-1, 1, 4)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    for a, b in zip(gradient(arrays, True), gradient(arrays, False), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-12, atol=1e-14
        )  # rounding in float64: all are exact


def test_scalar_states_aux_loops_in_the_step_and_closures():
    """A scan in the layer starts from a constant."""

    def loss(scale, factor, comm):
        def step(y, layer):
            total, _ = jax.lax.scan(
                lambda c, k: (c + jnp.sin(k * y), None), jnp.zeros(y.shape), jnp.arange(1.0, 3.0)
            )
            y = y + layer.dt * layer.params * total
            return y * factor, {"index": layer.index, "norm": jnp.sum(total**2)}

        solver = lp_jax.MGRIT(coarse_step=INJECT)
        solution = lp_jax.solve(
            step, scale, jnp.asarray(0.3), solver=solver, has_aux=True, comm=comm
        )
        return solution.y1.sum(), solution.aux

    scale = jnp.linspace(0.5, 1.5, 13)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    wanted, got = (run(scale, 1.01, comm) for comm in (None, mesh(8)))
    np.testing.assert_array_equal(got[0][1]["index"], np.arange(13))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_vmap_eager_and_another_batch():
    run = functools.partial(
        lp_jax.solve, dense_step, dense_params(12, 4), solver=lp_jax.MGRIT(coarse_step=INJECT)
    )
    comm, y0 = mesh(3), np.asarray(dense_state(5, 4))
    wanted = np.asarray(run(y0).y1)
    for batch in (5, 2):
        np.testing.assert_allclose(run(y0[:batch], comm=comm).y1, wanted[:batch], rtol=1e-12)
    many = jax.vmap(lambda y0: run(y0, comm=comm).y1)(np.stack([y0, 2 * y0]))
    np.testing.assert_allclose(many[0], wanted, rtol=1e-12)


def test_arrays_may_be_anywhere():
    """On one device, on all, or spread already, committed or not."""
    comm, params, y0 = mesh(4), dense_params(16, 4), dense_state(3, 4)
    wanted = lp_jax.solve(dense_step, params, y0).y1
    spread = NamedSharding(comm.mesh, PartitionSpec("layers"))
    for placed in (jax.devices()[5], spread, NamedSharding(comm.mesh, PartitionSpec())):
        got = lp_jax.solve(dense_step, jax.device_put(params, placed), y0, comm=comm).y1
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_the_identity_is_not_passed_from_device_to_device():
    """Its coarse problem is a prefix sum, and without a right-hand side no problem at all: messages grow as a logarithm."""
    params, y0 = dense_params(16, 4), dense_state(3, 4)
    solver = lp_jax.MGRIT(coarsening=2, iterations=2, coarse_step=lp_jax.Identity())

    def gradient(params, y0, comm):
        def loss(params):
            return jnp.sum(lp_jax.solve(dense_step, params, y0, solver=solver, comm=comm).y1 ** 2)

        return jax.grad(loss)(params)

    program = jax.jit(gradient, static_argnums=2)
    sent, wanted = {}, program(params, y0, None)
    for workers in (2, 4, 8):
        lowered = program.lower(params, y0, mesh(workers))
        counts = collectives(compiled(lowered))
        sent[workers] = sum(n for (kind, _), n in counts.items() if kind == "collective-permute")
        assert relative_error(program(params, y0, mesh(workers)), wanted) < 1e-12
    assert sent[8] - sent[4] <= sent[4] - sent[2], sent  # 10 and 8 with a chain through all devices


@pytest.mark.parametrize(("relaxations", "sequential"), [(0, "gather"), (1, "relay")])
def test_collectives(relaxations, sequential):
    """What algorithm.md section 6 implies: one state per relaxation, and the coarsest solve as chosen."""
    workers, cycles, levels, n, width, batch = 4, 5, 3, 64, 8, 3
    params, y0 = dense_params(n, width), dense_state(batch, width)
    hierarchy = {
        "levels": levels,
        "relaxation": ("F" + "CF" * relaxations, "FCF"),
        "coarse_step": INJECT,
    }
    solver = lp_jax.MGRIT(iterations=cycles, start="guess", at_once=1, **hierarchy)
    comm = mesh(workers, sequential=sequential)
    params = jax.device_put(params, NamedSharding(comm.mesh, PartitionSpec("layers")))

    def loss(params, y0):
        return jnp.sum(lp_jax.solve(dense_step, params, y0, solver=solver, comm=comm).y1 ** 2)

    forward = collectives(compiled(jax.jit(loss).lower(params, y0)))
    both = collectives(compiled(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, y0)))
    state = f"f64[{batch},{width}]"
    # finest: relaxations and residual; the level below: C-relaxation, residual, and F-relaxation after the correction
    per_cycle = (relaxations + 1) + (1 + 1) + 1
    wanted = collections.Counter(
        {("collective-permute", state): cycles * per_cycle + 1, ("all-reduce", state): 1}
    )
    if sequential == "relay":
        wanted["collective-permute", state] += (
            cycles * workers
        )  # that of the last turn is in a branch not taken
    else:
        wanted["all-gather", f"f64[{n // 16},{batch},{width}]"] = cycles  # the right-hand side
        wanted["all-gather", f"f64[{n // 16},{width},{width}]"] = (
            1  # the coarsest level's parameters, once
        )
        wanted["all-gather", f"f64[{n // 16},{width}]"] = 1
        wanted["all-gather", f"f64[{n // 16}]"] = 1  # dt
    assert forward == wanted
    # the adjoint needs the states that enter each device after the final sweep; those before it are the sweep's own
    wanted["collective-permute", state] = 2 * wanted["collective-permute", state] + 1
    wanted["all-reduce", state] *= 2
    if sequential == "gather":
        wanted["all-gather", f"f64[{n // 16},{batch},{width}]"] += (
            cycles + 1
        )  # and the states linearised at
    assert both == wanted


def conv_step(y, layer):
    """A convolution over the height, (batch, height, width, channels)."""
    kernel, bias = layer.params
    z = jax.lax.conv_general_dilated(
        y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + layer.dt * jnp.tanh(z + bias[None, None, None])


def test_layers_times_data_times_space():
    """2 x 2 x 2 devices: batch and height stay with the compiler, which exchanges halos; the gradient is exact."""
    mesh = jax.make_mesh((2, 2, 2), ("layers", "data", "space"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    params = (
        jnp.asarray(0.3 * rng.normal(size=(16, 3, 3, 4, 4))),
        jnp.asarray(rng.normal(size=(16, 4))),
    )
    y0 = jnp.asarray(rng.normal(size=(4, 12, 5, 4)))
    solver = lp_jax.MGRIT(
        levels=2, iterations=4, start="guess", coarse_step=INJECT
    )  # four intervals

    def loss(params, y0, solver, comm):
        return jnp.sum(jnp.sin(lp_jax.solve(conv_step, params, y0, solver=solver, comm=comm).y1))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)
    wanted = gradient(params, y0, lp_jax.Serial(), None)
    layered, spread = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("layers",), ("data", "space"))
    )
    arguments = jax.device_put(params, layered), jax.device_put(y0, spread), solver
    program = compiled(gradient.lower(*arguments, lp_jax.MeshComm(mesh)))
    assert relative_error(program(*arguments), wanted) < 1e-12
    kernels = re.findall(r"= (\S+) convolution\(", program.as_text())
    assert kernels and not any(
        "[4,12,5,4]" in shape for shape in kernels
    )  # no convolution of a whole image
    shapes = {shape for kind, shape in collectives(program) if kind == "collective-permute"}
    assert (
        "f64[2,6,5,4]" in shapes
    )  # a state to the neighbouring layers: half the batch, half the height
    assert any(re.fullmatch(r"f64\[2,1,5,4\]", shape) for shape in shapes), (
        shapes
    )  # a halo of one row


def bytes_of_each(state, comm):
    """Bytes of matrices and stacks on each device: one number where all have as many."""
    of_each = dict.fromkeys(comm.mesh.devices.flat, 0)
    for x in jax.tree.leaves(state):
        for shard in x.addressable_shards if x.ndim > 1 else ():
            of_each[shard.device] += shard.data.nbytes
    return set(of_each.values())


def test_parameters_and_what_the_optimizer_keeps_are_spread():
    """A module made on a mesh, a step of Adam on it: each device has its layers' share of all of this, and no more."""
    layers, width = 32, 8
    solver = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=INJECT)

    def loss_fn(graphdef, params, y, solver, adjoint_solver):
        solution = nnx.merge(graphdef, params).solve(
            y, solver=solver, adjoint_solver=adjoint_solver
        )
        none = jnp.int32(0)
        return jnp.mean(solution.y1**2), train.Info(none, solution.stats, solution.result)

    comm = mesh(8)
    with jax.numpy_dtype_promotion("standard"):
        make = lambda rngs: nn.DenseResidual(width, rngs=rngs)  # noqa: E731
        trunk = nn.LayerParallel(make, layers, comm=comm, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(trunk)
        optimizer = optax.adam(0.1)
        state = train.init_state(nnx.to_pure_dict(params), optimizer)
        step_fn = train.make_train_step(functools.partial(loss_fn, graphdef), optimizer)
        before = bytes_of_each(state, comm)
        after, _ = step_fn(state, jnp.ones((3, width), jnp.float32), solver, None)
    numbers = layers * (width * width + width)
    for held in (before, bytes_of_each(after, comm)):
        assert held == {3 * 4 * numbers // 8}  # parameters and both moments, float32
    assert all(x.is_deleted() for x in jax.tree.leaves(state.opt_state))  # donated


def test_bad_meshes():
    params, y0 = dense_params(8, 4), dense_state(3, 4)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    comm = lp_jax.MeshComm(mesh, "a")
    in_shards = {"in_specs": (PartitionSpec("a"), PartitionSpec()), "out_specs": PartitionSpec()}
    whole, split = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(None, "a"))
    )

    def solve(params=params, y0=y0, comm=comm):
        return lp_jax.solve(dense_step, params, y0, comm=comm).y1

    def within(y, layer):
        return y + layer.dt * solve(y0=y)

    refused = {
        r"itself spread over the axis 'a', by a solve within": lambda: lp_jax.solve(
            within, jnp.ones(4), y0, comm=comm
        ),
        r"no axis 'layers'; its axes are \('a', 'b'\)": lambda: lp_jax.MeshComm(mesh),
        "must be a jax": lambda: lp_jax.MeshComm(jax.devices()),
        "sequential": lambda: lp_jax.MeshComm(mesh, "a", sequential="both"),
        r"y0 and shared.*sharded over the axis 'a'": lambda: solve(y0=jax.device_put(y0, split)),
        r"params and data.*sharded over the axis 'a'": lambda: solve(
            jax.device_put(params, (split, whole))
        ),
        "inside a shard_map over the same axis": lambda: jax.shard_map(
            solve, mesh=mesh, **in_shards
        )(params, y0),
        "mesh has no axis 'layers'": lambda: solve(comm=mesh),
        r"comm must be None .*, MeshComm.* or MPIComm": lambda: solve(comm="mesh"),
    }
    for message, call in refused.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_a_device_without_layers_does_not_disturb_a_learned_slope():
    """Of 5 layers on 4 devices the last one holds none; the sum of the adjoint passes it first."""
    solver = lp_jax.Secant(sweeps=4)

    def run(comm):
        solution, pullback = lp_jax.solve_vjp(
            lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y),
            jnp.linspace(-2.5, -1.0, 5),
            jnp.ones(()),
            solver=solver,
            comm=comm,
        )
        gradients, stats = pullback(jnp.ones(()))
        return gradients.params, (gradients.y0, solution.stats, stats)

    assert_same(run(mesh(4)), run(None))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in set_mesh"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "with a counter"])
def test_a_scan_takes_layers_that_lie_on_their_devices(counted, kind, inside):
    """JAX's scan refuses to scan over an axis that is spread by its type, so the truth is that of arrays on one device."""
    layers = jax.make_mesh((4, 2), ("layers", "data"), axis_types=(kind,) * 2)
    weights = jnp.linspace(0.5, 1.0, 8)
    spread = jax.device_put(weights, NamedSharding(layers, PartitionSpec("layers")))

    def loss(scan, weights):
        def body(carry, w):
            count, y = carry
            scale = 0.1 * (1 + count) if counted else 0.1
            return (count + 1 if counted else None, y + scale * jnp.tanh(w * y)), jnp.sum(y)

        start = 0 if counted else None, jnp.asarray([1.0, -0.5])
        (_, last), sums = scan(body, start, weights)
        return jnp.sum(last) + jnp.sum(sums)

    def gradient(sweeps):
        scan = functools.partial(lp_jax.scan, solver=lp_jax.Picard(sweeps=sweeps), comm=layers)
        return jax.jit(jax.grad(functools.partial(loss, scan)))(spread)

    wanted = jax.grad(functools.partial(loss, jax.lax.scan))(weights)
    with jax.set_mesh(layers) if inside else contextlib.nullcontext():
        once, exact, again = map(jax.device_get, map(gradient, (1, 8, 8)))
    if counted:  # some entries are small differences of large numbers
        assert relative_error(exact, wanted) < 1e-14
    else:
        np.testing.assert_allclose(exact, wanted, rtol=1e-14)  # rounding of eight layers
    np.testing.assert_array_equal(exact, again)
    assert np.abs(once - wanted).max() > 1e-3


PADDED = {
    "Picard": lp_jax.Picard(sweeps=13),
    "Picard, in chunks": lp_jax.Picard(sweeps=13, at_once=2),
    "MGRIT": lp_jax.MGRIT(coarsening=2, iterations=8, coarse_step=lp_jax.Identity()),
    "Newton": lp_jax.Newton(iterations=13),
    "windows": lp_jax.Windowed(sweeps=13, windows=2),
    "Serial": lp_jax.Serial(),
    "Serial, checkpointed": lp_jax.Serial(checkpoint_every=3),
}


@pytest.mark.parametrize("devices", [None, (4,), (8,), (2, 2)])
@pytest.mark.parametrize("name", PADDED)
def test_padding_needs_no_derivative(name, devices):
    """The scan never evaluates the root at 0, where it has none. Early iterates are 0, and so is what follows the last layer."""
    begins, ends = jnp.zeros(13).at[0].set(1.0), jnp.zeros(13).at[-1].set(1.0)
    # The last layer is u -> -1 whatever enters, and |-1 + 1| enters the root in padding.
    layers = {"inner": begins + ends, "outer": ends, "scale": 1 - ends}

    def loss(scan, weight, layers, y0):
        def body(y, layer):
            root = jnp.sqrt(jnp.abs(y + layer["inner"]))
            y = layer["scale"] * weight * root - layer["outer"]
            return y, jnp.sin(weight * y)

        last, seen = scan(body, y0, layers)
        return jnp.sum(last) + jnp.sum(seen)

    def gradient(scan):
        return jax.jit(jax.grad(functools.partial(loss, scan), argnums=(0, 1, 2)))

    def gradient_by(solver):
        return gradient(functools.partial(lp_jax.scan, solver=solver, comm=comm))(*operands)

    # The first axis has the layers, and only the mesh of two axes is also that of the context.
    comm = devices and jax.make_mesh(devices, ("layers", "data")[: len(devices)])
    operands = jnp.asarray(0.9), layers, jnp.zeros(2)
    wanted = gradient(jax.lax.scan)(*operands)
    with jax.set_mesh(comm) if devices == (2, 2) else contextlib.nullcontext():
        got, again, once = map(
            jax.device_get,
            map(gradient_by, (PADDED[name], PADDED[name], lp_jax.Picard(sweeps=1))),
        )
    # Gradients of up to 40 are sums over 13 layers, rounded in another order than the scan's.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-14, atol=1e-14)
    jax.tree.map(close, got, wanted)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    assert not np.allclose(once[0], wanted[0], rtol=1e-3)  # a root at 0 was evaluated
