r"""The data sets of the papers, each in ten lines of reading. A script to read, to copy and to change.

    python notebooks/examples/data_of_papers.py mnist ~/mnist --out mnist.npz

reads a data set that you have downloaded, says what is in it, and with ``--out`` writes it as arrays ``x``, ``y``, ``test_x``
and ``test_y``. ``lp_jax.data.arrays("mnist.npz")`` reads them; for treebanks and series take ``numpy.load``. Copy the function
that you need into your own script. Each function says where its files come from.

Files from the network may be damaged, or made to do harm, so the readers keep three rules. A packed file may unpack to
256 MiB, or to 100 times its size, and no more. Nothing is unpickled. A parser that has crashed on damaged files runs in a
process of its own, with bounds on its memory and its time. A file that does not fit raises a ValueError with its name.
"""

import argparse
import contextlib
import gzip
import io
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

from lp_jax.data import Dataset


@contextlib.contextmanager
def reading(path):
    """Say which file it was that could not be read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def check(true, said):
    """Refuse a file unless ``true``. An assertion would vanish under ``python -O``."""
    if not true:
        raise ValueError(said)


def content(folder, name):
    """Return the path and the bytes of a file, or of one with ``.gz`` behind its name."""
    path = next((p for p in (Path(folder, name), Path(folder, f"{name}.gz")) if p.is_file()), None)
    check(path is not None, f"{folder} has no file {name} or {name}.gz")
    with reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        most = max(2**28, 100 * path.stat().st_size)
        raw = file.read(most + 1)
        check(len(raw) <= most, f"it unpacks to more than {most:,} bytes")
    return path, raw


def mnist(folder):
    """MNIST, Fashion-MNIST or the like: four IDX files, https://yann.lecun.com/exdb/mnist and its mirrors."""

    def idx(name, axes):  # 0, 0, 8 for bytes and the number of axes; the size of each; the values
        path, raw = content(folder, name)
        with reading(path):
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


def series(folder, name):
    """A problem of the UCR and UEA archives, NAME_TRAIN.ts and NAME_TEST.ts: https://timeseriesclassification.com

    Inputs are pairs, series padded with zeros ``(samples, time, channels)`` and their lengths, as `lp_jax.nn.GRU` takes them.
    Each channel is scaled to mean 0 and deviation 1 over the training series.
    """

    def read(split):
        path, raw = content(folder, f"{name}_{split}.ts")
        with reading(path):
            header, *body = re.split(r"(?mi)^@data\s*$", raw.decode())
            names = re.findall(r"(?mi)^@classlabel\s+true\s+(.*)", header)
            check(names, "no classes in the header")
            # a series is a line: its channels and its class, with colons between them
            lines = [line for line in "".join(body).splitlines() if line and line[0] != "#"]
            rows = [line.split(":") for line in lines]
            check(rows, "no series after @data")
            x = [np.array([c.split(",") for c in channels], float).T for *channels, _ in rows]
            check(all(np.isfinite(each).all() for each in x), "values are missing")
            check(len({each.shape[1:] for each in x}) == 1, "unlike numbers of channels")
            labels = [label.strip() for *_, label in rows]
            unknown = set(labels) - set(names[0].split())
            check(not unknown, f"classes that the header lacks: {unknown}")
            return x, labels, names[0].split()

    train, test = read("TRAIN"), read("TEST")
    check(train[2] == test[2], f"{name}: other classes in the test series")
    every = np.concatenate(train[0])
    check(test[0][0].shape[1] == every.shape[1], f"{name}: other channels in the test series")
    mean, deviation = every.mean(0), np.where(every.std(0) > 0, every.std(0), 1)
    longest = max(map(len, train[0] + test[0]))

    def arrays(x, labels, names):
        padded = np.zeros((len(x), longest, len(mean)), np.float32)
        for row, each in zip(padded, x, strict=True):
            row[: len(each)] = (each - mean) / deviation
        lengths = np.array([len(each) for each in x], np.int32)
        return (padded, lengths), np.array([names.index(label) for label in labels], np.int32)

    names, shape = tuple(train[2]), (longest, len(mean))
    return Dataset(*arrays(*train), *arrays(*test), classes=len(names), shape=shape, names=names)


