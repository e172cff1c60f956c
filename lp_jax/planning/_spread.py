"""Ways to spread a network over accelerators that need not be here, each compiled with its gradient."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree, State
from lp_jax._choice._fastest import SERIAL, Fastest, Pair
from lp_jax._comms._mesh import MeshComm
from lp_jax._pipeline import pipeline
from lp_jax._problem import Problem
from lp_jax._solvers._solver import Solver
from lp_jax.planning._compiled import Compiled, compiled, mesh_of
from lp_jax.planning._measure import arrays, as_pair, examples_of
from lp_jax.planning._words import align, pair


def spread(problem: Problem, on: Mesh, solvers: Sequence[Solver | Pair]) -> dict[str, Compiled]:
    """Compile a loss and its gradient for each way to spread it over the devices of a mesh.

    The loss is half the sum of squares of the last state. Its examples, along the first axis of the state, are divided where the
    number of devices divides theirs. A pipeline needs that, and no ``data``, which may be of examples, too. In the last ways the
    layers are spread, and the default, a relay and ``solvers`` solve.
    """
    count, given = on.size, arrays(problem)
    found = {}

    def look(way: str, layers: int, parts: int, *solvers: Solver, weights: str = "") -> None:
        """Compile a way on a mesh of ``layers`` times ``parts`` devices.

        Without solvers it is a pipeline; ``weights`` is the axis that divides each weight.
        """
        mesh = mesh_of(on.devices, layers=layers, examples=parts)

        def loss(params: PyTree, y0: State, shared: PyTree, data: PyTree) -> jax.Array:
            comm = MeshComm(mesh) if solvers else None
            here = problem.replace(params=params, y0=y0, shared=shared, data=data, comm=comm)
            solver, adjoint_solver = solvers or (None, None)
            y1 = here.solve(solver=solver, adjoint_solver=adjoint_solver).y1
            return _tree.sum_of_squares(y1) / 2

        def piped(params: PyTree, y0: State, *others: PyTree) -> jax.Array:
            """Return the loss as a pipeline. Microbatches are an inner axis of the examples, which may be spread, too."""
            # Example e is in microbatch e % count, so a spread axis of examples need not be moved.
            several = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), y0)
            run = pipeline(loss, mesh, in_axes=(None, 1, None, None))
            return run(params, several, *others).sum()

        # These are the partitions of params, y0, shared and data. The leading axis of params and data is that of the layers.
        axes = ("layers", weights or None), ("examples",), (), ("layers", "examples")
        shapes = [
            jax.tree.map(functools.partial(_placed, NamedSharding(mesh, PartitionSpec(*own))), tree)
            for tree, own in zip(given.values(), axes, strict=True)
        ]
        gradient = jax.value_and_grad(loss if solvers else piped, argnums=(0, 1, 2), allow_int=True)
        found[way] = compiled(gradient, *shapes, on=mesh)

    look("one device", 1, 1, *SERIAL)
    if count > 1 and examples_of(problem.y0) % count == 0:
        look("examples", 1, count, *SERIAL)
        look("weights", 1, count, *SERIAL, weights="examples")
        if problem.data is None:
            look("layers: pipeline", count, 1)
            # Both ways use all devices, and each row of layers needs a neighbour to send to.
            if count > 2 and count % 2 == 0:
                look("layers and examples: pipeline", count // 2, 2)
    for each in ((Fastest(), Fastest()), SERIAL, *map(as_pair, solvers)):
        look(f"layers: {pair(*each)}", count, 1, *each)
    return found


def _placed(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array with this sharding; an array that the mesh does not divide is on every device instead."""
    try:
        sharding.shard_shape(x.shape)
    except ValueError:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def comparison(ways: Mapping[str, Compiled]) -> list[str]:
    """Return lines that compare compiled programs: memory, messages and work of each device. A + marks unknown loops."""
    rows = [["GiB a device", "", "messages", "MB", "kernels", "million cycles", "spread along"]]
    for name, one in ways.items():
        sent, size = (sum(numbers) for numbers in zip((0, 0), *one.messages.values(), strict=True))
        known = sent, size / 1e6, one.kernels, one.cycles / 1e6
        cells = [f"{number:,.5g}{'+' * (one.unknown_loops > 0)}" for number in known]
        memory = f"{sum(one.memory.values()) / 2**30:.3g}"
        rows.append([memory, "fits" if one.fits else "OUT OF MEMORY", *cells, name])
    return align(rows)
