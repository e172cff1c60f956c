"""Refinement of a trained network: more layers over the same time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lp_jax import _check
from lp_jax._inputs import number_of_layers
from lp_jax._types import PyTree
from lp_jax.nn._layer_parallel import LayerParallel, refuse_ranks
from lp_jax.nn._spline import midpoints


def refine(layers: Any, factor: int = 2, how: str = "constant") -> Any:
    r"""Replace each layer of a trained network by ``factor`` layers, so that training continues with a deeper network.

    The layers are steps of an ODE over [t0, t1]; the refined network takes ``factor`` times as many, each 1 / ``factor`` as
    long. Its output changes by :math:`O(\Delta t)`, the distance of the network from the ODE's solution. As functions of
    depth, piecewise constant weights are the same function; piecewise linear ones are closer to a smooth one,
    :math:`O(\Delta t^2)` instead of :math:`O(\Delta t)`.

    Args:
        layers: stacked parameters, leaves ``(N, ...)``; or a `LayerParallel`.
        factor: number of layers that replace each layer.
        how: "constant"; "linear" between the layers' midpoints, extrapolated to both ends; or "zeros", which keeps each layer
            and its length, puts layers of zeros after it, and makes the time longer: where a layer of zeros returns its
            state, the network stays the same function. A trunk with a `Spline` is evaluated at more midpoints, whether
            "constant" or "linear".

    Returns:
        Parameters, leaves ``(factor * N, ...)``; or a new `LayerParallel` with the same settings. Running statistics are
        repeated. `lp_jax.train.deepen` refines the state of an optimizer, too.

    Raises:
        ValueError: if the factor is below 1, ``how`` is unknown, or the layers are spread over MPI ranks.
        TypeError: for any other module.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> nn.refine({"w": jnp.asarray([1.0, 3.0])}, how="linear")["w"]
        Array([0.5, 1.5, 2.5, 3.5], dtype=float32)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, t1=2.0, rngs=nnx.Rngs(0))
        >>> deeper = nn.refine(trunk)
        >>> deeper.num_layers, deeper.t1, deeper.layers.inner.kernel.shape
        (32, 2.0, (32, 8, 8))

    Reference:
        Cyr, Guenther, Schroder, "Multilevel initialization for layer-parallel deep neural network training",
        arXiv:1912.08974 (2019).
    """
    _check.integer("factor", factor, least=1)
    _check.one_of("how", how, ("constant", "linear", "zeros"))
    if isinstance(layers, LayerParallel):
        return _refined_trunk(layers, factor, how)
    if isinstance(layers, nnx.Module):
        raise TypeError(
            f"layers must be stacked parameters or a LayerParallel; got {type(layers).__name__}. Refine the trunk that it holds: "
            "model.trunk = nn.refine(model.trunk)."
        )
    return _refined(layers, np.arange(number_of_layers(layers, None) + 1.0), factor, how)


def _refined_trunk(trunk: LayerParallel, factor: int, how: str) -> LayerParallel:
    comm, uniform = trunk.comm, not np.ndim(trunk.t1)
    times = np.linspace(trunk.t0, trunk.t1, trunk.num_layers + 1) if uniform else np.asarray(trunk.t1)
    if how == "zeros" and trunk.weights is not None:
        raise ValueError('how="zeros" puts layers between others, and a trunk with a Spline has none; take "constant".')
    graphdef, *states = nnx.split(trunk, nnx.Param, nnx.BatchStat)
    params, stats = states
    if trunk.weights is None:
        refuse_ranks(trunk)

        def deeper(params: PyTree, stats: PyTree) -> tuple[PyTree, PyTree]:
            refined = _refined(params, times, factor, how), _refined(stats, times, factor, "constant")
            return refined if comm is None else comm.spread(refined)

        params, stats = jax.jit(deeper)(params, stats)
    refined = nnx.merge(graphdef, params, stats)
    refined.num_layers = factor * trunk.num_layers
    if how == "zeros":
        times = np.concatenate([times[:1], times[0] + np.cumsum(np.repeat(np.diff(times), factor))])
        refined.t1 = float(times[-1]) if uniform else tuple(times.tolist())
    elif not uniform:
        refined.t1 = tuple(_subdivided(times, factor).tolist())
    return refined


def _refined(tree: PyTree, times: np.ndarray, factor: int, how: str) -> PyTree:
    """Return stacked leaves for ``factor`` times as many layers; ``times`` are those between the given layers."""
    if how == "zeros":
        return jax.tree.map(functools.partial(_between_zeros, factor=factor), tree)
    if how == "constant" or len(times) == 2:
        return jax.tree.map(lambda x: jnp.repeat(x, factor, axis=0), tree)
    old, new = midpoints(times), midpoints(_subdivided(times, factor))
    left = np.clip(np.searchsorted(old, new) - 1, 0, len(old) - 2)
    weight = (new - old[left]) / (old[left + 1] - old[left])

    def leaf(x: jax.Array) -> jax.Array:
        w = jnp.asarray(weight, x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return (1 - w) * x[left] + w * x[left + 1]

    return jax.tree.map(leaf, tree)


def _between_zeros(x: jax.Array, factor: int) -> jax.Array:
    """Return stacked arrays with ``factor - 1`` of zeros after each."""
    return jnp.zeros((factor * len(x), *x.shape[1:]), x.dtype).at[::factor].set(x)


def _subdivided(times: np.ndarray, factor: int) -> np.ndarray:
    """Return ``times`` and those that cut each interval between them into ``factor`` equal parts."""
    parts = np.arange(factor) / factor
    inner = times[:-1, None] + np.diff(times)[:, None] * parts
    return np.append(inner.ravel(), times[-1])
