"""When iterations end: how large a change or a residual is, and whether more iterations help.

A state may hold metres beside kelvin, one channel of a thousand beside channels of one, or an outlier among its examples. So
each component, that is each number of a state, is compared with its own size, the largest that it has at any layer. The error
is the root of the mean square over the components, as in codes for ODEs (Hairer, Norsett, Wanner, "Solving Ordinary
Differential Equations I", section II.4). It does not depend on the units of the components.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Points, Scalar, State
from lp_jax._levels._level import Level, largest

_LOST = 1e-2  # of a state: largest rounding error
_ROUNDING = 10  # times that of a state: smaller residuals may go up and down
_GROWN = 12  # times the first error: sweeps that converge stay below 11 on the way, others pass 12
_NOISE = 32  # times the rounding of the norm: smaller changes may go up and down
# rate by which a change is trusted to shrink in the next iteration, even if it fell faster
_FASTEST = 0.3
_STALLED = 4  # iterations that do not halve an error that had fallen tenfold: rounding, or a limit


class Progress(NamedTuple):
    """The progress of iterations towards a tolerance. All workers have the same numbers.

    Attributes:
        errors: changes or residuals of the iterations that were made, in sizes of the first one; norms of residuals if there is
            no ``rtol``.
        sizes: size of each component in the first iteration, a tree like a state.
        done: number of iterations that were made before this one.
        met: whether the tolerance is met.
        given_up: whether more iterations do not help.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> start = lp_jax.multigrid.Progress.start(jnp.ones(3), 5, jnp.float32)
        >>> start.errors.shape, bool(start.met | start.given_up)
        ((5,), False)
    """

    errors: jax.Array
    sizes: State
    done: jax.Array
    met: jax.Array
    given_up: jax.Array

    @classmethod
    def start(cls, y0: State, iterations: int, dtype: DTypeLike) -> "Progress":
        """Nothing is known before the first of the iterations."""
        no = jnp.asarray(False)
        return cls(jnp.zeros((iterations,), dtype), jax.tree.map(jnp.abs, y0), jnp.int32(0), no, no)

    def measured(self, error: Scalar) -> "Progress":
        """Write down the error of this iteration."""
        errors = self.errors.at[self.done].set(error.astype(self.errors.dtype))
        return self._replace(errors=errors)

    def compare_residuals(
        self, y0: State, residuals: State, sizes: State, rtol: float | jax.Array
    ) -> "Progress":
        """Compare the largest residuals with the first ones, or with the sizes of the states if these are smaller."""
        progress = self._in_first_sizes(y0, residuals, sizes)
        error = error_of_residuals(y0, residuals, sizes)
        return progress.within(_ratio(error, jnp.minimum(1, progress.errors[0])), rtol)

    def compare_changes(
        self, y0: State, found: "Changes", rtol: float | jax.Array
    ) -> tuple["Progress", Scalar]:
        """Compare the error that is left with ``rtol``. The second result is the goal of `hopeless`."""
        progress = self._in_first_sizes(y0, found.change, found.size)
        error = error_of_changes(y0, found).astype(self.errors.dtype)
        left = left_after(error, progress.errors, self.done)
        goal = jnp.asarray(rtol, error.dtype) * jnp.minimum(1, progress.last / error)
        return progress.within(left, rtol), goal

    def _in_first_sizes(self, y0: State, magnitudes: State, sizes: State) -> "Progress":
        """Write down the largest changes, or residuals, of this iteration in sizes of the first one."""
        # a component may be zero until another one has moved it
        sizes = jax.tree.map(
            lambda x, size: jnp.where((self.done == 0) | (x == 0), size, x), self.sizes, sizes
        )
        return self._replace(sizes=sizes).measured(error_of_residuals(y0, magnitudes, sizes))

    @property
    def last(self) -> Scalar:
        """The error of this iteration."""
        return self.errors[self.done]

    def within(self, error: Scalar, tolerance: float | jax.Array) -> "Progress":
        """The tolerance is met once an error is at most this."""
        limit = jnp.asarray(tolerance, self.errors.dtype)
        return self._replace(met=self.met | (error.astype(self.errors.dtype) <= limit))


class Changes(NamedTuple):
    """Largest magnitudes of every component, at all layers or at the end of the chain; trees like a state."""

    change: State  # of the states by the last iteration
    size: State  # of the states
    moved: State  # of their distance to the state that enters the chain
    last_change: State  # of the state that leaves the chain by the last iteration
    last: State  # of that state


def scale_of(level: Level) -> Scalar:
    """Size of the states: the largest number of ``y0``, if there is a finite one that is not zero."""
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)

    def leaf(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(dtype)

    size = jnp.max(jnp.stack([leaf(x) for x in jax.tree.leaves(level.y0)]))
    return jnp.where(size > jnp.finfo(dtype).tiny, size, 1)


def changes(level: Level, before: tuple[Points, State], after: tuple[Points, State]) -> Changes:
    """Compare the states of this worker, and the one that leaves it, before and after an iteration."""
    (old, old_last), (new, new_last) = before, after
    # Only the worker with the end of the chain has its last state; the others contribute zeros to the maximum.
    has_end = level.workers.index() == level.workers.first(not level.reverse)

    def of_the_end(state: State) -> State:
        return largest(jax.tree.map(lambda x: jnp.where(has_end, x, 0)[None], state))

    return Changes(
        change=largest(_tree.sub(new, old)),
        size=largest(new),
        moved=largest(jax.tree.map(lambda x, y: x - y[None], new, level.y0)),
        last_change=of_the_end(_tree.sub(new_last, old_last)),
        last=of_the_end(new_last),
    )


def error_of_changes(y0: State, found: Changes) -> Scalar:
    """The last change as a relative error, the largest of all leaves; infinite where a number is not finite.

    The change is compared with the states, or with their distance to ``y0`` where that is smaller. The state that leaves the
    chain, from which the gradient of ``y0`` comes, is compared with itself, as the chain may have decayed until there.
    The error is infinite if that state is lost in the rounding of sums.
    """

    def leaf(y: jax.Array, *parts: jax.Array) -> jax.Array:
        change, _, moved, last_change, last = _in_sizes(y, *parts)
        summed = eps_of(_tree.wide(y))
        rounding = 4 * eps_of(y) + 8 * summed
        # A change that rounding explains counts as zero.
        error = _mean_square(jnp.where(change <= rounding, 0, change))
        left = _mean_square(last)
        # a component may pass zero at the end, and then has the rounding of the others
        floor = rounding * jnp.maximum(last, jnp.sqrt(left)) + summed
        last_error = _mean_square(jnp.where(last_change <= floor, 0, last_change))
        lost = (left > 0) & (jnp.sqrt(left) < summed / _LOST)
        of_last = jnp.where(lost, jnp.inf, _ratio(last_error, left))
        return jnp.maximum(_ratio(error, jnp.minimum(1, _mean_square(moved))), of_last)

    return _largest_root(jax.tree.map(leaf, y0, *found))


def error_of_residuals(y0: State, residuals: State, size: State) -> Scalar:
    """The largest residuals relative to the states, the largest of all leaves; infinite where a number is not finite."""

    def leaf(y: jax.Array, *parts: jax.Array) -> jax.Array:
        residual = _in_sizes(y, *parts)[0]
        return _mean_square(jnp.where(residual <= 2 * eps_of(y), 0, residual))

    return _largest_root(jax.tree.map(leaf, y0, residuals, size))


def _in_sizes(y: jax.Array, part: jax.Array, size: jax.Array, *more: jax.Array) -> list[jax.Array]:
    """Magnitudes of components relative to their size, at least that of the state that enters."""
    dtype = _tree.real_dtype(y, at_least=jnp.float32)
    size = jnp.maximum(size, jnp.abs(y)).astype(dtype)
    shares = [x.astype(dtype) / jnp.where(size > 0, size, 1) for x in (part, size, *more)]
    # a change to where all states are zero is as large as what it changes
    return [jnp.where((size > 0) | (x == 0) | jnp.isinf(x), x, 1) for x in shares]


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x)) / max(1, x.size)


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a / b``, or ``a`` where ``b`` is not positive. A result that is not a number is infinite."""
    ratio = jnp.where(b > 0, a / b, a)
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)


