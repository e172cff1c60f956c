"""What a solve returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._solver import Stats
from lp_jax._types import PyTree, State

DONE, NOT_CONVERGED, NON_FINITE = 0, 1, 2

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
}
"""Result codes and what they mean."""


class SolveError(RuntimeError):
    """A solve did not do what it was asked to."""


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

    def raise_if_failed(self) -> "Solution":
        """Return the solution itself, or raise `SolveError` with what happened and what to do. Not under jit."""
        if isinstance(self.result, jax.core.Tracer):
            raise SolveError(
                "raise_if_failed() was called under jit or another transformation; call it on what they return."
            )
        codes = {int(code) for code in jnp.ravel(self.result)} - {DONE}
        if codes:
            norms = ", ".join(f"{float(r):.3g}" for r in jnp.ravel(self.stats.residual_norms)[:12])
            reasons = "; ".join(RESULTS[code] for code in sorted(codes))
            raise SolveError(f"{reasons}. Residual norms: [{norms}].")
        return self


def result_code(y1: State, stats: Stats, met: jax.Array) -> jax.Array:
    """Fold what can go wrong into one code."""
    finite = (
        jnp.asarray([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(y1)]).all()
        & ~jnp.isinf(stats.residual_norms).any()
    )
    return jnp.where(finite, jnp.where(met, DONE, NOT_CONVERGED), NON_FINITE).astype(jnp.int32)
