"""Layers in chunks: loops over entries of a leading axis, of which several are taken at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree


def in_chunks(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    xs: PyTree,
    size: int,
    *,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """Run ``carry, ys = f(carry, xs)`` on ``size`` entries of ``xs`` and ``ys`` at a time. A shorter rest comes last."""
    n = _tree.leading(xs)
    size = chunk(n, size)
    if size >= n:
        return f(carry, xs)
    if size == 1:  # XLA copies operands that enter a loop with an axis of length 1

        def one(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
            carry, y = f(carry, _tree.at(x, None))
            return carry, _tree.at(y, 0)

        return _tree.scan(one, carry, xs, reverse=reverse)
    whole = n - n % size
    start = n - whole if reverse else 0
    middle = _tree.at(xs, slice(start, start + whole)) if whole < n else xs
    # The scan takes whole chunks; with `reverse` the rest, which comes last, are the first entries.
    carry, ys = _tree.scan(f, carry, _tree.split(middle, size), reverse=reverse)
    ys = _tree.merge(ys)
    if whole == n:
        return carry, ys
    carry, rest = f(carry, _tree.at(xs, slice(n - whole) if reverse else slice(whole, n)))
    return carry, jax.tree.map(
        lambda a, b: jnp.concatenate([b, a] if reverse else [a, b]), ys, rest
    )


def chunk(n: int, most: int) -> int:
    """Size of chunks of ``n`` entries: ``most``, or somewhat fewer where that makes all chunks equal."""
    if most >= n:
        return n
    # Equal chunks need no rest, which would be compiled as a second copy of `f`.
    even = _tree.divisor(n, most)
    return even if 2 * even > most else most


def batched(one: Callable[..., PyTree], size: int) -> Callable[..., PyTree]:
    """Apply ``one`` to each of ``size`` entries of the leading axis of all its arguments."""
    if size != 1:
        return jax.vmap(one)
    # A `vmap` over one entry would leave axes of length 1 in every operation.
    return lambda *operands: jax.tree.map(
        lambda x: jnp.asarray(x)[None], one(*_tree.at(operands, 0))
    )
