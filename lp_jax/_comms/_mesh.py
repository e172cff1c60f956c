"""Layers over the devices of a mesh, on one host or (with ``jax.distributed``) on many."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._gradient import without_gradient
from lp_jax._arrays._jaxpr import ALONE, opened_axes, varying_axes
from lp_jax._arrays._place import batch_with_place, retyped
from lp_jax._arrays._types import PyTree, Stacked
from lp_jax._comms import _wire
from lp_jax._comms._comm import Comm, Operands, Solve, Unit, common_unit
from lp_jax._comms._workers import SEQUENTIAL, Body, Local, Passed, Turn, Workers


@dataclasses.dataclass(frozen=True)
class MeshComm(Comm):
    """Spread the layers over one axis of a device mesh.

    Every device of the axis holds a contiguous run of layers: their parameters, gradients and states. Neighbours exchange one
    state per relaxation of `MGRIT`; the prefix sum of a sweep of `Picard` takes about log2 of the number of devices. The other
    axes of the mesh stay with the compiler: shard the batch over them as usual.

    Explicit axes, which `jax.make_mesh` gives by default, are automatic within a solve. The types of its
    outputs have a sharding again: ``y1``, and aux of the state's shape, that of ``y0``; other aux is on every device.

    Args:
        mesh: a device mesh, of one host or of all processes of ``jax.distributed``.
        axis: name of its axis that the layers are spread over.
        sequential: how a level is solved step after step: "relay", one device after the other, while the parameters stay
            where they are; "gather", on every device at once, from a copy of the level's parameters; or "auto", whichever
            needs less time by the bytes and the number of messages.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> mesh = jax.make_mesh((2,), ("layers",))
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solution = lp_jax.solve(step, jnp.ones(8), jnp.ones(()), comm=lp_jax.MeshComm(mesh))
        >>> solution.trajectory.shape
        (8,)
    """

    mesh: Mesh
    axis: str = "layers"
    sequential: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh, as jax.make_mesh gives it; got {self.mesh!r}."
            )
        if self.axis not in self.mesh.axis_names:
            raise ValueError(
                f"mesh has no axis {self.axis!r}; its axes are {self.mesh.axis_names}. Name the "
                f"one for the layers: "
                "MeshComm(mesh, axis=...)."
            )
        _check.one_of("sequential", self.sequential, SEQUENTIAL)

    @property
    def size(self) -> int:
        """Number of workers."""
        return int(self.mesh.shape[self.axis])

    @property
    def platform(self) -> str:
        return str(self.mesh.devices.flat[0].platform)

    @property
    def kind(self) -> str:
        return str(self.mesh.devices.flat[0].device_kind)

    @property
    def automatic(self) -> Mesh | AbstractMesh:
        """The mesh with all axes automatic. Inside a `jax.shard_map` over other axes it is the mesh of that context."""
        names, here = self.mesh.axis_names, jax.sharding.get_abstract_mesh()
        # A nested shard_map must name the mesh of its context, which knows that the outer axes are manual.
        if here.manual_axes and here.axis_names == names:
            return here
        return Mesh(self.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))

    def check_step(self, program: core.Jaxpr) -> None:
        if self.axis in opened_axes(program):
            raise ValueError(
                f"the step is itself spread over the axis {self.axis!r}, by a solve within it or "
                f"by jax.shard_map, and comm={self} has the layers on that axis. Give the solve "
                "within the step comm=None."
            )

    def adapt(self, program: Solve, arrays: PyTree, specs: Callable[[], PyTree]) -> Solve:
        explicit, here = self.mesh.explicit_axes, jax.sharding.get_abstract_mesh()
        meshes = here, *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
        # Without explicit axes in any type, the program needs no conversion.
        if not explicit or not any(mesh.explicit_axes for mesh in meshes):
            return program
        # The shardings are flattened, because the cache below needs arguments that can be hashed.
        leaves, structure = jax.tree.flatten(
            jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs())
        )
        automatic = _with_automatic_axes(program, explicit, tuple(leaves), structure)

        def placed(x: jax.Array) -> jax.Array:
            place = jax.typeof(x).sharding
            # Arrays whose type has no mesh get the type of arrays that are on every device of it.
            spec = PartitionSpec() if place.mesh.empty else place.spec
            # Inside of jax.set_mesh, cotangents that JAX computes without jit must come back from the automatic mesh.
            if place.mesh.empty or here == self.mesh.abstract_mesh:
                x = _resharded(x, NamedSharding(self.mesh, spec))
            return x

        return lambda arrays: automatic(jax.tree.map(placed, arrays))

    def place(
        self, layers: int, solvers: Sequence[Unit], operands: Operands, inside: bool = False
    ) -> Workers:
        """Cut the layers into equally long runs of whole intervals. The last runs may have slots beyond the last layer."""
        # Inside of a shard_map every device passes its own layers, so the network is `size` times as long.
        whole = layers * self.size if inside else layers
        unit = common_unit(solvers, whole)
        # All devices hold equally many slots, because one program serves all of them and arrays are split into equal parts.
        held = layers if inside else unit * math.ceil(math.ceil(layers / unit) / self.size)
        # The manual axes of the abstract mesh are those of the shard_map in which Python runs now.
        around = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        if inside and not around:
            raise ValueError(
                f"comm={self} needs a jax.shard_map over {self.axis!r} around the pieces of a "
                f"cycle, in which each device passes "
                "its own layers. Or give the cycle to a solver, MGRIT(cycle=...), which opens one."
            )
        if around and not inside:
            raise ValueError(
                f"comm={self} inside a shard_map over the same axis {self.axis!r}: solve opens one "
                f"of its own. Call it outside, "
                "with the whole stacks."
            )
        if inside and layers % unit:
            raise ValueError(
                f"each device of {self.axis!r} must hold whole intervals of all levels, {unit} "
                f"layers; got {layers} layers. "
                "Change the coarsening, or the number of devices."
            )
        if not inside:
            self._check_arrays(operands)
            # One device needs no shard_map.
            if self.size == 1:
                return Local(layers=layers, held=(layers,))
        # Types say what varies between devices only within a shard_map with check_vma=True, which does not work here.
        if varying_axes(*jax.tree.leaves(operands[:2])):
            raise ValueError(
                "the pieces of a cycle need check_vma=False, and gradients outside of the "
                "shard_map."
                if inside
                else f"comm={self} inside a shard_map that checks what varies between devices "
                "(check_vma=True) does not work. "
                "Spread the batch by its sharding instead of that shard_map; or call it with "
                "check_vma=False, where each device has the gradient of its own share, and average "
                "them (jax.lax.pmean)."
            )
        return OnMesh(
            layers=whole,
            held=(held,) * self.size,
            sequential=self.sequential,
            mesh=self.automatic,
            axis=self.axis,
            opened=inside,
        )

    def init(
        self, make: Callable[[jax.Array], PyTree], keys: jax.Array, solvers: Sequence[Unit] | None
    ) -> PyTree:
        # an array can be split into equal parts only
        spread = PartitionSpec(self.axis) if len(keys) % self.size == 0 else PartitionSpec()
        place, impl = NamedSharding(self.automatic, spread), jax.random.key_impl(keys)
        # Under jit with `out_shardings` each device makes only its own layers.
        build = jax.jit(
            lambda words: make(jax.random.wrap_key_data(words, impl=impl)), out_shardings=place
        )
        return build(np.asarray(jax.random.key_data(keys)))  # NumPy: of this process

    def spread(self, stacked: Stacked) -> Stacked:
        def leaf(x: jax.Array) -> jax.Array:
            if x.shape[0] % self.size:
                return x
            # Only the axis of the layers is fixed here; the compiler decides on the others.
            others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
            return lax.with_sharding_constraint(
                x, NamedSharding(self.automatic, PartitionSpec(self.axis, *others))
            )

        return jax.tree.map(leaf, stacked)

    def adopt(self, tree: PyTree) -> PyTree:
        devices = set(self.mesh.devices.flat)

        def leaf(x: jax.Array) -> jax.Array:
            # Arrays that are committed to other devices would make jit fail; uncommitted ones move by themselves.
            elsewhere = (
                not isinstance(x, jax.core.Tracer)
                and x.committed
                and x.sharding.device_set != devices
            )
            return (
                jax.device_put(x, NamedSharding(self.automatic, PartitionSpec()))
                if elsewhere
                else x
            )

        return jax.tree.map(leaf, tree)

    def _check_arrays(self, operands: Operands) -> None:
        """Refuse arrays that already use the axis for something else."""
        kinds = ("params and data", operands.stacked, 1), ("y0 and shared", operands.common, 0)
        for name, tree, first in kinds:
            for path, leaf in jax.tree.leaves_with_path(tree):
                # A tracer has its sharding in its type, a concrete array as an attribute.
                traced = isinstance(leaf, jax.core.Tracer)
                sharding = jax.typeof(leaf).sharding if traced else getattr(leaf, "sharding", None)
                spec = getattr(sharding, "spec", ())
                if self.axis in jax.tree.leaves(tuple(spec)[first:]):
                    where = f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
                    raise ValueError(
                        f"an array of {name} ({where}) is sharded over the axis {self.axis!r}, "
                        f"{spec}, which the layers are spread over. Give it another axis of the "
                        "mesh, or none."
                    )


def _resharded(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Reshard an array, whose type may have no mesh."""
    return _reshard.bind(x, place=place)


