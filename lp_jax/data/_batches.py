"""Mini-batches in an order that depends on seed and epoch alone."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lp_jax import _check
from lp_jax.data._dataset import Dataset


def batches(
    data: Dataset | Sequence[Any], batch_size: int, *, seed: int, epoch: int, drop_last: bool = True
) -> Iterator[tuple[Any, ...]]:
    """Shuffled mini-batches of one epoch.

    The order is a pure function of seed and epoch, so that a run that resumes in any epoch sees the batches that an
    uninterrupted one would have seen (``itertools.islice`` skips those already done).

    Args:
        data: a `Dataset`, whose training samples are taken, or a sequence of arrays with one leading length. In place of
            an array there may be a tuple of them: padded inputs and their lengths, say.
        batch_size: samples per batch.
        seed: of the order, a non-negative integer.
        epoch: the epoch's number, a non-negative integer; each has an order of its own.
        drop_last: leave out a last batch that is not full, so that shapes never change and nothing is compiled twice.

    Returns:
        An iterator over tuples of arrays ``(batch_size, ...)``: ``(x, y)`` for a `Dataset`. Tuples come as tuples.

    Raises:
        ValueError: for arrays of different lengths, and for batches larger than the data.
        TypeError: for a single array, for what is no array, and for a size, seed or epoch that is no integer.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x = np.arange(10)
        >>> [batch.shape for (batch,) in data.batches((x,), 4, seed=0, epoch=0)]
        [(4,), (4,)]
    """
    arrays = _arrays(data)
    size = len(_leaves(arrays)[0])
    _check.integer("batch_size", batch_size, least=1)
    if batch_size > size:
        raise ValueError(f"batch_size must be at most the number of samples, {size}; got {batch_size}.")
    order = generator(seed, epoch).permutation(size)
    return (jax.tree.map(operator.itemgetter(pick), arrays) for pick in groups(order, batch_size, drop_last))


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the random numbers of an epoch, a function of seed and epoch alone."""
    entropy = [_check.integer("seed", seed, least=0), _check.integer("epoch", epoch, least=0)]
    return np.random.default_rng(np.random.SeedSequence(entropy))


def groups(order: np.ndarray, size: int, drop_last: bool) -> list[np.ndarray]:
    """Return the parts of an order, ``size`` numbers each; a last one that is not full may be left out."""
    end = len(order) - len(order) % size if drop_last else len(order)
    return [order[start : start + size] for start in range(0, end, size)]


def _arrays(data: Dataset | Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(data, Dataset):
        return data.train_x, data.train_y
    if hasattr(data, "shape"):
        raise TypeError("data must be a Dataset or a sequence of arrays; got one array: pass (array,).")
    arrays = tuple(data)
    if other := [leaf for leaf in _leaves(arrays) if not hasattr(leaf, "shape")]:
        kind = type(other[0]).__name__
        raise TypeError(f"data must be arrays; got a {kind}: sequences of different lengths are for data.bucketed.")
    lengths = [len(array) for array in _leaves(arrays)]
    if len(set(lengths)) != 1:
        raise ValueError(f"data must be arrays with one leading length, the number of samples; got lengths {lengths}.")
    return arrays


def _leaves(arrays: Any) -> list[Any]:
    return jax.tree.leaves(arrays, is_leaf=lambda part: not isinstance(part, tuple))
