"""The ``.ts`` format of the time series classification archives: a header, then a series a line."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._read import lines, wrong


class Series(NamedTuple):
    """Time series and their classes.

    Attributes:
        x: the series, each ``(time steps, channels)`` float32; they may differ in length.
        labels: the class of each, as it stands in the file; empty where the file has no classes.
        classes: those that the header announces, in its order.
        name: of the problem.
        lines: where each series stands in the file, counted from 1.
    """

    x: list[np.ndarray]
    labels: list[str]
    classes: tuple[str, ...]
    name: str
    lines: list[int]


def read_ts(path: str | os.PathLike[str], *, fill: float | None = None) -> Series:
    r"""Read a file in the ``.ts`` format, plain or gzipped.

    A line is a series: its channels with colons between them, the values of a channel with commas between them, and the
    class at the end. Header keys are understood in any case: ``@problemName``, ``@univariate``, ``@dimensions``,
    ``@equalLength``, ``@seriesLength``, ``@classLabel`` and ``@data``; what they announce must be there. Series with
    time stamps or with a number in place of a class are refused, other keys skipped.

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.
        fill: what to put for missing values, ``?`` or ``NaN``. None refuses them.

    Returns:
        A `Series`.

    Raises:
        DataError: for a file that is missing, damaged, not in UTF-8, without a series, or with a line that is not what the
            header announces.

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
    header, start = _header(path, content)
    series = Series([], [], header.classes or (), header.name, [])
    for number, line in enumerate(content[start:], start + 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        channels = line.split(":")
        if header.classes is not None:
            label = channels.pop().strip()
            if label not in header.classes:
                classes = " ".join(header.classes)
                raise wrong(path, number, f"class {label!r}", f"one of those that the header announces, {classes}")
            series.labels.append(label)
        series.x.append(_series(path, number, channels, header, series.x, fill))
        series.lines.append(number)
    if not series.x:
        raise wrong(path, len(content), "the end of the file, no series before it", "one a line after @data")
    return series


class _Header(NamedTuple):
    name: str = ""
    classes: tuple[str, ...] | None = None
    channels: int | None = None
    length: int | None = None
    equal_length: bool | None = None


def _header(path: Path, content: list[str]) -> tuple[_Header, int]:
    """What the header announces, and how many lines it has."""
    header = _Header()
    for number, line in enumerate(content, 1):
        key, *values = line.split() or ["#"]
        match key.lower():
            case "@data":
                if header.equal_length is False:
                    header = header._replace(length=None)
                return header, number
            case "@problemname":
                header = header._replace(name=" ".join(values))
            case "@timestamps":
                if _flag(path, number, key, values):
                    raise wrong(path, number, "series with time stamps", "@timeStamps false")
            case "@targetlabel":
                if _flag(path, number, key, values):
                    raise wrong(path, number, "a problem of regression", "@classLabel")
            case "@univariate":
                if _flag(path, number, key, values):
                    header = header._replace(channels=1)
            case "@dimension" | "@dimensions":
                header = header._replace(channels=_count(path, number, key, values))
            case "@equallength":
                header = header._replace(equal_length=_flag(path, number, key, values))
            case "@serieslength":
                header = header._replace(length=_count(path, number, key, values))
            case "@classlabel":
                classes = tuple(values[1:]) if _flag(path, number, key, values) else None
                if classes is not None and not 0 < len(set(classes)) == len(classes):
                    raise wrong(
                        path, number, f"classes {' '.join(classes) or 'none'}", "at least one, none of them twice"
                    )
                header = header._replace(classes=classes)
            case _ if not key.startswith(("#", "@")):
                raise wrong(
                    path, number, f"{line[:20]!r} in the header", "a key (@...), a comment (#...) or @data first"
                )
    raise wrong(path, len(content), "the end of the file", "a line @data before it")


def _flag(path: Path, number: int, key: str, values: list[str]) -> bool:
    flag = values[0].lower() if values else ""
    if flag not in ("true", "false"):
        raise wrong(path, number, f"{key} {flag!r}", "true or false")
    return flag == "true"


def _count(path: Path, number: int, key: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdecimal():
        raise wrong(path, number, f"{key} {' '.join(values)!r}", "a number")
    return int(values[0])


def _series(
    path: Path, number: int, channels: list[str], header: _Header, before: list[np.ndarray], fill: float | None
) -> np.ndarray:
    """A line's channels as ``(time steps, channels)``, ``before`` being the series of the lines before it."""
    wanted = header.channels or (before[0].shape[1] if before else len(channels))
    if len(channels) != wanted or not channels:
        raise wrong(path, number, f"{len(channels)} channels", f"{wanted or 1}, with colons between them")
    rows = [_values(path, number, channel, fill) for channel in channels]
    length = len(rows[0])
    for at, row in enumerate(rows):
        if len(row) != length:
            raise wrong(path, number, f"{len(row)} values in channel {at + 1}", f"{length}, as in the first one")
    wanted = header.length or (len(before[0]) if before and header.equal_length else length)
    if length != wanted:
        raise wrong(path, number, f"a series of {length} time steps", f"{wanted}, as all have one length")
    return np.array(rows, np.float32).T


def _values(path: Path, number: int, channel: str, fill: float | None) -> list[float]:
    texts = channel.split(",")
    try:
        values = list(map(float, texts))
    except ValueError:
        values = [_value(path, number, text) for text in texts]
    if all(map(math.isfinite, values)):
        return values
    for at, value in enumerate(values):
        if not math.isfinite(value):
            if fill is None or not math.isnan(value):
                raise wrong(
                    path, number, f"value {texts[at].strip()!r}", "a finite number, or a fill for missing values"
                )
            values[at] = fill
    return values


def _value(path: Path, number: int, text: str) -> float:
    try:
        return math.nan if text.strip() == "?" else float(text)
    except ValueError:
        raise wrong(path, number, f"value {text.strip()!r}", "numbers with commas between them") from None
