"""Multigrid cycles over a tuple of levels, finest first. Static recursion; one screen, like the paper's algorithm."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lp_jax._arrays import _tree
from lp_jax._arrays._types import CPoints, Points, Scalar
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._relax import Relaxed, f_relax
from lp_jax._levels._sweep import sweep
from lp_jax._levels._transfer import coarse_rhs, correct, prolong, restrict
from lp_jax._solvers._solver import Solver, solve_levels

VISITS = {"V": ("V",), "F": ("F", "V"), "W": ("W", "W")}
"""The cycles that a cycle of each kind makes on the next coarser level, one after the other."""


@runtime_checkable
class Multigrid(Protocol):
    """The settings of a cycle; `MGRIT` has them."""

    @property
    def cycle(self) -> str:
        """Kind of cycle: "V", "F" or "W"."""

    @property
    def coarsest(self) -> Solver:
        """Solver of the coarsest level."""

    def pre_relax(self, level: Level, u: CPoints, *, points: bool) -> Relaxed:
        """Relax, then compute the residual; with the states that enter every step if ``points``."""


def cycle(mgrit: Multigrid, levels: Sequence[Level], u: CPoints, *, kind: str | None = None) -> tuple[CPoints, Scalar]:
    """One FAS cycle on ``levels[0]``, and its residual norm.

    Args:
        mgrit: relaxation, kind of cycle and solver of the coarsest level.
        levels: this level and all coarser ones.
        u: C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        kind: "V", "F" or "W"; that of ``mgrit`` if None.

    Returns:
        The corrected C-points, and the residual norm over the C-points after pre-relaxation, before correction.
    """
    u, squares = fas_cycle(mgrit, levels, u, kind or mgrit.cycle)
    return u, levels[0].norm(squares)


def fas_cycle(mgrit: Multigrid, levels: Sequence[Level], u: CPoints, kind: str) -> tuple[CPoints, Scalar]:
    """`cycle`, but with the sum of squares of this worker's residuals instead of the norm over all workers."""
    fine, *coarser = levels
    u, r, incoming, points = mgrit.pre_relax(fine, u, points=any(level.linearise_at for level in coarser))
    coarse, *coarser = [level.linearised_at(points) for level in coarser]
    v = restrict(fine, u)
    rhs = coarse_rhs(coarse, v, restrict(fine, r), restrict(fine, incoming))
    w = coarse_solve(mgrit, [coarse.with_rhs(rhs), *coarser], v, kind)
    return correct(fine, u, w, v), sum_of_squares(fine, r)


def coarse_solve(mgrit: Multigrid, levels: Sequence[Level], v: Points, kind: str) -> Points:
    """Approximate solution at all points of ``levels[0]``, leaves ``(steps, ...)``; that of ``coarsest`` on the last level."""
    if len(levels) == 1:
        return solve_levels(mgrit.coarsest, levels, guess=v)
    u = levels[0].c_points(v)
    for visit in VISITS[kind]:
        u, _ = fas_cycle(mgrit, levels, u, visit)
    return f_relax(levels[0], u)


def cascade(mgrit: Multigrid, levels: Sequence[Level], *, kind: str | None = None) -> CPoints:
    """Approximate the states without a guess: solve the coarsest level, then inject and F-relax level by level.

    It replaces the first visit of a cycle of its kind. Further visits (F, W) follow on every level but the finest and the
    coarsest. An adjoint with sources restricts them like a cycle that starts from zeros: the C-point at the end of an
    interval gets the propagated sum of its sources.

    Returns:
        C-points of ``levels[0]``.
    """
    kind = kind or mgrit.cycle
    fine, coarse, *coarser = [
        dataclasses.replace(level, linearise_at=None) for level in levels
    ]  # there are no states yet
    if fine.has_sources or fine.rhs is not None:
        zeros = _tree.zeros_like(_tree.repeat(fine.y0, fine.intervals))
        coarse = coarse.with_rhs(restrict(fine, sweep(fine, zeros)[0]))
    if not coarser:
        return prolong(fine, solve_levels(mgrit.coarsest, (coarse,)))
    u = cascade(mgrit, (coarse, *coarser), kind=kind)
    for visit in VISITS[kind][1:]:
        u, _ = fas_cycle(mgrit, (coarse, *coarser), u, visit)
    return prolong(fine, f_relax(coarse, u))
