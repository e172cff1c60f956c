"""The result of a solve, and a guess made of one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import CPoints, PyTree, State
from lp_jax._levels._result import DONE, FELL_BACK, NON_FINITE, RESULTS, SERIAL
from lp_jax._programs import _inputs
from lp_jax._solvers._solver import Stats, first_norms


class SolveError(RuntimeError):
    """Raised by `Solution.raise_if_failed`: the solve did not do what was asked.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> try:
        ...     problem.solve(solver=lp_jax.Picard(sweeps=1, rtol=1e-6)).raise_if_failed()
        ... except lp_jax.SolveError as error:
        ...     print(str(error).partition(" within")[0])
        the residual norm did not come down to the tolerance
    """


class Solution(NamedTuple):
    """Result of `solve`.

    Attributes:
        y1: the state after the last layer. Gradients flow through it and through ``aux`` only.
        stats: iterations, residual norms, and the result code.
        trajectory: level-0 C-point states after point 0, leaves ``(ceil(N / m), ...)``; a ``guess`` for the next solve.
        aux: the step's second output, stacked over layers, ``(N, ...)``; from the final sweep.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> solution = problem.solve(solver=lp_jax.MGRIT(coarsening=4, iterations=2))
        >>> solution.trajectory.shape, int(solution.result)
        ((16,), 0)
    """

    y1: State
    stats: Stats
    trajectory: State
    aux: PyTree

    @property
    def result(self) -> jax.Array:
        """An int32 code. 0 is done as asked; `RESULTS` has the messages."""
        return self.stats.result

    def __repr__(self) -> str:
        y1, trajectory, aux = map(_inputs.describe, (self.y1, self.trajectory, self.aux))
        stats = result = "traced"
        if not isinstance(self.result, jax.core.Tracer) and jnp.ndim(self.result) == 0:
            stats = repr(self.stats)
            result = f"{int(self.result)} ({self._reason(int(self.result)).partition('.')[0]})"
        return (
            f"Solution(y1={y1}, stats={stats}, result={result}, trajectory={trajectory}, aux={aux})"
        )

    def raise_if_failed(self) -> "Solution":
        """Return the solution itself, or raise `SolveError`. It does not work under jit. A fallback to `Serial` is no failure."""
        if isinstance(self.result, jax.core.Tracer):
            raise SolveError(
                "raise_if_failed() was called under jit or another transformation; call it on what "
                "they return."
            )
        # A batch of solves has a code for each of them.
        codes = {int(code) for code in jnp.ravel(self.result)} - {DONE, SERIAL, FELL_BACK}
        if codes:
            norms = first_norms(np.ravel(self.stats.residual_norms).tolist())
            reasons = "; ".join(map(self._reason, sorted(codes)))
            raise SolveError(f"{reasons}. Residual norms: [{norms}]." if norms else f"{reasons}.")
        return self

    def _reason(self, code: int) -> str:
        """The message of a result code. If the state is not finite, it names the first layer whose output is not."""
        if code != NON_FINITE or jnp.ndim(self.result):
            return RESULTS[code]
        leaves = jax.tree.leaves(self.trajectory)
        finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in leaves]  # in place
        # Entries of the trajectory are intervals; `bad[0]` is the first one that ends with a state that is not finite.
        bad = np.flatnonzero(~np.all(finite, axis=0))
        if not len(bad):
            return RESULTS[code]
        where = f"layer {bad[0]} (counted from 0) is the first whose output is not finite"
        if jax.tree.leaves(self.aux) and len(jax.tree.leaves(self.aux)[0]) > len(leaves[0]):
            where = (
                f"interval {bad[0]} (counted from 0) of {len(leaves[0])} is the first with a layer "
                "whose output is not finite"
            )
        return f"{where}: {RESULTS[code]}"


def interpolate(y0: State, trajectory: CPoints, count: int) -> CPoints:
    """States on another grid, by linear interpolation in time: a ``guess`` from a solve with more or fewer layers.

    Args:
        y0: the state that enters the first layer.
        trajectory: the states after the first layer, the second one, ..., at equal distances in time, such as
            `Solution.trajectory`, or the ``ys`` of a `scan`; leaves ``(K, ...)``.
        count: number of states of the result, at times ``T / count, 2 T / count, ..., T``. A ``guess`` for N layers has N states
            for `Picard` and `Newton`, and ``ceil(N / m)`` for `MGRIT` with coarsening factor m.

    Raises:
        ValueError: for a count below 1, and for a trajectory that is not a stack of states like ``y0``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> solution = lp_jax.solve(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(8), jnp.ones(()))
        >>> lp_jax.interpolate(jnp.ones(()), solution.trajectory, 64).shape
        (64,)
    """
    _check.integer("count", count, least=1)
    y0 = _inputs.state(y0)
    trajectory = jax.tree.map(jnp.asarray, trajectory)
    lengths = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(trajectory)}
    if len(lengths) != 1 or 0 in lengths or not _inputs.alike(y0, _tree.entry_like(trajectory)):
        shapes, points = (jax.tree.map(jnp.shape, tree) for tree in (y0, trajectory))
        raise ValueError(
            f"trajectory must be states like y0, {shapes}, stacked along a first axis of one "
            f"length, at least 1; got {points}."
        )
    (number,) = lengths
    # Times of the new states, in units of the old intervals.
    place = np.arange(1, count + 1) * number / count
    below = np.minimum(place.astype(int), number - 1)

    def leaf(start: jax.Array, x: jax.Array) -> jax.Array:
        # State 0 is the one that enters, so entry k is the state at time k.
        states = jnp.concatenate([start[None].astype(x.dtype), x])
        weight = jnp.asarray((place - below).reshape(-1, *[1] * (x.ndim - 1)), x.dtype)
        return (1 - weight) * states[below] + weight * states[below + 1]

    return jax.tree.map(leaf, y0, trajectory)
