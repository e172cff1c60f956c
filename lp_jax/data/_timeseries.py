"""Classifying the time series of a ``.ts`` problem."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._bucketed import padded
from lp_jax.data._dataset import Dataset
from lp_jax.data._read import find, wrong
from lp_jax.data._scale import Scale
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
    wanted = "the two files of a problem"
    paths = [find(folder, f"{name}_{split}.ts", wanted) for split in ("TRAIN", "TEST")]
    train, test = (read_ts(path, fill=fill) for path in paths)
    for path, series in zip(paths, (train, test), strict=True):
        _check_against(path, series, train)
    scale = Scale(np.concatenate(train.x))
    longest = max(len(x) for x in (*train.x, *test.x))
    (train_x, train_y), (test_x, test_y) = (_arrays(series, train.classes, scale, longest) for series in (train, test))
    return Dataset(
        train_x,
        train_y,
        test_x,
        test_y,
        classes=len(train.classes),
        shape=(longest, train.x[0].shape[1]),
        names=train.classes,
    )


def _check_against(path: Path, series: Series, train: Series) -> None:
    """Refuse a file that has no classes, or what training lacks."""
    if not series.labels:
        raise wrong(path, series.lines[0], "a series without a class", "one, announced by @classLabel true ...")
    channels, wanted = series.x[0].shape[1], train.x[0].shape[1]
    if channels != wanted:
        raise wrong(path, series.lines[0], f"{channels} channels", f"{wanted}, like those to train with")
    known = set(train.labels)
    for line, label in zip(series.lines, series.labels, strict=True):
        if label not in known:
            raise wrong(
                path, line, f"class {label!r}, which no training series has", "one of " + " ".join(sorted(known))
            )


def _arrays(
    series: Series, classes: tuple[str, ...], scale: Scale, longest: int
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    x = padded([scale(values) for values in series.x], longest)
    lengths = np.array([len(values) for values in series.x], np.int32)
    return (x, lengths), np.array([classes.index(label) for label in series.labels], np.int32)
