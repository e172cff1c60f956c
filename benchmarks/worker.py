"""A process of the suites ``ranks`` and ``model``: builds what it is told to, and times it when it is asked.

Arguments: kind of the group (jax, devices, ranks or torch) and the port of the suite's own process, which hands over the
key by the environment. A rank that waits for its next order waits for a message, not within MPI, where it would keep a
core busy.
"""

import os
import sys
from multiprocessing.connection import Client
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lp_jax
from benchmarks import calibration
from benchmarks.harness import timed
from benchmarks.networks import NETWORKS, SERIAL, Weights
from benchmarks.settings import SETTINGS
from benchmarks.training import Trainer
from lp_jax import planning


def build(kind: str, row: tuple[str, int, int, int], name: str, quick: bool, convolution: str) -> Any:
    """A contender: something to call, with the gradient of the layers (those that this process holds) and facts."""
    which, width, layers, batch = row
    details = {"size": 8 if quick else 28, "formulation": convolution} if which == "conv" else {}
    network = NETWORKS[which](width, layers, batch, **details)
    if kind == "torch":
        from benchmarks.torch_loop import Loop

        return Loop(network, 1 if "1 thread" in name else 2)
    comm = _comm(kind)
    solvers: Any = SERIAL if name.startswith("Serial") else None
    if comm is not None:
        solvers = SETTINGS[name](layers, comm.size)

    def spread(stack: Any) -> Any:
        if kind == "ranks":
            return jax.tree.map(lambda x: x[lp_jax.layer_slices(layers, comm.size, *solvers)[comm.rank]], stack)
        return jax.device_put(stack, NamedSharding(comm.mesh, PartitionSpec("layers"))) if comm else stack

    def same(tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(comm.mesh, PartitionSpec())) if kind == "devices" else tree

    weights, *examples = jax.tree.map(jnp.array, (network.weights, network.x, network.target))
    held = same(weights.layers) if which == "gru" else spread(weights.layers)
    weights = Weights(same(weights.opening), held, same(weights.closing))
    loss = network.loss(solvers, comm)
    return Trainer(loss, weights, tuple(same(examples)), updates=which != "dense", ahead=kind != "ranks")


def _comm(kind: str) -> Any:
    if kind == "devices":
        return lp_jax.MeshComm(jax.make_mesh((jax.device_count(),), ("layers",), axis_types=(AxisType.Auto,)))
    return lp_jax.MPIComm() if kind == "ranks" else None


def answer(kind: str, order: tuple[Any, ...], built: dict[str, Any], rank: int, meet: Any) -> Any:
    """Do as told."""
    what, name, *details = order
    if what == "build":
        row = details[0]
        built[name] = build(kind, row, name, *details[1:])
        gradient = [np.asarray(x) for x in jax.tree.leaves(built[name].gradient)]
        if row[0] == "gru" and rank > 0:  # the same on every rank
            gradient = [x[:0] for x in gradient]
        return gradient, getattr(built[name], "facts", {})
    if what == "calibrate":
        return calibration.machine(**details[0])
    if what == "gradients":
        built[name] = calibration.gradients(*details)
        return None
    if what == "wires":
        return planning.wires(_comm(kind))
    if kind == "torch":
        built[name].take_threads()
    meet()
    return timed(built[name], details[0])


def main() -> None:
    """Take orders until there are no more."""
    kind, port = sys.argv[1], int(sys.argv[2])
    rank, meet = 0, (lambda: None)
    if kind == "ranks":
        comm = lp_jax.MPIComm().host
        rank, meet = comm.Get_rank(), comm.Barrier
    built: dict[str, Any] = {}
    with Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["LP_JAX_BENCH_KEY"])) as orders:
        orders.send((rank, os.getpid()))
        while (order := orders.recv()) is not None:
            orders.send(answer(kind, order, built, rank, meet))


if __name__ == "__main__":
    main()