def treebank(folder):
    """Words and their parts of speech, from *-train.conllu and *-test.conllu: https://universaldependencies.org (GUM, EWT)

    Inputs are numbers of words ``(sentences, words)``, 0 in the padding and 1 for words that occur once; labels are -1 there.
    """
    import conllu

    def read(split):
        names = {p.name.removesuffix(".gz") for p in Path(folder).glob(f"*-{split}.conllu*")}
        check(len(names) == 1, f"{folder} has {len(names)} files *-{split}.conllu")
        path, raw = content(folder, *names)
        with reading(path):
            parsed = conllu.parse(raw.decode())
            words = [[t for t in sentence if isinstance(t["id"], int)] for sentence in parsed]
            return [[(t["form"].lower(), t["upos"]) for t in sentence] for sentence in words]

    train, test = read("train"), read("test")
    counts = Counter(word for sentence in train for word, _ in sentence)
    words = {word: n for n, word in enumerate((w for w in sorted(counts) if counts[w] > 1), 2)}
    tags = sorted({tag for sentence in train for _, tag in sentence})
    longest = max(map(len, train + test))

    def arrays(sentences):
        x, y = (np.full((len(sentences), longest), fill, np.int32) for fill in (0, -1))
        for row, labels, sentence in zip(x, y, sentences, strict=True):
            row[: len(sentence)] = [words.get(word, 1) for word, _ in sentence]
            labels[: len(sentence)] = [tags.index(t) if t in tags else -1 for _, t in sentence]
        return x, y

    return Dataset(
        *arrays(train), *arrays(test), classes=len(tags), shape=(longest,), names=tuple(tags)
    )


def shapes(folder, size=32):
    """ModelNet10 or ModelNet40, meshes CLASS/train/*.off, as voxels on the surface: https://modelnet.cs.princeton.edu"""
    import trimesh

    def voxels(path):
        with reading(path):
            mesh = trimesh.load_mesh(path, file_type="off", process=False)
            lines = re.sub("#.*", "", path.read_text()).replace("OFF", "", 1).splitlines()
            (corners, faces, *_), *rows = (line.split() for line in lines if line.strip())
            rows = rows[int(corners) :][: int(faces)]
            whole = sum(len(row) > int(row[0]) > 2 for row in rows)  # trimesh skips others
            check(0 < whole == int(faces), f"{whole} whole faces of {faces}")
            check(np.abs(mesh.vertices).max() < 1e100, "corners that are no numbers")
            check(mesh.extents.max() > 1e-100, "a single point")
            mesh.apply_translation(-mesh.bounds.mean(axis=0))
            mesh.apply_scale(size / mesh.extents.max())
            mesh.apply_translation([(size - 1) / 2] * 3)  # a voxel's centre is at whole numbers
            at = np.clip(np.round(mesh.voxelized(1.0).points).astype(int), 0, size - 1)
            grid = np.zeros((size, size, size, 1), np.float32)
            grid[tuple(at.T)] = 1
        return grid

    names = sorted(path.parent.name for path in Path(folder).glob("*/train"))
    parts = []
    for split in ("train", "test"):
        files = [sorted(Path(folder, name, split).glob("*.off")) for name in names]
        check(all(files) and files, f"{folder}: a class has no files {split}/*.off")
        parts.append(np.array([voxels(path) for paths in files for path in paths]))
        parts.append(np.repeat(np.arange(len(names), dtype=np.int32), list(map(len, files))))
    return Dataset(*parts, classes=len(names), shape=parts[0].shape[1:], names=tuple(names))


def packed_shapes(folder):
    """Voxels with one bit each, written by ``numpy.packbits(x[..., 0] > 0, axis=-1)``.

    Reading meshes takes minutes, but reading these takes seconds.
    """
    parts = []
    for split in ("train", "test"):
        path = Path(folder, f"voxels_{split}.npz")
        with reading(path), zipfile.ZipFile(path) as file:
            whole = sum(member.file_size for member in file.infolist())
            check(whole <= max(2**28, 100 * path.stat().st_size), f"it unpacks to {whole:,} bytes")
            with np.load(path, allow_pickle=False) as stored:
                x, y, names = stored["voxels"], stored["labels"], stored["classes"]
            check(x.dtype == np.uint8 and len(x) == len(y) and y.max() < len(names), "does not fit")
        parts += [np.unpackbits(x, axis=-1)[..., None].astype(np.float32), y.astype(np.int32)]
    return Dataset(*parts, classes=len(names), shape=parts[0].shape[1:], names=tuple(names))


def tiny_imagenet(folder):
    """Tiny ImageNet, 200 classes of 64 x 64 pixels, unpacked: http://cs231n.stanford.edu/tiny-imagenet-200.zip

    Inputs are bytes, 1.4 GB in all: scale a batch on the device, ``x.astype(jnp.float32) / 255``.
    """
    from PIL import Image

    def pixels(path):
        with reading(path), Image.open(path, formats=["JPEG"]) as image:
            check(image.size == (64, 64), f"{image.size} pixels")  # known before they are unpacked
            return np.asarray(image.convert("RGB"))

    folder = Path(folder)
    names = sorted(path.parent.name for path in folder.glob("train/*/images"))
    train = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted(folder.glob(f"train/{name}/images/*.JPEG"))
    ]
    lines = (folder / "val/val_annotations.txt").read_text().splitlines()
    test = [(Path(file).name, names.index(name)) for file, name, *_ in map(str.split, lines)]
    test = [(folder / "val/images" / file, label) for file, label in test]  # none leaves the folder
    parts = []
    for files in (train, test):
        parts.append(np.array([pixels(path) for path, _ in files]))
        parts.append(np.array([label for _, label in files], np.int32))
    return Dataset(*parts, classes=len(names), shape=(64, 64, 3), names=tuple(names))


