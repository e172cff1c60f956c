"""Arithmetic on pytrees, and the stacking of layers into intervals."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from lp_jax._arrays._jaxpr import vary, varying_axes
from lp_jax._arrays._types import PyTree, Scalar, Stacked

# the library's own loops: a progress bar that replaces ``jax.lax.scan`` counts the user's scans, and none of these
fori_loop = lax.fori_loop
scan = lax.scan
while_loop = lax.while_loop


def add(a: PyTree, b: PyTree | None) -> PyTree:
    """``a + b``, where None stands for zero."""
    return a if b is None else jax.tree.map(jnp.add, a, b)


def sub(a: PyTree, b: PyTree) -> PyTree:
    """``a - b``."""
    return jax.tree.map(jnp.subtract, a, b)


def blend(weight: jax.Array | float, a: PyTree, b: PyTree) -> PyTree:
    """``weight * a + (1 - weight) * b``, in the dtype of ``a``; ``a`` itself for the Python number 1."""
    if isinstance(weight, int | float) and weight == 1:
        return a

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        w = jnp.asarray(weight).astype(x.dtype)
        return w * x + (1 - w) * y

    return jax.tree.map(leaf, a, b)


def where(condition: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Leafwise ``jnp.where`` with a scalar condition."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def where_rows(mask: jax.Array, a: PyTree, b: PyTree | None = None) -> PyTree:
    """Leafwise ``jnp.where`` with a condition for each entry of the leading axis; None stands for zeros."""
    b = jax.tree.map(lambda x: 0, a) if b is None else b
    return jax.tree.map(lambda x, y: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)


def zeros_like(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Zeros of the same shapes, for arrays or shape structs; of the same dtypes unless one is given."""
    return jax.tree.map(lambda x: varying(lax.full_like(x, 0, dtype), x), tree)


def pad_zeros(x: jax.Array, more: int) -> jax.Array:
    """Append ``more`` entries of zeros."""
    return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])


def varying(tree: PyTree, like: PyTree) -> PyTree:
    """Within a user's ``shard_map``, mark ``tree`` as different between devices where ``like`` is."""
    axes = varying_axes(*jax.tree.leaves(like))
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


def shape_of(f: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """`jax.eval_shape`, which forgets the mesh that shapes vary over where some of its axes are the compiler's."""
    place = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    # Only a type that varies over manual axes needs the mesh of the context.
    return jax.tree.map(
        lambda x: x.update(sharding=place) if varying_axes(x) else x,
        jax.eval_shape(f, *arguments),
    )


def entry_like(tree: PyTree) -> PyTree:
    """Shapes and dtypes of one entry of the leading axis, which may be empty."""

    def leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
        if varying_axes(x):
            return shape_of(lambda x: x[0], x)
        place = jax.typeof(x).sharding if explicit(x) else None
        place = place and NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=place)

    return jax.tree.map(leaf, tree)


def sum_like(tree: PyTree, like: PyTree) -> PyTree:
    """Within a user's ``shard_map``, sum ``tree`` over the axes along which ``like`` is the same everywhere."""

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        if varying_axes(x) <= varying_axes(y):
            return x
        # The transpose of marking as varying is the sum over these axes.
        return cast(jax.Array, jax.linear_transpose(lambda y: varying(y, x), y)(x)[0])

    return jax.tree.map(leaf, tree, like)


def explicit(x: object) -> bool:
    """Whether an array's type holds its place on a mesh."""
    return isinstance(x, jax.Array) and bool(jax.typeof(x).sharding.mesh.explicit_axes)


