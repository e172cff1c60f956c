"""Multigrid cycles over a tuple of levels, finest first. The recursion is static, like the algorithm in the paper."""

import dataclasses
from collections.abc import Sequence

import jax

from lp_jax._arrays import _tree
from lp_jax._arrays._types import CPoints, Points, PyTree
from lp_jax._levels._level import Level, Residual, measure
from lp_jax._levels._relax import (
    Relaxation,
    coarse_rhs,
    correct,
    f_relax,
    prolong,
    relaxed,
    restrict,
)
from lp_jax._levels._sweep import sweep
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver, solve_levels

VISITS = {"V": ("V",), "F": ("F", "V"), "W": ("W", "W")}
"""The cycles that a cycle of each kind makes on the next coarser level, one after the other."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The relaxation of a cycle, and its solver of the coarsest level, as `MGRIT` has them."""

    relaxation: Relaxation | tuple[Relaxation, ...] = ("F", "FCF")
    c_weight: float | jax.Array = 1.0
    coarsest: Solver = Serial()


def fas_cycle(
    scheme: Scheme, levels: Sequence[Level], u: CPoints, kind: str
) -> tuple[CPoints, Residual]:
    """One FAS cycle of a kind, "V", "F" or "W", on ``levels[0]`` with C-points ``u``.

    It returns the corrected C-points, and this worker's residuals after relaxation and before correction, by `measure`.
    """
    fine, *coarser = levels
    # Coarse steps around the trajectory need the states at all points, which the relaxation has anyway.
    needs_states = any(level.with_states for level in coarser)
    u, r, incoming, entered = relaxed(scheme.relaxation, scheme.c_weight, fine, u, needs_states)
    # Only the finest level's visit finds levels that want states, those of every layer, and fills them in on all levels.
    coarse, *coarser = [level.fill_in(entered) for level in coarser]
    v = restrict(fine, u)
    # Full approximation scheme: A_c(w) = A_c(v) + R r, with v the restricted C-points and r their residual.
    rhs = coarse_rhs(coarse, v, restrict(fine, r), restrict(fine, incoming))
    w = coarse_solve(scheme, [coarse.with_rhs(rhs), *coarser], v, kind)
    # Only the change w - v is prolonged, so that u stays as it is where the coarse problem reproduces v.
    return correct(fine, u, w, v), measure(fine, r)


def coarse_solve(scheme: Scheme, levels: Sequence[Level], v: Points, kind: str) -> Points:
    """Approximate the solution at all points of ``levels[0]``, leaves ``(steps, ...)``. ``coarsest`` solves the last level."""
    if len(levels) == 1:
        return solve_levels(scheme.coarsest, levels, guess=v)
    # On a coarse level the unknowns are its own C-points; F-relaxation at the end gives the states between them.
    u = levels[0].c_points(v)
    for visit in VISITS[kind]:
        u, _ = fas_cycle(scheme, levels, u, visit)
    return f_relax(levels[0], u)


def coarse_to_fine(scheme: Scheme, levels: Sequence[Level], kind: str) -> CPoints:
    """Approximate the states without a guess: solve the coarsest level, then inject and F-relax level by level.

    It replaces the first visit of a cycle of its kind. Further visits (F, W) follow on every level but the finest and the
    coarsest. An adjoint with sources restricts them like a cycle that starts from zeros: the C-point at the end of an
    interval gets the propagated sum of its sources.
    """
    # There are no states yet to fill in: coarse steps are evaluated at the state that enters their interval.
    fine, coarse, *coarser = [dataclasses.replace(level, with_states=None) for level in levels]
    if fine.has_sources or fine.rhs is not None:
        # From zeros a sweep gives, at the end of each interval, the sum of its sources.
        zeros = _tree.zeros_like(_tree.repeat(fine.y0, fine.intervals))
        coarse = coarse.with_rhs(restrict(fine, sweep(fine, zeros)[0]))
    if not coarser:
        return prolong(fine, solve_levels(scheme.coarsest, (coarse,)))
    u = coarse_to_fine(scheme, (coarse, *coarser), kind)
    # The recursion above was the first visit.
    for visit in VISITS[kind][1:]:
        u, _ = fas_cycle(scheme, (coarse, *coarser), u, visit)
    return prolong(fine, f_relax(coarse, u))


def v_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Residual]:
    """One V-cycle of the full approximation scheme.

    Args:
        levels: finest first.
        u: C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        options: ``relaxation``, ``c_weight`` and ``coarsest``, as for `MGRIT`.

    Returns:
        The corrected C-points, and what `multigrid.measure` says of this worker's residuals after relaxation;
        ``levels[0].norm`` makes it the norm over all workers.

    Example:
        >>> import functools, jax.numpy as jnp, lp_jax
        >>> from lp_jax import multigrid
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> for one in (multigrid.v_cycle, multigrid.f_cycle, multigrid.w_cycle):
        ...     cycle = functools.partial(one, relaxation="FCF")
        ...     solution = problem.solve(solver=lp_jax.MGRIT(levels=3, cycle=cycle))
    """
    return fas_cycle(Scheme(**options), levels, u, "V")


def f_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Residual]:
    """One F-cycle: each coarse level is visited by an F-cycle, then by a V-cycle. Otherwise like `v_cycle`."""
    return fas_cycle(Scheme(**options), levels, u, "F")


def w_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Residual]:
    """One W-cycle: each coarse level is visited by two W-cycles. Otherwise like `v_cycle`."""
    return fas_cycle(Scheme(**options), levels, u, "W")


def cascade(levels: Sequence[Level], kind: str = "V", **options: PyTree) -> CPoints:
    """Approximate the C-points without a guess, from the coarsest level to the finest. Options are those of `v_cycle`."""
    return coarse_to_fine(Scheme(**options), levels, kind)
