"""More layers for a trained network, over the same time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lp_jax import _check
from lp_jax._inputs import number_of_layers
from lp_jax._mpi import MPIComm
from lp_jax._types import PyTree
from lp_jax.nn._layer_parallel import LayerParallel
from lp_jax.nn._spline import midpoints


def refine(layers: Any, factor: int = 2, how: str = "constant") -> Any:
    r"""Each layer of a trained network in ``factor`` parts, for training to go on with a deeper one.

    The layers are steps of an ODE over [t0, t1], and stay so: with ``factor`` times as many steps of 1 / ``factor`` of their
    length. What the network computes changes by :math:`O(\Delta t)`, its distance to the ODE's solution. Weights between
    the layers' midpoints are constant in pieces, which gives the same function of depth, or linear in pieces, which is
    closer to a smooth function of depth: :math:`O(\Delta t^2)` where constants give :math:`O(\Delta t)`.

    Args:
        layers: stacked parameters, leaves ``(N, ...)``; or a `LayerParallel`.
        factor: number of layers in the place of each.
        how: "constant", or "linear": linear between midpoints, and in the outer halves of the first and the last layer as in
            the next ones. A trunk of a `Spline` is neither, it is evaluated at more midpoints.

    Returns:
        Parameters, leaves ``(factor * N, ...)``; or a new `LayerParallel` with the same settings. Running statistics are
        repeated. An optimizer begins anew.

    Raises:
        ValueError: for a factor below 1, for an unknown ``how``, and for layers that are spread over MPI ranks.
        TypeError: for another module.

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
    _check.one_of("how", how, ("constant", "linear"))
    if isinstance(layers, LayerParallel):
        return _trunk(layers, factor, how)
    if isinstance(layers, nnx.Module):
        raise TypeError(
            f"layers must be stacked parameters or a LayerParallel; got {type(layers).__name__}. Refine the trunk that it holds: "
            "model.trunk = nn.refine(model.trunk)."
        )
    return _lists(layers, np.arange(number_of_layers(layers, None) + 1.0), factor, how)


def _trunk(trunk: LayerParallel, factor: int, how: str) -> LayerParallel:
    comm, times = trunk.comm, np.linspace(trunk.t0, trunk.t1, trunk.num_layers + 1)
    if np.ndim(trunk.t1):
        times = np.asarray(trunk.t1)
    graphdef, *states = nnx.split(trunk, nnx.Param, nnx.BatchStat)
    params, stats = states
    if trunk.weights is None:
        if isinstance(comm, MPIComm) and comm.size > 1:
            raise ValueError(
                f"refine was given layers that are spread over {comm.size} ranks, where more layers would lie otherwise. Refine "
                "the whole network on one rank, and let each rank take its own layers of that."
            )

        def deeper(params: PyTree, stats: PyTree) -> tuple[PyTree, PyTree]:
            lists = _lists(params, times, factor, how), _lists(stats, times, factor, "constant")
            return lists if comm is None else comm.spread(lists)

        params, stats = jax.jit(deeper)(params, stats)
    refined = nnx.merge(graphdef, params, stats)
    refined.num_layers = factor * trunk.num_layers
    if np.ndim(trunk.t1):
        refined.t1 = tuple(_subdivided(times, factor).tolist())
    return refined


def _lists(tree: PyTree, times: np.ndarray, factor: int, how: str) -> PyTree:
    """Lists over the layers between ``times`` as lists over ``factor`` times as many."""
    if how == "constant" or len(times) == 2:
        return jax.tree.map(lambda x: jnp.repeat(x, factor, axis=0), tree)
    old, new = midpoints(times), midpoints(_subdivided(times, factor))
    left = np.clip(np.searchsorted(old, new) - 1, 0, len(old) - 2)
    weight = (new - old[left]) / (old[left + 1] - old[left])

    def leaf(x: jax.Array) -> jax.Array:
        w = jnp.asarray(weight, x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return (1 - w) * x[left] + w * x[left + 1]

    return jax.tree.map(leaf, tree)


def _subdivided(times: np.ndarray, factor: int) -> np.ndarray:
    """``times``, and those that cut each interval between them into equal parts."""
    parts = np.arange(factor) / factor
    inner = times[:-1, None] + np.diff(times)[:, None] * parts
    return np.append(inner.ravel(), times[-1])