def broadcast(x: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast an array to the shape of another, and to its sharding where types hold that."""
    return jnp.broadcast_to(
        x, like.shape, out_sharding=jax.typeof(like).sharding if explicit(like) else None
    )


def at(tree: PyTree, index: Any) -> PyTree:
    """``x[index]`` of every leaf, as NumPy has it: an entry, or several ones; or the leaf with a new leading axis, by None.

    `take` and `put` are for an index that is traced.
    """
    return jax.tree.map(lambda x: x[index], tree)


def take(tree: PyTree, *index: jax.Array | int) -> PyTree:
    """The part at ``index`` in the leading axes of every leaf, by one slice."""

    def leaf(x: jax.Array) -> jax.Array:
        sizes = (1,) * len(index) + x.shape[len(index) :]
        # One slice over several leading axes; indexing axis by axis would copy the part in between.
        part = lax.dynamic_slice(x, start(x, index), sizes, allow_negative_indices=False)
        return lax.squeeze(part, range(len(index)))

    return jax.tree.map(leaf, tree)


def put(tree: PyTree, value: PyTree, *index: jax.Array | int) -> PyTree:
    """Replace the part at ``index`` in the leading axes of every leaf."""

    def leaf(x: jax.Array, new: jax.Array) -> jax.Array:
        new = lax.expand_dims(new, range(len(index)))
        return lax.dynamic_update_slice(x, new, start(x, index), allow_negative_indices=False)

    return jax.tree.map(leaf, tree, value)


def start(x: jax.Array, index: Sequence[jax.Array | int]) -> list[jax.Array | np.int32]:
    """Start indices of a slice. A Python integer may count from the end; a traced index must not be negative."""
    where = [
        np.int32(i + n * (i < 0)) if isinstance(i, int) else lax.convert_element_type(i, jnp.int32)
        for i, n in zip(index, x.shape, strict=False)
    ]
    return [*where, *(np.int32(0),) * (x.ndim - len(index))]


def repeat(tree: PyTree, n: int) -> PyTree:
    """``n`` copies along a new leading axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)


def push(tree: PyTree, entry: PyTree, *, reverse: bool) -> PyTree:
    """Move the entries of the leading axis by one place; ``entry`` comes first, or last if ``reverse``."""

    def leaf(x: jax.Array, new: jax.Array) -> jax.Array:
        if not x.shape[0]:
            return x
        new = new[None].astype(x.dtype)
        return jnp.concatenate([x[1:], new] if reverse else [new, x[:-1]])

    return jax.tree.map(leaf, tree, entry)


def prefix_sums(
    tree: PyTree, start: PyTree, *, reverse: bool, factor: Scalar | None = None
) -> tuple[PyTree, PyTree]:
    """``start`` plus the sum of the entries before each one (after it, if ``reverse``), and ``start`` plus all.

    With a ``factor`` the sum so far is multiplied by it before an entry is added: ``v[n+1] = factor v[n] + x[n]``.
    """
    if reverse and factor is not None:  # its padding has to come last
        before, last = prefix_sums(flip(tree), start, reverse=False, factor=factor)
        return flip(before), last
    sums = jax.tree.map(
        lambda x, y: _sums(y, x, reverse, None if factor is None else factor.astype(x.dtype)),
        wide(tree),
        wide(start),
    )
    before, last = jax.tree.transpose(jax.tree.structure(tree), None, sums)
    return narrow(before, tree), last


