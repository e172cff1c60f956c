"""A guess from a solve with another number of layers."""

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import CPoints, State
from lp_jax._programs import _inputs


def interpolate(y0: State, trajectory: CPoints, count: int) -> CPoints:
    """States on another grid, by linear interpolation in time: a ``guess`` from a solve with more or fewer layers.

    Args:
        y0: the state that enters the first layer.
        trajectory: the states after the first layer, the second one, ..., at equal distances in time, such as
            `Solution.trajectory`, or the ``ys`` of a `scan`; leaves ``(K, ...)``.
        count: number of states of the result, which ends with the last state of ``trajectory``. A ``guess`` for N layers has
            N states for `Picard` and `Newton`, and ``ceil(N / m)`` for `MGRIT` with coarsening factor m.

    Returns:
        Leaves ``(count, ...)``: the states at times ``T / count, 2 T / count, ..., T``.

    Raises:
        ValueError: for a count below 1, and for a trajectory that is not a stack of states like ``y0``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.Picard(sweeps=32, rtol=1e-5)
        >>> coarse = lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=solver)
        >>> guess = lp_jax.interpolate(jnp.ones(()), coarse.trajectory, 64)
        >>> fine = lp_jax.solve(step, jnp.ones(64), jnp.ones(()), solver=solver, guess=guess)
        >>> float(fine.stats.residual_norms[0]) < 0.1
        True
    """
    _check.integer("count", count, least=1)
    y0, trajectory = _inputs.state(y0), jax.tree.map(jnp.asarray, trajectory)
    if not _inputs.alike(y0, _tree.entry_like(trajectory)):
        shapes, points = (jax.tree.map(jnp.shape, tree) for tree in (y0, trajectory))
        raise ValueError(f"trajectory must be states like y0, {shapes}, stacked along a first axis; got {points}.")
    known = {x.shape[0] for x in jax.tree.leaves(trajectory)}
    if len(known) != 1 or known == {0}:
        raise ValueError(f"trajectory must have leaves of one length, at least 1; got lengths {sorted(known)}.")
    (number,) = known
    place = np.arange(1, count + 1) * number / count
    below = np.minimum(place.astype(int), number - 1)

    def leaf(start: jax.Array, x: jax.Array) -> jax.Array:
        states = jnp.concatenate([start[None].astype(x.dtype), x])
        weight = jnp.asarray((place - below).reshape(-1, *[1] * (x.ndim - 1)), x.dtype)
        return (1 - weight) * states[below] + weight * states[below + 1]

    return jax.tree.map(leaf, y0, trajectory)
