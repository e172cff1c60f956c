"""``--devices`` and ``--mesh``: the devices of the layers and of the examples of a batch."""

import abc
import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lp_jax import MeshComm, MPIComm, layer_slices
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver, Stats
from lp_jax.cli._call import Options
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._launch import DistributedLaunch, Launch, MPILaunch, mesh_sizes, set_cpu_devices
from lp_jax.cli._problem import Settings
from lp_jax.nn import LayerParallel
from lp_jax.train import Checkpoints, Info, LossFn, RankCheckpoints, Ranks
from lp_jax.train._types import Batch


class Place(abc.ABC):
    """The devices of the layers and of the examples of a batch."""

    comm: MeshComm | MPIComm | None = None  # of the solves
    ranks: Ranks | None = None
    devices = 1

    @abc.abstractmethod
    def describe(self) -> str | None:
        """Return a line on this place, or None."""

    def holding(self, model: nnx.Module) -> "Place":
        """Return this place with the paths of the parameters that are spread."""
        return self

    def everywhere(self, tree: PyTree) -> PyTree:
        """Return arrays of one worker on all workers."""
        return tree

    def share(self, batch: PyTree) -> PyTree:
        """Spread a batch over the workers."""
        return batch

    def loss(self, loss_fn: LossFn) -> LossFn:
        """Return the loss of a whole batch, from the loss of a share."""
        return loss_fn

    def size(self, params: PyTree) -> int:
        return sum(np.size(leaf) for leaf in jax.tree.leaves(params))

    def checkpoints(self, folder: Path, config: Mapping[str, object]) -> Checkpoints | RankCheckpoints:
        """Return the checkpoints of a run."""
        return Checkpoints(folder, config=config)


class OneDevice(Place):
    """A single device."""

    def describe(self) -> None:
        return None


class Devices(Place):
    """The devices of a mesh, of one process or of several."""

    def __init__(self, comm: MeshComm) -> None:
        self.comm: MeshComm = comm
        self.devices = comm.mesh.size

    def describe(self) -> str:
        shape = ", ".join(f"{name} {n}" for name, n in self.comm.mesh.shape.items())
        parts = set(self.comm.mesh.devices.flat) & set(jax.local_devices(backend="cpu"))
        cores = len(os.sched_getaffinity(0))
        shared = f"; {len(parts)} of them share {cores} cores: times say nothing of as many processors"
        shared = shared if len(parts) > cores else ""
        return f"devices: {shape}{_of_processes(jax.process_count())}{shared}"

    def everywhere(self, tree: PyTree) -> PyTree:
        return _replicated(tree, self.comm.mesh)

    def share(self, batch: PyTree) -> PyTree:
        if "data" not in self.comm.mesh.axis_names:
            return batch
        return jax.tree.map(lambda x: _put(x, self.comm.mesh, PartitionSpec("data")), batch)


class Copies(Place):
    """The devices of a mesh, each with all layers and its share of the examples; gradients are summed once per step."""

    def __init__(self, comm: MeshComm) -> None:
        self._comm = comm
        self.devices = comm.mesh.size

    def describe(self) -> str:
        return f"devices: data {self.devices}"

    def everywhere(self, tree: PyTree) -> PyTree:
        return _replicated(tree, self._comm.mesh)

    def loss(self, loss_fn: LossFn) -> LossFn:
        return data_parallel(loss_fn, self._comm)


def _replicated(tree: PyTree, mesh: Mesh) -> PyTree:
    devices = set(mesh.devices.flat)
    return jax.tree.map(lambda x: x if x.sharding.device_set == devices else _put(x, mesh, PartitionSpec()), tree)


