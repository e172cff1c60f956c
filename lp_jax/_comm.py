"""Where the layers live. The one place in which a state may cross from one worker to its neighbour.

The solver sees intervals and asks five things of its ``comm``; `Local` answers them on one device. Everything else
in the library is local to an interval.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lp_jax import _tree
from lp_jax._types import State


@dataclasses.dataclass(frozen=True)
class Local:
    """All layers on one device."""

    def shift(self, exits: State, y0: State, *, reverse: bool) -> State:
        """States that enter the intervals: ``y0`` for the first, its neighbour's exit for every other one.

        Leaves of ``exits`` are ``(intervals, ...)``. In a reversed chain the last interval is the first.
        """

        def leaf(first: jax.Array, u: jax.Array) -> jax.Array:
            first = first[None].astype(u.dtype)
            return jnp.concatenate([u[1:], first] if reverse else [first, u[:-1]])

        return jax.tree.map(leaf, y0, exits)

    def last(self, exits: State, *, reverse: bool) -> State:
        """The state that leaves the chain."""
        return jax.tree.map(lambda u: u[0 if reverse else -1], exits)

    def cumsum(self, increments: State, y0: State, *, reverse: bool) -> State:
        """``y0`` plus the sum of the increments of all intervals up to and including each one."""
        sums = _tree.cumsum(increments, reverse=reverse)
        return jax.tree.map(lambda y, s: y[None] + s, y0, sums)

    def norm(self, r: State) -> jax.Array:
        """2-norm over all intervals."""
        return _tree.norm(r)
