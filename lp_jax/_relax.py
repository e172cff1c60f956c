"""Relaxation and residual: the parallel half of a cycle (algorithm: Falgout et al. 2014, Guenther et al. 2020).

All three take C-points, leaves ``(intervals, ...)``. F-points are not stored: each function propagates the C-points
over them, so "F-relaxation, then ..." is part of what it computes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _tree
from lp_jax._level import Advance, Level, sweep
from lp_jax._types import PyTree, State


def f_relax(level: Level, u: State) -> State:
    """F-relaxation: the states after every step, F-points propagated from the C-point on their left.

    Returns:
        Leaves ``(steps, ...)``; the C-points among them are ``u`` itself.
    """
    m = level.factor
    if m == 1:
        return u

    last, entered = sweep(level, level.entries(u), advance=_with_entry(level), count=m - 1)

    def points(c: jax.Array, f: jax.Array, e: jax.Array) -> jax.Array:
        # the state that enters a step is the one that left the step before
        parts = (
            [c[:, None], f[:, None], e[:, 1 : m - 1]] if level.reverse else [e[:, 1 : m - 1], f[:, None], c[:, None]]
        )
        return jnp.concatenate(parts, axis=1)

    return level.with_c_points(_tree.merge(jax.tree.map(points, u, last, entered), level.steps), u)


def c_relax(level: Level, u: State, weight: jax.Array | float = 1.0) -> State:
    """F-relaxation, then C-relaxation ``u_c <- w Phi(u[c-1]) + (1 - w) u_c`` of all C-points at once (Jacobi)."""
    swept, _ = sweep(level, level.entries(u))
    return _tree.blend(weight, swept, u)


def residual(level: Level, u: State) -> State:
    """F-relaxation, then the residual at the C-points, ``r_c = Phi(u[c-1]) + g_c - u_c``. F-points have none."""
    return _tree.sub(sweep(level, level.entries(u))[0], u)


def pre_relax(level: Level, u: State, count: int, weight: jax.Array | float) -> tuple[State, State, State]:
    """``count`` times `c_relax`, then `residual`, as one loop over the sweeps that both are.

    Returns:
        The C-points, the residual there, and the states that enter the intervals.
    """

    def body(carry: tuple[State, State, State], _: None) -> tuple[tuple[State, State, State], None]:
        u, swept, _ = carry
        u = _tree.blend(weight, swept, u)
        entries = level.entries(u)
        return (u, sweep(level, entries)[0], entries), None

    (u, swept, entries), _ = lax.scan(body, (u, u, u), length=count + 1)
    return u, _tree.sub(swept, u), entries


def entering(level: Level, u: State) -> State:
    """F-relaxation: the states that enter every step, leaves ``(steps, ...)``."""
    return level.comm.shift(f_relax(level, u), level.y0, level.total, reverse=level.reverse)


def residual_and_entering(level: Level, u: State) -> tuple[State, State]:
    """`residual` and the states that enter every step (the F-points of the same relaxation), in one sweep."""
    swept, entered = sweep(level, level.entries(u), advance=_with_entry(level))
    return _tree.sub(swept, u), level.merge(entered)


def _with_entry(level: Level) -> Advance:
    def advance(u: State, x: PyTree, shared: PyTree) -> tuple[State, State]:
        return level.step(u, x, shared), u

    return advance