def _transposed(
    cotangent: jax.Array, x: ad.UndefinedPrimal, place: NamedSharding
) -> list[jax.Array]:
    """The cotangent: inside of `jax.set_mesh` on its mesh, as JAX has it there, and elsewhere of the type of ``x``."""
    if jax.sharding.get_abstract_mesh() == place.mesh.abstract_mesh:
        return [_resharded(cotangent, place)]
    return [retyped(cotangent, x.aval.sharding)]


# `jax.sharding.reshard` has no transpose to an array whose type has no mesh. This primitive has one.
_reshard = core.Primitive("resharded")
_reshard.def_impl(lambda x, place: jax.device_put(x, place))
_reshard.def_abstract_eval(
    lambda x, place: x.update(sharding=NamedSharding(place.mesh.abstract_mesh, place.spec))
)
mlir.register_lowering(
    _reshard,
    mlir.lower_fun(lambda x, place: jax.sharding.reshard(x, place), multiple_results=False),
)
ad.deflinear2(_reshard, _transposed)
batching.primitive_batchers[_reshard] = functools.partial(batch_with_place, _resharded)


# The cache keeps as many programs as `_program` does.
@functools.lru_cache(maxsize=32)
def _with_automatic_axes(
    program: Solve,
    axes: tuple[str, ...],
    leaves: tuple[NamedSharding, ...],
    structure: jax.tree_util.PyTreeDef,
) -> Solve:
    """Compile ``program`` with explicit axes made automatic, and explicit again in its outputs."""
    shardings = jax.tree.unflatten(structure, leaves)
    return jax.jit(jax.sharding.auto_axes(program, axes=axes, out_sharding=shardings))


