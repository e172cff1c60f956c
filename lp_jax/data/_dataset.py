"""What a data set is here."""

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