def _largest_root(squares: State) -> Scalar:
    dtype = _tree.real_dtype(squares)
    return jnp.sqrt(jnp.max(jnp.stack([x.astype(dtype) for x in jax.tree.leaves(squares)])))


def eps_of(x: jax.Array) -> float:
    """Rounding of numbers of an array's dtype."""
    return float(jnp.finfo(x.dtype).eps)


def left_after(error: Scalar, errors: jax.Array, k: jax.Array) -> Scalar:
    """The error that is left after the k-th change: changes that shrink by the last rate are a geometric series.

    The first change is taken as the error, as if each one were half of the one before. Changes near rounding have no rate.
    """
    # With rate r the changes that follow add up to ``error * (r + r^2 + ...) = error * r / (1 - r)``.
    rate = jnp.where(k == 0, 0.5, jnp.maximum(errors[k] / errors[k - 1], _FASTEST))
    left = jnp.where(rate < 1, error * rate / (1 - rate), jnp.inf)
    return jnp.where(error <= _NOISE * eps_of(error), error, left)


def growth(level: Level, squares: State) -> Scalar:
    """A sum over this worker's components that is positive if residuals rise; ``squares`` are those of all iterations.

    They rise where the last square is on average more than half of the first and the last one together, in any units.
    Squares that rounding explains count as nothing.
    """

    def leaf(y: jax.Array, squares: jax.Array) -> jax.Array:
        first, last = squares[0], squares[-1]
        rounding = _ROUNDING * eps_of(y) * jnp.abs(y).astype(last.dtype)
        if level.scale is not None:
            rounding /= level.scale.astype(last.dtype)
        # ``last / (first + last)`` is 1/2 where the residual stayed the same, in any units.
        both = jnp.where(last <= level.intervals * jnp.square(rounding), 0, first + last)
        counts = (both > 0) & jnp.isfinite(first)
        return jnp.sum(jnp.where(counts, last / jnp.where(counts, both, 1) - 0.5, 0))

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, level.y0, squares))


