"""Gradients that are sent in fewer bytes: half precision, eight bits, the largest entries."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lp_jax._arrays._types import PyTree

Send = Callable[[jax.Array, str], tuple[jax.Array, jax.Array]]
"""Maps an array and the name of the axis to the mean of the sent arrays, and the array that this copy sent."""


class Unsent(NamedTuple):
    """The part of the gradient that this copy has not sent yet, with the structure of the parameters."""

    unsent: PyTree


def average_compressed(axis: str, send: Send) -> optax.GradientTransformation:
    """Average gradients over an axis of a mesh, in fewer bytes: the first link of an optimizer's chain.

    A copy adds the part that it did not send to its next gradient ("error feedback"), so nothing is lost. The state differs from
    copy to copy. ``optax.stateless(lambda gradient, _: jax.lax.pmean(gradient, axis))`` sends gradients as they are.

    Source: Seide et al., 1-bit stochastic gradient descent (2014); Karimireddy et al., arXiv 1901.09847.

    Args:
        axis: name of the mesh's axis; it must be manual, as in `jax.shard_map` over it.
        send: `bfloat16`, `eight_bits`, `top_k`, or a function of your own.

    Example:
        >>> import functools, jax, jax.numpy as jnp, optax
        >>> from jax.sharding import PartitionSpec as P
        >>> from lp_jax.train import contrib
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> optimizer = optax.chain(contrib.average_compressed("data", contrib.top_k(0.25)), optax.sgd(1.0))
        >>> @jax.jit
        ... @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        ... def first_step(gradient):
        ...     return optimizer.update(gradient[0], optimizer.init(gradient[0]))[0][None]
        >>> print(-first_step(jnp.asarray([[1.0, 2.0, 3.0, 8.0], [9.0, 3.0, 2.0, 1.0]])))
        [[4.5 0.  0.  4. ]
         [4.5 0.  0.  4. ]]
    """

    def init(params: PyTree) -> Unsent:
        return Unsent(jax.tree.map(jnp.zeros_like, params))

    def update(gradient: PyTree, state: Unsent, params: PyTree = None) -> tuple[PyTree, Unsent]:
        due = jax.tree.map(jnp.add, gradient, state.unsent)
        pairs = jax.tree.map(lambda x: send(x, axis), due)
        mean, sent = jax.tree.transpose(jax.tree.structure(due), jax.tree.structure((0, 0)), pairs)
        return mean, Unsent(jax.tree.map(jnp.subtract, due, sent))

    return optax.GradientTransformation(init, update)


def bfloat16(x: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Send an array in bfloat16, half the bytes of float32. Every copy gets all arrays and adds them in full precision."""
    sent = x.astype(jnp.bfloat16)
    words = lax.bitcast_convert_type(sent, jnp.uint16)  # the compiler would send floats as float32
    everyone = lax.bitcast_convert_type(lax.all_gather(words, axis), jnp.bfloat16)
    return jnp.mean(everyone.astype(x.dtype), axis=0), sent.astype(x.dtype)


def eight_bits(x: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Send integers of eight bits, and a scale for each entry of the leading axis: a layer, where layers are stacked.

    Every copy gets all arrays and adds them in full precision.
    """
    rows = x.reshape(len(x) if x.ndim > 1 else 1, -1)
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 127
    whole = jnp.round(rows / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    everyone = lax.all_gather((whole, scale), axis)

    def read(whole: jax.Array, scale: jax.Array) -> jax.Array:
        return whole.astype(x.dtype) * scale

    return jnp.mean(read(*everyone), axis=0).reshape(x.shape), read(whole, scale).reshape(x.shape)


def top_k(fraction: float) -> Send:
    """Send the entries that are largest in magnitude, each with its place: a fraction, but one at least, of each layer.

    A layer is an entry of the leading axis of an array of two axes or more. Eight bytes for each entry sent.

    Raises:
        ValueError: if ``fraction`` is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1]; got {fraction}.")

    def send(x: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        rows = x.reshape(len(x) if x.ndim > 1 else 1, -1)
        _, places = lax.top_k(jnp.abs(rows), max(1, round(fraction * rows.shape[1])))
        chosen = jnp.take_along_axis(rows, places, axis=1)

        def spread(chosen: jax.Array, places: jax.Array) -> jax.Array:
            return jax.vmap(lambda row, i, v: row.at[i].add(v))(jnp.zeros_like(rows), places, chosen).reshape(x.shape)

        everyone = lax.all_gather((chosen, places), axis, axis=1, tiled=True)
        return spread(*everyone) / lax.axis_size(axis), spread(chosen, places)

    return send
