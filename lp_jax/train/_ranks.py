"""Training over MPI ranks: who holds what, and what they tell each other.

On a mesh none of this is needed: there arrays are global, and the compiler sums what is spread.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import MPIComm
from lp_jax._solver import Stats
from lp_jax._types import PyTree
from lp_jax.train._checkpoint import Checkpoints
from lp_jax.train._step import Batch, Info, LossFn, TrainState

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A grid of MPI ranks: along one side the layers are spread, along the other the examples of each batch.

    Ranks ``0 ... layers.size - 1`` of ``world`` hold the layers of one network together, the next ones those of its
    first copy, which sees other examples, and so on; `grid` makes them. What every rank has of the parameters: its
    layers, and all that lies outside the trunk.

    Args:
        world: all ranks.
        layers: those that hold one network together; the ``comm`` of `lp_jax.solve`.
        data: those that hold the same layers.
        trunk: path of the stacked layers within the parameters, or several. An optimizer keeps what belongs to a
            parameter under the same path, within its own state.

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
        ...     info = train.Info(jnp.int32(0), jnp.int32(len(batch)), solution.stats, solution.result)
        ...     return jnp.mean((solution.y1 - 2) ** 2), info
        >>> optimizer = optax.sgd(1.0)
        >>> step_fn = train.make_train_step(ranks.loss(loss_fn), optimizer, whole=ranks.whole)
        >>> state = train.init_state({"trunk": jnp.zeros(8)[mine]}, optimizer)
        >>> state, metrics = step_fn(state, ranks.share(jnp.ones(4)), solver, None)
        >>> float(metrics.loss)
        1.0
    """

    world: MPIComm
    layers: MPIComm
    data: MPIComm
    trunk: str | tuple[str, ...] = "trunk"

    @staticmethod
    def grid(comm: Any = None, *, data: int = 1, trunk: str | tuple[str, ...] = "trunk") -> "Ranks":
        """Arrange the ranks of a communicator; called by all of them.

        Args:
            comm: an mpi4py communicator; None is ``MPI.COMM_WORLD``.
            data: number of copies of the network, each with its share of every batch.
            trunk: as for the class.

        Raises:
            ValueError: if ``data`` does not divide the number of ranks.
        """
        world = MPIComm(comm)
        layers, rest = divmod(world.size, data)
        if rest:
            raise ValueError(
                f"{world.size} ranks cannot be arranged as layers x data with data={data}; it must divide."
            )
        row, column = divmod(world.rank, layers)
        along, across = (MPIComm(world.comm.Split(color, world.rank)) for color in (row, column))
        return Ranks(world, along, across, trunk)

    @property
    def chief(self) -> bool:
        """Whether this is the rank that writes files and shows how it goes."""
        return self.world.rank == 0

    def share(self, batch: Batch) -> Batch:
        """This rank's examples of a batch, leaves ``(batch, ...)``.

        Raises:
            ValueError: for a batch that cannot be split evenly.
        """
        copies, number = self.data.size, self.data.rank

        def leaf(x: Any) -> Any:
            size, rest = divmod(len(x), copies)
            if rest:
                raise ValueError(f"a batch of {len(x)} examples cannot be split evenly over {copies} copies.")
            return x[number * size : (number + 1) * size]

        return jax.tree.map(leaf, batch) if copies > 1 else batch

    def loss(self, loss_fn: LossFn) -> LossFn:
        """The mean of a loss over the shares of a batch: its value, its gradient and its `Info` are the whole batch's.

        Args:
            loss_fn: a mean over the ``info.total`` answers that it is asked for, as for `make_train_step`.
        """
        if self.data.size == 1:
            return loss_fn

        def mean_loss(params: PyTree, batch: Batch, solver: Any, adjoint_solver: Any) -> tuple[jax.Array, Info]:
            loss, info = loss_fn(_transposed_mean(params, self.data), batch, solver, adjoint_solver)
            whole = self._whole_info(jax.lax.stop_gradient(info))
            weight = info.total * self.data.size / whole.total
            return _mean(loss * weight.astype(loss.dtype), self.data), whole

        return mean_loss

    def _whole_info(self, info: Info) -> Info:
        norms, scale = info.stats.residual_norms, jnp.asarray(info.scale)
        correct, total, *squares = self.data.sum((info.correct, info.total, norms**2, scale**2))
        iterations, result = self.data.max((info.stats.iterations, info.result))
        replace = _mean(info.replace, self.data)
        return Info(correct, total, Stats(iterations, jnp.sqrt(squares[0])), result, jnp.sqrt(squares[1]), replace)

    def whole(self, sums: PyTree) -> PyTree:
        """Sums over each parameter, from what each rank has of it: ``whole`` of `make_train_step`."""
        spread = self._of_trunk(sums)
        leaves, structure = jax.tree.flatten(sums)
        summed = iter(self.layers.sum([x for x, mine in zip(leaves, spread, strict=True) if mine]))
        both = [next(summed) if mine else x for x, mine in zip(leaves, spread, strict=True)]
        return jax.tree.unflatten(structure, both)

    def agree(self, signal: int | None) -> int | None:
        """The signal that any rank received: ``agree`` of `fit`."""
        return max(self.world.host.allgather(signal or 0)) or None

    def once(self, f: Callable[[], T]) -> T:
        """``f()`` on the chief; its value, or what it raised, on every rank."""
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.chief:
            try:
                outcome = f(), None
            except Exception as error:
                outcome = None, error
        value, raised = self.world.host.bcast(outcome)
        if raised is not None:
            raise raised
        return value

    def checkpoints(self, folder: str | os.PathLike[str], **options: Any) -> "RankCheckpoints":
        """Checkpoints of the whole network, in files of the chief's; arguments as for `Checkpoints`."""
        return RankCheckpoints(self, folder, **options)

    def gather(self, tree: PyTree) -> PyTree:
        """Parameters, or a whole `TrainState`, as NumPy arrays of all layers, on the chief; None on other ranks."""
        if self.data.rank > 0:
            return None

        def leaf(x: Any, spread: bool) -> Any:
            parts = self.layers.host.gather(np.asarray(x)) if spread else None
            if not self.chief:
                return None
            return np.asarray(x) if parts is None else np.concatenate(parts)

        whole = self._leaf_by_leaf(leaf, tree)
        return whole if self.chief else None

    def scatter(self, whole: PyTree, like: PyTree) -> PyTree:
        """Undo `gather`.

        Args:
            whole: on the chief, what `gather` gave; anything on other ranks.
            like: what this rank is to get, for its structure and its number of layers.
        """
        whole = iter(jax.tree.leaves(whole) if self.chief else ())

        def leaf(x: Any, spread: bool) -> Any:
            all_of_it = np.asarray(next(whole)) if self.chief else None
            if not spread:
                return jnp.asarray(self.world.host.bcast(all_of_it))
            mine = None
            if self.data.rank == 0:
                lengths = self.layers.host.allgather(len(x))
                pieces = np.split(all_of_it, np.cumsum(lengths)[:-1]) if all_of_it is not None else None
                mine = self.layers.host.scatter(pieces)
            return jnp.asarray(self.data.host.bcast(mine))

        return self._leaf_by_leaf(leaf, like)

    def _leaf_by_leaf(self, f: Callable[[Any, bool], Any], tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(f, leaves, self._of_trunk(tree))))

    def _of_trunk(self, tree: PyTree) -> list[bool]:
        """For each leaf of parameters, or of an optimizer's state, whether it is a list of layers."""
        names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree))
        trunks = (self.trunk,) if isinstance(self.trunk, str) else self.trunk
        return [any(f"/{trunk}/" in f"/{name}/" for trunk in trunks) for name in names]


