"""Sweeps over all steps of a level: in chunks, and secant sweeps with a slope from earlier sweeps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import batched, chunk, in_chunks
from lp_jax._arrays._types import Points, PyTree, Scalar, SliceStep, State
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import single, sweep
from lp_jax._levels._tolerance import measure_corrections


class Swept(NamedTuple):
    """State of the sweeps: the states that enter the layers, ``(n, ...)``, and the one that leaves this worker's last layer.

    Sums of increments are these states, so that nothing is shifted by a layer between two sweeps.

    Attributes:
        entering: states that enter the layers.
        last: the state that leaves the last one.
        change: change of ``entering`` in the last secant sweep; None for plain sweeps.
        slope: slope of the last secant sweep; None for plain sweeps.
    """

    entering: Points
    last: State
    change: Points | None = None
    slope: Scalar | None = None

    def points(self, level: Level) -> Points:
        """The states that leave the layers."""
        return _tree.push(self.entering, self.last, reverse=not level.reverse)


def corrections(level: Level, before: Swept, after: Swept) -> jax.Array:
    """`measure_corrections` of a sweep."""
    return measure_corrections(level, (before.entering, before.last), (after.entering, after.last))


def from_points(level: Level, points: Points) -> Swept:
    """Make the state of the sweeps from the states that leave the layers."""
    edge = 0 if level.reverse else -1
    last = jax.tree.map(lambda x, y: x[edge] if x.shape[0] else y, points, level.y0)
    return Swept(level.incoming(points), last)


def sweep_by_chunks(level: Level, u: Swept) -> tuple[Swept, Scalar]:
    """`Picard.improve`, plain, over ``level.at_once`` layers at a time.

    It adds up increments and squares residuals on the way: the states of all layers pass through memory once, not four
    times. A layer's residual is known once the state that enters the next layer is.
    """
    first, n = level.workers.active == 1, level.steps
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    if not n:
        return u, jnp.zeros((), dtype)
    size = chunk(n, level.at_once)
    stepped_from = batched(single(level), size)

    def square(total: jax.Array, before: jax.Array, stepped: jax.Array, entering: jax.Array) -> jax.Array:
        """Squares of the state after each layer's predecessor, minus the state that enters the layer."""
        one = before[None]
        left = jnp.concatenate([stepped[1:], one] if level.reverse else [one, stepped[:-1]])
        size = jnp.abs(left - entering).astype(dtype)
        squares = jnp.square(size if level.unit is None else size * (1 / level.unit).astype(dtype))
        return total + _tree.pad_zeros(squares, len(total) - len(left))

    def layers(
        carry: tuple[State, State, State], operands: tuple[State, PyTree]
    ) -> tuple[tuple[State, State, State], State]:
        total, squares, before = carry
        stepped, _ = stepped_from(*operands)
        squares = jax.tree.map(square, squares, before, stepped, operands[0])
        entering, total = _tree.prefix_sums(_tree.sub(stepped, operands[0]), total, reverse=level.reverse)
        return (total, squares, _tree.take(stepped, 0 if level.reverse else -1)), entering

    start = _tree.wide(level.y0 if first else _tree.zeros_like(level.y0))
    squares = _tree.zeros_like(_tree.repeat(start, size), dtype)  # of each number; they are summed once, at the end
    entered = _tree.take(u.entering, -1 if level.reverse else 0)
    operands = u.entering, (level.xs, level.rhs)
    carry = start, squares, entered
    (total, squares, stepped), entering = in_chunks(layers, carry, operands, size, reverse=level.reverse)
    squares = [jnp.sum(x) for x in jax.tree.leaves(squares)]
    squares.append(sum_of_squares(level, _tree.sub(stepped, u.last)).astype(dtype))
    if not first:
        before = _tree.add(_tree.wide(level.y0), level.workers.exclusive_scan(total, reverse=level.reverse))
        entering = _tree.narrow(jax.tree.map(lambda x, y: x + y[None], _tree.wide(entering), before), entering)
        total = _tree.add(total, before)
    return Swept(entering, _tree.narrow(total, level.y0)), sum(squares[1:], squares[0])


