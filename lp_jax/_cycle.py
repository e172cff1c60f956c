"""Multigrid cycles over a tuple of levels, finest first. Static recursion; one screen, like the paper's algorithm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from lp_jax import _tree
from lp_jax._level import Level
from lp_jax._relax import c_relax, f_relax, pre_relax, residual_and_entering
from lp_jax._transfer import coarse_rhs, correct, prolong, restrict
from lp_jax._types import State

if TYPE_CHECKING:
    from lp_jax._mgrit import MGRIT

VISITS = {"V": ("V",), "F": ("F", "V"), "W": ("W", "W")}
"""The cycles that a cycle of each kind makes on the next coarser level, one after the other."""


def cycle(
    mgrit: "MGRIT", levels: Sequence[Level], u: State, *, kind: str | None = None, depth: int = 0
) -> tuple[State, jax.Array]:
    """One FAS cycle on ``levels[0]``, and its residual norm.

    Args:
        mgrit: relaxation, C-weight and kind of cycle.
        levels: this level and all coarser ones.
        u: C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        kind: "V", "F" or "W"; that of ``mgrit`` if None.
        depth: level number of ``levels[0]``, for settings per level.

    Returns:
        The corrected C-points, and the residual norm over the C-points after pre-relaxation, before correction.
    """
    u, squares = fas_cycle(mgrit, levels, u, kind=kind, depth=depth)
    return u, levels[0].comm.norm(squares)


def fas_cycle(
    mgrit: "MGRIT", levels: Sequence[Level], u: State, *, kind: str | None = None, depth: int = 0
) -> tuple[State, jax.Array]:
    """`cycle`, with the sum of squares of this worker's residuals in the place of the norm over all workers."""
    fine, *coarser = levels
    nu, weight = mgrit.c_relaxations(depth), mgrit.c_weight
    if fine.span == 1 and any(level.anchor for level in coarser):
        for _ in range(nu):
            u = c_relax(fine, u, weight)
        r, states = residual_and_entering(fine, u)
        coarser = [level.anchored(states) for level in coarser]
        entries = jax.tree.map(lambda x: x[:: fine.factor], states)
    else:
        u, r, entries = pre_relax(fine, u, nu, weight)
    v = restrict(fine, u)
    rhs = coarse_rhs(coarser[0], v, restrict(fine, r), restrict(fine, entries))
    w = coarse_solve(mgrit, [coarser[0].with_rhs(rhs), *coarser[1:]], v, kind=kind or mgrit.cycle, depth=depth + 1)
    return correct(fine, u, w, v), _tree.square(r)


def coarse_solve(mgrit: "MGRIT", levels: Sequence[Level], v: State, *, kind: str, depth: int) -> State:
    """Approximate solution at all points of ``levels[0]``, leaves ``(steps, ...)``: exact if it is the coarsest."""
    if len(levels) == 1:
        return mgrit.coarsest.run(levels, guess=v)
    u = levels[0].c_points(v)
    for visit in VISITS[kind]:
        u, _ = fas_cycle(mgrit, levels, u, kind=visit, depth=depth)
    return f_relax(levels[0], u)


def cascade(mgrit: "MGRIT", levels: Sequence[Level], *, kind: str | None = None, depth: int = 0) -> State:
    """First approximation without a guess: solve the coarsest level, then inject and F-relax level by level.

    It stands for the first visit of a cycle of its kind: where that makes more than one (F, W), the others follow on
    every level but the finest and the coarsest.

    Returns:
        C-points of ``levels[0]``.
    """
    kind = kind or mgrit.cycle
    fine, *coarser = levels
    if len(coarser) == 1:
        return prolong(fine, mgrit.coarsest.run(coarser))
    u = cascade(mgrit, coarser, kind=kind, depth=depth + 1)
    for visit in VISITS[kind][1:]:
        u, _ = fas_cycle(mgrit, coarser, u, kind=visit, depth=depth + 1)
    return prolong(fine, f_relax(coarser[0], u))
