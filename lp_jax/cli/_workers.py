"""``--devices`` and ``--mesh``: the devices of the layers and of the examples of a batch."""

import argparse
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lp_jax import MeshComm, MPIComm, Solver, layer_slices
from lp_jax._arrays._types import PyTree
from lp_jax._levels._result import ranked
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._launch import mesh_sizes, set_cpu_devices, unchanged
from lp_jax.cli._models import Pair
from lp_jax.cli._problems import Settings
from lp_jax.train import Info, Ranks
from lp_jax.train._types import Batch, Loss, LossFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The devices of the layers and of the examples of a batch. The default is a single device."""

    comm: MeshComm | MPIComm | None = None  # devices of the solves
    ranks: Ranks | None = None  # MPI ranks that hold the layers, if any
    devices: int = 1  # number of devices
    about: str = ""  # a line on them
    # from arrays of one worker to arrays on all workers
    everywhere: Callable[[PyTree], PyTree] = unchanged
    share: Callable[[PyTree], PyTree] = unchanged  # spreads a batch over the workers
    # from the loss of a share to that of a whole batch
    loss: Callable[[LossFn], LossFn] = unchanged


ONE_DEVICE = Place()


def devices(comm: MeshComm) -> Place:
    """Return the devices of a mesh, of one process or of several."""
    mesh = comm.mesh
    processes = jax.process_count()
    about = f"devices: {', '.join(f'{name} {n}' for name, n in mesh.shape.items())}"
    about += f", in {processes} processes" if processes > 1 else ""
    parts = set(mesh.devices.flat) & set(jax.local_devices(backend="cpu"))
    cores = len(os.sched_getaffinity(0))
    if len(parts) > cores:
        about += (
            f"; {len(parts)} of them share {cores} cores: times say nothing of as many processors"
        )

    place = Place(
        comm=comm, devices=mesh.size, about=about, everywhere=functools.partial(_replicated, mesh)
    )
    if "data" not in mesh.axis_names:
        return place
    return dataclasses.replace(
        place, share=lambda b: jax.tree.map(lambda x: _put(x, mesh, PartitionSpec("data")), b)
    )


def copies(comm: MeshComm) -> Place:
    """Return the devices of a mesh, each with all layers and its examples; gradients are summed once per step."""
    specs = (PartitionSpec(), PartitionSpec(comm.axis))

    def loss(loss_fn: LossFn) -> LossFn:
        def whole(params: PyTree, batch: Batch, *solvers: Solver | None) -> Loss:
            @functools.partial(
                jax.shard_map, mesh=comm.mesh, in_specs=specs, out_specs=PartitionSpec()
            )
            def share(params: PyTree, batch: Batch) -> Loss:
                own = jax.tree.map(lambda x: jax.lax.pcast(x, comm.axis, to="varying"), params)
                loss, info = loss_fn(own, batch, *solvers)
                loss, scale = jax.lax.pmean((loss, info.scale), comm.axis)
                correct, total = jax.lax.psum((info.correct, info.total), comm.axis)
                result = ranked(jax.lax.pmax(ranked(info.result), comm.axis))
                return loss, Info(total, info.stats._replace(result=result), result, correct, scale)

            return share(params, batch)

        return whole

    return Place(
        devices=comm.mesh.size, everywhere=functools.partial(_replicated, comm.mesh), loss=loss
    )


def rank_grid(ranks: Ranks) -> Place:
    """Return the ranks of an MPI job."""
    return Place(
        comm=ranks.layers,
        ranks=ranks,
        devices=ranks.layers.size * ranks.data.size,
        about=f"MPI ranks: layers {ranks.layers.size}, data {ranks.data.size}",
        share=ranks.local_batch,
        loss=ranks.loss,
    )


def _replicated(mesh: Mesh, tree: PyTree) -> PyTree:
    there = set(mesh.devices.flat)
    return jax.tree.map(
        lambda x: x if x.sharding.device_set == there else _put(x, mesh, PartitionSpec()), tree
    )


def _put(x: jax.Array | np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)  # which every process has
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def spread(options: argparse.Namespace, settings: Settings) -> dict[str, int]:
    """Return the axes of ``--devices`` or ``--mesh``, if this network fits them. A CPU is cut into as many devices."""
    sizes = mesh_sizes(options)
    batch = settings.training.batch_size
    layers = settings.layers
    if batch % sizes.get("data", 1):
        raise UsageError(
            f"--batch_size {batch} cannot be split evenly over data={sizes['data']}; choose a multiple."
        )
    if sizes.get("layers", 1) > layers:
        raise UsageError(
            f"{layers} layers cannot be spread over layers={sizes['layers']} devices; name fewer."
        )
    if not options.distributed:
        set_cpu_devices(math.prod(sizes.values()))
    return sizes


def workers(
    options: argparse.Namespace,
    sizes: Mapping[str, int],
    layers: int,
    processes: int,
    solvers: Pair,
) -> Place:
    """Return the place of a run by its options."""
    if options.mpi:
        copies = sizes.get("data", 1)
        rows = sizes.get("layers", max(1, processes // copies))
        if rows * copies != processes:
            raise CommandError(
                f"layers={rows} x data={copies} makes {rows * copies} ranks and mpirun started {processes}; "
                "with --mpi, --devices and --mesh must name all of them, or be left out."
            )
        busy = sum(run.stop > run.start for run in layer_slices(layers, rows, *solvers))
        if busy < rows:
            raise CommandError(
                f"{layers} layers can be cut into {busy} runs that cut no interval of this solver, and there are {rows} ranks "
                "for them; start fewer, spread the examples too (--mesh layers=...,data=...), or coarsen less."
            )
        ranks = Ranks.grid(data=copies)
        return rank_grid(
            dataclasses.replace(ranks, layers=dataclasses.replace(ranks.layers, check=True))
        )
    if not options.distributed and math.prod(sizes.values()) == 1:
        return ONE_DEVICE
    there = jax.device_count()
    # without axes, all devices in one row
    sizes = {"layers": 1, **sizes} if sizes else {"layers": there}
    needed = math.prod(sizes.values())
    if there < needed or (processes > 1 and there != needed):
        where = jax.default_backend() + (f", in {processes} processes" if processes > 1 else "")
        raise CommandError(
            f"{needed} devices are needed and there are {there} ({where}); ask for others with --devices or --mesh."
        )
    return devices(mesh_comm(sizes))


def mesh_comm(sizes: Mapping[str, int]) -> MeshComm:
    shape = tuple(sizes.values())
    axis_types = (AxisType.Auto,) * len(sizes)
    return MeshComm(
        jax.make_mesh(shape, tuple(sizes), axis_types, devices=jax.devices()[: math.prod(shape)])
    )
