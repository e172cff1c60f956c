"""Chains of affine maps, ``d[n+1] = A[n] d[n] + b[n]`` from zero, solved for all n in logarithmic depth.

Maps are composed in small groups, and groups of groups, up to one. Then states are propagated down: through the maps of the
topmost group, and each of these states through the group that it enters. An ordinary parallel scan takes twice as many
products of matrices with matrices. A single processor applies the maps one after another, without such products.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from lp_jax._arrays import _tree
from lp_jax._comms._workers import Compose, Workers


class Product(Protocol):
    """How a kind of matrices multiplies vectors and each other; ``group`` matrices are composed at a time."""

    group: int

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        """The matrix times the vector."""

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """The product ``second @ first``."""

    def flops(self, shape: Sequence[int]) -> float:
        """Flops of a product of two matrices of a shape."""

    def identity(self, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        """The identity matrix."""


class Maps(NamedTuple):
    """Affine maps ``d -> matrix d + vector``: one, or stacked along leading axes."""

    matrix: jax.Array
    vector: jax.Array


def solve(workers: Workers, maps: Maps, product: Product, *, reverse: bool) -> jax.Array:
    """States ``(n, ...)`` after each of this worker's maps, in the chain over all workers."""
    n = len(maps.vector)
    if not n:
        return maps.vector
    start = _tree.zeros_like(maps.vector[0])
    several = workers.active > 1
    compose = functools.partial(_compose, product)
    if not workers.processor.multiplies(product.flops(maps.matrix.shape[1:])):
        if several:
            total = _total_in_turn(maps, compose, reverse)
            start = workers.exclusive_scan(total, reverse=reverse, compose=compose).vector
        return lax.scan(lambda d, one: (_at(product, one, d),) * 2, start, maps, reverse=reverse)[1]
    levels = [_group(maps, product)]
    while len(levels[-1].vector) > 1:
        levels.append(_group(_totals(levels[-1], compose, reverse), product))
    if several:
        total = jax.tree.map(lambda x: x[0], _totals(levels[-1], compose, reverse))
        start = workers.exclusive_scan(total, reverse=reverse, compose=compose).vector
    states = start[None]
    for finer, groups in reversed(list(itertools.pairwise(levels))):
        states = _down(groups, states, product, reverse)[: len(finer.vector)]
    return _down(levels[0], states, product, reverse, leaving=True)[:n]


def _group(maps: Maps, product: Product) -> Maps:
    """Group leaves ``(n, ...)`` as ``(groups, size, ...)``; identities are appended where no size divides n."""
    n = len(maps.vector)
    size = n if n <= 2 * product.group else next((size for size in range(product.group, 1, -1) if n % size == 0), None)
    if size is None:
        size = product.group
        nothing = Maps(product.identity(maps.matrix.shape[1:], maps.matrix.dtype), _tree.zeros_like(maps.vector[0]))
        nothing = _tree.varying(nothing, maps)
        maps = jax.tree.map(lambda x, y: jnp.concatenate([x, _tree.repeat(y, -n % size)]), maps, nothing)
    return _tree.split(maps, size)


def _in_order(groups: Maps, reverse: bool) -> list[Maps]:
    """The first maps of all groups, their second ones, ..., in the order of the chain."""
    size = groups.vector.shape[1]
    return [jax.tree.map(lambda x, i=i: x[:, i], groups) for i in (range(size - 1, -1, -1) if reverse else range(size))]


def _totals(groups: Maps, compose: Compose, reverse: bool) -> Maps:
    """Each group as one map."""
    return functools.reduce(jax.vmap(compose), _in_order(groups, reverse))


def _total_in_turn(maps: Maps, compose: Compose, reverse: bool) -> Maps:
    """All maps as one."""
    first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
    first, rest = (jax.tree.map(lambda x, which=which: x[which], maps) for which in (first, rest))
    return lax.scan(lambda total, one: (compose(total, one), None), first, rest, reverse=reverse)[0]


def _down(groups: Maps, states: jax.Array, product: Product, reverse: bool, *, leaving: bool = False) -> jax.Array:
    """From states that enter the groups, ``(groups, ...)``, the states that enter (or leave) each map, ``(n, ...)``."""
    at = jax.vmap(functools.partial(_at, product))
    order = _in_order(groups, reverse)
    reached = list(itertools.accumulate(order if leaving else order[:-1], lambda d, one: at(one, d), initial=states))
    reached = reached[1:] if leaving else reached
    return _tree.merge(jnp.stack(reached[::-1] if reverse else reached, axis=1))


def _at(product: Product, one: Maps, d: jax.Array) -> jax.Array:
    return product.apply(one.matrix, d) + one.vector


def _compose(product: Product, first: Maps, second: Maps) -> Maps:
    return Maps(product.compose(first.matrix, second.matrix), _at(product, second, first.vector))
