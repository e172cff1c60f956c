"""Checks of the arguments of `solve` when a program is traced, and the times of the layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from lp_jax._arrays import _check
from lp_jax._arrays._types import CPoints, PyTree, Stacked, State, Step, Times
from lp_jax._choice._fastest import Fastest
from lp_jax._comms._comm import Comm, OneDevice
from lp_jax._comms._mesh import MeshComm
from lp_jax._programs._asked import asked
from lp_jax._solvers._solver import Solver


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The fields of a `Problem`, which says what they are, and their checks."""

    step: Step
    params: Stacked
    y0: State
    _: dataclasses.KW_ONLY
    shared: PyTree = None
    data: Stacked = None
    t0: Times = 0.0
    t1: Times = 1.0
    comm: Comm = None  # type: ignore[assignment]
    has_aux: bool = False
    steps: dataclasses.InitVar[int | None] = None

    def __post_init__(self, steps: int | None) -> None:
        if not callable(self.step):
            raise TypeError(f"step must be a function step(y, layer) -> y_next; got {self.step!r}.")
        # The class is frozen, so its fields are converted to arrays by the base method.
        object.__setattr__(self, "y0", state(self.y0))
        object.__setattr__(self, "comm", comm(self.comm))
        for name in ("params", "shared", "data"):
            object.__setattr__(self, name, arrays(getattr(self, name), name))
        if steps is not None and not jax.tree.leaves((self.params, self.data)):
            # A network without own parameters needs some stacked array; the numbers of its layers serve as `data`.
            numbers = jnp.arange(_check.integer("steps", steps, least=1), dtype=jnp.int32)
            object.__setattr__(self, "data", numbers)
        # A rank of an MPI job may hold no layers; one device may not.
        found = number_of_layers(self.params, self.data, one_worker=self.comm == OneDevice())
        if steps not in (None, found):
            raise ValueError(
                f"steps={steps}, and params and data have {found} layers; leave steps out."
            )

    @property
    def layers(self) -> int:
        """Number of layers that were passed: all layers; with `MPIComm`, those of this rank."""
        return int(jax.tree.leaves((self.params, self.data))[0].shape[0])


def state(y0: State) -> State:
    """Return ``y0`` as arrays; refuse leaves that are not floating point or complex."""
    leaves = jax.tree.leaves_with_path(y0)
    if not leaves:
        raise ValueError("y0 has no arrays in it; pass the state that enters the first layer.")
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"y0{jax.tree_util.keystr(path)} has dtype {dtype}; the state must be floating "
                f"point or complex. Cast it, "
                "or pass what does not change from layer to layer as `shared`."
            )
    return arrays(y0)


def arrays(tree: PyTree, name: str = "y0") -> PyTree:
    """Return the leaves as arrays; shape structs stay."""

    def leaf(path: jax.tree_util.KeyPath, x: Any) -> jax.Array | jax.ShapeDtypeStruct:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if callable(x) or isinstance(x, str):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is {x!r}, not an array. Take functions and "
                f"names out of the tree, with "
                "equinox.partition(module, equinox.is_array) or flax.nnx.split(module), and let "
                "the step close over them."
            )
        return jnp.asarray(x)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def note_on_call(step: Callable[..., PyTree], u: State, params: PyTree) -> str:
    """Make a note for an error in the step: its arguments, and mistakes that explain some errors."""
    name = getattr(step, "__name__", type(step).__name__)
    note = (
        f"lp_jax called {name}(y, layer), the state first, with y: {describe(u)} and layer.params, "
        f"one layer's slice: {describe(params)}."
    )
    if isinstance(params, jax.Array):
        note += " Where the array is meant, write layer.params, not layer."
    return note + _unstacked(params)


def _unstacked(params: PyTree) -> str:
    if (
        not isinstance(params, list)
        or len(params) < 2
        or not all(alike(params[0], other) for other in params[1:])
    ):
        return ""
    return (
        f" params is a list of {len(params)} equal trees. If these are the layers, stack them: "
        f"params = jax.tree.map("
        "lambda *leaves: jnp.stack(leaves), *params)."
    )


