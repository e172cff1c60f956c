"""Picard sweeps to a tolerance, over a window of layers that slides."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Points, PyTree, Scalar, State
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import sweep

Tolerance = float | jax.Array | None


def slide(level: Level, size: int, most: int, rtol: Tolerance, atol: Tolerance) -> tuple[Points, jax.Array, Scalar]:
    """Sweep over ``size`` steps at a time to the end of the chain, in at most ``most`` sweeps of every worker.

    After each sweep the window moves on by the first steps whose entering states changed by no more than a limit, at least one.
    If all steps are within their limits, the tolerances are met; a last sweep over all steps measures that. New steps start
    from the state that left the window before.

    Returns:
        The states after every step, the number of sweeps, and the first residual norm.

    Source: Shih, Belkhale, Ermon, Sadigh, Anari, "Parallel sampling of diffusion models", 2023, algorithm 1.
    """

    def run(y0: State, _: PyTree = None, /) -> tuple[Points, tuple[jax.Array, Scalar]]:
        return _slide(level, y0, size, most, rtol, atol)

    points, (sweeps, first) = level.workers.relay(run, level.y0, reverse=level.reverse)
    return points, level.workers.sum(sweeps), level.norm(first)


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


def _slide(
    level: Level, y0: State, size: int, most: int, rtol: Tolerance, atol: Tolerance
) -> tuple[Points, tuple[jax.Array, Scalar]]:
    """`slide` on one worker."""
    n, total = level.steps, level.workers.total(level.span)
    size = min(size, n)
    dtype = _tree.real_dtype(y0, at_least=jnp.float32)
    if not n:
        return _tree.repeat(y0, 0), (jnp.int32(0), jnp.zeros((), dtype))
    squares: Callable[[Points], jax.Array] = jax.vmap(functools.partial(sum_of_squares, level))  # of each row
    order = jnp.arange(size, dtype=jnp.int32)[:: -1 if level.reverse else 1]

    def limit(at: _Window) -> Scalar:
        """Largest squared change of a converged entering state."""
        unit = 1 if level.unit is None else level.unit.astype(dtype)
        limit = jnp.zeros((), dtype) if atol is None else jnp.square(jnp.asarray(atol, dtype) / unit) / total
        if rtol is not None:
            each = at.first / jnp.maximum(at.reached, 1).astype(dtype)
            limit = jnp.maximum(limit, jnp.square(jnp.asarray(rtol, dtype)) * each)
        return limit

    def turn(at: _Window) -> _Window:
        begin = jnp.minimum(at.done, n - size)
        row = n - size - begin if level.reverse else begin
        number = begin + order
        seen = number < at.reached
        old = _tree.where_rows(seen, _rows(at.entering, row, size), _tree.repeat(at.after, 1))
        y = _tree.take(old, -1 if level.reverse else 0)
        xs, rhs = _rows((level.xs, level.rhs), row, size)
        inside = level.window(xs, rhs, y)
        stepped, _ = sweep(inside, old)
        new, after = inside.workers.prefix_sums(_tree.sub(stepped, old), y, reverse=level.reverse)
        residuals = squares(_tree.sub(stepped, _tree.push(old, at.after, reverse=not level.reverse)))
        first = at.first + jnp.sum(jnp.where(seen, 0, residuals))
        reached = jnp.maximum(at.reached, begin + size)
        at = at._replace(after=after, reached=reached, sweeps=at.sweeps + 1, first=first.astype(dtype))
        kept = squares(_tree.sub(new, old)) <= limit(at)
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
    entering = _tree.where_rows(number < end.reached, end.entering, _tree.repeat(end.after, 1))
    return _tree.push(entering, end.after, reverse=not level.reverse), (end.sweeps, end.first)


def _rows(tree: PyTree, first: jax.Array, size: int) -> PyTree:
    """``size`` rows of every leaf, from ``first`` on."""

    def leaf(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, _tree.start(x, (first,)), (size, *x.shape[1:]), allow_negative_indices=False)

    return jax.tree.map(leaf, tree)
