"""Measure the times of messages between workers."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lp_jax._arrays._types import Layer
from lp_jax._comms._comm import Comm
from lp_jax._programs import _inputs
from lp_jax._solve import solve
from lp_jax._solvers._sweeps import Picard
from lp_jax.planning._measure import seconds
from lp_jax.planning._work import prefix_messages

_SWEEPS, _REPEATS, _SAMPLES = 17, 10, 5


def interconnect(comm: Comm | Mesh, *, sizes: tuple[int, int] = (1 << 8, 1 << 22)) -> dict[str, float]:
    """Measure messages between workers, by sweeps over a chain that computes almost nothing.

    Returns the fields ``latency`` and ``bandwidth`` of a `Machine`, for `dataclasses.replace`. The same sweep on one worker is
    subtracted. What is left are a state to the neighbour, one for each step of a prefix sum, and the residual norm to all.
    All ranks of an `MPIComm` call this together. ``sizes`` are the bytes of a small and of a large state.
    """
    comm = _inputs.comm(comm)
    if comm.size == 1:
        raise ValueError("interconnect got a comm of one worker, which has nobody to send to; give one of several.")
    messages, hops = 1 + prefix_messages(comm.size), (comm.size - 1).bit_length()
    small, large = (_sweep(comm, size) - _sweep(None, size) for size in sizes)
    latency = max(small, 1e-9) / (messages + hops)
    bandwidth = messages * (sizes[1] - sizes[0]) / max(large - small, 1e-9)
    return {"latency": latency, "bandwidth": bandwidth}


def _sweep(comm: Comm | None, size: int) -> float:
    """Seconds of a sweep, with a layer on each worker."""
    params, y0 = jnp.ones(1, jnp.float32), jnp.ones(size // 4, jnp.float32)
    if comm is not None:
        params = comm.share(jnp.ones(comm.size, jnp.float32), (Picard(),))

    @jax.jit
    def run(params: jax.Array, y0: jax.Array, atol: jax.Array) -> jax.Array:
        return solve(_step, params, y0, solver=Picard(sweeps=_SWEEPS, atol=atol), comm=comm).y1

    calls = [functools.partial(run, params, y0, jnp.float32(atol)) for atol in (-1.0, 1e30)]
    often, once = seconds(calls, samples=_SAMPLES, repeats=_REPEATS)  # as often on every rank
    return (often - once) / (_SWEEPS - 1)


def _step(y: jax.Array, layer: Layer) -> jax.Array:
    return y + layer.dt * layer.params * y
