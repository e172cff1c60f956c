"""What a data set is here."""

from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
    """Labelled samples, split into those to train with and those held out.

    Attributes:
        train_x: inputs, float32 in [0, 1], ``(train samples, *shape)``.
        train_y: their classes, int32 in [0, classes), ``(train samples,)``.
        test_x: inputs held out, ``(test samples, *shape)``.
        test_y: their classes, ``(test samples,)``.
        classes: number of classes.
        shape: shape of one input, channels last.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    shape: tuple[int, ...]


class DataError(ValueError):
    """A file that does not hold what it should: in one line the file, the place, what is there and what was wanted."""
