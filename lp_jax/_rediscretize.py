"""Rediscretization: one step with stretched dt stands in for the layers of an interval."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lp_jax import _check, _tree
from lp_jax._chain import Chain
from lp_jax._pytree import settings
from lp_jax._types import PyTree, Slices


@settings()
class Rediscretize:
    """The field's standard coarse step: the user's own step, once per interval, with the interval's whole dt.

    It needs a step that is a one-step method of an ODE, so that dt can be stretched, and costs one evaluation.

    Args:
        params: which parameters it takes. "inject": those of the interval's first layer; "mean": the mean over its
            layers; or a pure function of the interval's stacked parameters (leaves ``(k, ...)``, k the number of fine
            layers) that returns one layer's. Per-layer ``data`` follow the same rule: injected, or averaged where they
            are floating point; a function applies to parameters only and data are injected.

    Raises:
        ValueError: for another ``params``.

    Example:
        >>> import lp_jax
        >>> lp_jax.MGRIT(coarse_step=lp_jax.Rediscretize(params="mean")).coarse_step
        Rediscretize(params='mean')
    """

    params: str | Callable[[PyTree], PyTree] = "inject"

    def __post_init__(self):
        if not callable(self.params):
            _check.one_of("params", self.params, ("inject", "mean"), otherwise="or a function")

    def coarsen(self, chain: Chain, level: int, span: int) -> dict[str, Any]:
        """The step and operands of the coarse level whose steps span ``span`` layers."""
        slices = chain.slices

        def inject(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x[::span], tree)

        def mean(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: _mean(x, span), tree)

        if callable(self.params):
            params, data = _per_interval(self.params, slices.params, chain.steps, span), inject(slices.data)
        else:
            rule = inject if self.params == "inject" else mean
            params, data = rule(slices.params), rule(slices.data)
        coarse = Slices(
            params=params,
            data=data,
            t=slices.t[::span],
            dt=jnp.sum(_tree.split(slices.dt, span, fill="constant"), axis=1),
            index=slices.index[::span],
        )
        return {"step": chain.step_on(level), "xs": coarse}


def _mean(x: jax.Array, span: int) -> jax.Array:
    """Mean over each group of ``span``, the last one possibly short; what cannot be averaged is injected."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[::span]
    n = x.shape[0]
    sizes = jnp.asarray([min(span, n - i) for i in range(0, n, span)], x.dtype)
    sums = jnp.sum(_tree.split(x, span, fill="constant"), axis=1)
    return sums / sizes.reshape(-1, *[1] * (x.ndim - 1))


def _per_interval(rule: Callable[[PyTree], PyTree], params: PyTree, n: int, span: int) -> PyTree:
    """``rule`` on every interval; on the true layers alone where the last interval is short."""
    whole = n // span * span
    parts = []
    if whole:
        parts.append(jax.vmap(rule)(_tree.split(jax.tree.map(lambda x: x[:whole], params), span)))
    if whole < n:
        parts.append(jax.tree.map(lambda x: x[None], rule(jax.tree.map(lambda x: x[whole:], params))))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

