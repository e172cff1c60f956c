"""Measure the times of messages between workers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lp_jax._arrays._types import Layer, PyTree
from lp_jax._comms._comm import Comm
from lp_jax._programs import _inputs
from lp_jax._solve import solve
from lp_jax._solvers._picard import Picard
from lp_jax.planning._measure import seconds
from lp_jax.planning._work import prefix_messages

_SWEEPS, _REPEATS, _SAMPLES = 17, 10, 5


def interconnect(comm: Comm | Mesh, *, sizes: tuple[int, int] = (1 << 8, 1 << 22)) -> dict[str, float]:
    """Measure messages between workers, by sweeps over a chain that computes almost nothing.

    Returns the fields ``latency``, ``bandwidth`` and ``sum_bandwidth`` of a `Machine`, for `dataclasses.replace`.

    A sweep has three kinds of messages: a state to the neighbour, a state for each step of a prefix sum, and the residual norm
    to all workers. The time of the same sweep on one worker is subtracted. Sums over all workers, as of gradients, are measured
    by themselves.

    Args:
        comm: the workers of the layers, as for `lp_jax.solve`. All ranks of an `MPIComm` call this together.
        sizes: bytes of a small and of a large state, and of the arrays that are summed.

    Raises:
        ValueError: for a single worker.

    Example:
        >>> import jax, lp_jax
        >>> from lp_jax import planning
        >>> devices = jax.devices()[:2]
        >>> mesh = jax.make_mesh((len(devices),), ("layers",), (jax.sharding.AxisType.Auto,), devices=devices)
        >>> comm = lp_jax.MeshComm(mesh)
        >>> times = planning.interconnect(comm, sizes=(256, 1 << 16)) if len(devices) > 1 else None
    """
    comm = _inputs.comm(comm)
    if comm.size == 1:
        raise ValueError("interconnect got a comm of one worker, which has nobody to send to; give one of several.")
    messages, hops = 1 + prefix_messages(comm.size), (comm.size - 1).bit_length()
    small, large = (_sweep(comm, size) - _sweep(None, size) for size in sizes)
    latency = max(small, 1e-9) / (messages + hops)
    bandwidth = messages * (sizes[1] - sizes[0]) / max(large - small, 1e-9)
    small, large = (_sum(comm, size) for size in sizes)
    passed = 2 * (comm.size - 1) / comm.size * (sizes[1] - sizes[0])
    sum_bandwidth = passed / max(large - small, 1e-9)
    return {"latency": latency, "bandwidth": bandwidth, "sum_bandwidth": sum_bandwidth}


def _sweep(comm: Comm | None, size: int) -> float:
    """Seconds of a sweep, with a layer on each worker."""
    params = _layers(comm)
    y0 = jnp.ones(size // 4, jnp.float32)

    @jax.jit
    def run(params: jax.Array, y0: jax.Array, atol: jax.Array) -> jax.Array:
        return solve(_step, params, y0, solver=Picard(sweeps=_SWEEPS, atol=atol), comm=comm).y1

    often, once = (_seconds(run, params, y0, jnp.float32(atol)) for atol in (-1.0, 1e30))
    return (often - once) / (_SWEEPS - 1)


def _sum(comm: Comm, size: int) -> float:
    params, x = _layers(comm), jnp.ones(size // 4, jnp.float32)
    workers = comm.place(len(params), (Picard(),), params, x)

    @jax.jit
    def total(params: jax.Array, x: jax.Array) -> jax.Array:
        summed: jax.Array = workers.map(lambda own, x: (own, workers.sum(own[0] * x)))(params, x)[1]
        return summed

    return _seconds(total, params, x)


def _layers(comm: Comm | None) -> jax.Array:
    if comm is None:
        return jnp.ones(1, jnp.float32)
    mine: jax.Array = comm.share(jnp.ones(comm.size, jnp.float32), (Picard(),))
    return mine


def _seconds(f: Callable[..., PyTree], *args: PyTree) -> float:
    """Median time of a call, made as often on every rank."""
    return seconds([functools.partial(f, *args)], samples=_SAMPLES, repeats=_REPEATS)[0]


def _step(y: jax.Array, layer: Layer) -> jax.Array:
    return y + layer.dt * layer.params * y