def hopeless(errors: jax.Array, k: jax.Array, goal: float | Scalar | None) -> jax.Array:
    """Whether ``k`` errors show that the iteration diverges, stalls, or misses a ``goal`` of sweeps.

    Errors of sweeps fall like ``(L T)^s / s!``. The last two give ``L T``, and so the error after all sweeps.
    """
    last, most = errors[k - 1], len(errors)
    # An error that had fallen tenfold and no longer halves has reached rounding or a limit.
    stalled = (k > _STALLED) & (last < errors[0] / 10) & (last > errors[k - 1 - _STALLED] / 2)
    given_up = (last > _GROWN * errors[0]) | stalled
    if goal is None:
        return given_up
    # log(s!) for s = 1, ..., most: the error after s sweeps is taken as C (L T)^s / s!.
    factorial = jnp.asarray(np.cumsum(np.log(np.arange(1, most + 1))), errors.dtype)
    # errors[k-1] / errors[k-2] = L T / k gives log(L T).
    slope = jnp.log(k.astype(errors.dtype) * last / errors[k - 2])
    predicted = (
        jnp.log(last) + (most - k).astype(errors.dtype) * slope - (factorial[-1] - factorial[k - 1])
    )
    return given_up | ((k > 1) & (predicted > jnp.log(jnp.asarray(goal, errors.dtype))))