@dataclasses.dataclass(frozen=True)
class OnMesh(Workers):
    """The devices along one axis of a mesh, inside a ``shard_map`` over it. Each one holds the same number of slots."""

    mesh: Mesh | AbstractMesh
    axis: str
    opened: bool = False  # whether the caller is in that ``shard_map`` already, with its own layers
    number: jax.Array | None = None  # of this device, within a solve

    def index(self) -> jax.Array:
        return lax.axis_index(self.axis) if self.number is None else self.number

    def solving(self, arrays: PyTree) -> "OnMesh":
        # JAX cannot compile `axis_index` in a solve within a step of another one, but the layers know their numbers.
        return dataclasses.replace(self, number=arrays[0].index[0] // self.held[0])

    @property
    def rows(self) -> tuple[int, int]:
        # Inside of the caller's shard_map, arrays have one device's layers only.
        return (self.held[0],) * 2 if self.opened else super().rows

    def map(self, body: Body) -> Body:
        if self.opened:
            return body
        specs = PartitionSpec(self.axis), PartitionSpec()
        opened = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=specs,
            axis_names={self.axis},
            check_vma=False,
        )
        # In the gradient of a loop around a solve, JAX moves what does not depend on the carry out of the loop. A part of a solve
        # that is moved keeps types of the solve's mesh, and does not compile outside of it.

        def whole(*arrays: PyTree) -> tuple[Stacked, PyTree]:
            if any(map(_tree.explicit, jax.tree.leaves(arrays))):  # only outside of loops
                return opened(*arrays)
            # What depends on a batched array is batched, too. Keys of "rbg", and words of keys, would draw other numbers then.
            kinds = [x.dtype.name for x in jax.tree.leaves(arrays)]
            # `depend` makes all arrays depend on each other, so that JAX cannot take a part of the solve out of a loop.
            some, combine = _tree.partition(arrays, [k not in (*ALONE, "uint32") for k in kinds])
            return opened(*combine(_wire.depend(some, some)))

        return whole

    def shift(self, tree: PyTree, by: int) -> PyTree:
        # `ppermute` gives zeros to devices that no pair names as the destination.
        pairs = [(i, i + by) for i in range(self.active) if 0 <= i + by < self.active]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def sum(self, tree: PyTree) -> PyTree:
        return _sum(tree, self.axis)

    def max(self, tree: PyTree) -> PyTree:
        return _tree.narrow(lax.pmax(_tree.wide(tree), self.axis), tree)  # as for `_sum`

    def gather(self, tree: PyTree, span: int) -> PyTree:
        return lax.all_gather(tree, self.axis, tiled=True)

    def pipeline(self, turn: Turn, entries: Stacked, *, reverse: bool) -> Passed:
        count, by = _tree.leading(entries), -1 if reverse else 1
        place = by * (self.index() - self.first(reverse))  # in the row
        # In turn `now` the device at `place` takes microbatch `now - place`: the last one starts in turn `active - 1`.
        turns = count + self.active - 1
        # All devices evaluate every turn where kernels are launched, as idle devices would wait anyway; and where the mesh has
        # other axes, over which a step may exchange something (halos), as devices of a CPU all wait for such an exchange.
        # Within a comm that wraps this one, the processor is not known.
        wide = self.processor is not None and self.processor.wide
        everyone = wide or self.mesh.size > self.size
        send = functools.partial(self.shift, by=by)

        def body(carry: PyTree, now: jax.Array) -> tuple[PyTree, None]:
            entered, out, total = carry
            number = jnp.clip(now - place, 0, count - 1)
            # A device is idle in the first `place` turns and after its last microbatch; `clip` keeps `number` valid then.
            mine = (now - place == number) & (place >= 0) & (place < self.active)
            # The first device of the row takes microbatches from `entries`, each other one what its neighbour sent last.
            entry = _tree.where(place == 0, _tree.take(entries, number), entered)

            def one(number: jax.Array, carry: PyTree) -> PyTree:
                entry, out, total = carry
                last, kept, added = turn(entry, number)
                new = last, kept
                if everyone:
                    # An idle device evaluates the turn like all others, and keeps what it had.
                    new = _tree.where(mine, new, _tree.take(out, number))
                    added = _tree.where(mine, added, _tree.zeros_like(added))
                return last, _tree.put(out, new, number), _tree.add(total, added)

            if everyone:
                last, out, total = one(number, (entry, out, total))
                return (send(last), out, total), None
            # A loop of one turn or none, of which nothing can be taken out: a conditional would copy its operands, all
            # parameters of the level.
            last, out, total = _tree.fori_loop(
                number, number + mine.astype(jnp.int32), one, (entry, out, total)
            )
            # The last turn needs no message. All devices agree on `now`, so the conditional cannot separate them.
            return (lax.cond(now < turns - 1, send, lambda last: last, last), out, total), None

        first = _tree.at(entries, 0)
        *one, added = jax.eval_shape(turn, first, jnp.int32(0))
        none = _tree.zeros_like((one, added))
        start = first, tuple(_tree.repeat(none[0], count)), none[1]
        (_, out, total), _ = _tree.scan(body, start, jnp.arange(turns, dtype=jnp.int32))
        # The adjoint has a pipeline of its own, so reverse mode through this one is refused, with advice.
        lasts, kept, total = without_gradient((*out, total), _RELAYED)
        return lasts, kept, total


