"""Mini-batches in an order that depends only on seed and epoch; batches of sequences have few shapes."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax.data._dataset import Dataset, Samples


def batches(
    data: Dataset | Sequence[PyTree],
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    drop_last: bool = True,
) -> Iterator[tuple[PyTree, ...]]:
    """Return the shuffled mini-batches of one epoch.

    The order is a pure function of seed and epoch, so a resumed run sees the same batches as an uninterrupted one
    (``itertools.islice`` skips finished batches).

    Args:
        data: a `Dataset`, whose training samples are used, or a sequence of arrays with one leading length. A tuple of arrays
            may replace an array: padded inputs and their lengths, say.
        batch_size: samples per batch.
        seed: seed of the order, a non-negative integer.
        epoch: the epoch's number, a non-negative integer; each epoch has an order of its own.
        drop_last: leave out a last batch that is not full, so that shapes never change and nothing is compiled twice.

    Returns:
        An iterator over tuples of arrays ``(batch_size, ...)``: ``(x, y)`` for a `Dataset`. Tuples stay tuples.

    Raises:
        ValueError: if the arrays differ in length, or batches are larger than the data.
        TypeError: if ``data`` is a single array or holds anything but arrays, or a size, seed or epoch is not an integer.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x = np.arange(10)
        >>> [batch.shape for (batch,) in data.batches((x,), 4, seed=0, epoch=0)]
        [(4,), (4,)]
    """
    arrays = (data.train_x, data.train_y) if isinstance(data, Dataset) else data
    if hasattr(arrays, "shape"):
        raise TypeError(
            "data must be a Dataset or a sequence of arrays; got one array: pass (array,)."
        )
    arrays = tuple(arrays)
    leaves = jax.tree.leaves(arrays, is_leaf=lambda part: not isinstance(part, tuple))
    if other := [leaf for leaf in leaves if not hasattr(leaf, "shape")]:
        raise TypeError(
            f"data must be arrays; got a {type(other[0]).__name__}: sequences of different lengths are for data.bucketed."
        )
    lengths = list(map(len, leaves))
    if len(set(lengths)) != 1:
        raise ValueError(
            f"data must be arrays with one leading length, the number of samples; got lengths {lengths}."
        )
    parts = _parts(generator(seed, epoch).permutation(lengths[0]), batch_size, drop_last, "samples")
    return (jax.tree.map(operator.itemgetter(pick), arrays) for pick in parts)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the random numbers of an epoch, a function of seed and epoch only."""
    entropy = [_check.integer("seed", seed, least=0), _check.integer("epoch", epoch, least=0)]
    return np.random.default_rng(np.random.SeedSequence(entropy))


def _parts(order: np.ndarray, size: int, drop_last: bool, of: str) -> list[np.ndarray]:
    """Return the parts of an order, ``size`` numbers each."""
    _check.integer("batch_size", size, least=1)
    if size > len(order):
        raise ValueError(
            f"batch_size must be at most the number of {of}, {len(order)}; got {size}."
        )
    end = len(order) - len(order) % size if drop_last else len(order)
    return [order[start : start + size] for start in range(0, end, size)]


UNLABELLED = -1


class Sequences(NamedTuple):
    """Sequences and their labels, each of its own length: ``(length, *features)``; and ``(length,)`` int32, -1 for none."""

    x: list[np.ndarray]
    y: list[np.ndarray]


def padded(sequences: Sequence[np.ndarray], length: int, *, fill: int = 0) -> np.ndarray:
    """Return sequences, at least one, as one array ``(sequences, length, *features)`` with ``fill`` after short ones."""
    first = sequences[0]
    result = np.full((len(sequences), length, *first.shape[1:]), fill, first.dtype)
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

    A batch has sequences that need the same length. If they do not fill the last batch of a length, sequences of the next
    length are added. The batches come in a random order, a pure function of seed and epoch. Order and number are as for
    `batches`.

    Args:
        data: inputs and labels, like those of `gum`.
        batch_size: sequences per batch.
        lengths: padded lengths, increasing; the last one must suffice for the longest sequence.
        seed: as for `batches`.
        epoch: as for `batches`.
        drop_last: leave out a batch of fewer than ``batch_size`` sequences, so that there are no more shapes than lengths. Each
            epoch leaves out other sequences.

    Returns:
        An iterator over ``(x, y)``: inputs ``(batch_size, length, *features)``, 0 in the padding, and labels
        ``(batch_size, length)``, -1 in the padding.

    Raises:
        ValueError: if lengths do not increase or are too short, inputs and labels do not match, or batches are larger than the
            data.
        TypeError: if a size, length, seed or epoch is not an integer.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x = [np.full(length, 7) for length in (2, 5, 3, 4, 1, 9)]
        >>> pairs = data.bucketed(data.Sequences(x, x), 2, lengths=(4, 16), seed=0, epoch=0)
        >>> sorted(x.shape for x, y in pairs)
        [(2, 4), (2, 4), (2, 16)]
    """
    sizes = np.array(list(map(len, data.x)))
    for at, (elements, labels) in enumerate(
        itertools.zip_longest(sizes, map(len, data.y), fillvalue=0)
    ):
        if elements != labels:
            raise ValueError(
                f"data must have a label for each element; got {labels} for the {elements} of sequence {at}."
            )
    bounds = [_check.integer("lengths", length, least=1) for length in lengths]
    if not bounds or any(later <= earlier for earlier, later in itertools.pairwise(bounds)):
        raise ValueError(f"lengths must increase; got {tuple(bounds)}.")
    if sizes.max(initial=0) > bounds[-1]:
        raise ValueError(
            f"lengths must reach the longest sequence, {sizes.max()}; got at most {bounds[-1]}."
        )
    random = generator(seed, epoch)
    buckets = np.searchsorted(bounds, sizes)
    order = random.permutation(len(sizes))
    parts = _parts(
        order[np.argsort(buckets[order], kind="stable")], batch_size, drop_last, "sequences"
    )

    def batch(part: np.ndarray) -> Samples:
        length = bounds[buckets[part[-1]]]
        return padded([data.x[i] for i in part], length), padded(
            [data.y[i] for i in part], length, fill=UNLABELLED
        )

    return (batch(parts[number]) for number in random.permutation(len(parts)))
