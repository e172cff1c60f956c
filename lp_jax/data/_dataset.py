"""The record of a data set, its splitting and scaling, and the reading of files with errors for bad ones."""

import gzip
import importlib
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from lp_jax._arrays._types import StrPath as StrPath

Samples = tuple[np.ndarray, np.ndarray]
"""Inputs, and their labels or values."""

Arrays = np.ndarray | tuple[np.ndarray, ...]


class Dataset(NamedTuple):
    """Samples with a class or values each, split into training samples and held-out samples.

    Attributes:
        train_x: inputs, ``(train samples, *shape)``, float32 unless the loader says otherwise. Samples of different
            lengths are a tuple of arrays, padded inputs and their lengths.
        train_y: classes, int32 in [0, classes), ``(train samples,)``; ``(train samples, length)`` if every position of an
            input has a class of its own. Or values, unscaled: ``(train samples, values)``.
        test_x: held-out inputs, of the same form.
        test_y: their classes or values.
        classes: number of classes; 0 if samples have values.
        shape: shape of one input, channels last.
        names: names of the classes, by their numbers; empty if they have none.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> x, y = np.zeros((10, 2), np.float32), np.arange(10, dtype=np.int32) % 3
        >>> mine = data.Dataset(x[:8], y[:8], x[8:], y[8:], classes=3, shape=(2,))
        >>> [len(labels) for _, labels in data.batches(mine, 4, seed=0, epoch=0)]
        [4, 4]
    """

    train_x: Arrays
    train_y: np.ndarray
    test_x: Arrays
    test_y: np.ndarray
    classes: int
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()


class DataError(ValueError):
    """A file is damaged or of another kind. One line has the file, the place, its content and the expected content.

    Example:
        >>> from lp_jax import data
        >>> try:
        ...     data.mnist("no/such/folder")
        ... except data.DataError as error:
        ...     print(str(error).partition(" or ")[0])
        no/such/folder: has no file train-images-idx3-ubyte
    """


def check_fraction(test_fraction: float) -> None:
    """Refuse a fraction that leaves one part empty."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(
            f"test_fraction must be between 0 and 1, both excluded; got {test_fraction}."
        )


def split(
    x: np.ndarray, y: np.ndarray, test_fraction: float, seed: int, *, by_class: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and held-out samples, ``(train_x, train_y, test_x, test_y)``, by default the same part of every class."""
    check_fraction(test_fraction)
    counts = np.unique(y, return_counts=True)[1] if by_class else [len(y)]
    test = math.ceil(test_fraction * len(y))
    if min(counts) < 2:
        raise ValueError(
            "each class must have two samples or more, to train with and to hold out; one has a single one."
        )
    if min(test, len(y) - test) < len(counts):
        got = f"{test_fraction} leaves {len(y) - test} to train with and {test} to hold out, for {len(counts)} classes"
        raise ValueError(f"test_fraction must leave one sample of each class or more; {got}.")
    cut = require("sklearn.model_selection").train_test_split
    labels = y if by_class else None
    train_x, test_x, train_y, test_y = cut(
        x, y, test_size=test_fraction, random_state=seed, stratify=labels
    )
    return train_x, train_y, test_x, test_y


class Scaler:
    """Scales channels, the last axis, to the mean 0 and standard deviation 1 of ``values``, as float32, and back."""

    def __init__(self, values: np.ndarray):
        self._scaler = require("sklearn.preprocessing").StandardScaler().fit(_rows(values))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        scaled = self._scaler.transform(_rows(values)).reshape(values.shape)
        largest = float(np.finfo(np.float32).max)
        check_finite("after scaling by the training samples", "the data", scaled, largest=largest)
        return scaled.astype(np.float32)

    def back(self, scaled: np.ndarray) -> np.ndarray:
        return self._scaler.inverse_transform(_rows(scaled)).reshape(scaled.shape)


def _rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1]).astype(np.float64)


def wrong(place: object, got: str, wanted: str) -> DataError:
    return DataError(f"{place}: {got}; wanted {wanted}.")


@contextmanager
def reading(path: Path, wanted: str) -> Iterator[None]:
    """Turn any error of a parser on a missing or damaged file into a `DataError`."""
    try:
        if path.is_fifo() or path.is_char_device():  # waits, or never ends
            raise OSError("it is no regular file")
        yield
    except (DataError, ImportError):
        raise
    except Exception as error:
        reason = (
            getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        )
        raise wrong(path, f"cannot be read ({reason})", wanted) from error


def _check_unpacked(path: Path, size: int = 0) -> int:
    """Refuse a file that unpacks to more than data does, before it fills the memory; return how many bytes it may have."""
    most = max(2**28, 100 * path.stat().st_size)
    if size > most:
        raise wrong(
            path,
            f"unpacks to more than {most:,} bytes",
            "256 MiB or 100 times the file: save it unpacked",
        )
    return most


def content(path: Path, wanted: str) -> bytes:
    """Return the unpacked bytes of a file; one whose name ends in ``.gz`` must be gzipped, any other may be."""
    with reading(path, wanted), path.open("rb") as file:
        if path.suffix != ".gz" and file.peek(2)[:2] != b"\x1f\x8b":
            return file.read()
        raw = gzip.GzipFile(fileobj=file).read(_check_unpacked(path) + 1)
        _check_unpacked(path, len(raw))
    return raw


def archive(path: Path, wanted: str) -> dict[str, np.ndarray]:
    """Return the arrays of a ``.npz`` file. Their checksums and sizes are checked, and none is unpickled."""
    arrays = {}
    with reading(path, wanted), zipfile.ZipFile(path) as file:
        _check_unpacked(path, sum(member.file_size for member in file.infolist()))
        for member in file.infolist():
            with file.open(member) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
                if stream.read(1):
                    raise wrong(
                        f"{path}: {member.filename}",
                        f"more than {array.nbytes} bytes",
                        "what its header says",
                    )
            arrays[member.filename.removesuffix(".npy")] = array
    return arrays


LARGEST = 1e150  # its square is a number: a deviation can be computed


def check_finite(
    place: object, name: str, array: np.ndarray, wanted: str = "", largest: float = LARGEST
) -> None:
    """Refuse NaN, infinity and numbers that are too large; name the first one and its indices."""
    # float32 has no 1e150
    if array.dtype.kind == "f" and not (fine := np.abs(array) < np.float64(largest)).all():
        at = [int(index) for index in np.argwhere(~fine)[0]]
        raise wrong(
            place,
            f"{name} holds {array[*at]} at {at}",
            wanted or f"finite numbers below {largest:.0e}",
        )


def lines(path: Path, wanted: str) -> list[str]:
    """Return the lines of a text in UTF-8; only line feeds end one, with or without a return."""
    with reading(path, wanted):
        text = content(path, wanted).decode("utf-8-sig")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def find(folder: Path, name: str, wanted: str) -> Path:
    """Return the file of that name, or of that name with ``.gz``."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise wrong(folder, f"has no file {name} or {name}.gz", wanted)


def require(module: str) -> ModuleType:
    """Import a module of the extra lp_jax[data]."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lp_jax.data needs {error.name}, of the extra lp_jax[data]: pip install 'lp_jax[data]'",
            name=error.name,
        ) from None
