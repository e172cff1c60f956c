"""Picard sweeps over some of the layers at a time: window after window, or over a window that slides."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import CPoints, Points, PyTree, Scalar, State
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import sweep
from lp_jax._solvers._solver import Start
from lp_jax._solvers._sweeps import Sweeps, begin, from_points


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Windowed(Sweeps):
    """Sweeps of `Picard` over windows of layers.

    All sweeps but the last go over one window after the other, each from the state that leaves the window before; the last
    sweep goes over all layers. A window has 1/W of the time, so that fewer sweeps are enough, and 1/W of the layers, which are
    evaluated at once. W (sweeps - 1) + 1 evaluations wait for each other, also on several workers.

    With a tolerance one window of 1/W of the layers slides. After each sweep it moves on by the first layers whose entering
    states changed by no more than a limit, at least one, in W (sweeps - 1) sweeps of every worker at most. New layers start
    from the state that left the window before. If all layers are within their limits, the tolerance is met; the last sweep
    measures that.

    Args:
        windows: number W of windows.
        sweeps: number of sweeps over each window, the last one over all layers included; with a tolerance their maximum.
        rtol: stop when the residual norm is at most this times the first one.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially if the tolerance is not met.
        storage: arrays that the forward solve keeps for the adjoint, "all" or "states", as in `Picard`.
        at_once: number of independent layers that a worker evaluates at once, or "auto".

    Raises:
        ValueError: for less than one sweep, or two with a tolerance, an unknown ``storage``, and where a guess is given.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> stats = problem.solve(solver=lp_jax.Windowed(windows=4, sweeps=32, rtol=1e-3)).stats
        >>> int(stats.iterations), lp_jax.RESULTS[int(stats.result)]
        (16, 'done as asked')

    Reference:
        Shih, Belkhale, Ermon, Sadigh, Anari, "Parallel sampling of diffusion models", 2023, algorithm 1 (the window that
        slides).
    """

    windows: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.integer("windows", self.windows, least=1)
        if self.has_tolerance and self.sweeps < 2:
            raise ValueError(
                f"Windowed(windows={self.windows}) with a tolerance takes at least 2 sweeps; got sweeps=1."
            )

    def resolve(self, steps: int, *, warm: bool = False) -> Sweeps:
        if warm:
            raise ValueError(
                f"guess is not used by Windowed(windows={self.windows}), whose windows start from the state that leaves the "
                "one before. Leave the guess out, or take Picard(...)."
            )
        return self

    def unit(self, steps: int) -> int:
        return -(-steps // self.windows)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level = levels[0]
        if level.number > 0:
            raise ValueError(f"coarsest must sweep over its whole level; got {self!r}. Take Picard(...).")
        size, spent = self.unit(level.workers.total(level.span)), self.sweeps - 1
        if not self.has_tolerance:
            return Start(from_points(level, self._window_after_window(level, size)), spent)
        slide = functools.partial(_slide, self, level, size)
        points, (sweeps, first) = level.workers.relay(slide, level.y0, reverse=level.reverse)
        sweeps = level.workers.sum(sweeps)
        return Start(from_points(level, points), spent, sweeps, level.norm(first))

    def _window_after_window(self, level: Level, size: int) -> Points:
        """The states after every step."""

        def window(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, tuple[State, Points]]:
            inside = level.window(*operands, u)
            at = begin(inside, None)
            for _ in range(self.sweeps - 1):
                at, _ = self.improve((inside,), at)
            return at.last, (at.last, at.points(inside))

        windows = _tree.split((level.xs, level.rhs), size)

        def run(y0: State, _: PyTree = None, /) -> tuple[CPoints, Points]:
            return lax.scan(window, y0, windows, reverse=level.reverse)[1]

        _, points = level.workers.relay(run, level.y0, reverse=level.reverse)
        return _tree.merge(points)


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
    solver: Windowed, level: Level, size: int, y0: State, _: PyTree = None, /
) -> tuple[Points, tuple[jax.Array, Scalar]]:
    """Sweep over ``size`` steps at a time to the end of this worker's part of the chain.

    Returns:
        The states after every step, the number of sweeps, and the sum of the squared first residuals.
    """
    n, total, rtol, atol = level.steps, level.workers.total(level.span), solver.rtol, solver.atol
    size, most = min(size, n), (solver.sweeps - 1) * solver.windows
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
        rows = at.entering, level.xs, level.rhs
        entering, xs, rhs = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, size), rows)
        old = _tree.where_rows(seen, entering, _tree.repeat(at.after, 1))
        y = _tree.take(old, -1 if level.reverse else 0)
        inside = level.window(xs, rhs, y)
        stepped, _ = sweep(inside, old)
        new, after = inside.workers.prefix_sums(_tree.sub(stepped, old), y, reverse=level.reverse)
        residuals = squares(_tree.sub(stepped, _tree.push(old, at.after, reverse=not level.reverse)))
        first = at.first + jnp.sum(jnp.where(seen, 0, residuals))
        reached = jnp.maximum(at.reached, begin + size)
        at = at._replace(after=after, reached=reached, sweeps=at.sweeps + 1, first=first.astype(dtype))
        kept = squares(_tree.sub(new, old)) <= limit(at)
        kept = jnp.cumprod((kept[::-1] if level.reverse else kept).astype(jnp.int32))
        entering = jax.tree.map(lambda x, w: lax.dynamic_update_slice_in_dim(x, w, row, 0), at.entering, new)
        return at._replace(entering=entering, done=begin + jnp.maximum(1, jnp.sum(kept)).astype(jnp.int32))

    zero = jnp.int32(0)
    begin = _Window(_tree.zeros_like(_tree.repeat(y0, n)), y0, zero, zero, zero, jnp.zeros((), dtype))
    begin = _tree.varying(begin, (y0, level.xs, level.rhs))
    end = lax.while_loop(lambda at: (at.done < n) & (at.sweeps < most), turn, begin)
    number = jnp.arange(n, dtype=jnp.int32)[:: -1 if level.reverse else 1]
    entering = _tree.where_rows(number < end.reached, end.entering, _tree.repeat(end.after, 1))
    return _tree.push(entering, end.after, reverse=not level.reverse), (end.sweeps, end.first)
