"""Secant sweeps: they also estimate how the layers respond to a change."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import CPoints, Points, Scalar, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import sweep
from lp_jax._levels._tolerance import measure_corrections
from lp_jax._solvers._coarse_step import Coarse
from lp_jax._solvers._solver import Start
from lp_jax._solvers._sweeps import Sweeps, Swept, begin


class Learned(NamedTuple):
    """State of the secant sweeps: of plain ones, the last change of the states that enter the layers, and the last slope."""

    swept: Swept
    change: Points
    slope: Scalar


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Secant(Sweeps):
    r"""Sweeps over all layers at once that learn how much of a change survives a layer.

    A sweep is :math:`y_{n+1} \leftarrow \Phi_n(u_n) + (1 + a) (y_n - u_n)` for the states u of the sweep before, with one
    slope a in [-1, 0] for all layers. The slope fits the responses to the last change: where the states changed by d, it is that
    of least squares of :math:`\Phi(u) - \Phi(u - d) \approx (1 + a) d`. With a = 0 a sweep is one of `Picard`, as is the
    first. Chains that contract, such as a GRU, take a quarter of the sweeps; others take as many. No Jacobian is formed.

    Args:
        sweeps: number of sweeps; with a tolerance their maximum.
        rtol: as in `Picard`, for the changes of states.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially if the tolerance is not met.
        storage: arrays that the forward solve keeps for the adjoint, "all" or "states", as in `Picard`.
        at_once: number of independent layers that a worker evaluates at once, or "auto".

    Raises:
        ValueError: for less than one sweep, an unknown ``storage``, and as a coarse step.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: 0.9 * y + layer.params, jnp.ones(64), jnp.ones(()))
        >>> solvers = lp_jax.Picard(sweeps=64, rtol=1e-4), lp_jax.Secant(sweeps=64, rtol=1e-4)
        >>> [int(problem.solve(solver=solver).stats.iterations) for solver in solvers]
        [21, 3]

    Reference:
        Wegstein, "Accelerating convergence of iterative processes", Comm. ACM 1 (1958): the secant method of a fixed point,
        here with one slope for a chain.
    """

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level, swept = levels[0], begin(levels[0], guess)
        slope = _tree.varying(jnp.zeros((), _tree.real_dtype(swept.last, at_least=jnp.float32)), swept)

        def corrections(before: Learned, after: Learned) -> jax.Array:
            return measure_corrections(level, before.swept, after.swept)

        return Start(Learned(swept, _tree.zeros_like(swept.entering), slope), corrections=corrections)

    def improve(self, levels: Sequence[Level], state: Learned) -> tuple[Learned, Scalar]:
        level, u, workers = levels[0], state.swept, levels[0].workers
        stepped, _ = sweep(level, u.entering)
        residuals = _tree.sub(stepped, u.points(level))
        # Phi(u) - Phi(u - d) is (1 + slope) d plus the residuals
        along, squared = workers.sum((_tree.inner(residuals, state.change), _tree.inner(state.change, state.change)))
        slope = jnp.clip(state.slope + along / jnp.where(squared > 0, squared, 1), -1, 0)
        slope = jnp.where(jnp.isfinite(slope), slope, 0)
        factor = 1 + slope
        increments = jax.tree.map(lambda f, y: f - factor.astype(f.dtype) * y, stepped, u.entering)
        entering, last = workers.prefix_sums(increments, level.y0, reverse=level.reverse, factor=factor)
        change = _tree.sub(entering, u.entering)
        if workers.padded and not level.reverse and level.steps:
            entering, last, change = _fix_padding(level, entering, last, change)
        return Learned(Swept(entering, last), change, slope), sum_of_squares(level, residuals)

    def c_points(self, levels: Sequence[Level], state: Learned) -> CPoints:
        return state.swept.points(levels[0])

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        raise ValueError(
            f"coarse_step={self!r} would depend on the sweeps before it. Take Picard(sweeps={self.sweeps})."
        )


def _fix_padding(level: Level, entering: Points, last: State, change: Points) -> tuple[Points, State, Points]:
    """Set all slots beyond the last layer to the state that leaves it, with no change."""
    n, workers = level.steps, level.workers
    end = jnp.asarray(jnp.clip(workers.total(level.span) - workers.start(level.span), 0, n), jnp.int32)
    number = jnp.arange(n, dtype=jnp.int32)
    last = jax.tree.map(lambda x, y: jnp.where(end < n, x[jnp.minimum(end, n - 1)], y), entering, last)
    entering = jax.tree.map(lambda x: x[jnp.minimum(number, end)], entering)
    return entering, last, _tree.where_rows(number < end, change)
