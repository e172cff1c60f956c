"""Human activity recognition with a smartphone's sensors, from the UCI repository's text files."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import DataError, Dataset
from lp_jax.data._read import find, lines, wrong
from lp_jax.data._scale import Scale

_CHANNELS = [f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
_WANTED = "the files of UCI HAR"


def uci_har(folder: str | os.PathLike[str]) -> Dataset:
    """Human activities, six of them, from accelerometer and gyroscope: 128 time steps of 9 channels.

    The folder is the one called "UCI HAR Dataset": ``activity_labels.txt``; ``train/y_train.txt``; in ``train/Inertial
    Signals`` the nine files ``body_acc_x_train.txt`` to ``total_acc_z_train.txt``, a window of 128 numbers a line; and the
    same with ``test`` for ``train``. Files may be gzipped with ``.gz`` at their ends.

    Args:
        folder: where the files are.

    Returns:
        A `Dataset` of inputs ``(128, 9)``, float32, each channel with mean 0 and deviation 1 over the training windows;
        channels are the body's acceleration, its angular velocity and the total acceleration, each along x, y and z.

    Raises:
        DataError: for a file that is missing or malformed, windows of different lengths, and labels that are not in
            ``activity_labels.txt``, too few or too many, or of a class that no training window has.

    Example:
        >>> from lp_jax import data
        >>> data.uci_har("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no file activity_labels.txt or ...

    Reference:
        Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, "A public domain dataset for human activity recognition using
        smartphones", ESANN 2013.
    """
    folder = Path(folder)
    activities = _activities(find(folder, "activity_labels.txt", _WANTED))
    train_x, train_y = _split(folder / "train", "train", activities, None)
    test_x, test_y = _split(folder / "test", "test", activities, train_x.shape[1])
    if absent := sorted(set(test_y.tolist()) - set(train_y.tolist())):
        name = list(activities.values())[absent[0]]
        at = int(np.argmax(test_y == absent[0])) + 1
        path = find(folder / "test", "y_test.txt", _WANTED)
        raise wrong(path, at, f"activity {name}, which no training window has", "one that has")
    scale = Scale(train_x.reshape(-1, len(_CHANNELS)))
    names = tuple(activities.values())
    return Dataset(
        scale(train_x), train_y, scale(test_x), test_y, classes=len(names), shape=train_x.shape[1:], names=names
    )


def _activities(path: Path) -> dict[str, str]:
    """Names by the numbers that stand for them in the files of labels."""
    activities = {}
    for number, line in enumerate(lines(path, "numbers and names of activities"), 1):
        entry = line.split()
        if len(entry) != 2 or entry[0] in activities:
            raise wrong(path, number, f"{line!r}", "a new number and the name of an activity")
        activities[entry[0]] = entry[1]
    return activities


def _split(folder: Path, split: str, activities: dict[str, str], length: int | None) -> tuple[np.ndarray, np.ndarray]:
    labels_file = find(folder, f"y_{split}.txt", _WANTED)
    numbers = list(activities)
    labels = []
    for at, line in enumerate(lines(labels_file, "a number of an activity a line"), 1):
        if line.strip() not in activities:
            raise wrong(labels_file, at, f"activity {line.strip()!r}", f"one of {' '.join(numbers)}")
        labels.append(numbers.index(line.strip()))
    channels = []
    for channel in _CHANNELS:
        path = find(folder / "Inertial Signals", f"{channel}_{split}.txt", _WANTED)
        windows = _windows(path, length)
        length = windows.shape[1]
        if len(windows) != len(labels):
            wanted = f"{len(labels)}, one for each label of {labels_file.name}"
            raise DataError(f"{path}: line {len(windows)}: {len(windows)} windows; wanted {wanted}.")
        channels.append(windows)
    return np.stack(channels, axis=-1), np.array(labels, np.int32)


def _windows(path: Path, length: int | None) -> np.ndarray:
    rows = []
    for number, line in enumerate(lines(path, "a window of numbers a line"), 1):
        try:
            row = np.array(list(map(float, line.split())), np.float32)
        except ValueError as error:
            raise wrong(path, number, str(error), "numbers with spaces between them") from None
        if length is None:
            length = len(row)
        if len(row) != length or not length:
            raise wrong(path, number, f"a window of {len(row)} numbers", f"{length or 128}, like the others")
        if not np.isfinite(row).all():
            raise wrong(path, number, f"a value {row[~np.isfinite(row)][0]}", "finite numbers")
        rows.append(row)
    return np.stack(rows)
