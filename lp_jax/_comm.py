"""Where the layers live. The one place in which a state may cross from one worker to another.

The layers are spread over a row of workers in contiguous runs. The solver sees its own worker's intervals only and
asks its ``comm`` for what lies beyond them. An engine gives a few primitives (`Workers.neighbour`, `Workers.sum`,
`Workers.broadcast`, `Workers.gather`, `Workers.relay`); all else is written once, on top of them.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _tree
from lp_jax._types import PyTree, State

Compose = Callable[[PyTree, PyTree], PyTree]
"""An associative operation: what comes first, and what follows."""

Run = Callable[[State], tuple[State, Any]]
"""A worker's part of a sequential solve: from the state that enters to its points, and whatever else it returns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers(abc.ABC):
    """A row of workers, seen from one of them. Lists of states are spread over it in contiguous runs.

    Attributes:
        size: number of workers.
        active: number of workers that have layers; they come first.
        padded: whether workers may hold list entries beyond the end of the list. Such an entry is inert: its step is
            the identity, and what enters it is its own state.
        coarsest: how a sequential level is solved: "relay", "gather" or "auto".
    """

    size: int = 1
    active: int = 1
    padded: bool = False
    coarsest: str = "relay"

    @abc.abstractmethod
    def index(self) -> Any:
        """Number of this worker."""

    @abc.abstractmethod
    def neighbour(self, tree: PyTree, by: int) -> PyTree:
        """What the active worker ``by`` places earlier in the row holds (one message); zeros where there is none."""

    @abc.abstractmethod
    def sum(self, tree: PyTree) -> PyTree:
        """Sum over the workers, on each of them."""

    @abc.abstractmethod
    def broadcast(self, tree: PyTree, root: int) -> PyTree:
        """What worker ``root`` holds, on each of them."""

    @abc.abstractmethod
    def gather(self, tree: PyTree, span: int) -> PyTree:
        """The lists of all workers, with an entry for every ``span`` layers, as one list on each of them."""

    @abc.abstractmethod
    def own(self, tree: PyTree, span: int) -> PyTree:
        """This worker's entries of what `gather` gives."""

    @abc.abstractmethod
    def relay(self, run: Run, y0: State, *, reverse: bool) -> tuple[State, Any]:
        """``run`` on one worker after the other, each from the last state of the one before; ``size - 1`` messages."""

    def first(self, reverse: bool) -> int:
        """The worker where a chain begins."""
        return self.active - 1 if reverse else 0

    def end(self, total: int, n: int) -> tuple[Any, int]:
        """Where the last of ``total`` entries is: whether on this worker, and at which of its ``n`` positions."""
        return self.index() == self.active - 1, (total - 1) % n if self.padded else n - 1

    def shift(self, exits: State, y0: State, total: int, *, reverse: bool) -> State:
        """States that enter: ``y0`` for the first of ``total``, its predecessor's exit for every other one.

        Leaves of ``exits`` are ``(n, ...)`` for the n entries of this worker. A reversed chain begins with the last
        one. One message of one state.
        """
        n = _tree.leading(exits)
        if n == 0:
            return exits
        entered = y0
        if self.active > 1:
            edge = jax.tree.map(lambda u: u[0 if reverse else -1], exits)
            received = self.neighbour(edge, -1 if reverse else 1)
            entered = self.first_or(y0, received, reverse=reverse)

        def leaf(first: jax.Array, u: jax.Array) -> jax.Array:
            first = first[None].astype(u.dtype)
            return jnp.concatenate([u[1:], first] if reverse else [first, u[:-1]])

        entries = jax.tree.map(leaf, entered, exits)
        if not self.padded:
            return entries
        if reverse:
            here, at = self.end(total, n)
            entries = _tree.put(entries, select(here, y0, _tree.take(entries, at)), at)
        inside = self.index() * n + jnp.arange(n, dtype=jnp.int32) < total
        return jax.tree.map(lambda e, u: jnp.where(inside.reshape(n, *[1] * (u.ndim - 1)), e, u), entries, exits)

    def first_or(self, y0: State, received: State, *, reverse: bool) -> State:
        """``y0`` on the worker where a chain begins, what was received on every other one."""
        return select(self.index() == self.first(reverse), y0, received)

    def last(self, exits: State, total: int, *, reverse: bool) -> State:
        """The state that leaves the chain of ``total`` entries, on every worker."""
        n = _tree.leading(exits)
        if n:
            edge = _tree.take(exits, 0 if reverse else self.end(total, n)[1])
        else:
            edge = jax.tree.map(lambda u: jnp.zeros(u.shape[1:], u.dtype), exits)
        return self.broadcast(edge, 0 if reverse else self.active - 1)

    def cumsum(self, increments: State, y0: State, *, reverse: bool) -> State:
        """``y0`` plus the sum of all increments up to and including each one."""
        if self.active > 1 and _tree.leading(increments):
            y0 = _tree.add(y0, self.before(_tree.total(increments), reverse=reverse))
        return _tree.cumsum(increments, y0, reverse=reverse)

    def accumulate(self, values: PyTree, compose: Compose, *, reverse: bool) -> PyTree:
        """All values up to and including each one, composed in the order of the chain.

        ``compose(first, second)`` is associative; composing with zeros in front must be what the beginning of the chain
        means.
        """
        out = lax.associative_scan(jax.vmap(compose), values, reverse=reverse)
        if self.active > 1 and _tree.leading(out):
            edge = jax.tree.map(lambda x: x[0 if reverse else -1], out)
            before = self.before(edge, reverse=reverse, compose=compose)
            out = jax.vmap(compose, in_axes=(None, 0))(before, out)
        return out

    def before(self, value: PyTree, *, reverse: bool, compose: Compose = _tree.add) -> PyTree:
        """The values of all workers before this one, composed (added up), in ``1 + ceil(log2(active - 1))`` messages."""
        by = -1 if reverse else 1
        total = self.neighbour(value, by)
        distance = 1
        while distance < self.active - 1:
            total = compose(self.neighbour(total, by * distance), total)
            distance *= 2
        return total

    def cuts(self, total: int, size: int) -> bool:
        """Whether the last of groups of ``size`` among ``total`` entries is to be padded."""
        return not self.padded and total % size > 0

    def gathers(self, operands: PyTree, state: State, total: int, solves: int) -> bool:
        """Whether a sequential level is solved on every worker, from a copy of all its operands.

        Args:
            operands: this worker's, leaves ``(n, ...)``.
            state: one state.
            total: number of steps of the level.
            solves: how often the level is solved.
        """
        if self.size == 1 or self.coarsest != "auto":
            return self.size > 1 and self.coarsest == "gather"
        one = _tree.nbytes(state)
        each = _tree.nbytes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), operands))
        relayed = solves * (self.active - 1) * (_LATENCY + one)
        gathered = total * (each + solves * one) + (solves + 1) * _LATENCY
        return gathered < relayed

    def norm(self, squares: jax.Array) -> jax.Array:
        """2-norm, from every worker's sum of squares."""
        return jnp.sqrt(self.sum(squares))


