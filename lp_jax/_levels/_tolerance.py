"""When iterations end: rounding, divergence, and how large the error of a solve can be."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax._arrays import _tree
from lp_jax._arrays._types import CPoints, PyTree, Scalar
from lp_jax._levels._level import Level, sum_of_squares


def unit_of(level: Level) -> Scalar:
    """Size of the states: the largest number of ``y0``, if there is a finite one that is not zero."""
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    size = jnp.max(
        jnp.stack([jnp.max(_finite(x), initial=0).astype(dtype) for x in jax.tree.leaves(level.y0)])
    )
    return jnp.where(size > jnp.finfo(dtype).tiny, size, 1)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0)


def rounding_of(level: Level, u: CPoints) -> Scalar:
    """Square of the rounding of states. No residual norm gets below it."""
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    squares = [
        jnp.square(eps_of(x)) * sum_of_squares(level, _finite(x)).astype(dtype)
        for x in jax.tree.leaves(u)
    ]
    return jnp.sum(jnp.stack(squares))


def eps_of(x: jax.Array) -> float:
    """Rounding of numbers of an array's dtype."""
    return float(jnp.finfo(x.dtype).eps)


_LOST = 1e-2  # of a state: largest rounding error
ROUNDING = 10  # times the rounding norm: smaller residual norms may go up and down
_GROWN = 10  # times the first residual norm: sweeps that converge stay below 3 on the way, others pass 10
_STALLED = (
    4  # iterations that do not halve a residual norm that had fallen tenfold: rounding, or a limit
)


def largest_reference(level: Level) -> Scalar:
    """Largest first residual norm that a tolerance may be relative to: of changes as large as ``y0`` in every interval.

    Coarse steps that diverge lead to larger states.
    """
    size = level.in_units(sum_of_squares(level, level.y0)) * math.sqrt(
        level.workers.total(level.interval_span)
    )
    return jnp.where(size > 0, size, jnp.inf)


def changed_unseen(level: Level, before: CPoints, after: CPoints) -> jax.Array:
    """How many numbers of the last C-point here an iteration changed, of those too small for squares of residuals, ``(1,)``."""

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        seen = (
            math.sqrt(jnp.finfo(a.dtype).tiny)
            / eps_of(a)
            * level.in_units(jnp.ones((), jnp.finfo(a.dtype).dtype))
        )
        return jnp.sum((a[-1:] != b[-1:]) & (jnp.abs(b[-1:]) < seen), dtype=jnp.int32)

    return sum(jax.tree.leaves(jax.tree.map(leaf, before, after)), jnp.int32(0))[None]


def measure_corrections(
    level: Level, before: tuple[PyTree, ...], after: tuple[PyTree, ...]
) -> jax.Array:
    """Squares by leaves of the state, ``(leaves, 4)``: of the change of all states, of these, of the last one's change, of that.

    ``before`` and ``after`` hold the states, then the one that leaves this worker.
    """
    ends = level.workers.index() == level.workers.first(not level.reverse)

    def leaf(old: jax.Array, new: jax.Array, old_last: jax.Array, new_last: jax.Array) -> jax.Array:
        parts = [sum_of_squares(level, x) for x in (new - old, new, new_last - old_last, new_last)]
        vanished = (parts[3] == 0) & jnp.any(
            new_last != 0
        )  # then a correction may not be seen either
        last = [jnp.where(ends, x, 0) for x in parts[2:]]
        return jnp.stack([jnp.where(vanished, jnp.inf, parts[0]), parts[1], *last])

    (old, old_last, *_), (new, new_last, *_) = before, after
    return jnp.stack(jax.tree.leaves(jax.tree.map(leaf, old, new, old_last, new_last)))


def relative_error(
    level: Level,
    norms: jax.Array,
    count: jax.Array,
    first: jax.Array,
    errors: jax.Array,
    *,
    warm: bool,
) -> tuple[Scalar, Scalar, jax.Array]:
    """Estimate the relative error of a sweep's states, the largest of all leaves, from the norms of its corrections.

    All states are compared with the first correction, or with the states where these are smaller; the state that leaves the
    chain, from which the gradient of ``y0`` comes, with itself. The error is infinite where that is lost in the rounding of sums.
    After a ``warm`` start the first correction is no measure, and the states are one.

    ``norms`` are those of `measure_corrections`, ``first`` those of the first correction, ``errors`` those of the
    ``count`` sweeps before. It returns the last correction as a relative error, the error that is left, and ``first``.
    """
    leaves = jax.tree.leaves(level.y0)
    dtype = norms.dtype
    summed = jnp.asarray(
        [eps_of(x) for x in jax.tree.leaves(jax.eval_shape(_tree.wide, level.y0))], dtype
    )
    eps = 2 * jnp.asarray([eps_of(x) for x in leaves], dtype) + 8 * summed
    change, size, last_change, last = norms.T
    first = jnp.where(count == 0, size if warm else change, first)
    first = jnp.where(
        first <= eps * size, change, first
    )  # a leaf may stay until another one has changed

    def ratio(a: jax.Array, floor: jax.Array, b: jax.Array) -> jax.Array:
        small = (a <= floor) & jnp.isfinite(a)
        return jnp.where(small, 0, jnp.where(b > 0, a / jnp.where(b > 0, b, 1), jnp.inf))

    of_all = ratio(change, eps * size, jnp.minimum(first, size))
    of_last = ratio(last_change, eps * last + summed * size, last)
    lost = (last > 0) & (summed * size > _LOST * last)  # in the rounding of the sum
    error = jnp.max(jnp.concatenate([of_all, jnp.where(lost, jnp.inf, of_last)]))
    error = jnp.where(jnp.isnan(norms).any(), jnp.nan, error)
    rate = error / jnp.where(count == 0, jnp.inf, errors[count - 1])
    # corrections that shrink by the rate from here on are a geometric series
    left = jnp.where(rate < 1, rate / (1 - rate), jnp.inf)
    return error, jnp.where(rate > 0.5, error * left, error), first


def hopeless(errors: jax.Array, k: jax.Array, sweeps_to: float | jax.Array | None) -> jax.Array:
    """Whether ``k`` errors show that the iteration diverges, stalls, or misses a tolerance of sweeps, ``sweeps_to``.

    Errors of sweeps fall like ``(L T)^s / s!``. The last two give ``L T``, and so the error after all sweeps.
    """
    last, most = errors[k - 1], len(errors)
    stalled = (k > _STALLED) & (last < errors[0] / 10) & (last > errors[k - 1 - _STALLED] / 2)
    given_up = (last > _GROWN * errors[0]) | stalled
    if sweeps_to is None:
        return given_up
    factorial = jnp.asarray(np.cumsum(np.log(np.arange(1, most + 1))), errors.dtype)
    growth = jnp.log(k.astype(errors.dtype) * last / errors[k - 2])
    predicted = (
        jnp.log(last)
        + (most - k).astype(errors.dtype) * growth
        - (factorial[-1] - factorial[k - 1])
    )
    return given_up | ((k > 1) & (predicted > jnp.log(jnp.asarray(sweeps_to, errors.dtype))))
