"""The one driver: iterate a solver on its levels, to a fixed number of cycles or to a tolerance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _tree
from lp_jax._level import Level
from lp_jax._types import State

if TYPE_CHECKING:
    from lp_jax._solver import Solver


class Stats(NamedTuple):
    """What a solve measured.

    Attributes:
        iterations: number of cycles (of sweeps, for `Picard`) that were done, an int32 scalar.
        residual_norms: 2-norm of the residual over the C-points of the finest level, all leaves of the state and the
            whole batch, taken during each cycle after its pre-relaxation and before its coarse correction. Fixed
            length; NaN for a skipped down-cycle and for cycles that were not needed.
    """

    iterations: jax.Array
    residual_norms: jax.Array


def iterate(solver: "Solver", levels: Sequence[Level], guess: State | None) -> tuple[State, Stats, jax.Array]:
    """Run ``solver`` on ``levels``.

    Args:
        solver: gives the start, one cycle, the number of cycles and the tolerances.
        levels: finest first.
        guess: C-points, leaves ``(intervals, ...)``, or None for the constant ``y0``.

    Returns:
        The C-points, what was measured, and whether the tolerances (if any) were met.
    """
    comm = levels[0].comm
    u, spent = solver.start(levels, guess)
    cycles = solver.iterations - spent
    skipped = jnp.full((spent,), jnp.nan, _norm_dtype(levels[0]))
    tolerant = solver.rtol is not None or solver.atol is not None
    if cycles <= 0:
        return u, Stats(jnp.asarray(spent, jnp.int32), skipped), jnp.asarray(not tolerant)
    if not tolerant:
        u, squares = lax.scan(lambda u, _: solver.improve(levels, u), u, length=cycles)
        norms = comm.norm(squares)  # once, not in every cycle
        stats = Stats(
            jnp.asarray(solver.iterations, jnp.int32), jnp.concatenate([skipped, norms.astype(skipped.dtype)])
        )
        return u, stats, jnp.asarray(True)

    atol = jnp.asarray(-jnp.inf if solver.atol is None else solver.atol, skipped.dtype)

    def tolerance(norms: jax.Array) -> jax.Array:
        return atol if solver.rtol is None else jnp.maximum(atol, jnp.asarray(solver.rtol, atol.dtype) * norms[0])

    def unfinished(carry: tuple[State, jax.Array, jax.Array]) -> jax.Array:
        _, k, norms = carry
        # a NaN compares false, so a diverged solve stops at once
        return (k < cycles) & ((k == 0) | (norms[k - 1] > tolerance(norms)))

    def body(carry: tuple[State, jax.Array, jax.Array]) -> tuple[State, jax.Array, jax.Array]:
        u, k, norms = carry
        u, squares = solver.improve(levels, u)
        return u, k + 1, norms.at[k].set(comm.norm(squares).astype(norms.dtype))

    u, k, norms = lax.while_loop(unfinished, body, (u, jnp.int32(0), jnp.full((cycles,), jnp.nan, skipped.dtype)))
    met = norms[k - 1] <= tolerance(norms)
    return u, Stats(k + spent, jnp.concatenate([skipped, norms])), met


def _norm_dtype(level: Level) -> jnp.dtype:
    return _tree.real_dtype(level.y0, at_least=jnp.float32)