def _sums(
    start: jax.Array, x: jax.Array, reverse: bool, factor: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`prefix_sums` of an array: within groups of a few entries, and recursively between groups.

    Each level is computed before the next one reads it: a GPU's compiler would sum the groups anew for every entry above
    them, which takes a quarter longer (docs/benchmarks.md).
    """

    def then(total: jax.Array, entry: jax.Array, by: jax.Array | None = factor) -> jax.Array:
        return (total if by is None else by * total) + entry

    n = x.shape[0]
    rest = x.shape[1:]
    if n == 0:
        return x, start
    # A short sum is unrolled.
    if n <= _GROUP:
        sums = list(itertools.accumulate([start, *(x[::-1] if reverse else x)], then))
        return jnp.stack(sums[-2::-1] if reverse else sums[:-1]), sums[-1]
    size = divisor(n, _GROUP)
    if size == 1:
        # No group size divides n, so zeros are appended. With a factor the padded sum would go on to decay, so its last entry is
        # computed apart.
        before, last = _sums(start, pad_zeros(x, -n % _GROUP), reverse, factor)
        return before[:n], last if factor is None else then(before[n - 1], x[n - 1])
    # ``within[i]`` is the sum of the first i + 1 entries of each group, ``(groups, ...)``.
    groups = x.reshape(n // size, size, *rest)
    within = list(
        itertools.accumulate(
            (groups[:, i] for i in (range(size)[::-1] if reverse else range(size))), then
        )
    )
    power = None if factor is None else factor**size
    # The recursion gives the sum that enters each group, with the factor of a whole group.
    before, last = _sums(start, lax.optimization_barrier(within[-1]), reverse, power)
    entries = [
        before,
        *(
            then(before, sums, None if factor is None else factor**i)
            for i, sums in enumerate(within[:-1], 1)
        ),
    ]
    return jnp.stack(entries[::-1] if reverse else entries, axis=1).reshape(n, *rest), last


_GROUP = 8


def wide(tree: PyTree) -> PyTree:
    """The leaves in at least single precision, for sums over many layers."""
    return jax.tree.map(
        lambda x: x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32), tree
    )


def flip(tree: PyTree) -> PyTree:
    """The leading axis from its end."""
    return jax.tree.map(lambda x: x[::-1], tree)


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """The leaves in the dtypes of ``like``."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def total(tree: PyTree) -> PyTree:
    """Sums along the leading axis, in at least single precision."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), wide(tree))


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def resize(tree: PyTree, n: int) -> PyTree:
    """Cut the leading axis to n entries, or extend it by copies of the last one."""

    def leaf(x: jax.Array) -> jax.Array:
        missing = n - x.shape[0]
        if missing <= 0:
            return x if missing == 0 else x[:n]
        last = jnp.broadcast_to(with_fresh_keys(x)[-1:], (missing, *x.shape[1:]))
        return jnp.concatenate([with_fresh_keys(x), last])

    return jax.tree.map(leaf, tree)


def with_fresh_keys(tree: PyTree) -> PyTree:
    """Clone the keys: a layer uses its key on every visit, which ``jax_debug_key_reuse`` would report."""
    return jax.tree.map(
        lambda x: jax.random.clone(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


def leading(tree: PyTree) -> int:
    """Length of the leading axis."""
    return jax.tree.leaves(tree)[0].shape[0]


def leaf_squares(tree: PyTree) -> PyTree:
    """Sum of squared magnitudes of each leaf, in at least single precision."""
    dtype = wide_dtype(tree)
    return jax.tree.map(lambda x: jnp.sum(jnp.square(jnp.abs(x)).astype(dtype)), wide(tree))


def sum_of_squares(tree: PyTree) -> jax.Array:
    """Sum of squared magnitudes over all leaves, in at least single precision."""
    return jax.tree.reduce(jnp.add, leaf_squares(tree), jnp.zeros((), wide_dtype(tree)))


def inner_by_component(a: Stacked, b: Stacked) -> PyTree:
    """Real parts of the inner products along the leading axis, in one dtype of at least single precision."""
    dtype = wide_dtype(a)
    return jax.tree.map(
        lambda x, y: jnp.sum(jnp.real(x * jnp.conj(y)).astype(dtype), 0), wide(a), wide(b)
    )


def real_dtype(tree: PyTree, at_least: DTypeLike | None = None) -> np.dtype:
    """The real floating dtype that all leaves of a state promote to."""
    dtypes = [jnp.finfo(x.dtype).dtype for x in jax.tree.leaves(tree)]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes, *([] if at_least is None else [at_least]))


def wide_dtype(tree: PyTree) -> np.dtype:
    """`real_dtype`, or single precision if that is less: the dtype of sums and norms."""
    return real_dtype(tree, at_least=jnp.float32)


def split(tree: PyTree, size: int) -> PyTree:
    """Group the leading axis, whose length ``size`` divides: ``(n, ...) -> (n / size, size, ...)``."""
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // size, size, *x.shape[1:]), with_fresh_keys(tree)
    )


def divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``: a size by which `split` groups ``n`` entries."""
    return next((size for size in range(min(n, most), 0, -1) if n % size == 0), 1)


def merge(tree: PyTree) -> PyTree:
    """Undo `split`: ``(groups, size, ...) -> (n, ...)``."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def inexact(x: ArrayLike) -> bool:
    """Whether an array is floating point or complex, so that it has a gradient."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def partition(
    tree: PyTree, mask: Sequence[bool] | None = None
) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """The leaves to differentiate (by default the inexact ones), and a function that puts new ones into the tree."""
    leaves, structure = jax.tree.flatten(tree)
    mask = list(map(inexact, leaves)) if mask is None else mask

    def combine(new: Sequence[object], *, fill: object = ...) -> PyTree:
        values = iter(new)
        # `...` keeps a leaf that is not differentiated; any other `fill` takes its place.
        kept = [
            next(values) if m else (x if fill is ... else fill)
            for x, m in zip(leaves, mask, strict=True)
        ]
        return jax.tree.unflatten(structure, kept)

    return [x for x, m in zip(leaves, mask, strict=True) if m], combine
