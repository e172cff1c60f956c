"""The workers as a solver sees them: its own intervals, and messages to the other workers."""

import abc
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._types import CPoints, PyTree, Scalar, Stacked, State
from lp_jax._comms import _wire

Compose = Callable[[PyTree, PyTree], PyTree]  # an associative operation ``compose(first, second)``
# The part of a solve on one worker: ``body(stacked, common) -> (stacked, common)``.
Body = Callable[[Stacked, PyTree], tuple[Stacked, PyTree]]

Run = Callable[[State], tuple[CPoints, PyTree]]
"""A worker's part of a sequential solve: ``run(y0)`` returns its points, and a tree of other results."""

Passed = tuple[PyTree, PyTree, PyTree]
"""The state that leaves a worker, results to keep, and others to add up; after a `Turn`, or stacked after all."""

Turn = Callable[[State, jax.Array | int], Passed]
"""A worker's part for one of several microbatches, ``turn(entry, number)``."""

SEQUENTIAL = ("auto", "relay", "gather")


@dataclasses.dataclass(frozen=True)
class Workers(abc.ABC):
    """A row of workers, seen from one of them. Stacked arrays are spread over it in contiguous runs.

    Slots beyond the last layer are inert: their step is the identity, and the state that enters one is its own. Methods with an
    argument ``span`` take arrays with an entry for every ``span`` layers.

    Attributes:
        layers: number of layers of all workers.
        held: number of slots for layers on each worker. Workers without layers come last.
        sequential: how a level is solved step after step: "relay", "gather" or "auto".
        processor: their device, a Processor of `lp_jax._choice`, which solvers ask how many layers to evaluate at once and which
            loops to unroll; None until the step is traced.
        exchanged: axes of the caller's ``shard_map`` over which the step itself exchanges something.
    """

    layers: int
    held: tuple[int, ...]
    sequential: str
    processor: Any = dataclasses.field(default=None, kw_only=True)
    exchanged: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    @abc.abstractmethod
    def index(self) -> int | jax.Array:
        """Return the number of this worker: an int, or traced where one program serves workers with equally many slots."""

    @property
    def rows(self) -> tuple[int, int]:
        """Length of stacked arrays: as the caller of `solve` passes them, and with all slots."""
        return self.layers, sum(self.held)

    def map(self, body: Body) -> Body:
        """Return ``body`` as a function that runs on every worker; override it where one caller stands for all of them."""
        return body

    def solving(self, arrays: PyTree) -> "Workers":
        """Return these workers within a solve of these arrays, the layers first; override it where workers need some of them."""
        return self

    @abc.abstractmethod
    def shift(self, tree: PyTree, by: int) -> PyTree:
        """Return the tree of the worker ``by`` places earlier in the row (one message); zeros where there is none."""

    @abc.abstractmethod
    def sum(self, tree: PyTree) -> PyTree:
        """Return the sum over the workers, on each of them."""

    @abc.abstractmethod
    def max(self, tree: PyTree) -> PyTree:
        """Return the largest number over the workers, element by element, on each of them."""

    @abc.abstractmethod
    def gather(self, tree: PyTree, span: int) -> PyTree:
        """Return the stacked arrays of all workers, on each of them."""

    @abc.abstractmethod
    def pipeline(self, turn: Turn, entries: Stacked, *, reverse: bool) -> Passed:
        """Take microbatches through the workers, one following the other, so that workers work at the same time.

        ``entries``, leaves ``(count, ...)``, enter the first worker. Returns the states that leave this worker and what it
        keeps, leaves ``(count, ...)``, and its sums. With one microbatch, the workers run one after the other.
        """

    def relay(self, run: Run, y0: State, *, reverse: bool) -> tuple[CPoints, PyTree]:
        """Run on one worker after the other, each from the last state of the one before. This takes ``active - 1`` messages."""

        def turn(entry: State, number: jax.Array | int) -> Passed:
            out, at = run(entry), 0 if reverse else -1
            # A worker without intervals passes on the state that entered.
            return jax.tree.map(lambda u, y: u[at] if len(u) else y, out[0], entry), out, None

        _, out, _ = self.pipeline(turn, _tree.at(y0, None), reverse=reverse)
        return _tree.at(out, 0)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.held)

    @property
    def active(self) -> int:
        """Number of workers that hold layers."""
        # Padding may leave the last workers with slots but without layers.
        starts = itertools.accumulate(self.held, initial=0)
        return sum(
            n > 0 and start < self.layers for n, start in zip(self.held, starts, strict=False)
        )

    @property
    def padded(self) -> bool:
        """Whether there are slots beyond the last layer."""
        return sum(self.held) > self.layers

    def fit(self, unit: int) -> "Workers":
        """Return these workers with slots for whole units of layers."""
        return dataclasses.replace(self, held=tuple(-(-n // unit) * unit for n in self.held))

    def pad(self, tree: Stacked, span: int = 1) -> Stacked:
        """Extend arrays as the caller passes them to all slots, by copies of their last entry."""
        return _tree.resize(tree, self.rows[1] // span)

    def trim(self, tree: Stacked, span: int = 1) -> Stacked:
        """Undo `pad`."""
        return _tree.resize(tree, -(-self.rows[0] // span))

    def broadcast(self, tree: PyTree, root: int) -> PyTree:
        """Return the tree of worker ``root``, on each of them. It is a sum, so that each worker waits for all others."""
        # `here` is a Python boolean where each worker traces a program of its own, and an array where one program serves all.
        here = self.index() == root
        if isinstance(here, bool):
            # A rank that adds zeros joins the sum only after its own result is computed; see `_wire.zeros_after`.
            return self.sum(tree if here else _wire.zeros_after(tree))
        return self.sum(_tree.where(here, tree, _tree.zeros_like(tree)))

    def start(self, span: int) -> int | jax.Array:
        """Return the number of this worker's first entry among those of all workers."""
        index = self.index()
        return (
            sum(self.held[:index]) // span
            if isinstance(index, int)
            else index * (self.held[0] // span)
        )

    def local_slice(self, tree: PyTree, span: int) -> PyTree:
        """Return this worker's part of what `gather` returns."""
        index = self.index()
        start, n = self.start(span), self.held[index if isinstance(index, int) else 0] // span
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, n), tree)

    def total(self, span: int) -> int:
        """Number of entries of all workers, without inert ones."""
        return -(-self.layers // span)

    def first(self, reverse: bool) -> int:
        """Return the number of the worker where a chain begins."""
        return self.active - 1 if reverse else 0

    def end(self, span: int, n: int) -> tuple[bool | jax.Array, int]:
        """Return whether the last entry is on this worker, and at which of its ``n`` positions."""
        # All workers before the last active one are full, so this is the position within that one.
        at = self.total(span) - 1 - sum(self.held[: self.active - 1]) // span
        return self.index() == self.active - 1, min(at, n - 1)

    def incoming(self, u: CPoints, y0: State, span: int, *, reverse: bool) -> CPoints:
        """Return the state that enters each entry of this worker: ``y0``, or the predecessor's ``u``. One message."""
        n = _tree.leading(u)
        if n == 0:
            return u
        entered = y0
        if self.active > 1:
            # The neighbour needs only the state that leaves this worker.
            edge = _tree.at(u, 0 if reverse else -1)
            entered = self._first_or(y0, self.shift(edge, -1 if reverse else 1), reverse=reverse)
        # The state that enters an entry is the one that leaves the entry before it.
        states = _tree.push(u, entered, reverse=reverse)
        # Without padding this is all.
        if sum(self.held) // span == self.total(span):
            return states
        if reverse:
            here, at = self.end(span, n)
            # In reverse the chain begins at the last entry that is not padding.
            states = _tree.put(states, select(here, y0, _tree.take(states, at)), at)
        # A padding entry is entered by its own state, so that its residual is zero.
        inside = self.start(span) + jnp.arange(n, dtype=jnp.int32) < self.total(span)
        return _tree.where_rows(inside, states, u)

    def _first_or(self, y0: State, received: State, *, reverse: bool) -> State:
        """``y0`` on the worker where a chain begins, ``received`` on every other one."""
        here = self.index() == self.first(reverse)
        if isinstance(here, bool):  # later operations wait for the message, see `_wire.after`
            return _wire.after(y0, received) if here else received
        return _tree.where(here, y0, received)

    def last(self, u: CPoints, span: int, *, reverse: bool) -> State:
        """Return the state that leaves the chain, on every worker."""
        n = _tree.leading(u)
        # In reverse the chain leaves through the first entry, else through the last one that is not padding.
        edge = (
            _tree.take(u, 0 if reverse else self.end(span, n)[1])
            if n
            else _tree.zeros_like(_tree.entry_like(u))
        )
        return self.broadcast(edge, 0 if reverse else self.active - 1)

    def prefix_sums(
        self, increments: Stacked, y0: State, *, reverse: bool, factor: Scalar | None = None
    ) -> tuple[Stacked, State]:
        """`_tree.prefix_sums` of the increments of all workers: this worker's part, and the sum up to its last one."""
        start = y0
        if self.active > 1 and _tree.leading(increments):
            if factor is not None:
                start = self._decayed_before(increments, y0, factor, reverse=reverse)
            else:
                # Sums are taken in at least single precision, and rounded once at the end.
                total = _tree.total(increments)
                start = _tree.add(_tree.wide(y0), self.exclusive_scan(total, reverse=reverse))
        before, last = _tree.prefix_sums(increments, start, reverse=reverse, factor=factor)
        return before, _tree.narrow(last, y0)

    def _decayed_before(
        self, increments: Stacked, y0: State, factor: Scalar, *, reverse: bool
    ) -> State:
        """The sum that enters this worker. A worker maps it to ``power * sum + total``, and the first one starts from ``y0``."""
        y0, here = _tree.wide(y0), self.index() == self.first(reverse)
        start = select(here, y0, _tree.zeros_like(y0))
        _, total = _tree.prefix_sums(increments, start, reverse=reverse, factor=factor)
        # Worker w maps a sum s that enters it to ``factor ** n * s + total``; these affine maps are composed over the row.
        power = jnp.where(here, 0, factor ** _tree.leading(increments))

        def compose(
            first: tuple[Scalar, State], second: tuple[Scalar, State]
        ) -> tuple[Scalar, State]:
            power, total = second
            return first[0] * power, jax.tree.map(
                lambda x, y: power.astype(x.dtype) * x + y, first[1], total
            )

        _, total = self.exclusive_scan((power, total), reverse=reverse, compose=compose)
        # Workers without layers receive nothing; with ``y0`` their slots stay as they are.
        total = select(self.index() < self.active, total, y0)
        return self._first_or(y0, total, reverse=reverse)

    def exclusive_scan(
        self, value: PyTree, *, reverse: bool, compose: Compose = _tree.add
    ) -> PyTree:
        """Compose (add up) the values of all workers before this one, in ``1 + ceil(log2(active - 1))`` messages."""
        by = -1 if reverse else 1
        total, distance = self.shift(value, by), 1
        # After k turns `total` covers the 2**k workers before this one, as in a parallel prefix sum by Hillis and Steele.
        while distance < self.active - 1:
            total = compose(self.shift(total, by * distance), total)
            distance *= 2
        return total

    def prefers_gather(self, operands: PyTree, state: State, total: int, solves: int) -> bool:
        """Whether a level of ``total`` steps is solved on every worker ``solves`` times, from a copy of all its operands."""
        if self.size == 1 or self.sequential != "auto":
            return self.size > 1 and self.sequential == "gather"
        # Compare the bytes of both ways: a relay sends a state to one worker after the other in every solve; gathering copies
        # the operands once, and then the right-hand side of every solve.
        one = _tree.nbytes(state)
        each = _tree.nbytes(_tree.entry_like(operands))
        # Messages of a relay wait for each other, so that each one costs its latency.
        relayed = solves * (self.active - 1) * (_LATENCY + one)
        gathered = total * (each + solves * one) + (solves + 1) * _LATENCY
        return gathered < relayed


# Bytes that could be sent while an empty message is on its way: 10 us at 10 GB/s, assumed for all engines.
_LATENCY = 100_000


def select(condition: bool | jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """``a`` if the scalar condition holds, else ``b``. For a Python boolean there is no operation."""
    if isinstance(condition, bool):
        return a if condition else b
    return _tree.where(condition, a, b)


@dataclasses.dataclass(frozen=True)
class Local(Workers):
    """All layers on one device."""

    sequential: str = "relay"

    def index(self) -> int:
        return 0

    def shift(self, tree: PyTree, by: int) -> PyTree:
        return _tree.zeros_like(tree)

    def sum(self, tree: PyTree) -> PyTree:
        return tree

    def max(self, tree: PyTree) -> PyTree:
        return tree

    def gather(self, tree: PyTree, span: int) -> PyTree:
        return tree

    def relay(self, run: Run, y0: State, *, reverse: bool) -> tuple[CPoints, PyTree]:
        return run(y0)

    def pipeline(self, turn: Turn, entries: Stacked, *, reverse: bool) -> Passed:
        return one_after_another(turn, entries)


def one_after_another(turn: Turn, entries: Stacked) -> Passed:
    """Take microbatches through one worker."""
    if _tree.leading(entries) == 1:
        last, kept, total = turn(_tree.at(entries, 0), 0)
        return *_tree.at((last, kept), None), total

    def body(total: PyTree, x: tuple[State, jax.Array]) -> tuple[PyTree, tuple[State, PyTree]]:
        last, kept, added = turn(*x)
        return _tree.add(total, added), (last, kept)

    numbers = jnp.arange(_tree.leading(entries), dtype=jnp.int32)
    first = _tree.entry_like((entries, numbers))
    # The sums start from zeros of the shapes that a turn adds.
    none = _tree.zeros_like(jax.eval_shape(turn, *first)[2])
    total, (lasts, kept) = _tree.scan(body, none, (entries, numbers))
    return lasts, kept, total
