"""Time series to classify: the ``.ts`` problems of the archives, and a smartphone's sensors (UCI HAR)."""

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._batches import padded
from lp_jax.data._dataset import Dataset, Scaler, check_finite, find, lines, reading, wrong


class Series(NamedTuple):
    """Time series, each ``(time steps, channels)`` float64, their classes, and the classes in the header, in its order."""

    x: list[np.ndarray]
    labels: list[str]  # empty if the file has no classes
    classes: tuple[str, ...]


def read_ts(path: Path, fill: float | None = None) -> Series:
    """Read a ``.ts`` file: a header; then a series a line, its channels and its class with colons between them."""
    content = lines(path, "a .ts file")
    start = next((number for number, line in enumerate(content, 1) if line.lower().split() == ["@data"]), 0)
    series = Series([], [], _classes(path, content[:start]))
    for number, line in enumerate(content[start:], start + 1):
        if not line.strip() or line.startswith("#"):
            continue
        place, channels = f"{path}: line {number}", line.split(":")
        if series.classes:
            series.labels.append(channels.pop().strip())
            if series.labels[-1] not in series.classes:
                wanted = f"one of those that the header announces, {' '.join(series.classes)}"
                raise wrong(place, f"class {series.labels[-1]!r}", wanted)
        x = _values(place, channels, fill)
        if series.x and x.shape[1] != series.x[0].shape[1]:
            raise wrong(place, f"{x.shape[1]} channels", f"{series.x[0].shape[1]}, with colons between them")
        series.x.append(x)
    if not series.x:
        raise wrong(path, "no series", "one a line after @data")
    return series


def _classes(path: Path, content: list[str]) -> tuple[str, ...]:
    """Return the classes of a header, the lines up to @data; refuse what is no problem of classification."""
    entries = [line.split() for line in content if line.strip() and not line.startswith("#")]
    if not entries or not all(key.startswith("@") for key, *_ in entries):
        raise wrong(path, "no header, or more in it than keys and comments", "keys (@...), the last of them @data")
    keys = {key.lower(): values for key, *values in entries}
    true = {key for key, values in keys.items() if [value.lower() for value in values[:1]] == ["true"]}
    if true & {"@timestamps", "@targetlabel"}:
        raise wrong(path, "a problem of regression, or series with time stamps", "classes, and values at equal steps")
    classes = tuple(keys["@classlabel"][1:]) if "@classlabel" in true else ()
    if "@classlabel" in true and not 0 < len(set(classes)) == len(classes):
        raise wrong(path, f"classes {' '.join(classes) or 'none'}", "at least one, none of them twice")
    return classes


def _values(place: str, channels: list[str], fill: float | None) -> np.ndarray:
    """Return a line's channels as ``(time steps, channels)``."""
    try:
        rows = [[float(text) for text in channel.replace("?", "nan").split(",")] for channel in channels]
    except ValueError as error:
        raise wrong(place, str(error), "numbers with commas between them") from None
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        raise wrong(place, f"channels of {lengths} values", "at least one channel, all of one length")
    x = np.array(rows)
    if fill is not None:
        x[np.isnan(x)] = fill
    check_finite(place, "the series", x.T, "finite numbers, or a fill for missing values")
    return x.T


