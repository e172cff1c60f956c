"""A process of the suites ``ranks``, ``model`` and ``tunnel``: builds what it is told to, and times or calibrates it when asked.

Arguments: kind of the group (jax, devices, ranks or torch) and the port of the suite's own process, which hands over the
key by the environment. A rank that waits for its next order waits for a message, not within MPI, where it would keep a
core busy.
"""

import functools
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import lp_jax
from benchmarks import emulation
from benchmarks.harness import timed
from benchmarks.networks import NETWORKS, SERIAL, SETTINGS, Weights
from benchmarks.training import Trainer
from lp_jax import Problem, Serial, planning
from lp_jax.cli._heap import keep_heap
from lp_jax.planning._calibrate import interconnect

Sizes = tuple[str, int, int, int]
"""Network, width, layers, batch."""


def problem(network: str, width: int, layers: int, batch: int) -> Problem:
    """The layers only, with weights as the suites draw them."""
    drawn = NETWORKS[network](width, layers, batch)
    return Problem(**drawn.problem(*jax.tree.map(jnp.asarray, (drawn.weights, drawn.x))))


def machine(sizes: Sizes) -> planning.Machine:
    """Calibrate in this process, on its first device."""
    return lp_jax.calibrate(problem(*sizes), name=", ".join(map(str, sizes)))


def gradients(sizes: Sizes, devices: int) -> Callable[[], Any]:
    """That of all layers, by serial propagation, on each of so many devices at the same time, in one program."""
    given = problem(*sizes)
    arrays = {name: getattr(given, name) for name in ("params", "y0", "shared", "data")}

    def gradient(arrays: dict[str, Any]) -> Any:
        solution, pullback = given.replace(**arrays).solve_vjp(solver=Serial())
        return pullback(solution.y1)[0]

    if devices == 1:
        return functools.partial(jax.jit(gradient), jax.tree.map(jnp.asarray, arrays))
    mesh = jax.make_mesh((devices,), ("copies",), axis_types=(AxisType.Auto,))

    def own(copies: dict[str, Any]) -> Any:
        return jax.tree.map(lambda x: x[None], gradient(jax.tree.map(lambda x: x[0], copies)))

    spread = jax.shard_map(own, mesh=mesh, in_specs=P("copies"), out_specs=P("copies"))
    copies = jax.tree.map(lambda x: jnp.stack([x] * devices), arrays)
    return functools.partial(
        jax.jit(spread), jax.device_put(copies, NamedSharding(mesh, P("copies")))
    )


def build(
    kind: str, row: tuple[str, int, int, int], name: str, quick: bool, convolution: str
) -> Any:
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
            return jax.tree.map(
                lambda x: x[lp_jax.layer_slices(layers, comm.size, *solvers)[comm.rank]], stack
            )
        return jax.device_put(stack, NamedSharding(comm.mesh, P("layers"))) if comm else stack

    def same(tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(comm.mesh, P())) if kind == "devices" else tree

    weights, *examples = jax.tree.map(jnp.array, (network.weights, network.x, network.target))
    held = same(weights.layers) if which == "gru" else spread(weights.layers)
    weights = Weights(same(weights.opening), held, same(weights.closing))
    loss = network.loss(solvers, comm)
    return Trainer(
        loss, weights, tuple(same(examples)), updates=which != "dense", ahead=kind != "ranks"
    )


def _comm(kind: str) -> Any:
    if kind == "devices":
        return lp_jax.MeshComm(
            jax.make_mesh((jax.device_count(),), ("layers",), axis_types=(AxisType.Auto,))
        )
    return lp_jax.MPIComm() if kind == "ranks" else None


def answer(kind: str, order: tuple[Any, ...], built: dict[str, Any], rank: int, meet: Any) -> Any:
    what, name, *details = order
    if what == "build":
        row = details[0]
        built[name] = build(kind, row, name, *details[1:])
        gradient = [np.asarray(x) for x in jax.tree.leaves(built[name].gradient)]
        if row[0] == "gru" and rank > 0:  # the same on every rank
            gradient = [x[:0] for x in gradient]
        return gradient, getattr(built[name], "facts", {})
    if what == "emulate":
        built[name] = emulated = emulation.build(
            name, emulation.Place(kind, _comm(kind).size), *details
        )
        built[emulation.awake(name)] = emulated.awake
        return emulated.gradient, emulated.facts
    if what == "calibrate":
        return machine(**details[0])
    if what == "gradients":
        built[name] = gradients(*details)
        return None
    if what == "wires":
        return interconnect(_comm(kind), **details[0])
    if kind == "torch":
        built[name].take_threads()
    meet()
    return timed(built[name], details[0])


def main() -> None:
    keep_heap()
    kind, port = sys.argv[1], int(sys.argv[2])
    rank, meet = 0, (lambda: None)
    if kind == "ranks":
        comm = lp_jax.MPIComm().python_comm
        rank, meet = comm.Get_rank(), comm.Barrier
    built: dict[str, Any] = {}
    with Client(
        ("127.0.0.1", port), authkey=bytes.fromhex(os.environ["LP_JAX_BENCH_KEY"])
    ) as orders:
        orders.send((rank, os.getpid()))
        while (order := orders.recv()) is not None:
            orders.send(answer(kind, order, built, rank, meet))


if __name__ == "__main__":
    main()