def same_over(x: jax.Array, varying: frozenset[Hashable]) -> jax.Array:
    """Let an array that is equal along further axes of a ``shard_map`` vary over ``varying`` only, as far as its type tells."""
    for axis in sorted(varying_axes(x) - varying, key=str):
        # All devices hold equal numbers, so the sum takes them from the first one; after `psum` the type does not vary over it.
        x = _sum(jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x)), axis)
    return x


def anywhere(flag: jax.Array, workers: Workers) -> jax.Array:
    """Whether a flag is set on any of the devices that steps exchange something with.

    They wait for each other in every evaluation, so all of them take as many turns of a loop as the slowest one.
    """
    axes = workers.exchanged
    return lax.psum(flag.astype(jnp.int32), axes) > 0 if axes else flag


def _sum(tree: PyTree, axis: Hashable) -> PyTree:
    """Sum over an axis, in at least single precision: XLA ends a process on a CPU that sums bfloat16 over one of several axes."""
    return _tree.narrow(lax.psum(_tree.wide(tree), axis), tree)


_RELAYED = (
    "Reverse mode was applied twice to lp_jax.solve over a mesh, or once to a cycle by hand, with "
    "a level that is solved one device after the other. Take forward over reverse (jax.jvp of "
    "jax.grad), MeshComm(sequential='gather') or one device."
)
