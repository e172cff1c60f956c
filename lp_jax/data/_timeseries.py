"""Time series to classify: the ``.ts`` problems of the archives."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._batches import padded
from lp_jax.data._dataset import Dataset, Scaler, StrPath, check_finite, find, lines, wrong


class Series(NamedTuple):
    """Time series, each ``(time steps, channels)`` float64, their classes, and the classes in the header, in its order."""

    x: list[np.ndarray]
    labels: list[str]
    classes: tuple[str, ...]


def read_ts(path: Path, fill: float | None = None) -> Series:
    """Read a ``.ts`` file: a header; then a series a line, its channels and its class with colons between them."""
    content = lines(path, "a .ts file")
    start = next(
        (number for number, line in enumerate(content, 1) if line.lower().split() == ["@data"]), 0
    )
    series = Series([], [], _classes(path, content[:start]))
    for number, line in enumerate(content[start:], start + 1):
        if not line.strip() or line.startswith("#"):
            continue
        place = f"{path}: line {number}"
        *channels, label = line.split(":")
        series.labels.append(label.strip())
        if series.labels[-1] not in series.classes:
            wanted = f"one of those that the header announces, {' '.join(series.classes)}"
            raise wrong(place, f"class {series.labels[-1]!r}", wanted)
        x = _values(place, channels, fill)
        if series.x and x.shape[1] != series.x[0].shape[1]:
            raise wrong(
                place, f"{x.shape[1]} channels", f"{series.x[0].shape[1]}, with colons between them"
            )
        series.x.append(x)
    if not series.x:
        raise wrong(path, "no series", "one a line after @data")
    return series


def _classes(path: Path, content: list[str]) -> tuple[str, ...]:
    """Return the classes of a header, the lines up to @data; refuse what is no problem of classification."""
    entries = [line.split() for line in content if line.strip() and not line.startswith("#")]
    if not entries or not all(key.startswith("@") for key, *_ in entries):
        raise wrong(
            path,
            "no header, or more in it than keys and comments",
            "keys (@...), the last of them @data",
        )
    keys = {key.lower(): values for key, *values in entries}
    true = {
        key for key, values in keys.items() if [value.lower() for value in values[:1]] == ["true"]
    }
    if true & {"@timestamps", "@targetlabel"}:
        raise wrong(
            path,
            "a problem of regression, or series with time stamps",
            "classes, and values at equal steps",
        )
    classes = tuple(keys["@classlabel"][1:]) if "@classlabel" in true else ()
    if not 0 < len(set(classes)) == len(classes):
        wanted = "at least one, none of them twice, announced by @classLabel true ..."
        raise wrong(path, f"classes {' '.join(classes) or 'none'}", wanted)
    return classes


def _values(place: str, channels: list[str], fill: float | None) -> np.ndarray:
    """Return a line's channels as ``(time steps, channels)``."""
    try:
        rows = [
            [float(text) for text in channel.replace("?", "nan").split(",")] for channel in channels
        ]
    except ValueError as error:
        raise wrong(place, str(error), "numbers with commas between them") from None
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        raise wrong(
            place, f"channels of {lengths} values", "at least one channel, all of one length"
        )
    x = np.array(rows)
    if fill is not None:
        x[np.isnan(x)] = fill
    check_finite(place, "the series", x.T, "finite numbers, or a fill for missing values")
    return x.T


def timeseries(folder: StrPath, name: str, *, fill: float | None = None) -> Dataset:
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
    paths = [
        find(Path(folder), f"{name}_{split}.ts", "the two files of a problem")
        for split in ("TRAIN", "TEST")
    ]
    train, test = (read_ts(path, fill) for path in paths)
    channels = test.x[0].shape[1]
    wanted = train.x[0].shape[1]
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

    names = train.classes
    return Dataset(
        *arrays(train), *arrays(test), classes=len(names), shape=(longest, wanted), names=names
    )
