"""MNIST, and what comes in its format, from a folder."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import DataError, Dataset
from lp_jax.data._idx import read_idx
from lp_jax.data._read import find

_CLASSES = 10


def mnist(folder: str | os.PathLike[str]) -> Dataset:
    """MNIST, Fashion-MNIST or the like, from the four IDX files of the usual names.

    The names are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each plain or gzipped with ``.gz`` at its end. The ``t10k`` files are held out.

    Args:
        folder: where the files are.

    Returns:
        A `Dataset` of inputs ``(rows, columns, 1)``, for MNIST ``(28, 28, 1)``, in 10 classes.

    Raises:
        DataError: for a file that is missing or malformed, images without labels or labels without images, labels above
            9, no images, or images of two sizes.

    Example:
        >>> from lp_jax import data
        >>> data.mnist("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no file train-images-idx3-ubyte or ...

    Reference:
        LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
    """
    folder = Path(folder)
    train_x, train_y = _split(folder, "train")
    test_x, test_y = _split(folder, "t10k")
    if train_x.shape[1:] != test_x.shape[1:]:
        got, wanted = (" x ".join(map(str, x.shape[1:3])) for x in (test_x, train_x))
        path = _find(folder, "t10k-images-idx3-ubyte")
        raise DataError(f"{path}: byte 8: images of {got} pixels; wanted {wanted}, like those to train with.")
    return Dataset(train_x, train_y, test_x, test_y, classes=_CLASSES, shape=train_x.shape[1:])


def _split(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    images_file, labels_file = _find(folder, f"{name}-images-idx3-ubyte"), _find(folder, f"{name}-labels-idx1-ubyte")
    images = _read(images_file, axes=3)
    labels = _read(labels_file, axes=1)
    if images.size == 0:
        raise DataError(
            f"{images_file}: byte 4: {' x '.join(map(str, images.shape))} pixels; wanted at least one image."
        )
    if len(labels) != len(images):
        wanted = f"wanted {len(images)}, one for each image of {images_file.name}"
        raise DataError(f"{labels_file}: byte 4: {len(labels)} labels; {wanted}.")
    if labels.max() >= _CLASSES:
        at = int(np.argmax(labels >= _CLASSES))
        raise DataError(f"{labels_file}: byte {8 + at}: label {labels[at]}; wanted 0 to {_CLASSES - 1}.")
    return images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _find(folder: Path, name: str) -> Path:
    return find(folder, name, "a folder with the four files of MNIST")


def _read(path: Path, *, axes: int) -> np.ndarray:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.ndim != axes:
        raise DataError(f"{path}: byte 2: {array.dtype} values along {array.ndim} axes; wanted uint8 along {axes}.")
    return array
