"""The pieces of a cycle (Falgout et al. 2014, Guenther et al. 2020): relaxation and residual; and the way to the coarser level.

They take C-points, leaves ``(intervals, ...)``. F-points are not stored: each function computes them again from the C-points,
which its docstring calls "F-relaxation, then ...". Points of the coarser level are the C-points, so injection in time is the
identity. The coarse right-hand side and the correction are those of the full approximation scheme (FAS).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Advance, CPoints, Points, PyTree, State
from lp_jax._levels._level import Level, identity
from lp_jax._levels._sweep import each, sweep

Relaxation: TypeAlias = str | Callable[[Level, CPoints], CPoints]

T = TypeVar("T")


class Relaxed(NamedTuple):
    """A level after its pre-relaxation."""

    u: CPoints
    residual: CPoints  # at the C-points
    incoming: CPoints  # states that enter the intervals
    # states that enter every step, ``(steps, ...)``; None where they are not needed
    entered: Points | None = None


def f_relax(level: Level, u: CPoints) -> Points:
    """F-relaxation: the states after every step, ``(steps, ...)``, F-points propagated from the C-point before them.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, _ = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> lp_jax.multigrid.f_relax(fine, lp_jax.multigrid.march(fine)).shape
        (64,)
    """
    if level.factor == 1:
        return u
    entered = _tree.split(entering(level, level.incoming(u)), level.factor)
    # The state that leaves a step enters the next one. So the entering states move by one place, and the C-point comes last.
    left = jax.vmap(functools.partial(_tree.push, reverse=not level.reverse))(entered, u)
    return level.with_c_points(_tree.merge(left), u)


def c_relax(level: Level, u: CPoints, weight: jax.Array | float = 1.0) -> CPoints:
    """F-relaxation, then C-relaxation of all C-points at once (Jacobi), ``u_c <- w (Phi(u[c-1]) + g_c) + (1 - w) u_c``.

    ``g`` is the level's right-hand side.
    """
    swept, _ = sweep(level, level.incoming(u))
    return _tree.blend(weight, swept, u)


def residual(level: Level, u: CPoints) -> CPoints:
    """F-relaxation, then the residual at the C-points, ``r_c = Phi(u[c-1]) + g_c - u_c``. F-points have none."""
    return _tree.sub(sweep(level, level.incoming(u))[0], u)


def relaxed(
    relaxation: Relaxation | tuple[Relaxation, ...],
    weight: jax.Array | float,
    level: Level,
    u: CPoints,
    keeps_entered: bool,
) -> Relaxed:
    """Relax by the rule for this level, then compute the residual; with the states that enter every step if wanted."""
    rules: tuple[Relaxation, ...] = per_level(relaxation)
    rule = at_level(rules, level.number)
    if callable(rule):
        u, relaxations = rule(level, u), 0
    else:
        relaxations = rule.count("C")
    if keeps_entered:
        # A loop has one body, and only the last sweep emits states, so here the relaxations are unrolled.
        for _ in range(relaxations):
            u = c_relax(level, u, weight)
        incoming = level.incoming(u)
        swept, entered = sweep(level, incoming, advance=_with_incoming(level))
        return Relaxed(u, _tree.sub(swept, u), incoming, level.merge(entered))

    def sweeps(
        carry: tuple[CPoints, CPoints, CPoints], _: None
    ) -> tuple[tuple[CPoints, CPoints, CPoints], None]:
        u, swept, _ = carry
        # Each turn blends, then sweeps. The first blend is of ``u`` with itself, so k + 1 turns are k relaxations and a residual.
        u = _tree.blend(weight, swept, u)
        incoming = level.incoming(u)
        return (u, sweep(level, incoming)[0], incoming), None

    # C-relaxations, and the sweep of the residual, in one loop: each sweep is compiled once.
    (u, swept, incoming), _ = _tree.scan(sweeps, (u, u, u), length=relaxations + 1)
    return Relaxed(u, _tree.sub(swept, u), incoming)


def per_level(setting: T | tuple[T, ...]) -> tuple[T, ...]:
    """A setting of the levels, finest first."""
    return setting if isinstance(setting, tuple) else (setting,)


def at_level(settings: tuple[T, ...], level: int) -> T:
    """The setting of a level; the last one repeats."""
    return settings[min(level, len(settings) - 1)]


def entering(level: Level, incoming: CPoints) -> Points:
    """F-relaxation: the states that enter every step, leaves ``(steps, ...)``, given those that enter the intervals."""
    if level.factor == 1:
        return incoming
    # One step less is evaluated, as the state after the last step of an interval enters none of its steps. So `sweep` leaves one
    # place empty, which takes the state that it reached.
    last, entered = sweep(level, incoming, advance=_with_incoming(level), count=level.factor - 1)

    def with_last(last: jax.Array, entered: jax.Array) -> jax.Array:
        last = last[:, None]
        parts = [last, entered[:, 1:]] if level.reverse else [entered[:, :-1], last]
        return jnp.concatenate(parts, axis=1)

    return _tree.merge(jax.tree.map(with_last, last, entered))


def _with_incoming(level: Level) -> Advance:
    def advance(u: State, x: PyTree, shared: PyTree) -> tuple[State, State]:
        return level.step(u, x, shared), u

    return advance


def restrict(level: Level, u: CPoints) -> Points:
    """C-points of ``level`` as the points of the next coarser one, ``v_j = R u[jm]``. Leaves ``(intervals, ...)``."""
    return u if level.transfer is None else jax.vmap(level.transfer[0])(u)


def prolong(level: Level, v: Points) -> CPoints:
    """Points of the next coarser level as C-points of ``level``, ``P v_j``. Leaves ``(intervals, ...)``."""
    return v if level.transfer is None else jax.vmap(level.transfer[1])(v)


def coarse_rhs(coarse: Level, v: Points, r: Points, incoming: Points | None = None) -> Points:
    """Right-hand side of the coarse problem, ``g'_j = r_j + v_j - Phi'(v_{j-1})``, from restricted states and residuals.

    All have leaves ``(coarse.steps, ...)``. ``incoming`` are the ``v_{j-1}``, where they are known.
    """
    if incoming is None:
        incoming = coarse.workers.incoming(v, coarse.y0, coarse.span, reverse=coarse.reverse)
    if coarse.step is identity:
        stepped = incoming
    else:
        one = each(coarse, lambda u, x: coarse.step(u, x, coarse.shared), incoming)
        stepped = one(incoming, coarse.merge(coarse.xs))
    return _tree.add(r, _tree.sub(v, stepped))


def correct(level: Level, u: CPoints, new: Points, old: Points) -> CPoints:
    """Coarse-grid correction of the C-points, ``u_c + P(u'_j - v_j)``."""
    return _tree.add(u, prolong(level, _tree.sub(new, old)))
