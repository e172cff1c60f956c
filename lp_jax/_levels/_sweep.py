"""Propagate through a level: all intervals at once (`sweep`), or step after step (`march`)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import batched, chunk, in_chunks
from lp_jax._arrays._types import Advance, CPoints, PyTree, State
from lp_jax._comms._workers import Run
from lp_jax._levels._level import Level, identity


def sweep(
    level: Level, incoming: CPoints, *, advance: Advance | None = None, count: int | None = None
) -> tuple[CPoints, PyTree]:
    """Propagate states through the first ``count`` steps of their intervals (by default all), all intervals at once.

    It returns the states reached, ``(intervals, ...)``, and the trees that ``advance`` emitted at each step, grouped as by
    `Level.split`, with zeros for steps that are not taken. An ``advance`` is the level's step with something to emit; without
    one, the step itself is evaluated.
    """
    if level.factor == 1:
        # Intervals of one step are independent steps, without a loop within them.
        return each(level, single(level, advance), incoming)(incoming, (level.xs, level.rhs))
    count, emitted = count or level.factor, None
    if advance is not None:
        # Outputs of a loop are written into an array that is carried along, ``(intervals, factor, ...)``.
        room = _room(level, advance, *_tree.entry_like((incoming, level.xs)))
        emitted = _tree.varying(_tree.repeat(room, level.intervals), incoming)
    if not level.intervals:  # a worker without layers
        return incoming, emitted
    size = chunk(level.intervals, level.at_once)
    if size == level.intervals > 1:
        return _at_once(level, advance, count, incoming, emitted, 0, size)

    # Intervals are taken in chunks of `size`, so that not all of them are in memory at once.
    def some(
        first: jax.Array | int, number: int, carry: tuple[CPoints, PyTree]
    ) -> tuple[CPoints, PyTree]:
        reached, emitted = carry
        if size == 1:
            u = _tree.take(incoming, first)
            u, emitted = _interval(level, advance, count, u, level.xs, level.rhs, emitted, first)
            return _tree.put(reached, u, first), emitted
        u = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, number), incoming)
        u, emitted = _at_once(level, advance, count, u, emitted, first, number)
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, axis=0), reached, u
        ), emitted

    whole, left = divmod(level.intervals, size)
    carry = (_tree.zeros_like(incoming), emitted)
    # A single interval needs no loop around it.
    if level.intervals == 1:
        return some(0, 1, carry)
    carry = _tree.fori_loop(
        0, whole, lambda k, carry: some(k * size if size > 1 else k, size, carry), carry
    )
    return some(whole * size, left, carry) if left else carry


def each(level: Level, one: Callable[..., PyTree], like: PyTree) -> Callable[..., PyTree]:
    """Let ``one`` take all entries of operands as long as ``like``, ``level.at_once`` entries at a time."""
    n = _tree.leading(like)
    size = chunk(n, level.at_once)
    at_once = batched(one, size)
    if size == n:
        return at_once
    return lambda *operands: in_chunks(lambda _, x: (None, at_once(*x)), None, operands, size)[1]


def _at_once(
    level: Level,
    advance: Advance | None,
    count: int,
    u: CPoints,
    emitted: PyTree,
    first: jax.Array | int,
    size: int,
) -> tuple[CPoints, PyTree]:
    """`sweep` through ``size`` intervals as a batch: a loop over steps, each of which takes the whole batch.

    In a batch of loops, writing the output of a step would be a scatter.
    """
    xs, rhs, whole = level.xs, level.rhs, size == level.intervals
    if level.expand is not None:
        # These intervals' operands are computed here, from the states that enter the intervals.
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), xs)
        xs = jax.vmap(level.expand, in_axes=(0, None))(some, level.shared)
    one = jax.vmap(advance or level.step, in_axes=(0, 0, None))

    def write(emitted: PyTree, new: PyTree, n: jax.Array | int) -> PyTree:
        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            if whole:
                return lax.dynamic_update_index_in_dim(x, new, n, axis=1)
            new = lax.expand_dims(new, (1,))
            return lax.dynamic_update_slice(
                x, new, _tree.start(x, (first, n)), allow_negative_indices=False
            )

        return jax.tree.map(put, emitted, new)

    def body(
        i: jax.Array | int, carry: tuple[CPoints, PyTree], keep: Callable[..., PyTree] = write
    ) -> tuple[CPoints, PyTree]:
        u, emitted = carry
        n = level.factor - 1 - i if level.reverse else i

        def take(x: jax.Array) -> jax.Array:
            # The operands are those of these intervals already, or those of all intervals.
            if len(x) == size:
                return lax.dynamic_index_in_dim(x, n, axis=1, keepdims=False)
            at = _tree.start(x, (first, n))
            return lax.squeeze(
                lax.dynamic_slice(x, at, (size, 1, *x.shape[2:]), allow_negative_indices=False),
                (1,),
            )

        out = one(u, jax.tree.map(take, xs), level.shared)
        u, new = out if advance else (out, None)
        return _tree.add(u, jax.tree.map(take, rhs)), keep(emitted, new, n)

    turns = level.workers.processor.loop_unroll(count, body, 0, (u, emitted))
    if turns < level.factor or not whole:
        return _tree.fori_loop(0, count, body, (u, emitted), unroll=turns)
    # All turns are unrolled: outputs are stacked once, instead of written into an array step by step.
    outputs: list[PyTree] = []
    for i in range(count):
        u, outputs = body(i, (u, outputs), lambda outputs, new, _: [*outputs, new])
    return u, jax.tree.map(
        lambda *x: jnp.stack(x, axis=1), *(outputs[::-1] if level.reverse else outputs)
    )


def march(level: Level) -> CPoints:
    """Solve a level step after step, and return its C-points, on the coarsest level all its points."""
    return march_and_emit(level, None)[0]


def march_and_emit(level: Level, advance: Advance | None) -> tuple[CPoints, PyTree]:
    """Solve the level step after step, and return what `sweep` would return from the exact C-points."""
    if level.step is identity and level.factor == 1 and advance is None:
        if level.rhs is None:  # every worker has y0, so that none waits for it
            return _tree.repeat(level.y0, level.intervals), None
        # u[n+1] = u[n] + rhs[n] is a prefix sum, over all workers at once.
        return level.cumsum(level.rhs, level.y0), None
    if level.gathered is None:
        return level.workers.relay(_marcher(level, advance), level.y0, reverse=level.reverse)
    # Each worker has all operands, solves the whole level, and keeps its own part: no message but the right-hand side's.
    everywhere = dataclasses.replace(
        level, xs=level.gathered, rhs=level.workers.gather(level.rhs, level.span)
    )
    return level.workers.local_slice(_marcher(everywhere, advance)(level.y0), level.span)


def _marcher(level: Level, advance: Advance | None) -> Run:
    """`march` through the intervals of ``level``."""

    def interval(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, PyTree]:
        xs, rhs = operands
        room = None if advance is None else _room(level, advance, u, xs)
        return _interval(level, advance, level.factor, u, xs, rhs, room)

    through = single(level, advance) if level.factor == 1 else interval

    def body(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, tuple[State, PyTree]]:
        u, emitted = through(u, operands)
        return u, (u, emitted)

    def march_from(y0: State) -> tuple[CPoints, PyTree]:
        operands = level.xs, level.rhs
        first = _tree.entry_like(operands)
        unroll = max(
            level.unroll, level.workers.processor.loop_unroll(level.intervals, body, y0, first)
        )
        return _tree.scan(body, y0, operands, reverse=level.reverse, unroll=unroll)[1]

    return march_from


def single(
    level: Level, advance: Advance | None = None
) -> Callable[[State, tuple[PyTree, State | None]], tuple[State, PyTree]]:
    """Return the function that takes a state through an interval of one step, right-hand side included."""

    def step(u: State, operands: tuple[PyTree, State | None]) -> tuple[State, PyTree]:
        xs, rhs = operands
        u, emitted = (
            advance(u, xs, level.shared) if advance else (level.step(u, xs, level.shared), None)
        )
        return _tree.add(u, rhs), emitted

    return step


def _interval(
    level: Level,
    advance: Advance | None,
    count: int,
    u: State,
    xs: PyTree,
    rhs: PyTree,
    emitted: PyTree,
    *at: jax.Array | int,
) -> tuple[State, PyTree]:
    """``count`` steps from ``u`` through the interval ``at`` of ``xs``, ``rhs`` and ``emitted``.

    These have leaves ``(intervals, factor, ...)``, or ``(factor, ...)`` where ``at`` is left out; states in ``xs`` that are to be
    recomputed have ``(intervals, ...)``. They are indexed by interval
    and step at once, not scanned over: an interval's operands would be copied first, and under vmap a scanned operand
    would have its two leading axes swapped, which copies all parameters.
    """
    xs, within = _expand(level, xs, *at)

    def body(i: jax.Array | int, carry: tuple[State, PyTree]) -> tuple[State, PyTree]:
        u, emitted = carry
        n = level.factor - 1 - i if level.reverse else i
        x = _tree.take(xs, *within, n)
        u, new = advance(u, x, level.shared) if advance else (level.step(u, x, level.shared), None)
        u = _tree.add(u, None if rhs is None else _tree.take(rhs, *at, n))
        return u, _tree.put(emitted, new, *at, n)

    # One step needs no loop.
    if count == 1:
        return body(0, (u, emitted))
    unroll = level.workers.processor.loop_unroll(count, body, 0, (u, emitted))
    return _tree.fori_loop(0, count, body, (u, emitted), unroll=unroll)


def _expand(level: Level, xs: PyTree, *at: jax.Array | int) -> tuple[PyTree, tuple]:
    """Return ``(tree, index)``, where the operands of step n are ``tree[*index, n]``. States that are recomputed are so here."""
    return (
        (xs, at) if level.expand is None else (level.expand(_tree.take(xs, *at), level.shared), ())
    )


def _room(level: Level, advance: Advance, u: PyTree, xs: PyTree) -> PyTree:
    """Zeros like the outputs that the steps of one interval emit, leaves ``(factor, ...)``; ``xs`` is that interval's."""

    def first(u: PyTree, xs: PyTree) -> PyTree:
        # The shapes are those of the first step, and all steps have the same.
        return advance(u, _tree.take(_expand(level, xs)[0], 0), level.shared)[1]

    return _tree.repeat(_tree.zeros_like(_tree.shape_of(first, u, xs)), level.factor)
