"""Time series to classify: the ``.ts`` problems of the archives, and a smartphone's sensors (UCI HAR)."""

import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._batches import padded
from lp_jax.data._dataset import Dataset, find, lines, reading, scaler, wrong


class Series(NamedTuple):
    """Time series and their classes.

    Attributes:
        x: the series, each ``(time steps, channels)`` float32; they may differ in length.
        labels: the class of each series, as in the file; empty if the file has no classes.
        classes: the classes in the header, in its order.
        name: name of the problem.
        lines: the line of each series in the file, counted from 1.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x = [np.zeros((3, 2), np.float32), np.zeros((1, 2), np.float32)]
        >>> series = data.Series(x, labels=["b", "a"], classes=("a", "b"), name="Two", lines=[4, 5])
        >>> [len(steps) for steps in series.x], series.labels
        ([3, 1], ['b', 'a'])
    """

    x: list[np.ndarray]
    labels: list[str]
    classes: tuple[str, ...]
    name: str
    lines: list[int]


def read_ts(path: str | os.PathLike[str], *, fill: float | None = None) -> Series:
    r"""Read a file in the ``.ts`` format, plain or gzipped (``.gz``).

    A line is a series: its channels with colons between them, the values of a channel with commas between them, and the
    class at the end. Header keys are understood in any case: ``@problemName``, ``@univariate``, ``@dimensions``,
    ``@equalLength``, ``@seriesLength``, ``@classLabel`` and ``@data``; the series must agree with them. Series with time
    stamps or with a number in place of a class are refused, other keys skipped. ``fill`` replaces missing values, ``?`` or
    ``NaN``; None refuses them.

    Raises:
        DataError: if the file is missing, damaged, not in UTF-8 or without a series, or a line contradicts the header.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "Two_TRAIN.ts"
        ...     _ = path.write_text("@problemName Two\n@classLabel true a b\n@data\n1,2,3:4,5,6:b\n7:8:a\n")
        ...     series = data.read_ts(path)
        >>> [x.shape for x in series.x], series.labels
        ([(3, 2), (1, 2)], ['b', 'a'])

    Reference:
        Bagnall et al., "The UEA multivariate time series classification archive, 2018", arXiv:1811.00075; Löning et al.,
        "sktime: a unified interface for machine learning with time series", arXiv:1909.07872.
    """
    path = Path(path)
    content = lines(path, "a .ts file")
    start = next((number for number, line in enumerate(content, 1) if line.lower().split() == ["@data"]), 0)
    series, count, length, equal = _header(path, content[:start])
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
        count = count or x.shape[1]
        length = length or (len(x) if equal else 0)
        if x.shape[1] != count:
            raise wrong(place, f"{x.shape[1]} channels", f"{count}, with colons between them")
        if length and len(x) != length:
            raise wrong(place, f"a series of {len(x)} time steps", f"{length}, as all have one length")
        series.x.append(x)
        series.lines.append(number)
    if not series.x:
        raise wrong(path, "no series", "one a line after @data")
    return series


def _header(path: Path, content: list[str]) -> tuple[Series, int, int, bool]:
    """Return the header, from the lines up to @data.

    These are the series without any line, the numbers of channels and of time steps, 0 where the header does not say, and
    whether all series have one length.
    """
    entries = [line.split() for line in content if line.strip() and not line.startswith("#")]
    if not entries or not all(key.startswith("@") for key, *_ in entries):
        raise wrong(path, "no header, or more in it than keys and comments", "keys (@...), the last of them @data")
    keys = {key.lower(): values for key, *values in entries}

    def value(key: str, default: str, allowed: str, wanted: str) -> str:
        got = [*keys.get(key, [default]), ""][0].lower()
        if not re.fullmatch(allowed, got):
            raise wrong(path, f"{key} {got!r}", wanted)
        return got

    def flag(key: str, default: str = "false") -> bool:
        return value(key, default, "true|false", "true or false") == "true"

    def count(key: str) -> int:
        return int(value(key, "0", "[0-9]+", "a number"))

    if flag("@timestamps") or flag("@targetlabel"):
        raise wrong(path, "a problem of regression, or series with time stamps", "classes, and values at equal steps")
    classes = tuple(keys["@classlabel"][1:]) if flag("@classlabel") else ()
    if flag("@classlabel") and not 0 < len(set(classes)) == len(classes):
        raise wrong(path, f"classes {' '.join(classes) or 'none'}", "at least one, none of them twice")
    channels = 1 if flag("@univariate") else count("@dimensions") or count("@dimension")
    length = count("@serieslength") if flag("@equallength", "true") else 0
    return Series([], [], classes, " ".join(keys.get("@problemname", [])), []), channels, length, flag("@equallength")


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
    if not np.isfinite(x).all():
        raise wrong(place, f"value {x[~np.isfinite(x)][0]}", "a finite number, or a fill for missing values")
    return x.astype(np.float32).T


def timeseries(folder: str | os.PathLike[str], name: str, *, fill: float | None = None) -> Dataset:
    """Load a problem of the UCR and UEA archives, from a folder of the two files ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``.

    Each is plain or gzipped with ``.gz`` at its end, read as by `read_ts`. Channels are scaled to mean 0 and deviation 1 over
    all time steps of the training series. Then shorter series are padded with zeros at their ends.

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
    train, test = (read_ts(path, fill=fill) for path in paths)
    for path, series in zip(paths, (train, test), strict=True):
        _check_against(path, series, train)
    scaled = scaler(np.concatenate(train.x))
    longest = max(map(len, train.x + test.x))

    def arrays(series: Series) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        lengths = np.array([len(x) for x in series.x], np.int32)
        labels = np.array([train.classes.index(label) for label in series.labels], np.int32)
        return (padded([scaled(x) for x in series.x], longest), lengths), labels

    shape = (longest, train.x[0].shape[1])
    return Dataset(*arrays(train), *arrays(test), classes=len(train.classes), shape=shape, names=train.classes)


def _check_against(path: Path, series: Series, train: Series) -> None:
    """Refuse a file without classes, or with channels or classes that the training file lacks."""
    if not series.labels:
        raise wrong(path, "series without classes", "classes, announced by @classLabel true ...")
    channels, wanted = series.x[0].shape[1], train.x[0].shape[1]
    if channels != wanted:
        raise wrong(path, f"{channels} channels", f"{wanted}, like those to train with")
    known = set(train.labels)
    for line, label in zip(series.lines, series.labels, strict=True):
        if label not in known:
            got = f"class {label!r}, which no training series has"
            raise wrong(f"{path}: line {line}", got, f"one of {' '.join(sorted(known))}")


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
            not in ``activity_labels.txt`` or does not occur in training.

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
            got = f"{len(windows)} windows of {windows.shape[1]} numbers"
            raise wrong(path, got, f"{shape[0]}, one for each label, of {shape[1]}")
        if not np.isfinite(windows).all():
            raise wrong(path, f"a value {windows[~np.isfinite(windows)][0]}", "finite numbers")
        channels.append(windows)
    return np.stack(channels, axis=-1), np.array([numbers.index(label) for label in labels], np.int32)