class RankCheckpoints:
    """`Checkpoints` for a training over MPI ranks; `Ranks.checkpoints` makes them.

    A file holds the whole network, as that of a run on one device does; so a run goes on with any number of ranks, on a
    mesh, or on one device. Only the chief touches the folder; its memory must hold the whole state. All ranks call the
    methods together.

    Args:
        ranks: who holds what.
        folder: as for `Checkpoints`, like the options.
    """

    def __init__(self, ranks: Ranks, folder: str | os.PathLike[str], **options: Any):
        self.folder = Path(folder).resolve()
        self._ranks = ranks
        self._files: Any = Checkpoints(folder, **options) if ranks.chief else None  # the chief alone uses it
        self.latest = ranks.once(lambda: self._files.latest)

    def __enter__(self) -> "RankCheckpoints":
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._files is not None:
            self._files.__exit__(*raised)

    def save(self, state: TrainState) -> None:
        """As for `Checkpoints`."""
        step = int(state.step)
        if step == self.latest:
            return
        whole = self._ranks.gather(state)
        self._ranks.once(lambda: self._files.save(whole))
        self.latest = step

    def restore(self, template: TrainState) -> TrainState:
        """As for `Checkpoints`; ``template`` is this rank's part."""
        ranks = self._ranks
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def leaf(x: Any, spread: bool) -> Any:
            length = [sum(ranks.layers.host.allgather(len(x)))] if spread else []
            return jax.ShapeDtypeStruct((*length, *x.shape[len(length) :]), x.dtype, sharding=device)

        wanted = ranks._leaf_by_leaf(leaf, template)
        whole: list[Any] = []
        ranks.once(lambda: whole.append(self._files.restore(wanted)))
        return ranks.scatter(whole[0] if whole else None, template)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _mean(x: jax.Array, ranks: MPIComm) -> jax.Array:
    """Mean over the ranks. Every rank differentiates it on its own, for all: the cotangent is that of one of them."""
    return jax.tree.map(lambda u: u / ranks.size, ranks.sum(x))


_mean.defvjp(lambda x, ranks: (_mean(x, ranks), None), lambda ranks, _, cotangent: (cotangent,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _transposed_mean(tree: PyTree, ranks: MPIComm) -> PyTree:
    """What all ranks have, used by each for its own part of a mean: the gradient is the mean of theirs."""
    return tree


_transposed_mean.defvjp(
    lambda tree, ranks: (tree, None),
    lambda ranks, _, cotangent: (jax.tree.map(lambda u: u / ranks.size, ranks.sum(cotangent)),),
)
