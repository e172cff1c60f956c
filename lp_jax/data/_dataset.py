"""The record of a data set, and how its samples are split."""

import importlib
import math
from types import ModuleType
from typing import NamedTuple

import numpy as np

Arrays = np.ndarray | tuple[np.ndarray, ...]


class Dataset(NamedTuple):
    """Samples with a class or values each, split into training samples and held-out samples.

    Attributes:
        train_x: inputs, ``(train samples, *shape)``, float32 unless the loader says otherwise. Samples of different
            lengths are a tuple of arrays, padded inputs and their lengths.
        train_y: classes, int32 in [0, classes), ``(train samples,)``; ``(train samples, length)`` if every position of an
            input has a class of its own. Or values, unscaled: ``(train samples, values)``.
        test_x: held-out inputs, of the same form.
        test_y: their classes or values.
        classes: number of classes; 0 if samples have values.
        shape: shape of one input, channels last.
        names: names of the classes, by their numbers; empty if they have none.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x, y = np.zeros((10, 2), np.float32), np.arange(10, dtype=np.int32) % 3
        >>> mine = data.Dataset(x[:8], y[:8], x[8:], y[8:], classes=3, shape=(2,))
        >>> [len(labels) for _, labels in data.batches(mine, 4, seed=0, epoch=0)]
        [4, 4]
    """

    train_x: Arrays
    train_y: np.ndarray
    test_x: Arrays
    test_y: np.ndarray
    classes: int
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()


class DataError(ValueError):
    """A file is damaged or of another kind. One line has the file, the place, its content and the expected content.

    Example:
        >>> from lp_jax import data
        >>> try:
        ...     data.arrays("no/such/file.npz")
        ... except data.DataError as error:
        ...     print(str(error).partition(";")[0])
        no/such/file.npz: cannot be read (No such file or directory)
    """


def split(
    x: np.ndarray, y: np.ndarray, test_fraction: float, seed: int, *, by_class: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and held-out samples, ``(train_x, train_y, test_x, test_y)``, by default the same part of every class."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(
            f"test_fraction must be between 0 and 1, both excluded; got {test_fraction}."
        )
    counts = np.unique(y, return_counts=True)[1] if by_class else [len(y)]
    # scikit-learn rounds the held-out part up, too, so its own error, which names no remedy, never comes.
    test = math.ceil(test_fraction * len(y))
    if min(counts) < 2:
        raise ValueError(
            "each class must have two samples or more, to train with and to hold out; one has a "
            "single one."
        )
    if min(test, len(y) - test) < len(counts):
        got = (
            f"{test_fraction} leaves {len(y) - test} to train with and {test} to hold out, "
            f"for {len(counts)} classes"
        )
        raise ValueError(f"test_fraction must leave one sample of each class or more; {got}.")
    cut = require("sklearn.model_selection").train_test_split
    # `stratify` takes the same part of every class; values are hardly ever equal, and have no classes.
    labels = y if by_class else None
    train_x, test_x, train_y, test_y = cut(
        x, y, test_size=test_fraction, random_state=seed, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def require(module: str) -> ModuleType:
    """Import a module of scikit-learn, which comes with the extra lp_jax[train]."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lp_jax.data needs {error.name}, of the extra lp_jax[train]: pip install "
            f"'lp_jax[train]'",
            name=error.name,
        ) from None
