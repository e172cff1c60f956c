"""The record of a data set, its splitting and scaling, and the reading of files with errors for bad ones."""

import gzip
import importlib
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np

Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, ...]


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
        raise ValueError(f"test_fraction must be between 0 and 1, both excluded; got {test_fraction}.")


def stratified(
    labels: np.ndarray, test_fraction: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return training positions and held-out positions, the same fraction of every class, each in a random order."""
    check_fraction(test_fraction)
    train, test = [], []
    for label in np.unique(labels):
        (of_class,) = np.nonzero(labels == label)
        of_class = generator.permutation(of_class)
        held_out = round(test_fraction * len(of_class))
        if not 0 < held_out < len(of_class):
            raise ValueError(
                f"test_fraction {test_fraction} leaves class {label}, of {len(of_class)} samples, "
                f"{held_out} of them to test with; wanted at least one to train and one to test with."
            )
        test.append(of_class[:held_out])
        train.append(of_class[held_out:])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))


class Scaler(NamedTuple):
    """Scales channels, the last axis, to mean 0 and standard deviation 1, as float32, and back."""

    mean: np.ndarray
    deviation: np.ndarray

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return ((values - self.mean) / self.deviation).astype(np.float32)

    def back(self, scaled: np.ndarray) -> np.ndarray:
        return scaled * self.deviation + self.mean


def scaler(values: np.ndarray) -> Scaler:
    """Return the scaler for the channels of ``values``. Constant channels become 0."""
    axes = tuple(range(values.ndim - 1))
    mean, deviation = (np.asarray(moment(values, axis=axes, dtype=np.float64)) for moment in (np.mean, np.std))
    # rounding leaves a small deviation for a constant
    deviation = np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation)
    return Scaler(mean, deviation)


def wrong(place: object, got: str, wanted: str) -> DataError:
    return DataError(f"{place}: {got}; wanted {wanted}.")


@contextmanager
def reading(path: Path, wanted: str) -> Iterator[None]:
    """Turn any error of a parser on a missing or damaged file into a `DataError`."""
    try:
        yield
    except (DataError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise wrong(path, f"cannot be read ({reason})", wanted) from error


def content(path: Path, wanted: str) -> bytes:
    """Return the unpacked bytes of a file; one whose name ends in ``.gz`` must be gzipped, any other may be."""
    with reading(path, wanted):
        packed = path.read_bytes()
        return gzip.decompress(packed) if path.suffix == ".gz" or packed[:2] == b"\x1f\x8b" else packed


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


def select_classes(classes: Sequence[str] | None, known: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the names of the classes to take: ``classes``, which must be known, or all."""
    names = tuple(known if classes is None else classes)
    if not 0 < len(set(names)) == len(names):
        raise ValueError(f"classes must be at least one name, none of them twice; got {list(names)}.")
    for name in names:
        if name not in known:
            raise wrong(folder, f"has no class {name!r}", f"one of {textwrap.shorten(', '.join(known), 100)}")
    return names


def require(module: str) -> ModuleType:
    """Import a module of the extra lp_jax[data]."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lp_jax.data needs {error.name}, of the extra lp_jax[data]: pip install 'lp_jax[data]'", name=error.name
        ) from None