def indian_pines(folder):
    """Spectra of an aerial image and the crop in each pixel: https://purr.purdue.edu/publications/1947, as .mat files at
    https://www.ehu.eus/ccwintco/index.php/Hyperspectral_Remote_Sensing_Scenes. Every fifth pixel of a class is held out."""
    image = matlab(Path(folder, "Indian_pines_corrected.mat"), "indian_pines_corrected", axes=3)
    truth = matlab(Path(folder, "Indian_pines_gt.mat"), "indian_pines_gt", axes=2)
    check(truth.shape == image.shape[:2], f"classes of {truth.shape} pixels, not {image.shape[:2]}")
    check(0 == truth.min() <= truth.max() <= 16, f"classes {truth.min()} to {truth.max()}")
    order = np.random.default_rng(0).permutation(np.flatnonzero(truth))
    order = order[np.argsort(truth.ravel()[order], kind="stable")]
    x = image.reshape(truth.size, -1)[order].astype(float)
    y = truth.ravel()[order].astype(np.int32) - 1
    held = np.arange(len(y)) % 5 == 0
    x = ((x - x[~held].mean(0)) / x[~held].std(0)).astype(np.float32)
    return Dataset(x[~held], y[~held], x[held], y[held], classes=16, shape=x.shape[1:])


def matlab(path, name, axes):
    """Read a variable in a process of its own: scipy's reader has ended in a segmentation fault on damaged files."""
    with reading(path):
        path.open("rb").close()
        command = [sys.executable, "-P", "-c", _MATLAB, str(path), name]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # the memory of many is too much
        done = subprocess.run(command, capture_output=True, timeout=60, env=env)
        said = done.stderr.decode(errors="replace").strip() or f"code {done.returncode}"
        check(done.returncode == 0, said.splitlines()[-1])
        array = np.lib.format.read_array(io.BytesIO(done.stdout), allow_pickle=False)
        check(
            array.ndim == axes and array.size and array.dtype.kind in "uif",
            f"{name}: {array.dtype} of {array.shape}, not numbers along {axes} axes",
        )
        check(np.isfinite(array).all(), f"{name}: numbers that are not finite")
    return array


_MATLAB = """
import contextlib, sys
with contextlib.suppress(ImportError, ValueError):  # a system without such bounds
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
import numpy, scipy.io
path, name = sys.argv[1:]
array = numpy.asarray(scipy.io.loadmat(path, variable_names=[name])[name])
numpy.lib.format.write_array(sys.stdout.buffer, array, allow_pickle=False)
"""


def uci_har(folder):
    """Nine signals of a telephone over 128 steps, six activities, unpacked: https://archive.ics.uci.edu/dataset/240"""
    parts = []
    for split in ("train", "test"):
        sensors = "body_acc", "body_gyro", "total_acc"
        kinds = [f"{sensor}_{axis}" for sensor in sensors for axis in "xyz"]
        paths = [Path(folder, split, "Inertial Signals", f"{kind}_{split}.txt") for kind in kinds]
        with reading(Path(folder, split)):
            x = np.stack([np.loadtxt(path, np.float32) for path in paths], axis=-1)
            y = np.loadtxt(Path(folder, split, f"y_{split}.txt"), np.int32) - 1
            check(x.shape == (len(y), 128, 9), f"{x.shape} values and {y.shape} classes")
            check(y.min() >= 0 and y.max() < 6, f"classes {y.min() + 1} to {y.max() + 1}")
        parts += [x, y]
    return Dataset(*parts, classes=6, shape=(128, 9))


READERS = mnist, series, treebank, shapes, packed_shapes, tiny_imagenet, indian_pines, uci_har


def main(arguments=None):
    readers = {reader.__name__: reader for reader in READERS}
    parser = argparse.ArgumentParser(description="Read a data set of a paper.")
    parser.add_argument("reader", choices=readers)
    parser.add_argument("folder")
    parser.add_argument("name", nargs="*", help="of a problem of time series, like BasicMotions")
    parser.add_argument("--out", help="file of arrays to write, .npz")
    args = parser.parse_args(arguments)
    found = readers[args.reader](args.folder, *args.name)
    arrays = {"y": found.train_y, "test_y": found.test_y}
    for name, x in (("x", found.train_x), ("test_x", found.test_x)):
        parts = x if isinstance(x, tuple) else (x,)
        arrays |= dict(zip((name, f"{name}_lengths"), parts, strict=False))
    for name, array in sorted(arrays.items()):
        print(f"{name:14} {array.dtype} {array.shape}")
    print(f"{found.classes} classes {' '.join(found.names)}")
    if args.out:
        np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