def alike(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have equal structures and shapes."""
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (a, b)]
    return _same_structure(a, b) and shapes[0] == shapes[1]


def number_of_layers(params: PyTree, data: PyTree, *, one_worker: bool = True) -> int:
    """The common leading length of all leaves of ``params`` and ``data``; 0 is refused on ``one_worker``."""
    lengths = {}
    for name, tree in (("params", params), ("data", data)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            where = name + jax.tree_util.keystr(path)
            if jnp.ndim(leaf) == 0:
                raise ValueError(
                    f"{where} is a scalar; every leaf of {name} must be stacked along a leading "
                    f"axis of length N, the "
                    "number of layers. Pass what all layers share as `shared`."
                )
            lengths[where] = jnp.shape(leaf)[0]
    if not lengths:
        raise ValueError(
            "params and data have no arrays in them, so the number of layers is unknown; stack "
            "each layer's parameters (or inputs) along a leading axis. For a network without "
            "either, pass its number of layers, steps=N."
        )
    if len(set(lengths.values())) > 1:
        different = ", ".join(f"{where}: {n}" for where, n in lengths.items())
        raise ValueError(
            f"params (and data) must have one leading length, the number of layers; got "
            f"{different}. Pass what all layers share as `shared`.{_unstacked(params)}"
        )
    where, n = next(iter(lengths.items()))
    if n == 0 and one_worker:
        raise ValueError(f"{where} has leading length 0; a network needs at least one layer.")
    return n


def times(t0: Any, t1: Any, steps: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return the start and the length of every layer, ``(steps,)`` each."""
    for name, value in (("t0", t0), ("t1", t1)):
        if isinstance(value, str) or value is None:
            raise TypeError(
                f"{name} must be a number{', or an array of times' * (name == 't1')}; got "
                f"{value!r}."
            )
    if jnp.ndim(t0) != 0:
        raise ValueError(
            f"t0 must be a scalar; got shape {jnp.shape(t0)}. A grid of times is passed as t1."
        )
    if isinstance(t1, list | tuple):
        t1 = np.asarray(t1)
    even = jnp.ndim(t1) == 0
    if not even and jnp.shape(t1) != (steps + 1,):
        raise ValueError(
            f"t1 must be a scalar, or the {steps + 1} times at which the {steps} layers start and "
            f"the last one ends; got shape {jnp.shape(t1)}."
        )
    traced = isinstance(t1, jax.core.Tracer) or (even and isinstance(t0, jax.core.Tracer))
    # numbers are computed in double precision, and rounded once
    numpy: Any = jnp if traced else np
    kind = dtype if traced else np.float64
    first, last = numpy.asarray(t0, kind), numpy.asarray(t1, kind)
    # Layers are equally long, or cut the given grid of times.
    length = (last - first) / steps if even else numpy.diff(last)
    if not traced and not np.all((length > 0) & np.isfinite(length)):
        # `n` is the first layer whose length is not positive.
        n = int(np.argmin(length > 0))
        raise ValueError(
            f"t1 must be finite and later than t0; got t0={first}, t1={last}."
            if even
            else f"t1 must be strictly increasing; got t1[{n}]={last[n]}, "
            f"t1[{n + 1}]={last[n + 1]}."
        )
    fractions = numpy.asarray(np.arange(steps) / steps, kind)
    t = first + (last - first) * fractions if even else last[:-1]
    dt = jnp.full((steps,), length, dtype) if even else jnp.asarray(length, dtype)
    return jnp.asarray(t, dtype), dt


def comm(value: object) -> Comm:
    """Return where the layers live: one device for None, or the row of a pipeline; for a mesh, its axis "layers"."""
    if value is None or value == OneDevice():
        return OneDevice() if asked.value.piping is None else asked.value.piping.comm
    if isinstance(value, Mesh):
        return MeshComm(value)
    if not isinstance(value, Comm):
        raise TypeError(
            "comm must be None (one device), a mesh, MeshComm(mesh, axis=...) or MPIComm(comm); "
            "got "
            f"{value!r} ({type(value).__name__})."
        )
    return value


def step_output(out: PyTree, u: State, has_aux: bool) -> None:
    """Refuse an output of the step without the state's structure, shapes and dtypes."""
    pair = isinstance(out, tuple) and len(out) == 2
    if has_aux and not pair:
        raise TypeError(
            f"step must return (y_next, aux) with has_aux=True; got {describe(out)}. Return a "
            f"pair, or leave has_aux out."
        )
    # A pair whose first entry looks like the state is likely a step with aux whose has_aux was forgotten.
    out, forgotten = (out[0], False) if has_aux else (out, pair and _same_structure(out[0], u))
    if not _same_structure(u, out):
        hint = " It looks like (y_next, aux): pass has_aux=True." * forgotten
        raise TypeError(
            f"step must return a state like the one it got, {describe(u)}; got "
            f"{describe(out)}.{hint}"
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(u), jax.tree.leaves(out), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"step must return a state of the same shapes and dtypes as the one it got; leaf "
                f"y{jax.tree_util.keystr(path)} went in as {_aval(a)} and came out as {_aval(b)}. "
                f"Cast or reshape it inside. Put a layer that changes the "
                "state's shape between two solves."
            )


def trajectory(name: str, value: CPoints, y0: State, intervals: int) -> CPoints:
    """Return C-points with leaves ``(intervals, ...)``; refuse all else."""
    # Structures, shapes and dtypes are compared in one go, as trees of shape structs.
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct((intervals, *x.shape), x.dtype), y0)
    got = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)
    if not _same_structure(wanted, got) or jax.tree.leaves(wanted) != jax.tree.leaves(got):
        raise ValueError(
            f"{name} must have one state for each interval of the finest level, "
            f"{describe(wanted)}, like Solution.trajectory of a solve with the same coarsening and "
            f"batch; got {describe(got)}."
        )
    return jax.tree.map(jnp.asarray, value)


