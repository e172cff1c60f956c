"""What goes into one message, and what waits for it. No MPI here: arrays to arrays."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays._types import PyTree


def after(tree: PyTree, message: PyTree) -> PyTree:
    """``tree``, once a message has been exchanged.

    XLA runs a program's operations one after the other in any order that data allow: a rank might do a whole sweep before
    it sends what its neighbour is waiting for. So what follows a message is made to depend on it, by a condition that no
    bits fulfil, which XLA does not know: no square is 2 modulo 4.
    """
    never = _never(message)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)


def nothing(tree: PyTree) -> PyTree:
    """Zeros, once ``tree`` is there; see `after`."""
    never = _never(tree)
    return jax.tree.map(lambda x: jnp.where(never, x, jnp.zeros_like(x)), tree)


def _never(tree: PyTree) -> jax.Array:
    """False."""
    words = [x for x in jax.tree.leaves(tree) if x.size]
    if not words:
        return jnp.asarray(False)
    bits = _encode(words[0].reshape(-1)[:1], 0)[0].astype(jnp.uint32)
    return bits * bits % 4 == 2


def merged(tree: PyTree, f: Any) -> PyTree:
    """``f`` on all leaves of one dtype at once, as one flat array."""
    leaves, structure = jax.tree.flatten(tree)
    out: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        places = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = f(jnp.concatenate([leaves[i].reshape(-1) for i in places]))
        ends = list(itertools.accumulate(leaves[i].size for i in places))
        for i, part in zip(places, jnp.split(flat, ends[:-1]), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, out)


def packed(tree: PyTree, f: Any, *, listed: bool = False) -> PyTree:
    """``f`` on all leaves at once, as one flat array (``(n, size)`` for lists).

    Leaves that are not of one dtype that MPI knows are sent as bytes.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    lead = 1 if listed else 0
    dtypes = {x.dtype for x in leaves}
    if len(dtypes) == 1 and str(leaves[0].dtype) in _KNOWN:
        encoded = [x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in leaves]
    else:
        encoded = [_encode(x, lead) for x in leaves]
    flat = f(jnp.concatenate(encoded, axis=-1))
    parts = jnp.split(flat, list(itertools.accumulate(x.shape[-1] for x in encoded))[:-1], axis=-1)
    return jax.tree.unflatten(structure, [_decode(part, x, lead) for part, x in zip(parts, leaves, strict=True)])


_KNOWN = ("float32", "float64", "complex64", "complex128", "int32", "int64", "uint32", "uint64")


def _encode(x: jax.Array, lead: int) -> jax.Array:
    """The bytes of an array, all axes but the first ``lead`` in one."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    x = lax.bitcast_convert_type(x, jnp.uint8)
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def _decode(x: jax.Array, like: Any, lead: int) -> jax.Array:
    """Undo `_encode`, where that was done; ``x`` may be a longer list than ``like`` is."""
    shape = (*x.shape[:lead], *like.shape[lead:])
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        words = _decode(x, jax.eval_shape(jax.random.key_data, like), lead)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if like.dtype in (x.dtype, bool):
        return x.reshape(shape).astype(like.dtype)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = _decode(x, jax.ShapeDtypeStruct((*like.shape, 2), jnp.finfo(like.dtype).dtype), lead)
        return lax.complex(parts[..., 0], parts[..., 1])
    size = like.dtype.itemsize
    return lax.bitcast_convert_type(x.reshape(*shape, size) if size > 1 else x.reshape(shape), like.dtype)
