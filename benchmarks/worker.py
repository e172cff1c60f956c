"""A process of the suite ``ranks``: builds what it is told to, and times it when it is asked.

Arguments: kind of the group (jax, devices, ranks or torch) and the port of the suite's own process, which hands over the
key by the environment. A rank that waits for its next order waits for a message, not within MPI, where it would keep a
core busy.
"""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lp_jax
from benchmarks import calibration, dense, gru, resnet
from benchmarks.harness import timed
from benchmarks.propagation import scan, solved
from benchmarks.settings import SETTINGS
from lp_jax import planning

Place = Callable[[Any], Any]


def build(kind: str, row: tuple[str, int, int, int], name: str, quick: bool, convolution: str) -> Any:
    """A contender: something to call, with the gradient of the layers (those that this process holds) and facts."""
    network, width, layers, batch = row
    comm = _comm(kind)
    solvers = (
        SETTINGS[name](layers, comm.size) if comm is not None else gru.SERIAL if name.startswith("Serial") else None
    )
    propagate = scan if solvers is None else solved(*solvers, comm)
    ahead = kind != "ranks"

    def spread(stack: Any) -> Any:
        if kind == "ranks":
            return jax.tree.map(lambda x: x[lp_jax.layer_slices(layers, comm.size, *solvers)[comm.rank]], stack)
        return jax.device_put(stack, NamedSharding(comm.mesh, PartitionSpec("layers"))) if comm else stack

    def same(tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(comm.mesh, PartitionSpec())) if kind == "devices" else tree

    threads = 1 if "1 thread" in name else 2  # of PyTorch
    if network == "dense":
        weights, *states = dense.random_problem(layers, width, batch)
        return dense.Gradient(propagate, (spread(weights), *same(states)), ahead=ahead)
    if network == "gru":
        sequences = gru.Problem.random(width, layers, batch)
        if kind == "torch":
            from benchmarks.torch_loop import GRULoop

            return GRULoop(sequences, threads)
        return gru.trainer(sequences, solvers, comm, same, ahead=ahead)
    problem = resnet.Problem.random(width, layers, size=8 if quick else 28, batch=batch)
    if kind == "torch":
        from benchmarks.torch_loop import ResNetLoop

        return ResNetLoop(problem, threads)

    def place(network: resnet.Network) -> resnet.Network:
        return resnet.Network(same(network.opening), spread(network.layers), same(network.closing))

    return resnet.trainer(propagate, convolution, problem, place, ahead=ahead)


def _comm(kind: str) -> Any:
    if kind == "devices":
        return lp_jax.MeshComm(jax.make_mesh((jax.device_count(),), ("layers",), axis_types=(AxisType.Auto,)))
    return lp_jax.MPIComm() if kind == "ranks" else None


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
            what, name, *details = order
            if what == "build":
                row = details[0]
                built[name] = build(kind, row, name, *details[1:])
                gradient = [np.asarray(x) for x in jax.tree.leaves(built[name].gradient)]
                if row[0] == "gru" and rank > 0:  # the same on every rank
                    gradient = [x[:0] for x in gradient]
                orders.send((gradient, getattr(built[name], "facts", {})))
            elif what == "calibrate":
                orders.send(calibration.machine(**details[0]))
            elif what == "gradients":
                built[name] = calibration.gradients(*details)
                orders.send(None)
            elif what == "wires":
                orders.send(planning.interconnect(_comm(kind)))
            else:
                if kind == "torch":
                    built[name].take_threads()
                meet()
                orders.send(timed(built[name], details[0]))


if __name__ == "__main__":
    main()