def _same_structure(a: PyTree, b: PyTree) -> bool:
    return bool(jax.tree.structure(a) == jax.tree.structure(b))  # type: ignore[operator]


def _aval(x: ArrayLike) -> str:
    return f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]"


def describe(tree: PyTree) -> str:
    """Dtypes and shapes of a tree, as text."""
    return str(jax.tree.map(_aval, tree)).replace("'", "")


def at_once(solver: Solver, layers: int) -> None:
    """Refuse more layers at once than there are."""
    if isinstance(solver.at_once, int) and solver.at_once > layers:
        raise ValueError(
            f"{type(solver).__name__}(at_once={solver.at_once}) got {layers} layers. Set at most "
            f"{layers}, math.inf for all "
            'layers whatever their number, or "auto".'
        )


def solvers(solver: Any, adjoint_solver: Any = None, *, optional: bool = False) -> None:
    """Refuse values that are not solvers. ``solver`` may be None if it is ``optional``, and ``adjoint_solver`` always.

    The default chooses both solvers, so that it is no adjoint solver of another one.
    """
    for name, value in (("solver", solver), ("adjoint_solver", adjoint_solver)):
        missing = value is None and (optional or name == "adjoint_solver")
        if not (missing or isinstance(value, Solver)):
            hint = " Call it: MGRIT(), not MGRIT." if isinstance(value, type) else ""
            raise TypeError(
                f"{name} must be a solver, like MGRIT(...), Picard(...), Newton(...) or Serial(); "
                f"got {value!r}.{hint}"
            )
    if adjoint_solver and adjoint_solver.chooses and adjoint_solver != (solver or Fastest()):
        raise ValueError(
            f"adjoint_solver={adjoint_solver!r} chooses the forward solver, too. Give "
            f"solver={adjoint_solver!r} and no "
            "adjoint_solver; or name a solver of the adjoint system, like Picard(...)."
        )


def pair(solver: Solver, adjoint_solver: Solver | None) -> tuple[Solver, Solver]:
    """Return both solvers; that of the adjoint system, which is linear, has a default. Refuse others."""
    solvers(solver, adjoint_solver)
    return solver, adjoint_solver or solver.for_adjoint()
