"""Divergence: warnings while training, and the error that stops it."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lp_jax import RESULTS
from lp_jax._levels._result import DONE, FELL_BACK, NON_FINITE, SERIAL
from lp_jax.train._types import Batch, Metrics

ADVICE = (
    'the layer-parallel gradient may be wrong. Relax more (relaxation="FCF"), take a coarse step '
    "closer to the layers (coarse_step=Picard(sweeps=2)), a smaller t1 or learning rate; more "
    "iterations help only where the norms come down"
)
# Residual norms below this fraction of the state's norm are near the rounding of single precision, where they grow by chance.
_ROUNDING = 1e-5


class DivergenceError(RuntimeError):
    """Training cannot go on: the loss, the gradient or the state is not finite."""


def convergence_warning(
    solve: str, norms: Sequence[float], scale: float = 0.0, result: int = DONE
) -> str | None:
    """Return a warning on a solve with advice; None if it shows no problem."""
    # Norms below zero were not measured.
    measured = [norm for norm in norms if norm >= 0]
    if (
        result != FELL_BACK
        and measured
        and measured[-1] > measured[0] > 0
        and max(measured) > _ROUNDING * scale
    ):
        # Divergence is shown by norms that grow from the first to the last
        # iteration; near rounding, norms go up and down by chance.
        listed = ", ".join(f"{norm:.2g}" for norm in measured)
        grown = f"{listed}; factor {measured[-1] / measured[0]:.3g}"
        return f"the {solve} residual grows over the cycles ({grown}): {ADVICE}."
    if result not in (DONE, SERIAL, NON_FINITE):
        return f"the {solve} solve: {RESULTS[result]}."
    return None


def divergence_message(step: int, metrics: Metrics, batch: Batch) -> str:
    """Return why training stops at a step that is not finite, and what to do. The batch is checked first."""
    loss = float(metrics.loss)
    outside = int(metrics.info.outside)
    if outside:
        return (
            f"stopped at step {step}: {outside} labels of its batch are none of the classes, so "
            f"that the loss is {loss}. Labels "
            "are integers from 0 to the number of classes less one; negative ones do not count."
        )
    # A single number of the data that is not finite makes everything after it so, and is the cause to name first.
    for path, leaf in jax.tree.leaves_with_path(batch):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and (
            count := int(jnp.sum(~jnp.isfinite(leaf)))
        ):
            name = f"batch{jax.tree_util.keystr(path)}"
            return (
                f"stopped at step {step}: {count} of the {jnp.size(leaf)} numbers in {name} are "
                "not finite. Clean the data."
            )
    if metrics.info.result == NON_FINITE:
        return f"stopped at step {step}: {RESULTS[NON_FINITE]}."
    what = "the updated parameters are not finite"
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    elif not math.isfinite(metrics.gradient_norm):
        what = f"the gradient is not finite (norm {float(metrics.gradient_norm)})"
    return (
        f"stopped at step {step}: {what}. Lower the learning rate; if training with the exact "
        'gradient (solver=Serial()) stays finite, relax more (relaxation="FCF") or take '
        "coarse_step=Picard(sweeps=2)."
    )
