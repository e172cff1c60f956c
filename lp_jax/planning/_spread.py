"""Ways to spread a network over accelerators that need not be here, each compiled with its gradient."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree
from lp_jax._choice._fastest import SERIAL, Fastest, Pair
from lp_jax._comms._mesh import MeshComm
from lp_jax._pipeline import pipeline
from lp_jax._problem import Problem
from lp_jax._solvers._solver import Solver
from lp_jax.planning._compiled import Compiled, compiled, mesh_of
from lp_jax.planning._measure import arrays, as_pair, examples_of
from lp_jax.planning._words import align, pair

Loss = Callable[..., jax.Array]
DEFAULT = Fastest(), Fastest()


def spread(problem: Problem, on: Mesh, solvers: Sequence[Solver | Pair]) -> dict[str, Compiled]:
    """Compile a loss and its gradient for each way to spread it over the devices of a mesh.

    The loss is half the sum of squares of the last state. Its examples, along the first axis of the state, are divided where the
    number of devices divides theirs. A pipeline needs that, and no ``data``, which may be of examples, too. In the last ways the
    layers are spread, and the default, a relay and ``solvers`` solve.
    """
    count, given = on.size, arrays(problem)
    one, row = (mesh_of(on.devices, layers=size) for size in (1, count))
    found = {}

    def loss(solvers: Pair, comm: MeshComm | None, *values: PyTree) -> jax.Array:
        here = problem.replace(**dict(zip(given, values, strict=True)), comm=comm)
        solution = here.solve(solver=solvers[0], adjoint_solver=solvers[1])
        return _tree.sum_of_squares(solution.y1) / 2

    def piped(comm: MeshComm, params: PyTree, y0: PyTree, *others: PyTree) -> jax.Array:
        """The loss as a pipeline. Microbatches are an inner axis of the examples, which may be spread, too."""
        parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), y0)
        run = pipeline(functools.partial(loss, DEFAULT, None), comm, in_axes=(None, 1, None, None))
        return run(params, parts, *others).sum()

    def look(way: str, mesh: Mesh, loss: Loss, weights: Sequence[Any], *examples: str) -> None:
        """Compile a loss, with weights and examples spread over axes of the mesh, in the order of their own axes."""
        axes = weights, examples, (), (weights[0], *examples)
        shapes = [
            jax.tree.map(
                lambda x, own=own: _placed(x, NamedSharding(mesh, PartitionSpec(*own))), tree
            )
            for tree, own in zip(given.values(), axes, strict=True)
        ]
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), allow_int=True)
        found[way] = compiled(gradient, *shapes, on=mesh)

    alone = functools.partial(loss, SERIAL, None)
    look("one device", one, alone, [None])
    if count > 1 and examples_of(problem.y0) % count == 0:
        look("examples", row, alone, [None], "layers")
        look("weights", row, alone, [None, "layers"], "layers")
        if problem.data is None:
            both = mesh_of(on.devices, layers=count // 2, examples=2)
            for mesh, examples in ((row, ()), (both, ("examples",))):
                way = f"layers: pipeline over {mesh.shape['layers']}, {count} microbatches"
                look(way, mesh, functools.partial(piped, MeshComm(mesh)), ["layers"], *examples)
    for each in (DEFAULT, SERIAL, *map(as_pair, solvers)):
        solved = functools.partial(loss, each, MeshComm(row))
        look(f"layers: {pair(*each)}", row, solved, ["layers"])
    return found


def _placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that is spread over a mesh, or on every device where the mesh does not divide it."""
    try:
        sharding.shard_shape(x.shape)
    except ValueError:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def comparison(ways: Mapping[str, Compiled]) -> list[str]:
    """Lines that compare compiled programs: memory, messages and work of each device. A + marks loops of unknown length."""
    rows = [["GiB a device", "", "messages", "MB", "kernels", "million cycles", "spread along"]]
    for name, one in ways.items():
        sent, size = (sum(numbers) for numbers in zip((0, 0), *one.messages.values(), strict=True))
        known = sent, size / 1e6, one.kernels, one.cycles / 1e6
        cells = [f"{number:,.5g}{'+' * (one.unknown_loops > 0)}" for number in known]
        memory = f"{sum(one.memory.values()) / 2**30:.3g}"
        rows.append([memory, "fits" if one.fits else "OUT OF MEMORY", *cells, name])
    return align(rows)
