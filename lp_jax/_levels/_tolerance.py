"""When iterations end: rounding, divergence, and how large a first residual norm can be."""

import math

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._types import Scalar
from lp_jax._levels._level import Level


def rounding(level: Level) -> jax.Array:
    """Residual norm that rounding alone leaves, for states about as large as the one that enters: no solve gets below."""
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    each = [(float(jnp.finfo(x.dtype).eps) * _tree.norm(x)).astype(dtype) for x in jax.tree.leaves(level.y0)]
    return jnp.sqrt(level.workers.total(level.interval_span) * sum(x**2 for x in each))


ROUNDING = 10  # times the norm that rounding leaves: residual norms below this may go up and down
_GROWN = 10  # times the first residual norm: sweeps that converge stay below 3 on the way, those that do not pass by
_STALLED = 4  # iterations that do not halve a residual norm which had come down by ten: rounding, or a limit


def believed(level: Level) -> Scalar:
    """The largest first residual norm that a tolerance is relative to, where a start made up the states.

    That of changes in every interval as large as the state that enters the network. Coarse steps that diverge leave any states.
    """
    size = _tree.norm(level.y0) * math.sqrt(level.workers.total(level.interval_span))
    return jnp.where(size > 0, size, jnp.inf)


def hopeless(norms: jax.Array, k: jax.Array) -> jax.Array:
    """Whether ``k`` residual norms show that the iteration diverges, or that it gets no further."""
    last = norms[k - 1]
    stalled = (k > _STALLED) & (last < norms[0] / 10) & (last > norms[k - 1 - _STALLED] / 2)
    return (last > _GROWN * norms[0]) | stalled
