"""Between two levels: restriction, the coarse right-hand side and correction of the full approximation scheme (FAS).

Points of the coarse level are the C-points of the finer one, so injection in time is the identity. The state
itself may be transferred, too (spatial coarsening).
"""

import jax

from lp_jax._arrays import _tree
from lp_jax._arrays._types import CPoints, Points, State, Transfer
from lp_jax._levels._level import Level, identity
from lp_jax._levels._sweep import each


def fit_transfer(transfer: Transfer | None, fine: State) -> Transfer | None:
    """Fit ``transfer`` to the shapes of ``fine``, if its prolongation has a method ``fit``."""
    if transfer is None or not hasattr(transfer[1], "fit"):
        return transfer
    return transfer[0], transfer[1].fit(fine)


def restrict(level: Level, u: CPoints) -> Points:
    """C-points of ``level`` as the points of the next coarser one, ``v_j = R u[jm]``. Leaves ``(intervals, ...)``."""
    return u if level.transfer is None else jax.vmap(level.transfer[0])(u)


def prolong(level: Level, v: Points) -> CPoints:
    """Points of the next coarser level as C-points of ``level``, ``P v_j``. Leaves ``(intervals, ...)``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, coarse = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> lp_jax.multigrid.prolong(fine, lp_jax.multigrid.march(coarse)).shape  # no coarsening in space: unchanged
        (16,)
    """
    return v if level.transfer is None else jax.vmap(level.transfer[1])(v)


def coarse_rhs(coarse: Level, v: Points, r: Points, incoming: Points | None = None) -> Points:
    """Right-hand side of the coarse problem, ``g'_j = r_j + v_j - Phi'(v_{j-1})``.

    Args:
        coarse: the coarse level (its own right-hand side is not used).
        v: restricted states, leaves ``(coarse.steps, ...)``.
        r: restricted residuals, same shapes.
        incoming: ``v_{j-1}``, the restricted states that enter the finer level's intervals, where they are known.
    """
    if incoming is None:
        incoming = coarse.incoming_points(v)
    if coarse.step is identity:
        stepped = incoming
    else:
        one = each(coarse, lambda u, x: coarse.step(u, x, coarse.shared), incoming)
        stepped = one(incoming, coarse.merge(coarse.xs))
    return _tree.add(r, _tree.sub(v, stepped))


def correct(level: Level, u: CPoints, new: Points, old: Points) -> CPoints:
    """Coarse-grid correction of the C-points, ``u_c + P(u'_j - v_j)``."""
    return _tree.add(u, prolong(level, _tree.sub(new, old)))
