"""Human activity recognition with a smartphone's sensors, from the UCI repository's text files."""

import os
import warnings
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import Dataset, scaler
from lp_jax.data._read import find, lines, reading, wrong

_CHANNELS = [f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
_WANTED = "the files of UCI HAR"


def uci_har(folder: str | os.PathLike[str]) -> Dataset:
    """Human activities, six of them, from accelerometer and gyroscope: 128 time steps of 9 channels.

    The folder is the one called "UCI HAR Dataset": ``activity_labels.txt``; ``train/y_train.txt``; in ``train/Inertial
    Signals`` the nine files ``body_acc_x_train.txt`` to ``total_acc_z_train.txt``, a window of 128 numbers a line; and the
    same with ``test`` for ``train``. Files may be gzipped with ``.gz`` at their ends.

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
    path = find(folder, "activity_labels.txt", _WANTED)
    with reading(path, "a number and a name a line"):
        activities = dict(line.split() for line in lines(path, _WANTED))
    if len(activities) < len(lines(path, _WANTED)):
        raise wrong(path, "a number twice", "a new one for each activity")
    (train_x, train_y), (test_x, test_y) = (
        _split(folder / split, split, (*activities,)) for split in ("train", "test")
    )
    scaled, names, length = scaler(train_x), tuple(activities.values()), train_x.shape[1]
    if test_x.shape[1] != length:
        raise wrong(folder / "test", f"windows of {test_x.shape[1]} numbers", f"{length}, like those of train")
    if absent := set(test_y.tolist()) - set(train_y.tolist()):
        raise wrong(folder / "test", f"activity {names[min(absent)]}", "one that a training window has")
    return Dataset(
        scaled(train_x), train_y, scaled(test_x), test_y, classes=len(names), shape=train_x.shape[1:], names=names
    )


def _split(folder: Path, split: str, numbers: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    path = find(folder, f"y_{split}.txt", _WANTED)
    labels = [line.strip() for line in lines(path, _WANTED)]
    for at, label in enumerate(labels, 1):
        if label not in numbers:
            raise wrong(f"{path}: line {at}", f"activity {label!r}", f"one of {' '.join(numbers)}")
    channels: list[np.ndarray] = []
    for channel in _CHANNELS:
        path = find(folder / "Inertial Signals", f"{channel}_{split}.txt", _WANTED)
        text = lines(path, _WANTED)
        with reading(path, "a window of numbers a line, all of one length"), warnings.catch_warnings(action="error"):
            windows = np.loadtxt(text, ndmin=2).astype(np.float32)
        shape = (len(labels), channels[0].shape[1] if channels else windows.shape[1])
        if windows.shape != shape:
            found = f"{len(windows)} windows of {windows.shape[1]} numbers"
            raise wrong(path, found, f"{shape[0]}, one for each label, of {shape[1]}")
        if not np.isfinite(windows).all():
            raise wrong(path, f"a value {windows[~np.isfinite(windows)][0]}", "finite numbers")
        channels.append(windows)
    return np.stack(channels, axis=-1), np.array([numbers.index(label) for label in labels], np.int32)
