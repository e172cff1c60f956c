"""Picard sweeps to a tolerance, over a window of layers that slides."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Points, PyTree, Scalar, State
from lp_jax._comms._workers import Local
from lp_jax._levels._level import Level
from lp_jax._levels._sweep import sweep

Tolerance = float | jax.Array | None


class Slid(NamedTuple):
    """Result of a sliding window: states after every step, number of sweeps, squared first residual norm."""

    points: Points
    sweeps: jax.Array
    first: Scalar


def slide(level: Level, size: int, most: int, rtol: Tolerance, atol: Tolerance) -> Slid:
    """Sweep over ``size`` steps at a time to the end of the chain, in at most ``most`` sweeps of every worker.

    After each sweep the window moves on by the first steps whose entering states changed by no more than a limit, at least one.
    If all steps are within their limits, the tolerances are met; a last sweep over all steps measures that. New steps start
    from the state that left the window before.

    Source: Shih, Belkhale, Ermon, Sadigh, Anari, "Parallel sampling of diffusion models", 2023, algorithm 1.
    """
    workers = level.workers

    def run(y0: State) -> tuple[Points, tuple[jax.Array, Scalar]]:
        points, sweeps, first = _slide(level, y0, size, most, rtol, atol)
        return points, (sweeps, first)

    points, (sweeps, first) = workers.relay(run, level.y0, reverse=level.reverse)
    return Slid(points, workers.sum(sweeps), workers.sum(first))


class _Window(NamedTuple):
    """State of the sliding window. Steps are counted from the beginning of the chain.

    Attributes:
        entering: states that enter the steps, leaves ``(n, ...)``; of those below ``reached`` only.
        after: the state that enters step ``reached``, the start for all later ones.
        done: number of steps whose entering states have converged.
        reached: number of steps that were in a window.
        sweeps: number of sweeps.
        first: sum of the squared first residuals of the steps that were in a window.
    """

    entering: Points
    after: State
    done: jax.Array
    reached: jax.Array
    sweeps: jax.Array
    first: Scalar


def _slide(level: Level, y0: State, size: int, most: int, rtol: Tolerance, atol: Tolerance) -> Slid:
    """`slide` on one worker."""
    n, total = level.steps, level.workers.total(level.span)
    size = min(size, n)
    dtype = _tree.real_dtype(y0, at_least=jnp.float32)
    if not n:
        return Slid(_tree.repeat(y0, 0), jnp.int32(0), jnp.zeros((), dtype))
    one_worker = Local(layers=size, held=(size,), processor=level.workers.processor)
    order = jnp.arange(size, dtype=jnp.int32)[:: -1 if level.reverse else 1]

    def limit(at: _Window) -> Scalar:
        """Largest squared change of a converged entering state."""
        limit = jnp.zeros((), dtype) if atol is None else jnp.square(jnp.asarray(atol, dtype)) / total
        if rtol is not None:
            each = at.first / jnp.maximum(at.reached, 1).astype(dtype)
            limit = jnp.maximum(limit, jnp.square(jnp.asarray(rtol, dtype)) * each)
        return limit

    def turn(at: _Window) -> _Window:
        begin = jnp.minimum(at.done, n - size)
        row = n - size - begin if level.reverse else begin
        number = begin + order
        seen = number < at.reached
        old = _choose(seen, _rows(at.entering, row, size), at.after)
        y = _tree.take(old, -1 if level.reverse else 0)
        xs, rhs = _rows((level.xs, level.rhs), row, size)
        inside = dataclasses.replace(level, xs=xs, rhs=rhs, y0=y, steps=size, workers=one_worker)
        stepped, _ = sweep(inside, old)
        new, after = one_worker.prefix_sums(_tree.sub(stepped, old), y, reverse=level.reverse)
        residuals = _squares(_tree.sub(stepped, _next(old, at.after, level.reverse)))
        first = at.first + jnp.sum(jnp.where(seen, 0, residuals))
        reached = jnp.maximum(at.reached, begin + size)
        at = at._replace(after=after, reached=reached, sweeps=at.sweeps + 1, first=first.astype(dtype))
        kept = _squares(_tree.sub(new, old)) <= limit(at)
        kept = jnp.cumprod((kept[::-1] if level.reverse else kept).astype(jnp.int32))
        entering = jax.tree.map(
            lambda x, w: lax.dynamic_update_slice(x, w, _tree.start(x, (row,)), allow_negative_indices=False),
            at.entering,
            new,
        )
        return at._replace(entering=entering, done=begin + jnp.maximum(1, jnp.sum(kept)).astype(jnp.int32))

    zero = jnp.int32(0)
    begin = _Window(_tree.zeros_like(_tree.repeat(y0, n)), y0, zero, zero, zero, jnp.zeros((), dtype))
    begin = _tree.varying(begin, (y0, level.xs, level.rhs))
    end = lax.while_loop(lambda at: (at.done < n) & (at.sweeps < most), turn, begin)
    number = jnp.arange(n, dtype=jnp.int32)[:: -1 if level.reverse else 1]
    entering = _choose(number < end.reached, end.entering, end.after)
    return Slid(_next(entering, end.after, level.reverse), end.sweeps, end.first)


def _rows(tree: PyTree, first: jax.Array, size: int) -> PyTree:
    """``size`` rows of every leaf, from ``first`` on."""

    def leaf(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, _tree.start(x, (first,)), (size, *x.shape[1:]), allow_negative_indices=False)

    return jax.tree.map(leaf, tree)


def _choose(seen: jax.Array, states: Points, other: State) -> Points:
    """The states of the seen rows, and ``other`` for the rest."""

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(seen.reshape(-1, *[1] * (x.ndim - 1)), x, y[None].astype(x.dtype))

    return jax.tree.map(leaf, states, other)


def _next(entering: Points, after: State, reverse: bool) -> Points:
    """The states that leave the steps: each enters the next step."""

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y[None].astype(x.dtype)
        return jnp.concatenate([y, x[:-1]] if reverse else [x[1:], y])

    return jax.tree.map(leaf, entering, after)


def _squares(states: Points) -> jax.Array:
    """Squared norm of each row."""
    squared: Callable[[State], jax.Array] = _tree.sum_of_squares
    return jax.vmap(squared)(states)
