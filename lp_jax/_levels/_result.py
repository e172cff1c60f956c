"""How a solve ended, as a number: a solve raises nothing under jit."""

import jax
import jax.numpy as jnp

from lp_jax._arrays._types import State

DONE, SERIAL, FELL_BACK, NOT_CONVERGED, NON_FINITE, NOT_FALLING = range(6)
# from best to worst; as two codes change places, this maps codes to ranks, and ranks to codes
_ORDER = DONE, SERIAL, FELL_BACK, NOT_CONVERGED, NOT_FALLING, NON_FINITE

RESULTS = {
    DONE: "done as asked",
    SERIAL: (
        "one layer after another, as nothing is predicted to be faster here; the result is exact"
    ),
    FELL_BACK: (
        "the residual norm did not come down to the tolerance, and the layers were propagated one "
        "after another instead: the result is right, but took longer than with lp_jax.Serial(). "
        "Take a solver that converges on this network (lp_jax.plan tries them), or Serial()"
    ),
    NOT_CONVERGED: (
        "the residual norm did not come down to the tolerance within `iterations` cycles. Allow "
        "more iterations, loosen "
        'rtol/atol, or set fallback=True. In MGRIT also relax more (relaxation="FCF") or use a '
        "coarse step closer to the layers "
        "(coarse_step=Picard(sweeps=2))"
    ),
    NON_FINITE: (
        "the state is not finite. If the serial network's is (solver=Serial()), the iteration "
        "diverged: set a tolerance and fallback=True, or a smaller t1; otherwise the network "
        "itself overflows"
    ),
    NOT_FALLING: (
        "the last residual norm is larger than the first, so that more iterations do not help. Use "
        "Serial(), or a smaller t1; in "
        'MGRIT also more relaxation (relaxation="FCF") or a coarse step closer to the layers '
        "(coarse_step=Picard(sweeps=2))"
    ),
}
"""Result codes and what they mean."""


def ranked(codes: jax.Array | int) -> jax.Array:
    """Return the ranks of codes, of which the largest is the worst, and the codes of ranks."""
    return jnp.asarray(_ORDER, jnp.int32)[codes]


def of_norms(norms: jax.Array, rising: jax.Array) -> jax.Array:
    """The code after a fixed number of iterations, by the norms of their residuals and whether these rise."""
    code = jnp.where(rising, NOT_FALLING, DONE)
    return jnp.where(jnp.isfinite(norms[-1]), code, NON_FINITE).astype(jnp.int32)


def if_finite(code: jax.Array, y1: State) -> jax.Array:
    """The code, or `NON_FINITE` if the state is not finite."""
    finite = jnp.asarray([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(y1)]).all()
    return jnp.where(finite, code, NON_FINITE).astype(jnp.int32)
