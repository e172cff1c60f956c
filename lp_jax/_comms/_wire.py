"""Pack trees into one message, and order operations by messages. No MPI here: arrays to arrays."""

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree


def after(tree: PyTree, message: PyTree) -> PyTree:
    """Return ``tree``, after a message has been exchanged.

    XLA might do a whole sweep before it sends the state that a neighbour waits for. So later operations are made to depend on
    the message, by a condition that is never true, which XLA does not know: no square is 2 modulo 4.
    """
    never = _never(message)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)


def zeros_after(tree: PyTree) -> PyTree:
    """Return zeros like ``tree``, after it has been computed; see `after`."""
    never = _never(tree)
    return jax.tree.map(lambda x: jnp.where(never, x, jnp.zeros_like(x)), tree)


def _never(tree: PyTree) -> jax.Array:
    """False, in a way that XLA cannot know."""
    words = [x for x in jax.tree.leaves(tree) if x.size]
    if not words:
        return jnp.asarray(False)
    # One byte of one number is enough to depend on the whole message.
    bits = encode(words[0].reshape(-1)[:1], 0)[0].astype(jnp.uint32)
    return bits * bits % 4 == 2


def depend(tree: PyTree, others: PyTree) -> PyTree:
    """Return the tree, made to depend on all ``others`` for JAX. XLA drops this, because it is a choice between equals."""
    arrays = [x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    # With the choice, XLA drops these sums over whole arrays, too.
    some = functools.reduce(jnp.logical_or, [jnp.any(x != x) for x in arrays], jnp.asarray(False))
    return jax.tree.map(lambda x: jnp.where(some, x, x), tree)


def batched_alike(out: PyTree, others: PyTree) -> PyTree:
    """The outputs of a solve, of the inputs ``others``: `jax.vmap` gives a batch axis to all that have a gradient, or to none.

    An output without the axis, such as aux of time alone, has one cotangent for the whole batch. JAX's ``custom_vjp`` adds that
    up as often as there are examples, without a word before jax 0.12, which refuses it.
    """
    leaves, combine = _tree.partition(out)
    return combine(depend(leaves, others)) if len(leaves) > 1 else out


def apply_by_dtype(tree: PyTree, f: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Apply ``f`` to all leaves of one dtype at once, as one flat array."""
    dtypes = [x.dtype for x in jax.tree.leaves(tree)]
    # A dict keeps the order of the leaves, so that all ranks send their messages in one order.
    for dtype in dict.fromkeys(dtypes):
        leaves, combine = _tree.partition(tree, [each == dtype for each in dtypes])
        flat, unravel = ravel_pytree(leaves)
        tree = combine(unravel(f(flat)))
    return tree


def apply_packed(tree: PyTree, f: Callable[[jax.Array], jax.Array], *, lead: int = 0) -> PyTree:
    """Apply ``f`` to all leaves at once, as one array with their first ``lead`` axes and another one."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    dtypes = {x.dtype for x in leaves}
    if len(dtypes) == 1 and str(leaves[0].dtype) in _KNOWN:
        encoded = [_flat(x, lead) for x in leaves]
    else:
        # Several dtypes, or one that MPI does not know, are sent as bytes.
        encoded = [encode(x, lead) for x in leaves]
    ends = list(itertools.accumulate(x.shape[-1] for x in encoded))
    parts = jnp.split(f(jnp.concatenate(encoded, axis=-1)), ends[:-1], axis=-1)
    return jax.tree.unflatten(
        structure, [_decode(part, x, lead) for part, x in zip(parts, leaves, strict=True)]
    )


_KNOWN = ("float32", "float64", "complex64", "complex128", "int32", "int64", "uint32", "uint64")


def encode(x: jax.Array, lead: int) -> jax.Array:
    """The bytes of an array, with all axes but the first ``lead`` as one."""
    # Keys are opaque to `view`; their data are words.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return _flat(x, lead).view(jnp.uint8)


def _decode(x: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, lead: int) -> jax.Array:
    """Undo `encode`, if it was applied; ``x`` may have more rows than ``like``."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        # The data of a key have another axis, for its words.
        words = _decode(x, jax.eval_shape(jax.random.key_data, like), lead)
        return jax.random.wrap_key_data(
            words,
            impl=jax.random.key_impl(like),  # type: ignore[arg-type]
        )
    return x.view(like.dtype).reshape(*x.shape[:lead], *like.shape[lead:])


def _flat(x: jax.Array, lead: int) -> jax.Array:
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))
