"""Training over MPI ranks: the distribution of layers and examples, and the sums over ranks.

A mesh needs none of this: its arrays are global, and the compiler sums over devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import MPIComm, Solver
from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree
from lp_jax._levels._result import ranked
from lp_jax._programs._asked import asked
from lp_jax._programs._results import count_results
from lp_jax.nn._solved import combined_stats
from lp_jax.train._types import Batch, Loss, LossFn

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A grid of MPI ranks: the layers are spread along one side, the examples of each batch along the other.

    Ranks ``0 ... layers.size - 1`` of ``world`` hold the layers of one network, the next ones a copy for other examples, and so
    on. Each rank has the parameters of its layers, and all parameters outside the trunk. `grid` makes such a grid.

    Args:
        world: all ranks.
        layers: the ranks that hold one network; the ``comm`` of `lp_jax.solve`.
        data: the ranks that hold the same layers.
        trunk: path, or paths, of the stacked layers in the parameters, and below it in an optimizer's state.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> ranks, solver = train.Ranks.grid(), lp_jax.MGRIT()
        >>> mine = lp_jax.layer_slices(8, ranks.layers.size, solver)[ranks.layers.rank]
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(
        ...         step, params["trunk"], batch, solver=solver, adjoint_solver=adjoint_solver, comm=ranks.layers
        ...     )
        ...     info = train.Info(jnp.int32(len(batch)), solution.stats, solution.result)
        ...     return jnp.mean((solution.y1 - 2) ** 2), info
        >>> optimizer = optax.sgd(1.0)
        >>> step_fn = train.make_train_step(ranks.loss(loss_fn), optimizer, ranks=ranks)
        >>> state = train.init_state({"trunk": jnp.zeros(8)[mine]}, optimizer)
        >>> state, metrics = step_fn(state, ranks.local_batch(jnp.ones(4)), solver, None)
        >>> float(metrics.loss)
        1.0
    """

    world: MPIComm
    layers: MPIComm
    data: MPIComm
    trunk: str | tuple[str, ...] = "trunk"

    @staticmethod
    def grid(
        comm: object = None, *, data: int = 1, trunk: str | tuple[str, ...] = "trunk"
    ) -> "Ranks":
        """Arrange the ranks of an mpi4py communicator, by default ``MPI.COMM_WORLD``, as a grid. All ranks must call this.

        There are ``data`` copies of the network, a divisor of the number of ranks; each gets an equal part of every batch.
        """
        world = MPIComm(comm)
        layers, rest = divmod(world.size, data)
        if rest:
            raise ValueError(
                f"{world.size} ranks cannot be arranged as layers x data with data={data}; it must "
                f"divide their number."
            )
        # `Split` puts ranks of one colour into one communicator: a row holds one
        # network, a column holds the same layers of all copies.
        row, column = divmod(world.rank, layers)
        along, across = (MPIComm(world.comm.Split(color, world.rank)) for color in (row, column))
        return Ranks(world, along, across, trunk)

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0 of ``world``, which writes files and shows the progress."""
        return self.world.rank == 0

    def local_batch(self, batch: Batch) -> Batch:
        """Return this rank's examples of a batch, leaves ``(batch, ...)``; ValueError if it cannot be split evenly."""
        copies = self.data.size
        number = self.data.rank

        def leaf(x: jax.Array) -> jax.Array:
            size, rest = divmod(len(x), copies)
            if rest:
                raise ValueError(
                    f"a batch of {len(x)} examples cannot be split evenly over {copies} copies."
                )
            return x[number * size : (number + 1) * size]

        return jax.tree.map(leaf, batch) if copies > 1 else batch

    def loss(self, loss_fn: LossFn) -> LossFn:
        """Return the mean of a loss over the ranks' examples; value, gradient and `Info` are those of the whole batch.

        ``loss_fn`` is a mean over ``info.total`` answers, as for `make_train_step`.
        """
        if self.data.size == 1:
            return loss_fn

        def mean_loss(params: PyTree, batch: Batch, *solvers: Solver | None) -> Loss:
            # The counter collects result codes of adjoint solves as cotangents of
            # its counts. They must pass the mean over ranks, too.
            watched = asked.value.counter and asked.value.counter.counts
            params, watched = _transposed_mean((params, watched), self.data)
            own_loss = (
                loss_fn if watched is None else functools.partial(count_results(loss_fn), watched)
            )
            loss, info = own_loss(params, batch, *solvers)
            # The sums below are messages between ranks, and nothing differentiates them.
            info = jax.lax.stop_gradient(info)
            square = jnp.asarray(info.scale) ** 2
            correct, total, outside, square = self.data.sum(
                (info.correct, info.total, jnp.asarray(info.outside), square)
            )
            whole = info._replace(
                correct=correct,
                total=total,
                outside=outside,
                scale=jnp.sqrt(square),
                stats=combined_stats(info.stats, self.data.sum, self.data.max),
                result=ranked(self.data.max(ranked(info.result))),
                replace=_mean(info.replace, self.data),
            )
            # The loss is a mean over the answers of a rank; ranks may have different
            # numbers of answers, because padding does not count.
            weight = info.total * self.data.size / total
            return _mean(loss * weight.astype(loss.dtype), self.data), whole

        return mean_loss

    def sums(self, sums: PyTree) -> PyTree:
        """Sum over all ranks of the layers; ``sums`` has one sum over this rank's layers for each parameter."""
        # Parameters outside the trunk are on every rank, so their sums are complete; only those of layers are added over ranks.
        spread, combine = _tree.partition(sums, self._in_trunk(sums))
        return combine(self.layers.sum(spread))

    def agree(self, signal: int | None) -> int | None:
        """Return the signal that any rank received: ``agree`` of `fit`."""
        return max(self.world.python_comm.allgather(signal or 0)) or None

    def once(self, f: Callable[[], T]) -> T:
        """Call ``f()`` on rank 0 and return its value, or raise its exception, on every rank."""
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_root:
            try:
                outcome = f(), None
            except Exception as error:
                outcome = None, error
        # The exception is sent, too: ranks that waited for a value that never comes would hang.
        value, raised = self.world.python_comm.bcast(outcome)
        if raised is not None:
            raise raised
        return value

    def gather(self, tree: PyTree) -> PyTree:
        """Return parameters, or a `TrainState`, as NumPy arrays of all layers on rank 0; None on other ranks."""
        if self.data.rank > 0:
            return None

        def leaf(x: jax.Array, spread: bool) -> np.ndarray | None:
            runs = self.layers.python_comm.gather(np.asarray(x)) if spread else None
            if not self.is_root:
                return None
            return np.asarray(x) if runs is None else np.concatenate(runs)

        gathered = self._leaf_by_leaf(leaf, tree)
        return gathered if self.is_root else None

    def whole(self, template: PyTree) -> PyTree:
        """Return shapes and dtypes of all layers, for `Checkpoints`; ``template`` has those of this rank's part."""
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def leaf(x: jax.Array, spread: bool) -> jax.ShapeDtypeStruct:
            length = [sum(self.layers.python_comm.allgather(len(x)))] if spread else []
            return jax.ShapeDtypeStruct(
                (*length, *x.shape[len(length) :]), x.dtype, sharding=device
            )

        return self._leaf_by_leaf(leaf, template)

    def scatter(self, gathered: PyTree, like: PyTree) -> PyTree:
        """Return this rank's part of arrays that `gather` returned on rank 0; ``like`` has its structure and number of layers."""
        leaves = iter(jax.tree.leaves(gathered))

        def leaf(x: jax.Array, spread: bool) -> jax.Array:
            part: Any = np.asarray(next(leaves)) if self.is_root else None
            if not spread:
                return jnp.asarray(self.world.python_comm.bcast(part))
            # The first copy of the network gets its layers from rank 0, and each of its
            # ranks sends them to the same place of the other copies.
            if self.data.rank == 0:
                ends = np.cumsum(self.layers.python_comm.allgather(len(x)))
                part = self.layers.python_comm.scatter(
                    None if part is None else np.split(part, ends[:-1])
                )
            return jnp.asarray(self.data.python_comm.bcast(part))

        return self._leaf_by_leaf(leaf, like)

    def _leaf_by_leaf(self, f: Callable[[jax.Array, bool], PyTree], tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(f, leaves, self._in_trunk(tree))))

    def _in_trunk(self, tree: PyTree) -> list[bool]:
        """Return for each leaf of parameters, or of an optimizer's state, whether it is stacked over the trunk's layers."""
        names = (
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(tree)
        )
        trunks = (self.trunk,) if isinstance(self.trunk, str) else self.trunk
        return [
            # Trajectories are stacked over layers or intervals, as the trunk is.
            name.startswith("restart/") or any(f"/{trunk}/" in f"/{name}/" for trunk in trunks)
            for name in names
        ]


def total(ranks: Ranks | None, sums: PyTree) -> jax.Array:
    """Return the sum over all parameters, of all processes, of which each gives the sums over its part."""
    return jax.tree.reduce(jnp.add, sums if ranks is None else ranks.sums(sums))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _mean(x: jax.Array, ranks: MPIComm) -> jax.Array:
    """Return the mean over the ranks. All ranks differentiate the same mean, so the cotangent is passed on unchanged."""
    return jax.tree.map(lambda u: u / ranks.size, ranks.sum(x))


_mean.defvjp(lambda x, ranks: (_mean(x, ranks), None), lambda ranks, _, cotangent: (cotangent,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _transposed_mean(tree: PyTree, ranks: MPIComm) -> PyTree:
    """Return ``tree``, which all ranks hold; its cotangent is the mean of the ranks' cotangents."""
    return tree


_transposed_mean.defvjp(
    lambda tree, ranks: (tree, None), lambda ranks, _, cotangent: (_mean(cotangent, ranks),)
)
