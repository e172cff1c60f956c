"""When iterations end: rounding, divergence, and how large a first residual norm can be."""

import math

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Scalar
from lp_jax._levels._level import Level


def rounding(level: Level) -> jax.Array:
    """Residual norm from rounding, for states about as large as ``y0``. No solve gets below it."""
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    each = [(float(jnp.finfo(x.dtype).eps) * _tree.norm(x)).astype(dtype) for x in jax.tree.leaves(level.y0)]
    return jnp.sqrt(level.workers.total(level.interval_span) * sum(x**2 for x in each))


ROUNDING = 10  # times the rounding norm: smaller residual norms may go up and down
_GROWN = 10  # times the first residual norm: sweeps that converge stay below 3 on the way, others pass 10
_STALLED = 4  # iterations that do not halve a residual norm that had fallen tenfold: rounding, or a limit


def largest_reference(level: Level) -> Scalar:
    """Largest first residual norm that a tolerance may be relative to, after a start from coarse levels.

    It is the norm of changes as large as ``y0`` in every interval. Coarse steps that diverge lead to larger states.
    """
    size = _tree.norm(level.y0) * math.sqrt(level.workers.total(level.interval_span))
    return jnp.where(size > 0, size, jnp.inf)


def hopeless(norms: jax.Array, k: jax.Array) -> jax.Array:
    """Whether ``k`` residual norms show that the iteration diverges or stalls."""
    last = norms[k - 1]
    stalled = (k > _STALLED) & (last < norms[0] / 10) & (last > norms[k - 1 - _STALLED] / 2)
    return (last > _GROWN * norms[0]) | stalled