def timeseries(folder: str | os.PathLike[str], name: str, *, fill: float | None = None) -> Dataset:
    """Load a problem of the UCR and UEA archives, from a folder of the two files ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``.

    Each is in the ``.ts`` format, plain or gzipped with ``.gz`` at its end. ``fill`` replaces missing values, ``?`` or ``NaN``;
    None refuses them. Channels are scaled to mean 0 and deviation 1 over all time steps of the training series. Then shorter
    series are padded with zeros at their ends.

    Returns:
        A `Dataset` whose inputs are pairs ``(x, lengths)``: ``(samples, time steps, channels)`` float32 with as many time
        steps as the longest series has, and ``(samples,)`` int32. Its shape is that of ``x``, ``(time steps, channels)``.

    Raises:
        DataError: if a file is missing, malformed or without classes, or the test file has classes or channels that the
            training file lacks.

    Example:
        >>> from lp_jax import data
        >>> data.timeseries("no/such/folder", "Two")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no file Two_TRAIN.ts or Two_TRAIN.ts.gz; wanted ...

    Reference:
        Dau et al., "The UCR time series archive", arXiv:1810.07758; Bagnall et al., "The UEA multivariate time series
        classification archive, 2018", arXiv:1811.00075.
    """
    paths = [find(Path(folder), f"{name}_{split}.ts", "the two files of a problem") for split in ("TRAIN", "TEST")]
    train, test = (read_ts(path, fill) for path in paths)
    for path, series in zip(paths, (train, test), strict=True):
        if not series.labels:
            raise wrong(path, "series without classes", "classes, announced by @classLabel true ...")
    channels, wanted = test.x[0].shape[1], train.x[0].shape[1]
    if channels != wanted:
        raise wrong(paths[1], f"{channels} channels", f"{wanted}, like those to train with")
    if unseen := set(test.labels) - set(train.labels):
        got = f"class {min(unseen)!r}, which no training series has"
        raise wrong(paths[1], got, f"one of {' '.join(sorted(set(train.labels)))}")
    scaled = Scaler(np.concatenate(train.x))
    longest = max(map(len, train.x + test.x))

    def arrays(series: Series) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        lengths = np.array([len(x) for x in series.x], np.int32)
        labels = np.array([train.classes.index(label) for label in series.labels], np.int32)
        return (padded([scaled(x) for x in series.x], longest), lengths), labels

    shape = (longest, wanted)
    return Dataset(*arrays(train), *arrays(test), classes=len(train.classes), shape=shape, names=train.classes)


_CHANNELS = [f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
_WANTED = "the files of UCI HAR"


def uci_har(folder: str | os.PathLike[str]) -> Dataset:
    """Load six human activities, from accelerometer and gyroscope: 128 time steps of 9 channels.

    The folder is "UCI HAR Dataset": ``activity_labels.txt``; ``train/y_train.txt``; in ``train/Inertial Signals`` the nine
    files ``body_acc_x_train.txt`` to ``total_acc_z_train.txt``, with a window of 128 numbers per line; and the same with
    ``test`` for ``train``. Files may be gzipped with ``.gz`` at their ends.

    Returns:
        A `Dataset` of inputs ``(128, 9)``, float32, each channel with mean 0 and deviation 1 over the training windows;
        channels are the body's acceleration, its angular velocity and the total acceleration, each along x, y and z.

    Raises:
        DataError: if a file is missing or malformed, windows differ in length, labels are too few or too many, or a label is
            not in ``activity_labels.txt``.

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
        names = tuple(name for _, name in map(str.split, lines(path, _WANTED)))
    (train_x, train_y), (test_x, test_y) = (_split(folder / split, split, len(names)) for split in ("train", "test"))
    shape = train_x.shape[1:]
    if test_x.shape[1:] != shape:
        raise wrong(folder / "test", f"windows of {test_x.shape[1]} numbers", f"{shape[0]}, like those of train")
    scaled = Scaler(train_x)
    return Dataset(scaled(train_x), train_y, scaled(test_x), test_y, classes=len(names), shape=shape, names=names)


def _split(folder: Path, split: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    path = find(folder, f"y_{split}.txt", _WANTED)
    table = _table(path)
    if table.shape[1] != 1 or not np.isin(table, range(1, classes + 1)).all():
        raise wrong(
            path,
            f"activities {table.min():g} to {table.max():g}, {table.shape[1]} a line",
            f"1 to {classes}, one a line",
        )
    labels = table[:, 0].astype(np.int32)
    channels: list[np.ndarray] = []
    for channel in _CHANNELS:
        path = find(folder / "Inertial Signals", f"{channel}_{split}.txt", _WANTED)
        channels.append(_table(path))
        shape = len(labels), channels[0].shape[1]
        if channels[-1].shape != shape:
            got = f"{len(channels[-1])} windows of {channels[-1].shape[1]} numbers"
            raise wrong(path, got, f"{shape[0]}, one for each label, of {shape[1]}")
    return np.stack(channels, axis=-1), labels - 1


def _table(path: Path) -> np.ndarray:
    text = lines(path, _WANTED)
    with reading(path, "lines of equally many numbers"), warnings.catch_warnings(action="error"):
        table = np.loadtxt(text, ndmin=2)
    check_finite(path, "the table", table)
    return table
