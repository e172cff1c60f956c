"""Ways to spread a network over accelerators that need not be here, each compiled with its gradient."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lp_jax._arrays import _tree
from lp_jax._choice._fastest import SERIAL, Pair
from lp_jax._comms._mesh import MeshComm
from lp_jax._pipeline import pipeline
from lp_jax._problem import Problem
from lp_jax._solvers._solver import Solver
from lp_jax.planning._compiled import Compiled, compiled, mesh_of
from lp_jax.planning._measure import arrays, as_pair, examples_of
from lp_jax.planning._words import align, pair


class Way(NamedTuple):
    """A loss, and the axes of the mesh that its weights and its examples are spread over, from their first axis on."""

    mesh: Mesh
    loss: Callable[[Any], jax.Array]  # of the problem's arrays, by name
    weights: tuple[str | None, ...] = (None,)  # the first axis is that of the layers
    examples: tuple[str, ...] = ()

    def compiled(self, arrays: Mapping[str, Any]) -> Compiled:
        """Compile the loss with the gradient of all weights."""
        by_layer = self.weights[0], *self.examples
        axes = {"params": self.weights, "data": by_layer, "y0": self.examples, "shared": ()}
        placed = {
            name: jax.tree.map(functools.partial(self._place, axes[name]), tree)
            for name, tree in arrays.items()
        }
        weights = {name: placed.pop(name) for name in ("params", "shared")}
        gradient = jax.value_and_grad(lambda own, rest: self.loss(own | rest), allow_int=True)
        return compiled(gradient, weights, placed, on=self.mesh)

    def _place(self, axes: Sequence[str | None], x: Any) -> jax.ShapeDtypeStruct:
        """Spread an array over the axes of the mesh, if they divide it."""
        sizes = [self.mesh.shape[axis] if axis else 1 for axis in axes]
        fits = not any(length % size for length, size in zip(x.shape, sizes, strict=False))
        spec = PartitionSpec(*axes[: x.ndim]) if fits else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))


def spread(problem: Problem, on: Mesh, solvers: Sequence[Solver | Pair]) -> dict[str, Compiled]:
    """Compile a loss and its gradient for each way to spread it over the devices of a mesh.

    The loss is half the sum of squares of the last state. Its examples, along the first axis of the state, are divided where the
    number of devices divides theirs. In the last ways the layers are spread, and the default, a relay and ``solvers`` solve.
    """
    count, examples, given = on.size, examples_of(problem.y0), arrays(problem)
    one, row = (mesh_of(on.devices, layers=size) for size in (1, count))

    def loss(arrays: Any, *, solvers: Any = SERIAL, comm: MeshComm | None = None) -> jax.Array:
        solver, adjoint_solver = solvers
        over = problem.replace(**arrays, comm=comm)
        y1 = over.solve(solver=solver, adjoint_solver=adjoint_solver).y1
        return _tree.sum_of_squares(y1) / 2

    def piped(mesh: Mesh) -> Callable[[Any], jax.Array]:
        """The loss as a pipeline. Microbatches are an inner axis of the examples, which may be spread, too."""
        own = jax.tree.map(lambda x: x.shape[1:2] == (examples,), given["data"])
        of_data = jax.tree.map(lambda each: 2 if each else None, own)
        axes = {"params": None, "shared": None, "y0": 1, "data": of_data}
        run = pipeline(functools.partial(loss, solvers=(None, None)), mesh, in_axes=(axes,))

        def parts(x: jax.Array, axis: int) -> jax.Array:
            return x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :])

        def whole(arrays: Any) -> jax.Array:
            y0 = jax.tree.map(lambda x: parts(x, 0), arrays["y0"])
            data = jax.tree.map(lambda x, each: parts(x, 1) if each else x, arrays["data"], own)
            return run(arrays | {"y0": y0, "data": data}).sum()

        return whole

    ways = {"one device": Way(one, loss)}
    if examples % count == 0 and count > 1:
        ways |= {
            "examples": Way(row, loss, (None,), ("layers",)),
            "weights": Way(row, loss, (None, "layers"), ("layers",)),
            f"layers: pipeline, {count} microbatches": Way(row, piped(row), ("layers",)),
        }
    if examples % (2 * count) == 0 and count % 4 == 0:
        both = mesh_of(on.devices, layers=count // 2, examples=2)
        name = f"{count // 2} x layers, 2 x examples: pipeline, {count} microbatches"
        ways[name] = Way(both, piped(both), ("layers",), ("examples",))
    by_solvers: dict[str, Any] = {"the default": (None, None), "relay": SERIAL}
    by_solvers |= {pair(*each): each for each in map(as_pair, solvers)}
    for name, each in by_solvers.items():
        solved = functools.partial(loss, solvers=each, comm=MeshComm(row))
        ways[f"layers: {name}"] = Way(row, solved, ("layers",))
    return {name: way.compiled(given) for name, way in ways.items()}


def comparison(ways: Mapping[str, Compiled]) -> list[str]:
    """Lines that compare compiled programs: memory, messages and work of each device. A + marks loops of unknown length."""
    rows = [["GiB a device", "", "messages", "MB", "kernels", "million cycles", "spread along"]]
    for name, one in ways.items():
        memory, cells = f"{sum(one.memory.values()) / 2**30:.3g}", ["OUT OF MEMORY", *"----"]
        if one.fits:
            counts, sizes = ([sent[i] for sent in one.messages.values()] for i in (0, 1))
            megabytes, cycles = sum(sizes) / 1e6, one.cycles / 1e6
            numbers = f"{sum(counts)}", f"{megabytes:.3g}", f"{one.kernels}", f"{cycles:.3g}"
            cells = ["fits", *(number + "+" * bool(one.unknown_loops) for number in numbers)]
        rows.append([memory, *cells, name])
    return align(rows)
