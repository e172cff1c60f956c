r"""Shapes in three dimensions that papers train on: ModelNet, as voxels. A script to read, to copy and to change.

    python notebooks/examples/data_shapes.py meshes ~/ModelNet10 shapes.npz

reads meshes that you have downloaded, which takes minutes, prints what is in them, and writes the arrays ``x``, ``y``, ``test_x``
and ``test_y`` to a file. ``lp_jax.data.arrays("shapes.npz")`` reads it in seconds. Or copy the function into your own script.

Files from the network may be damaged, or made to do harm. So a packed file may unpack to 256 MiB, or to 100 times its size, and
to no more. Nothing is unpickled. A file that does not fit raises a ValueError with the name of the file.
"""

import contextlib
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import trimesh

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


def meshes(folder, size=32):
    """ModelNet10 or ModelNet40, meshes CLASS/train/*.off, as voxels on the surface: https://modelnet.cs.princeton.edu"""

    def filled(path):
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
        parts.append(np.array([filled(path) for paths in files for path in paths]))
        parts.append(np.repeat(np.arange(len(names), dtype=np.int32), list(map(len, files))))
    return Dataset(*parts, classes=len(names), shape=parts[0].shape[1:], names=tuple(names))


def voxels(folder):
    """Voxels with one bit each, written by ``numpy.packbits(x[..., 0] > 0, axis=-1)``.

    They take a thirty-second part of the room, in voxels_train.npz and voxels_test.npz.
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


def main(reader, folder, out):
    found = {"meshes": meshes, "voxels": voxels}[reader](folder)
    arrays = {"x": found.train_x, "y": found.train_y}
    arrays |= {"test_x": found.test_x, "test_y": found.test_y}
    print(f"{found.classes} classes:", *found.names)
    print({key: array.shape for key, array in arrays.items()})
    np.savez(out, **arrays)  # not compressed, because these would then unpack to over 100 times


if __name__ == "__main__":
    main(*sys.argv[1:])