def _put(x: jax.Array | np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)  # which every process has
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class RankGrid(Place):
    """The ranks of an MPI job."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks: Ranks = ranks
        self.comm: MPIComm = ranks.layers
        self.devices = ranks.layers.size * ranks.data.size

    def holding(self, model: nnx.Module) -> "RankGrid":
        spread = [
            "/".join(map(str, (*path, "layers")))
            for path, part in nnx.iter_modules(model)
            if isinstance(part, LayerParallel) and part.comm is not None and part.weights is None
        ]
        return RankGrid(dataclasses.replace(self.ranks, trunk=tuple(spread)))

    def describe(self) -> str:
        return f"MPI ranks: layers {self.ranks.layers.size}, data {self.ranks.data.size}"

    def share(self, batch: PyTree) -> PyTree:
        return self.ranks.local_batch(batch)

    def loss(self, loss_fn: LossFn) -> LossFn:
        return self.ranks.loss(loss_fn)

    def size(self, params: PyTree) -> int:
        sizes = self.ranks.sums(jax.tree.map(lambda x: np.asarray([x.size], np.int32), params))
        return sum(int(leaf[0]) for leaf in jax.tree.leaves(sizes))

    def checkpoints(self, folder: Path, config: Mapping[str, object]) -> RankCheckpoints:
        return self.ranks.checkpoints(folder, config=config)


def workers(options: Options, settings: Settings, launch: Launch, solvers: tuple[Solver, Solver]) -> Place:
    """Return the place of a run by its options. A CPU is cut into the devices of a mesh."""
    sizes = mesh_sizes(options)
    if settings.training.batch_size % sizes.get("data", 1):
        raise UsageError(
            f"--batch_size {settings.training.batch_size} cannot be split evenly over data={sizes['data']}; choose a multiple."
        )
    if isinstance(launch, MPILaunch):
        return RankGrid(_grid(sizes, launch, settings.layers, solvers))
    needed = math.prod(sizes.values())
    if isinstance(launch, DistributedLaunch):
        return Devices(_mesh(sizes, launch.size))
    return OneDevice() if needed == 1 else Devices(_mesh(sizes, 1))


def _grid(sizes: Mapping[str, int], launch: MPILaunch, layers: int, solvers: tuple[Solver, Solver]) -> Ranks:
    copies = sizes.get("data", 1)
    rows = sizes.get("layers", max(1, launch.size // copies))
    if rows * copies != launch.size:
        raise CommandError(
            f"layers={rows} x data={copies} makes {rows * copies} ranks and mpirun started {launch.size}; "
            "with --mpi, --devices and --mesh must name all of them, or be left out."
        )
    busy = sum(run.stop > run.start for run in layer_slices(layers, rows, *solvers))
    if busy < rows:
        raise CommandError(
            f"{layers} layers can be cut into {busy} runs that cut no interval of this solver, and there are {rows} ranks "
            "for them; start fewer, spread the examples too (--mesh layers=...,data=...), or coarsen less."
        )
    return Ranks.grid(data=copies)


def _mesh(sizes: dict[str, int], processes: int) -> MeshComm:
    """Return the mesh of these axes; without axes, all devices in one row."""
    if processes == 1:
        set_cpu_devices(math.prod(sizes.values()))
    there = jax.device_count()
    sizes = {"layers": 1} | sizes if sizes else {"layers": there}
    needed = math.prod(sizes.values())
    if there < needed or (processes > 1 and there != needed):
        raise CommandError(
            f"{needed} devices are needed and there are {there} ({jax.default_backend()}{_of_processes(processes)}); "
            "ask for others with --devices or --mesh."
        )
    return mesh_comm(sizes)


def mesh_comm(sizes: Mapping[str, int]) -> MeshComm:
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    return MeshComm(mesh)


def data_parallel(loss_fn: LossFn, comm: MeshComm) -> LossFn:
    """Return the loss of a batch whose examples are divided; gradients are summed once per step, not layer by layer."""

    def whole(params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None) -> tuple[jax.Array, Info]:
        shares = functools.partial(
            jax.shard_map,
            mesh=comm.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(comm.axis)),
            out_specs=PartitionSpec(),
        )

        @shares
        def share(params: PyTree, batch: Batch) -> tuple[jax.Array, ...]:
            own = jax.tree.map(lambda x: jax.lax.pcast(x, comm.axis, to="varying"), params)
            loss, info = loss_fn(own, batch, solver, adjoint_solver)
            loss, scale = jax.lax.pmean((loss, info.scale), comm.axis)
            correct, total = jax.lax.psum((info.correct, info.total), comm.axis)
            return loss, correct, total, scale, jax.lax.pmax(info.result, comm.axis)

        loss, correct, total, scale, result = share(params, batch)
        return loss, Info(total, Stats(jnp.int32(0), jnp.zeros(0, jnp.float32), result), result, correct, scale)

    return whole


def _of_processes(count: int) -> str:
    return f", in {count} processes" if count > 1 else ""
