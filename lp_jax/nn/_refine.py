"""A network with more layers over the same time, or with fewer."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lp_jax import layer_slices
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree
from lp_jax._programs._inputs import number_of_layers
from lp_jax.nn._layer_parallel import LayerParallel, end_times, midpoints, refuse_ranks


def refine(layers: PyTree, factor: int = 2, how: str = "constant") -> PyTree:
    r"""Replace each layer of a network by ``factor`` layers, each 1 / ``factor`` as long; see `lp_jax.train.deepen`, too.

    The layers are steps of an ODE over [t0, t1], so the output changes by :math:`O(\Delta t)`, the distance of the network from
    the ODE's solution. Piecewise linear weights are closer to a smooth function of depth than piecewise constant ones.

    Args:
        layers: stacked parameters, leaves ``(N, ...)``; or a `LayerParallel`, whose settings the new one has. Its running
            statistics are repeated, its `Spline` is evaluated at other midpoints.
        factor: number of layers that replace each layer.
        how: "constant"; "linear" between the layers' midpoints, extrapolated to both ends; or "zeros", which keeps each layer and
            its length, puts layers of zeros after it, and makes the time longer: if a layer of zeros returns its state, the
            network stays the same function.

    Raises:
        ValueError: if the factor is below 1, ``how`` is unknown, or layers would have to move between MPI ranks, as for
            "linear" or for other intervals.
        TypeError: for any other module.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import nn
        >>> nn.refine({"w": jnp.asarray([1.0, 3.0])}, how="linear")["w"]
        Array([0.5, 1.5, 2.5, 3.5], dtype=float32)

    Reference:
        Cyr, Guenther, Schroder, "Multilevel initialization for layer-parallel deep neural network training",
        arXiv:1912.08974 (2019).
    """
    _check.integer("factor", factor, least=1)
    _check.one_of("how", how, ("constant", "linear", "zeros"))
    number = _count(layers, "refine")
    if not isinstance(layers, LayerParallel):
        return _refined(layers, np.arange(number + 1.0), factor, how)
    if how == "zeros" and layers.weights is not None:
        raise ValueError(
            'how="zeros" puts layers between others, and a trunk with a Spline has none; '
            'take "constant".'
        )
    times = _times(staying(layers, factor * number, how))
    if how == "zeros":
        lengths = np.repeat(np.diff(times), factor)
        new = times[0] + np.cumsum([0.0, *lengths])
    else:
        new = _subdivided(times, factor)
    refined = functools.partial(_refined, times=times, factor=factor)
    return _replaced(
        layers,
        new,
        lambda params, stats: (refined(params, how=how), refined(stats, how="constant")),
    )


def coarsen(layers: PyTree, factor: int = 2) -> PyTree:
    """Replace each ``factor`` layers of a network by one of their total length, with the mean of their parameters.

    The coarse network is another discretization of the same ODE; `coarsen` undoes `refine` with ``how="constant"``. Arguments,
    result and errors are those of `refine`; it is a ValueError, too, if the factor does not divide the number of layers.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import nn
        >>> nn.coarsen(jnp.asarray([1.0, 3.0, 5.0, 7.0]))
        Array([2., 6.], dtype=float32)
    """
    _check.integer("factor", factor, least=1)
    number = _count(layers, "coarsen")
    if number % factor:
        raise ValueError(
            f"factor must divide the number of layers; got {factor} and {number} layers."
        )

    def means(*trees: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.mean(x, axis=1), _tree.split(trees, factor))

    if isinstance(layers, LayerParallel):
        return _replaced(staying(layers, number // factor), _times(layers)[::factor], means)
    return means(layers)[0]


def staying(trunk: LayerParallel, layers: int, how: str = "constant") -> LayerParallel:
    """Return the trunk, or refuse it if another number of layers would move layers between MPI ranks."""
    comm = trunk.comm
    count = trunk.num_layers
    if trunk.weights is not None or not comm.splits:
        return trunk
    if how == "linear":
        refuse_ranks(trunk)
    now, then = (layer_slices(n, comm.size, *trunk.placing_solvers()) for n in (count, layers))
    # No layer moves if every rank ends at the same fraction of the network before and after.
    if any(old.stop * layers != new.stop * count for old, new in zip(now, then, strict=True)):
        present, wanted = ([run.stop - run.start for run in runs] for runs in (now, then))
        raise ValueError(
            f"layers cannot move between ranks, which hold {present} of {count} layers and would "
            f"hold {wanted} of {layers}. "
            "Take numbers of layers that the ranks share evenly, in whole intervals of the solver."
        )
    return trunk


def _replaced(
    trunk: LayerParallel, times: np.ndarray, change: Callable[[PyTree, PyTree], PyTree]
) -> LayerParallel:
    """Return a trunk with the given times between its layers; ``change`` makes its parameters and running statistics."""
    graphdef, *states = nnx.split(trunk, nnx.Param, nnx.BatchStat)
    if trunk.weights is None:
        states = jax.jit(lambda *states: trunk.comm.spread(change(*states)))(*states)
    result = nnx.merge(graphdef, *states)
    result.num_layers = len(times) - 1
    # Layers of equal length are described by the end time only; unequal lengths need all times.
    result.t1 = end_times(times if np.ndim(trunk.t1) else times[-1])
    return result


def _times(trunk: LayerParallel) -> np.ndarray:
    """Return the times between the layers, including both ends."""
    if np.ndim(trunk.t1):
        return np.asarray(trunk.t1)
    return np.linspace(trunk.t0, trunk.t1, trunk.num_layers + 1)


def _count(layers: PyTree, what: str) -> int:
    """Return the number of layers; refuse a module that only holds them."""
    if isinstance(layers, LayerParallel):
        return layers.num_layers
    if isinstance(layers, nnx.Module):
        raise TypeError(
            f"layers must be stacked parameters or a LayerParallel; got {type(layers).__name__}. "
            f"Take the trunk that it holds: model.trunk = nn.{what}(model.trunk)."
        )
    return number_of_layers(layers, None)


def _refined(tree: PyTree, times: np.ndarray, factor: int, how: str) -> PyTree:
    """Return stacked leaves for ``factor`` times as many layers; ``times`` are the times between the old layers."""
    if how == "zeros":
        return jax.tree.map(
            lambda x: jnp.zeros((factor * len(x), *x.shape[1:]), x.dtype).at[::factor].set(x), tree
        )
    if how == "constant" or len(times) == 2:
        return jax.tree.map(lambda x: jnp.repeat(x, factor, axis=0), tree)
    old = midpoints(times)
    new = midpoints(_subdivided(times, factor))
    # `left` is the old midpoint before each new one. At both ends it is clipped
    # to the outermost pair, whose line then extrapolates.
    left = np.clip(np.searchsorted(old, new) - 1, 0, len(old) - 2)
    weight = (new - old[left]) / (old[left + 1] - old[left])

    def leaf(x: jax.Array) -> jax.Array:
        w = jnp.asarray(weight, x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return (1 - w) * x[left] + w * x[left + 1]

    return jax.tree.map(leaf, tree)


def _subdivided(times: np.ndarray, factor: int) -> np.ndarray:
    """Return ``times`` and those that cut each interval between them into ``factor`` equal parts."""
    return np.interp(
        np.arange(factor * (len(times) - 1) + 1) / factor, np.arange(len(times)), times
    )
