"""Handwritten digits: those of scikit-learn, and MNIST from IDX files (a magic number, sizes of the axes, bytes)."""

import math
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import (
    Dataset,
    Samples,
    StrPath,
    content,
    find,
    reading,
    require,
    split,
    wrong,
)

_CLASSES = 10


def mnist(folder: StrPath) -> Dataset:
    """Load MNIST, Fashion-MNIST or the like, from a folder of four IDX files of the usual names.

    The names are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each plain or gzipped with ``.gz`` at its end. The ``t10k`` files are held out.

    Returns:
        A `Dataset` of inputs ``(rows, columns, 1)``, for MNIST ``(28, 28, 1)``, in 10 classes.

    Raises:
        DataError: if a file is missing or malformed, the numbers of images and labels differ, a label is above 9, there are no
            images, or images differ in size.

    Reference:
        LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
    """
    train_x, train_y = _split(Path(folder), "train", None)
    test_x, test_y = _split(Path(folder), "t10k", train_x.shape[1:3])
    return Dataset(train_x, train_y, test_x, test_y, classes=_CLASSES, shape=train_x.shape[1:])


def _split(folder: Path, name: str, size: tuple[int, ...] | None) -> Samples:
    images_file, images = _bytes(folder, f"{name}-images-idx3-ubyte", axes=3)
    labels_file, labels = _bytes(folder, f"{name}-labels-idx1-ubyte", axes=1)
    if images.size == 0 or images.shape[1:] != (size or images.shape[1:]):
        wanted = (
            f"{' x '.join(map(str, size))}, like those to train with"
            if size
            else "at least one pixel"
        )
        raise wrong(
            images_file, f"{' x '.join(map(str, images.shape))} pixels", f"images of {wanted}"
        )
    if len(labels) != len(images):
        raise wrong(
            labels_file,
            f"{len(labels)} labels",
            f"{len(images)}, one for each image of {images_file.name}",
        )
    if labels.max() >= _CLASSES:
        at = int(np.argmax(labels >= _CLASSES))
        raise wrong(labels_file, f"label {labels[at]} of image {at}", f"0 to {_CLASSES - 1}")
    return images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _bytes(folder: Path, name: str, *, axes: int) -> tuple[Path, np.ndarray]:
    """Read an IDX file: 0, 0, 8 for bytes, the number of axes; the size of each in 4 bytes; the values."""
    path = find(folder, name, "a folder with the four files of MNIST")
    magic = bytes([0, 0, 8, axes])
    wanted = f"an IDX file of bytes along {axes} axes"
    raw = content(path, wanted)
    if not raw.startswith(magic):
        raise wrong(path, f"starts with {raw[:4].hex()!r}", f"{magic.hex()!r}, {wanted}")
    with reading(path, wanted):
        shape = np.frombuffer(raw, ">u4", axes, offset=4).tolist()
    first = 4 + 4 * axes
    if len(raw) != first + math.prod(shape):
        described = f"{first + math.prod(shape)}, for the {' x '.join(map(str, shape))} values that its header announces"
        raise wrong(path, f"{len(raw)} bytes", described)
    return path, np.frombuffer(raw, np.uint8, offset=first).reshape(shape)


def digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """Load the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; nothing to download.

    They are split at random by ``seed``; ``test_fraction`` of every class, in (0, 1), is held out.

    Returns:
        A `Dataset` of inputs ``(8, 8, 1)`` in 10 classes.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
        ValueError: if the fraction is outside (0, 1), or leaves a class without training or held-out samples.

    Example:
        >>> from lp_jax import data
        >>> data.digits().train_x.shape
        (1437, 8, 8, 1)

    Reference:
        Alpaydin, Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
    """
    bunch = require("sklearn.datasets").load_digits()
    x = (bunch.images[..., None] / 16.0).astype(np.float32)
    y = bunch.target.astype(np.int32)
    return Dataset(*split(x, y, test_fraction, seed), classes=_CLASSES, shape=x.shape[1:])