COARSEST = ("auto", "relay", "gather")

_LATENCY = 100_000
"""Bytes that could be sent in the time that an empty message takes: 10 us at 10 GB/s, assumed for all engines."""


def select(condition: Any, a: PyTree, b: PyTree) -> PyTree:
    """``a`` where the scalar condition holds, else ``b``; decided at once where the condition is known."""
    if isinstance(condition, bool):
        return a if condition else b
    return _tree.where(condition, a, b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Workers):
    """All layers on one device."""

    def index(self) -> int:
        return 0

    def neighbour(self, tree: PyTree, by: int) -> PyTree:
        return _tree.zeros_like(tree)

    def sum(self, tree: PyTree) -> PyTree:
        return tree

    def broadcast(self, tree: PyTree, root: int) -> PyTree:
        return tree

    def gather(self, tree: PyTree, span: int) -> PyTree:
        return tree

    def own(self, tree: PyTree, span: int) -> PyTree:
        return tree

    def relay(self, run: Run, y0: State, *, reverse: bool) -> tuple[State, Any]:
        return run(y0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Which layers a worker holds. Here: all that it is given, as they are.

    Attributes:
        workers: what the solver asks for all that lies on other workers.
        total: number of layers, on all workers.
        steps: number of layers that this worker holds.
    """

    workers: Workers = Local()
    total: int
    steps: int

    def share(self, tree: PyTree) -> PyTree:
        """Of lists over all layers, the part that the caller of `solve` passes."""
        return tree

    def shared(self, x: Any) -> Any:
        """A value that every worker has and uses for its own layers only: its gradient is the sum over the workers."""
        return x

    def pad(self, tree: PyTree, span: int = 1) -> PyTree:
        """Lists with an entry for every ``span`` layers, extended to a length that can be spread."""
        return tree

    def trim(self, tree: PyTree, span: int = 1) -> PyTree:
        """Undo `pad`."""
        return tree

    def valid(self) -> jax.Array | None:
        """Which entries of a padded list of layers are layers; None if all are."""
        return None

    def run(self, body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], lists: PyTree, common: PyTree) -> Any:
        """``body(lists, common) -> (lists, common)`` on every worker, on its part of the lists."""
        return body(lists, common)
