"""ModelNet: shapes as voxels, from meshes (OFF files) or from files of voxels."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import (
    LARGEST,
    Dataset,
    Samples,
    StrPath,
    archive,
    check_finite,
    lines,
    reading,
    require,
    wrong,
)


def modelnet(folder: StrPath, size: int = 32) -> Dataset:
    """Load ModelNet10, ModelNet40 or the like: the surfaces of shapes on a grid of ``size``³ voxels.

    The folder holds meshes, ``CLASS/train/*.off`` and ``CLASS/test/*.off``, plain or gzipped; or ready voxels in
    ``voxels_train.npz`` and ``voxels_test.npz``. These have the arrays ``voxels``, uint8
    ``(samples, size, size, size / 8)`` with eight voxels packed into each byte of the last axis as by ``numpy.packbits``,
    ``labels`` ``(samples,)`` and ``classes``, the names, the same in both files.

    The package ``trimesh`` reads the meshes and finds their voxels, those of points half a voxel apart at most. So it may
    miss a voxel that only a corner or an edge of the surface touches. A mesh is centred in a cube, its longest side from
    wall to wall.

    Args:
        folder: folder of the files.
        size: voxels along each side; ready voxels must have the same size.

    Returns:
        A `Dataset` of inputs ``(size, size, size, 1)``, float32: 1 on the surface, 0 elsewhere. It takes 128 KiB for each
        sample of size 32. The classes of meshes are in alphabetical order.

    Raises:
        ModuleNotFoundError: for meshes, if trimesh is not installed.
        DataError: if files are missing or malformed, or a class has no shapes.
        ValueError: if the size is below 1.
        TypeError: if the size is not an integer.

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015.
    """
    folder = Path(folder)
    _check.integer("size", size, least=1)
    if (folder / "voxels_train.npz").exists():
        train_x, train_y, names = _ready(folder / "voxels_train.npz", size)
        test_x, test_y, others = _ready(folder / "voxels_test.npz", size)
        if others != names:
            wanted = f"{', '.join(names)}, those of voxels_train.npz"
            raise wrong(folder / "voxels_test.npz", f"classes {', '.join(others)}", wanted)
    else:
        names = tuple(sorted(path.parent.name for path in folder.glob("*/train") if path.is_dir()))
        if not names:
            raise wrong(
                folder,
                "has no file voxels_train.npz and no folder */train of meshes",
                "one of the two",
            )
        (train_x, train_y), (test_x, test_y) = (
            _meshes(folder, split, names, size) for split in ("train", "test")
        )
    return Dataset(
        train_x,
        train_y,
        test_x,
        test_y,
        classes=len(names),
        shape=(size, size, size, 1),
        names=names,
    )


def _meshes(folder: Path, split: str, names: Sequence[str], size: int) -> Samples:
    x = []
    y = []
    for label, name in enumerate(names):
        paths = sorted(
            path for end in ("off", "off.gz") for path in (folder / name / split).glob(f"*.{end}")
        )
        if not paths:
            raise wrong(folder / name / split, "has no files *.off", "at least one")
        x += [_voxels(path, size) for path in paths]
        y += [label] * len(paths)
    return np.array(x, np.float32)[..., None], np.array(y, np.int32)


def _voxels(path: Path, size: int) -> np.ndarray:
    """Return the voxels of a mesh, booleans ``(size, size, size)`` along the coordinates' axes."""
    wanted = "an OFF file of a mesh"
    trimesh = require("trimesh")
    text = "\n".join(lines(path, wanted))
    with reading(path, wanted):
        mesh = trimesh.load_mesh(io.StringIO(text), file_type="off", process=False)
        rows = [
            row.split()
            for row in re.sub("#.*", "", text).partition("OFF")[2].splitlines()
            if row.strip()
        ]
        corners, faces = map(int, rows[0][:2])
        whole = [
            row for row in rows[1 + corners :][:faces] if len(row) > int(row[0]) > 2
        ]  # trimesh skips others
        if not 0 < len(whole) == faces:
            got = f"{len(whole)} faces of three corners or more"
            raise wrong(path, got, f"{wanted}, with the {faces} of its header")
        check_finite(path, "the list of corners", mesh.vertices)
        if not mesh.extents.max() > 1 / LARGEST:
            raise wrong(path, "a single point", wanted)
        mesh.apply_translation(-mesh.bounds.mean(axis=0))
        mesh.apply_scale(size / mesh.extents.max())
        mesh.apply_translation([(size - 1) / 2] * 3)  # a voxel's centre is at whole numbers
        points = mesh.voxelized(1.0).points
    voxels = np.zeros((size, size, size), bool)
    voxels[tuple(np.clip(np.round(points).astype(int), 0, size - 1).T)] = True
    return voxels


def _ready(path: Path, size: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the voxels of a file, the numbers of their classes, and the classes' names."""
    wanted = "a NumPy archive with voxels, labels and classes"
    stored = archive(path, wanted)
    with reading(path, wanted):
        voxels, labels, classes = (stored[name] for name in ("voxels", "labels", "classes"))
    if (
        voxels.dtype != np.uint8
        or voxels.shape != (labels.size, size, size, size / 8)
        or not labels.size
    ):
        wanted = f"uint8 of shape (labels, {size}, {size}, {size / 8:g}), the last axis packed"
        raise wrong(path, f"voxels: {voxels.dtype} of shape {voxels.shape}", wanted)
    if (
        labels.dtype.kind not in "iu"
        or labels.ndim != 1
        or classes.dtype.kind != "U"
        or classes.ndim != 1
    ):
        got = f"{labels.dtype} labels of {labels.ndim} axes and {classes.dtype} classes of {classes.ndim}"
        raise wrong(path, got, "a list of integers and a list of names")
    if not len(set(classes)) == len(classes):
        raise wrong(path, f"classes {', '.join(classes)}", "names, none of them twice")
    if labels.min() < 0 or labels.max() >= len(classes):
        raise wrong(
            path,
            f"labels {labels.min()} to {labels.max()}",
            f"0 to {len(classes) - 1}, numbers of classes",
        )
    x = np.unpackbits(voxels, axis=-1)[..., None].astype(np.float32)
    return x, labels.astype(np.int32), tuple(classes.tolist())
