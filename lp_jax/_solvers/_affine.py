"""Chains of affine maps, ``d[n+1] = A[n] d[n] + b[n]`` from zero, solved for all n in logarithmic depth.

Maps are composed in small groups, and groups of groups, up to one. Then states are propagated down: through the maps of the
topmost group, and each of these states through the group that it enters. An ordinary parallel scan takes twice as many
products of matrices with matrices. A single processor applies the maps one after another, without such products.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._comms._workers import Compose, Workers
from lp_jax._solvers._jacobians import Jacobians


class Maps(NamedTuple):
    """Affine maps ``d -> matrix d + vector``: one, or stacked along leading axes."""

    matrix: jax.Array
    vector: jax.Array


def solve(workers: Workers, maps: Maps, kind: Jacobians, *, reverse: bool) -> jax.Array:
    """States ``(n, ...)`` after each of this worker's maps, in the chain over all workers."""
    n = len(maps.vector)
    # A rank without layers has no maps.
    if not n:
        return maps.vector
    start = _tree.zeros_like(maps.vector[0])
    several = workers.active > 1

    def compose(first: Maps, second: Maps) -> Maps:
        return Maps(kind.compose(first.matrix, second.matrix), _at(kind, second, first.vector))

    # Where products of matrices cost too much, the maps are applied one after another, a product with a vector each.
    if not workers.processor.multiplies(kind.flops(maps.matrix.shape[1:])):
        if several:
            # Over several workers, each first composes its maps into one, from which follow the states that enter the workers.
            first, rest = (-1, slice(-1)) if reverse else (0, slice(1, None))
            total, _ = _tree.scan(
                lambda total, one: (compose(total, one), None),
                _tree.at(maps, first),
                _tree.at(maps, rest),
                reverse=reverse,
            )
            start = workers.exclusive_scan(total, reverse=reverse, compose=compose).vector
        return _tree.scan(lambda d, one: (_at(kind, one, d),) * 2, start, maps, reverse=reverse)[1]
    # Up: groups become one map each, until a single group is left.
    levels = [_group(maps, kind)]
    while len(levels[-1].vector) > 1:
        levels.append(_group(_totals(levels[-1], compose, reverse), kind))
    if several:
        total = _tree.at(_totals(levels[-1], compose, reverse), 0)
        start = workers.exclusive_scan(total, reverse=reverse, compose=compose).vector
    # Down: the states that enter the groups of a level give those that enter its maps, which are the groups of the finer level.
    states = start[None]
    for finer, groups in reversed(list(itertools.pairwise(levels))):
        states = _down(groups, states, kind, reverse)[: len(finer.vector)]
    # The cut drops states after the appended identities.
    return _down(levels[0], states, kind, reverse, leaving=True)[:n]


def _group(maps: Maps, kind: Jacobians) -> Maps:
    """Group leaves ``(n, ...)`` as ``(groups, size, ...)``. Identities are appended if no size divides n."""
    n = len(maps.vector)
    size = n if n <= 2 * kind.group else _tree.divisor(n, kind.group)
    if size == 1 < n:
        size = kind.group
        nothing = Maps(
            kind.identity(maps.matrix.shape[1:], maps.matrix.dtype),
            _tree.zeros_like(maps.vector[0]),
        )
        # Within a user's shard_map, only arrays that vary over the same axes can be concatenated.
        nothing = _tree.varying(nothing, maps)
        maps = jax.tree.map(
            lambda x, y: jnp.concatenate([x, _tree.repeat(y, -n % size)]), maps, nothing
        )
    return _tree.split(maps, size)


def _in_order(groups: Maps, reverse: bool) -> list[Maps]:
    """The first maps of all groups, their second ones, ..., in the order of the chain."""
    places = range(groups.vector.shape[1])
    return [_tree.at(groups, (slice(None), i)) for i in (places[::-1] if reverse else places)]


def _totals(groups: Maps, compose: Compose, reverse: bool) -> Maps:
    """Each group as one map."""
    # The groups are composed side by side, as a batch.
    return functools.reduce(jax.vmap(compose), _in_order(groups, reverse))


def _down(
    groups: Maps, states: jax.Array, kind: Jacobians, reverse: bool, *, leaving: bool = False
) -> jax.Array:
    """From states that enter the groups, ``(groups, ...)``, the states that enter (or leave) each map, ``(n, ...)``."""
    at = jax.vmap(functools.partial(_at, kind))
    order = _in_order(groups, reverse)
    # Within a group the maps are applied one after another; all groups side by side.
    reached = list(
        itertools.accumulate(
            order if leaving else order[:-1], lambda d, one: at(one, d), initial=states
        )
    )
    reached = reached[1:] if leaving else reached
    return _tree.merge(jnp.stack(reached[::-1] if reverse else reached, axis=1))


def _at(kind: Jacobians, one: Maps, d: jax.Array) -> jax.Array:
    return kind.apply(one.matrix, d) + one.vector
