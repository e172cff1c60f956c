"""MNIST, and what comes in its format, from a folder."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import Dataset
from lp_jax.data._idx import read_idx
from lp_jax.data._read import find, wrong

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
    train_x, train_y = _split(Path(folder), "train", None)
    test_x, test_y = _split(Path(folder), "t10k", train_x.shape[1:3])
    return Dataset(train_x, train_y, test_x, test_y, classes=_CLASSES, shape=train_x.shape[1:])


def _split(folder: Path, name: str, size: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    images_file, images = _bytes(folder, f"{name}-images-idx3-ubyte", axes=3)
    labels_file, labels = _bytes(folder, f"{name}-labels-idx1-ubyte", axes=1)
    if images.size == 0 or images.shape[1:] != (size or images.shape[1:]):
        wanted = f"{' x '.join(map(str, size))}, like those to train with" if size else "at least one pixel"
        raise wrong(images_file, f"{' x '.join(map(str, images.shape))} pixels", f"images of {wanted}")
    if len(labels) != len(images):
        raise wrong(labels_file, f"{len(labels)} labels", f"{len(images)}, one for each image of {images_file.name}")
    if labels.max() >= _CLASSES:
        at = int(np.argmax(labels >= _CLASSES))
        raise wrong(labels_file, f"label {labels[at]} of image {at}", f"0 to {_CLASSES - 1}")
    return images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _bytes(folder: Path, name: str, *, axes: int) -> tuple[Path, np.ndarray]:
    path = find(folder, name, "a folder with the four files of MNIST")
    array = read_idx(path)
    if array.dtype != np.uint8 or array.ndim != axes:
        raise wrong(path, f"{array.dtype} values along {array.ndim} axes", f"uint8 along {axes}")
    return path, array
