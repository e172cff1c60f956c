r"""Pictures that papers train on: MNIST and its kind, and Tiny ImageNet. A script to read, to copy and to change.

    python notebooks/examples/data_pictures.py mnist ~/mnist mnist.npz

reads a data set that you have downloaded, prints what is in it, and writes the arrays ``x``, ``y``, ``test_x`` and ``test_y`` to
a file, which ``lp_jax.data.arrays("mnist.npz")`` reads. Each function says where its files come from. Copy the one that you need
into your own script.

Files from the network may be damaged, or made to do harm. So a packed file may unpack to 256 MiB, or to 100 times its size, and
to no more. Nothing is unpickled. A file that does not fit raises a ValueError with the name of the file.
"""

import contextlib
import gzip
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from lp_jax.data import Dataset


@contextlib.contextmanager
def content(name):
    """Yield the bytes of a file, or of the one with ``.gz`` behind its name; an error in what is done with it names the file."""
    path = Path(f"{name}.gz") if Path(f"{name}.gz").exists() else Path(name)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            most = max(2**28, 100 * path.stat().st_size)
            raw = file.read(most + 1)
        check(len(raw) <= most, f"it unpacks to more than {most:,} bytes")
        yield raw
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def check(true, said):
    """Refuse a file unless ``true``. An assertion would vanish under ``python -O``."""
    if not true:
        raise ValueError(said)


def mnist(folder):
    """MNIST, https://yann.lecun.com/exdb/mnist and its mirrors, Fashion-MNIST, or the like: four IDX files, packed or not."""

    def idx(name, axes):
        """A file has the bytes 0, 0, 8 and the number of axes, then the size of each axis, then the values."""
        with content(Path(folder, name)) as raw:
            check(raw[:4] == bytes([0, 0, 8, axes]), f"no IDX file of bytes along {axes} axes")
            shape = np.frombuffer(raw, ">u4", axes, offset=4).tolist()
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)

    parts = []
    for split in ("train", "t10k"):
        x, y = idx(f"{split}-images-idx3-ubyte", 3), idx(f"{split}-labels-idx1-ubyte", 1)
        check(0 < len(x) == len(y) and y.max() < 10, f"{split}: {len(x)} images, {len(y)} labels")
        parts += [x[..., None] / np.float32(255), y.astype(np.int32)]
    check(parts[0].shape[1:] == parts[2].shape[1:], "images of two sizes")
    return Dataset(*parts, classes=10, shape=parts[0].shape[1:])


def tiny_imagenet(folder):
    """Tiny ImageNet, 200 classes of 64 x 64 pixels, unpacked: http://cs231n.stanford.edu/tiny-imagenet-200.zip

    Inputs are bytes, 1.4 GB in all: scale a batch on the device, ``x.astype(jnp.float32) / 255``.
    """

    def pixels(path):
        with content(path) as raw, Image.open(io.BytesIO(raw), formats=["JPEG"]) as image:
            check(image.size == (64, 64), f"{image.size} pixels")  # known before they are unpacked
            return np.asarray(image.convert("RGB"))

    train, test = Path(folder, "train"), Path(folder, "val")
    paths = sorted(train.glob("*/images/*.JPEG"))
    labels = [path.parent.parent.name for path in paths]
    names = sorted(set(labels))
    with content(test / "val_annotations.txt") as raw:
        rows = [line.split() for line in raw.decode().splitlines()]
        test_paths = [test / "images" / Path(row[0]).name for row in rows]  # none leaves the folder
        test_labels = [row[1] for row in rows]
    parts = []
    for files, own in ((paths, labels), (test_paths, test_labels)):
        parts.append(np.array([pixels(path) for path in files]))
        parts.append(np.array([names.index(name) for name in own], np.int32))
    return Dataset(*parts, classes=len(names), shape=(64, 64, 3), names=tuple(names))


def main(reader, folder, out):
    found = {"mnist": mnist, "tiny_imagenet": tiny_imagenet}[reader](folder)
    arrays = {"x": found.train_x, "y": found.train_y}
    arrays |= {"test_x": found.test_x, "test_y": found.test_y}
    print(f"{found.classes} classes:", *found.names)
    print({key: array.shape for key, array in arrays.items()})
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
