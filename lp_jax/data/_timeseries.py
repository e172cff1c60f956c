"""Classifying the time series of a ``.ts`` problem."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._bucketed import padded
from lp_jax.data._dataset import Dataset
from lp_jax.data._read import find, wrong
from lp_jax.data._scale import scaler
from lp_jax.data._ts import Series, read_ts


def timeseries(folder: str | os.PathLike[str], name: str, *, fill: float | None = None) -> Dataset:
    """A problem of the UCR and UEA archives, from the two files ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``.

    Each is plain or gzipped with ``.gz`` at its end. Channels are taken to mean 0 and deviation 1 over all time steps of
    the training series; then shorter series are filled up with zeros at their ends.

    Args:
        folder: where the files are.
        name: of the problem.
        fill: what to put for missing values, before the channels are scaled. None refuses them.

    Returns:
        A `Dataset` whose inputs are pairs ``(x, lengths)``: ``(samples, time steps, channels)`` float32 with as many time
        steps as the longest series has, and ``(samples,)`` int32. Its shape is that of ``x``, ``(time steps, channels)``.

    Raises:
        DataError: for a file that is missing or malformed, without classes, with a class that no training series has, or
            with other channels than those to train with.

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
    """Refuse a file that has no classes, or what training lacks."""
    if not series.labels:
        raise wrong(path, "series without classes", "classes, announced by @classLabel true ...")
    channels, wanted = series.x[0].shape[1], train.x[0].shape[1]
    if channels != wanted:
        raise wrong(path, f"{channels} channels", f"{wanted}, like those to train with")
    known = set(train.labels)
    for line, label in zip(series.lines, series.labels, strict=True):
        if label not in known:
            found = f"class {label!r}, which no training series has"
            raise wrong(f"{path}: line {line}", found, f"one of {' '.join(sorted(known))}")
