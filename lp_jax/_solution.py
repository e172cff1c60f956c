"""What a solve returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._solver import Stats
from lp_jax._types import PyTree, State

DONE, NOT_CONVERGED, NON_FINITE, NOT_FALLING = range(4)

RESULTS = {
    DONE: "done as asked",
    NOT_CONVERGED: (
        "the residual norm did not come down to the tolerance within `iterations` cycles. Allow more iterations, relax more "
        '(relaxation="FCF"), use a coarse step closer to the layers (coarse_step=Picard(sweeps=2)), or loosen rtol/atol'
    ),
    NON_FINITE: (
        "the state is not finite. If the serial network's is (solver=Serial()), the iteration diverged: use more relaxation, a "
        "coarse step closer to the layers (coarse_step=Picard(sweeps=2)) or a smaller t1; otherwise the network itself overflows"
    ),
    NOT_FALLING: (
        "the last residual norm is larger than the first, so that more iterations do not help. Use more relaxation "
        '(relaxation="FCF"), a coarse step closer to the layers (coarse_step=Picard(sweeps=2)) or a smaller t1'
    ),
}
"""Result codes and what they mean."""


class SolveError(RuntimeError):
    """Raised by `Solution.raise_if_failed`: the solve did not do what was asked."""


class Solution(NamedTuple):
    """Result of `solve`.

    Attributes:
        y1: the state after the last layer. The only part that gradients flow through.
        stats: iterations and residual norms.
        result: an int32 code; 0 is done as asked, `RESULTS` has the messages.
        trajectory: level-0 C-point states after point 0, leaves ``(ceil(N / m), ...)``; a ``guess`` for the next solve.
        aux: what the step returned beside the state, stacked over layers, ``(N, ...)``; from the final sweep.
    """

    y1: State
    stats: Stats
    result: jax.Array
    trajectory: State
    aux: PyTree

    def __repr__(self) -> str:
        def shapes(tree: PyTree) -> str:
            return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)).replace("'", "")

        stats, result = "traced", "traced"
        if not isinstance(self.result, jax.core.Tracer) and jnp.ndim(self.result) == 0:
            stats, result = repr(self.stats), f"{int(self.result)} ({RESULTS[int(self.result)].partition('.')[0]})"
        return (
            f"Solution(y1={shapes(self.y1)}, stats={stats}, result={result}, trajectory={shapes(self.trajectory)}, "
            f"aux={shapes(self.aux)})"
        )

    def raise_if_failed(self) -> "Solution":
        """Return the solution itself, or raise `SolveError` with what happened and what to do. Not under jit."""
        if isinstance(self.result, jax.core.Tracer):
            raise SolveError(
                "raise_if_failed() was called under jit or another transformation; call it on what they return."
            )
        codes = {int(code) for code in jnp.ravel(self.result)} - {DONE}
        if codes:
            norms = ", ".join("–" if r < 0 else f"{float(r):.3g}" for r in jnp.ravel(self.stats.residual_norms)[:12])
            reasons = "; ".join(RESULTS[code] for code in sorted(codes))
            raise SolveError(f"{reasons}. Residual norms: [{norms}].")
        return self


def result_code(y1: State, stats: Stats, met: jax.Array, floor: jax.Array | float = 0.0) -> jax.Array:
    """Fold what can go wrong into one code. Residual norms below ``floor`` are rounding."""
    finite = (
        jnp.asarray([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(y1)]).all()
        & ~jnp.isinf(stats.residual_norms).any()
    )
    norms = stats.residual_norms
    falling = jnp.asarray(True)
    if len(norms) > 1:
        taken = norms >= 0
        first, last = norms[jnp.argmax(taken)], norms[len(norms) - 1 - jnp.argmax(taken[::-1])]
        falling = (last <= first) | (last <= floor)
    code = jnp.where(met, jnp.where(falling, DONE, NOT_FALLING), NOT_CONVERGED)
    return jnp.where(finite, code, NON_FINITE).astype(jnp.int32)