def with_slope(u: Swept) -> Swept:
    """Start secant sweeps with slope 0: the first one is a plain sweep."""
    slope = _tree.varying(jnp.zeros((), _tree.real_dtype(u.last, at_least=jnp.float32)), u)
    return u._replace(change=_tree.zeros_like(u.entering), slope=slope)


def secant_sweep(level: Level, u: Swept) -> tuple[Swept, Scalar]:
    """Evaluate every step, then propagate through ``y -> Phi(u) + (1 + slope) (y - u)``.

    If the states u changed by d, with slope s, then Phi(u) - Phi(u - d) is (1 + s) d plus the residuals. The slope of least
    squares is s + <residuals, d> / <d, d>.
    """
    workers = level.workers
    stepped, _ = sweep(level, u.entering)
    residuals = _tree.sub(stepped, u.points(level))
    along, squared = workers.sum((_tree.inner(residuals, u.change), _tree.inner(u.change, u.change)))
    slope = jnp.clip(u.slope + along / jnp.where(squared > 0, squared, 1), -1, 0)
    slope = jnp.where(jnp.isfinite(slope), slope, 0)
    factor = 1 + slope
    increments = jax.tree.map(lambda f, y: f - factor.astype(f.dtype) * y, stepped, u.entering)
    entering, last = workers.prefix_sums(increments, level.y0, reverse=level.reverse, factor=factor)
    change = _tree.sub(entering, u.entering)
    if workers.padded and not level.reverse and level.steps:
        entering, last, change = _fix_padding(level, entering, last, change)
    return Swept(entering, last, change, slope), sum_of_squares(level, residuals)


def _fix_padding(level: Level, entering: Points, last: State, change: Points) -> tuple[Points, State, Points]:
    """Set all slots beyond the last layer to the state that leaves it, with no change."""
    n, workers = level.steps, level.workers
    end = jnp.asarray(jnp.clip(workers.total(level.span) - workers.start(level.span), 0, n), jnp.int32)
    number = jnp.arange(n, dtype=jnp.int32)
    last = jax.tree.map(lambda x, y: jnp.where(end < n, x[jnp.minimum(end, n - 1)], y), entering, last)
    entering = jax.tree.map(lambda x: x[jnp.minimum(number, end)], entering)
    return entering, last, _tree.where_rows(number < end, change)


def sweep_interval(
    step: SliceStep, sweeps: int, at_once: int, u: State, x: tuple[PyTree, Points | None], shared: PyTree
) -> State:
    """The state after one interval's layers, for a coarse step.

    ``x`` has the operands of the layers, ``(span, ...)``; and the states at which their increments are evaluated, or None for
    the state that enters the interval.
    """
    xs, states = x
    if states is None:
        incoming = _tree.repeat(u, _tree.leading(xs))
    else:  # shifted by the change of the state that enters
        incoming = jax.tree.map(lambda s, y: s + (y - s[0])[None], states, u)

    def increment(y: State, x: PyTree) -> State:
        return _tree.sub(step(y, x, shared), y)

    size = chunk(_tree.leading(xs), at_once)
    if size == 1:  # one increment at a time: only the total is kept for the transpose

        def one(total: State, operands: tuple[State, PyTree]) -> tuple[State, State]:
            return _tree.add(total, _tree.wide(increment(*operands))), _tree.narrow(total, u)

        for _ in range(sweeps - 1):
            incoming = lax.scan(one, _tree.wide(u), (incoming, xs))[1]
        return _tree.narrow(lax.scan(one, _tree.wide(u), (incoming, xs))[0], u)

    increments = batched(increment, size)

    def add(total: State, operands: tuple[Points, PyTree]) -> tuple[State, Points]:
        before, total = _tree.prefix_sums(increments(*operands), total, reverse=False)
        return total, before

    def last(total: State, operands: tuple[Points, PyTree]) -> tuple[State, None]:
        return _tree.add(total, _tree.total(increments(*operands))), None

    for _ in range(sweeps - 1):
        incoming = in_chunks(add, _tree.wide(u), (incoming, xs), size)[1]
    return _tree.narrow(in_chunks(last, _tree.wide(u), (incoming, xs), size)[0], u)
