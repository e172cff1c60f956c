"""What a data set is here, and how one is split and scaled."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, ...]


class Dataset(NamedTuple):
    """Labelled samples, split into those to train with and those held out.

    Attributes:
        train_x: inputs, ``(train samples, *shape)``, float32 unless the loader says otherwise. Samples of different
            lengths are a tuple of arrays, padded inputs and their lengths.
        train_y: their classes, int32 in [0, classes), ``(train samples,)``; where every place of an input has a class of
            its own, ``(train samples, length)``.
        test_x: inputs held out, of the same form.
        test_y: their classes.
        classes: number of classes.
        shape: shape of one input, channels last.
        names: of the classes, by their numbers; empty where they have none.
    """

    train_x: Arrays
    train_y: np.ndarray
    test_x: Arrays
    test_y: np.ndarray
    classes: int
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()


class DataError(ValueError):
    """A file that does not hold what it should: in one line the file, the place, what is there and what was wanted."""


def check_fraction(test_fraction: float) -> None:
    """Refuse a fraction that leaves nothing on one side."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"test_fraction must be between 0 and 1, both excluded; got {test_fraction}.")


def stratified(
    labels: np.ndarray, test_fraction: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions to train with and positions held out, the same fraction of every class, each in a random order."""
    check_fraction(test_fraction)
    train, test = [], []
    for label in np.unique(labels):
        (of_class,) = np.nonzero(labels == label)
        of_class = generator.permutation(of_class)
        held_out = round(test_fraction * len(of_class))
        if not 0 < held_out < len(of_class):
            raise ValueError(
                f"test_fraction {test_fraction} leaves class {label}, of {len(of_class)} samples, "
                f"{held_out} of them to test with; wanted at least one to train and one to test with."
            )
        test.append(of_class[:held_out])
        train.append(of_class[held_out:])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))


def scaler(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that takes the channels of ``values``, the last axis, to mean 0 and standard deviation 1.

    It returns float32. Channels that never change stay at 0.
    """
    axes = tuple(range(values.ndim - 1))
    mean, deviation = (statistic(values, axis=axes, dtype=np.float64) for statistic in (np.mean, np.std))
    # of a constant, rounding leaves more than nothing
    deviation = np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation)
    return lambda other: ((other - mean) / deviation).astype(np.float32)
