"""What every process of a test runs: a solve over the devices of several processes, against the same on one device.

Then it trains for two steps, and all processes write one checkpoint. Arguments: process, number of processes, devices of each,
port of the coordinator, folder of the checkpoint.
"""

import functools
import sys

import jax

PROCESS, PROCESSES, DEVICES, PORT = map(int, sys.argv[1:5])
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS, heartbeat_timeout_seconds=20)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from problems import INJECT, dense_params, dense_state, dense_step, relative_error  # noqa: E402

import lp_jax  # noqa: E402

mesh = jax.make_mesh((PROCESSES * DEVICES,), ("layers",), axis_types=(AxisType.Auto,))
comm = lp_jax.MeshComm(mesh)
n, width = 32, 6
params, y0 = dense_params(n, width), dense_state(3, width)


def value_and_gradients(params, y0, solver, comm):
    def loss(params, y0):
        solution = lp_jax.solve(dense_step, params, y0, solver=solver, comm=comm)
        return jnp.sum(solution.y1**2), (solution.y1, solution.stats.residual_norms)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, y0)


run = jax.jit(value_and_gradients, static_argnames=("comm",))
spread, same = NamedSharding(mesh, PartitionSpec("layers")), NamedSharding(mesh, PartitionSpec())


def placed(x, sharding):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


solver = lp_jax.MGRIT(coarsening=4, iterations=3, coarse_step=INJECT)
wanted = run(params, y0, solver, None)
got = run(jax.tree.map(lambda x: placed(x, spread), params), placed(y0, same), solver, comm)
got = jax.block_until_ready(got)
(loss, (y1, norms)), (of_params, of_y0) = got
assert all(len(g.addressable_shards) == DEVICES for g in jax.tree.leaves(of_params))
assert {s.data.shape[0] for s in of_params[0].addressable_shards} == {n // (PROCESSES * DEVICES)}
of_params = multihost_utils.process_allgather(of_params, tiled=True)
mine = jax.tree.map(np.asarray, (loss, y1, of_params, of_y0))
theirs = jax.tree.map(np.asarray, (wanted[0][0], wanted[0][1][0], *wanted[1]))
for a, b in zip(mine, theirs, strict=True):
    assert relative_error(a, b) < 1e-12
np.testing.assert_allclose(norms, wanted[0][1][1], rtol=1e-11, atol=1e-14)


def piped_gradient(params, batches, mapped):
    def loss(params, y0):
        return jnp.sum(lp_jax.solve(dense_step, params, y0).y1 ** 2)

    return jax.grad(lambda params: mapped(loss, in_axes=(None, 0))(params, batches).sum())(params)


batches = np.stack([y0, 2 * y0, 3 * y0])
pipeline = functools.partial(lp_jax.pipeline, comm=mesh)
wanted = jax.jit(functools.partial(piped_gradient, mapped=jax.vmap))(params, batches)
got = jax.jit(functools.partial(piped_gradient, mapped=pipeline))(
    jax.tree.map(lambda x: placed(x, spread), params), placed(batches, same)
)
for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert relative_error(multihost_utils.process_allgather(a, tiled=True), b) < 1e-12

# --- training: layers over the devices of a process, examples over the processes ----------------------------------------

import training  # noqa: E402

mesh = jax.make_mesh((PROCESSES, DEVICES), ("data", "layers"), axis_types=(AxisType.Auto,) * 2)
same = NamedSharding(mesh, PartitionSpec())


def everywhere(tree):
    there = set(mesh.devices.flat)
    return jax.tree.map(lambda x: x if x.sharding.device_set == there else placed(x, same), tree)


def agree(signal):
    return int(multihost_utils.process_allgather(np.int32(signal or 0)).max()) or None


examples = NamedSharding(mesh, PartitionSpec("data"))
training.run(
    sys.argv[5],
    epochs=1,
    comm=lp_jax.MeshComm(mesh),
    everywhere=everywhere,
    share=lambda batch: jax.tree.map(lambda x: placed(x, examples), batch),
    agree=agree,
)

multihost_utils.sync_global_devices("done")
print(f"passed in process {PROCESS}", flush=True)
jax.distributed.shutdown()
