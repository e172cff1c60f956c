"""Mini-batches in an order that depends only on seed and epoch."""

import operator
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax.data._dataset import Dataset


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
    # a tuple may stand for an array, so that its parts are leaves; nothing else is taken apart
    arrays = tuple(arrays)
    leaves = jax.tree.leaves(arrays, is_leaf=lambda part: not isinstance(part, tuple))
    if other := [leaf for leaf in leaves if not hasattr(leaf, "shape")]:
        raise TypeError(
            f"data must be arrays; got a {type(other[0]).__name__}: pad sequences of different "
            f"lengths."
        )
    lengths = list(map(len, leaves))
    if len(set(lengths)) != 1:
        raise ValueError(
            f"data must be arrays with one leading length, the number of samples; got lengths "
            f"{lengths}."
        )
    _check.integer("batch_size", batch_size, least=1)
    size = lengths[0]
    if batch_size > size:
        raise ValueError(
            f"batch_size must be at most the number of samples, {size}; got {batch_size}."
        )
    # A SeedSequence mixes both numbers, so that seed 0 of epoch 1 and seed 1 of epoch 0 are different orders.
    entropy = [_check.integer("seed", seed, least=0), _check.integer("epoch", epoch, least=0)]
    order = np.random.default_rng(np.random.SeedSequence(entropy)).permutation(size)
    # Each shape of a batch compiles a program, so the rest is left out unless it is wanted.
    end = size - size % batch_size if drop_last else size
    parts = [order[start : start + batch_size] for start in range(0, end, batch_size)]
    return (jax.tree.map(operator.itemgetter(part), arrays) for part in parts)
