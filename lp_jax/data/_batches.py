"""Mini-batches in an order that depends on seed and epoch alone; of sequences in few shapes."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lp_jax._arrays import _check
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
        TypeError: for a single array, for anything that is not an array, and for a size, seed or epoch that is not an integer.

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


UNLABELLED = -1


class Sequences(NamedTuple):
    """Sequences and their labels, each of its own length: ``(length, *features)``; and ``(length,)`` int32, -1 for none."""

    x: list[np.ndarray]
    y: list[np.ndarray]


def padded(sequences: Sequence[np.ndarray], length: int | None = None, *, fill: int = 0) -> np.ndarray:
    """Return sequences as one array, with short ones padded at their ends.

    Args:
        sequences: arrays ``(length, *features)`` that differ in nothing but their lengths.
        length: of all of them in the end; by default that of the longest.
        fill: what to fill up with.

    Returns:
        An array ``(sequences, length, *features)``.

    Raises:
        ValueError: for no sequences, and for one that is longer than ``length``.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> data.padded([np.array([1, 2, 3]), np.array([4])])
        array([[1, 2, 3],
               [4, 0, 0]])
    """
    if not sequences:
        raise ValueError("sequences must be at least one array; got none.")
    longest = max(map(len, sequences))
    if length is not None and longest > length:
        raise ValueError(f"length must be at least that of the longest sequence, {longest}; got {length}.")
    first = sequences[0]
    result = np.full((len(sequences), length or longest, *first.shape[1:]), fill, first.dtype)
    for row, sequence in zip(result, sequences, strict=True):
        row[: len(sequence)] = sequence
    return result


def bucketed(
    data: Sequences,
    batch_size: int,
    *,
    lengths: Sequence[int] = (16, 32, 64, 128),
    seed: int,
    epoch: int,
    drop_last: bool = True,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Make shuffled mini-batches of one epoch of sequences. Each batch is padded to one of a few lengths.

    Sequences that need the same length come together. Where those of one length do not fill a last batch, it is filled
    with some that need the next one. The batches come in a random order, a pure function of seed and epoch as for `batches`,
    and there are as many of them.

    Args:
        data: inputs and labels, like those of `gum`.
        batch_size: sequences per batch.
        lengths: to pad to, increasing; the last one must do for the longest sequence.
        seed: as for `batches`.
        epoch: as for `batches`.
        drop_last: leave out a batch of fewer than ``batch_size`` sequences, so that there are no more shapes than lengths;
            which ones is another matter in each epoch.

    Returns:
        An iterator over ``(x, y)``: inputs ``(batch_size, length, *features)``, 0 in the padding, and labels
        ``(batch_size, length)``, -1 in the padding.

    Raises:
        ValueError: for lengths that do not increase or are too short, for inputs and labels that do not fit, and for
            batches larger than the data.
        TypeError: for a size, length, seed or epoch that is no integer.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x = [np.full(length, 7) for length in (2, 5, 3, 4, 1, 9)]
        >>> pairs = data.bucketed(data.Sequences(x, x), 2, lengths=(4, 16), seed=0, epoch=0)
        >>> sorted(x.shape for x, y in pairs)
        [(2, 4), (2, 4), (2, 16)]
    """
    sizes = np.array([len(x) for x in data.x])
    pairs = itertools.zip_longest(sizes.tolist(), map(len, data.y), fillvalue=0)
    for at, (elements, labels) in enumerate(pairs):
        if elements != labels:
            raise ValueError(
                f"data must have a label for each element; got {labels} for the {elements} of sequence {at}."
            )
    bounds = [_check.integer("lengths", length, least=1) for length in lengths]
    if not bounds or any(later <= earlier for earlier, later in itertools.pairwise(bounds)):
        raise ValueError(f"lengths must increase; got {tuple(bounds)}.")
    if sizes.max(initial=0) > bounds[-1]:
        raise ValueError(f"lengths must reach the longest sequence, {sizes.max()}; got at most {bounds[-1]}.")
    _check.integer("batch_size", batch_size, least=1)
    if batch_size > len(sizes):
        raise ValueError(f"batch_size must be at most the number of sequences, {len(sizes)}; got {batch_size}.")
    random = generator(seed, epoch)
    buckets = np.searchsorted(bounds, sizes)
    order = random.permutation(len(sizes))
    parts = groups(order[np.argsort(buckets[order], kind="stable")], batch_size, drop_last)

    def batch(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        length = bounds[buckets[part[-1]]]
        return padded([data.x[i] for i in part], length), padded([data.y[i] for i in part], length, fill=UNLABELLED)

    return (batch(parts[number]) for number in random.permutation(len(parts)))
