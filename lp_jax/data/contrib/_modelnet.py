"""ModelNet: shapes as voxels, from meshes (OFF files: counts, vertices, polygons) or from files of voxels."""

import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import Dataset, lines, reading, require, select_classes, wrong


class Mesh(NamedTuple):
    """Triangles in space: coordinates, ``(vertices, 3)`` float64, and numbers of the corners, ``(triangles, 3)`` int32."""

    vertices: np.ndarray
    faces: np.ndarray


def read_off(path: str | os.PathLike[str]) -> Mesh:
    r"""Read a mesh from an OFF file, plain or gzipped (``.gz``), with the package ``trimesh``.

    Polygons become triangles. The colour of a polygon, which follows its corners, is skipped. The counts may stand on the first
    line, even right behind "OFF", as in some files of ModelNet.

    Raises:
        ModuleNotFoundError: if trimesh is not installed.
        DataError: if the file is missing, damaged, not an OFF file, or shorter or longer than its counts say.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax.data import contrib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "triangle.off"
        ...     _ = path.write_text("OFF\n3 1 0\n0 0 0\n1 0 0\n1 1 0\n3 0 1 2\n")
        ...     contrib.read_off(path).faces.tolist()
        [[0, 1, 2]]

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015 (ModelNet); the format: Rost,
        "OFF - a 3D object file format", 1989.
    """
    path, wanted = Path(path), "an OFF file"
    trimesh = require("trimesh")
    entries = [entry for line in lines(path, wanted) if (entry := line.partition("#")[0].strip())]
    header = re.match(r"OFF\s*(\d+) +(\d+)( +\d+)?\n", "\n".join([*entries, ""]))
    if not header:
        raise wrong(path, f"starts with {' '.join(entries)[:20]!r}", "OFF and the numbers of vertices, faces and edges")
    vertices, faces = int(header[1]), int(header[2])
    number = len(entries) - header[0].count("\n")
    if number != vertices + faces:
        # trimesh does not check this
        raise wrong(path, f"{number} lines after the counts", f"{vertices} vertices and {faces} faces")
    with reading(path, wanted):
        mesh = trimesh.load_mesh(io.StringIO("\n".join(entries)), file_type="off", process=False)
    if len(mesh.faces) < faces:
        raise wrong(path, "a face with fewer corners than it announces, or fewer than 3", "polygons")
    return Mesh(np.array(mesh.vertices, np.float64), np.array(mesh.faces, np.int32))


_READY = "voxels_{}.npz"


def modelnet(
    folder: str | os.PathLike[str], classes: Sequence[str] | None = None, size: int = 32, *, margin: int = 0
) -> Dataset:
    """Load ModelNet10, ModelNet40 or the like: the surfaces of shapes on a grid of ``size``³ voxels.

    The folder holds meshes, ``CLASS/train/*.off`` and ``CLASS/test/*.off``, which `voxelize` turns into voxels; or ready
    voxels in ``voxels_train.npz`` and ``voxels_test.npz``. These have the arrays ``voxels``, uint8
    ``(samples, size, size, size / 8)`` with eight voxels packed into each byte of the last axis as by ``numpy.packbits``,
    ``labels`` ``(samples,)`` and ``classes``, the names.

    Args:
        folder: folder of the files.
        classes: names of the classes to take, numbered in this order; by default all, for meshes in alphabetical order.
        size: voxels along each side; ready voxels must have the same size.
        margin: voxels that stay empty at each wall, for meshes.

    Returns:
        A `Dataset` of inputs ``(size, size, size, 1)``, float32: 1 on the surface, 0 elsewhere. It takes 128 KiB for each
        sample of size 32.

    Raises:
        DataError: if files are missing or malformed, or a class is missing or has no shapes.
        ValueError: if there are no classes or one is given twice, or a size or margin is out of range.
        TypeError: if a size or margin is not an integer.

    Example:
        >>> from lp_jax.data import contrib
        >>> contrib.modelnet("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no file voxels_train.npz and no folder */train ...

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015.
    """
    folder = Path(folder)
    _check.integer("size", size, least=1)
    _check.integer("margin", margin, least=0)
    if (folder / _READY.format("train")).exists():
        known: Sequence[str] = _arrays(folder, "train", size)[2].tolist()
        load = functools.partial(_ready, size=size)
    else:
        known = sorted(path.parent.name for path in folder.glob("*/train") if path.is_dir())
        load = functools.partial(_meshes, size=size, margin=margin)
        if not known:
            raise wrong(folder, "has no file voxels_train.npz and no folder */train of meshes", "one of the two")
    names = select_classes(classes, known, folder)
    (train_x, train_y), (test_x, test_y) = (load(folder, split, names) for split in ("train", "test"))
    return Dataset(train_x, train_y, test_x, test_y, classes=len(names), shape=(size, size, size, 1), names=names)


def _meshes(
    folder: Path, split: str, names: tuple[str, ...], *, size: int, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    x, y = [], []
    for label, name in enumerate(names):
        paths = sorted(path for end in ("off", "off.gz") for path in (folder / name / split).glob(f"*.{end}"))
        if not paths:
            raise wrong(folder / name / split, "has no files *.off", "at least one")
        for path in paths:
            mesh = read_off(path)
            with reading(path, "a mesh"):
                x.append(voxelize(mesh.vertices, mesh.faces, size, margin=margin))
            y.append(label)
    return np.array(x, np.float32)[..., None], np.array(y, np.int32)


def _ready(folder: Path, split: str, names: tuple[str, ...], *, size: int) -> tuple[np.ndarray, np.ndarray]:
    voxels, labels, classes = _arrays(folder, split, size)
    of = classes[labels]
    if absent := set(names) - set(of):
        raise wrong(folder / _READY.format(split), f"no shape of class {min(absent)!r}", "at least one")
    kept = np.isin(of, names)
    x = np.unpackbits(voxels[kept], axis=-1)[..., None].astype(np.float32)
    return x, np.array([names.index(name) for name in of[kept]], np.int32)


def _arrays(folder: Path, split: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path = folder / _READY.format(split)
    with reading(path, "a NumPy archive with voxels, labels and classes"), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        voxels, labels, classes = (archive[name] for name in ("voxels", "labels", "classes"))
    shape = (labels.size, size, size, size / 8)
    if voxels.dtype != np.uint8 or voxels.shape != shape or not labels.size:
        wanted = f"uint8 of shape (labels, {size}, {size}, {size / 8:g}), the last axis packed"
        raise wrong(path, f"voxels: {voxels.dtype} of shape {voxels.shape}", wanted)
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or classes.dtype.kind != "U" or classes.ndim != 1:
        got = f"{labels.dtype} labels of {labels.ndim} axes and {classes.dtype} classes of {classes.ndim}"
        raise wrong(path, got, "a list of integers and a list of names")
    if labels.min() < 0 or labels.max() >= len(classes):
        raise wrong(path, f"labels {labels.min()} to {labels.max()}", f"0 to {len(classes) - 1}, numbers of classes")
    return voxels, labels, classes


_CANDIDATES = 1 << 18  # voxels tested at once: some 20 MB of projections


def voxelize(vertices: np.ndarray, faces: np.ndarray, size: int = 32, *, margin: int = 0) -> np.ndarray:
    """Return the voxels that the surface of a mesh goes through.

    The mesh is centred in a cube, its longest side from wall to wall. Intersections of triangles and voxels are exact, not
    sampled: both are projected on the ten axes that can separate them, the triangle's normal and the products of its edges
    with the edges of a cube. The three axes of the cube bound the voxels that are tested. A triangle between two layers of
    voxels belongs to the upper one.

    Args:
        vertices: coordinates, ``(vertices, 3)``.
        faces: numbers of the corners, ``(triangles, 3)`` integers.
        size: voxels along each side of the cube.
        margin: voxels that stay empty at each wall.

    Returns:
        Booleans ``(size, size, size)`` along the coordinates' axes.

    Raises:
        ValueError: if arrays have other shapes, corners do not exist, coordinates are not finite, there are no triangles, the
            mesh is a single point, or the margin leaves no voxels.
        TypeError: if a size, margin or corner is not an integer.

    Example:
        >>> import numpy as np
        >>> from lp_jax.data import contrib
        >>> corners = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> contrib.voxelize(corners, np.array([[0, 1, 2]]), size=4)[:, :, 2].astype(int)
        array([[1, 1, 1, 1],
               [1, 1, 1, 1],
               [1, 1, 1, 0],
               [1, 1, 0, 0]])

    Reference:
        Akenine-Möller, "Fast 3D triangle-box overlap testing", Journal of Graphics Tools 6 (2001).
    """
    _check.integer("size", size, least=1)
    _check.integer("margin", margin, least=0)
    if 2 * margin >= size:
        raise ValueError(f"margin must be less than half of the size, {size}; got {margin}.")
    corners = _corners(np.asarray(vertices, np.float64), np.asarray(faces))
    low, high = corners.min(axis=(0, 1)), corners.max(axis=(0, 1))
    extent = (high - low).max()
    corners = (corners - (low + high) / 2) * ((size - 2 * margin) / extent) + size / 2
    # rounding must not push points on a wall outside, nor a plane between two layers to the lower one
    corners = np.round(corners, 9)
    edges = np.roll(corners, -1, axis=1) - corners
    axes = np.cross(edges[:, :, None, :], np.eye(3)).reshape(-1, 9, 3)
    axes = np.concatenate([axes, np.cross(edges[:, 0], edges[:, 1])[:, None]], axis=1)
    projected = np.einsum("tax,tcx->tac", axes, corners)
    reach = np.abs(axes).sum(axis=-1) * (0.5 + 1e-9 * size)  # of a voxel from its centre, and rounding
    least, most = projected.min(axis=-1) - reach, projected.max(axis=-1) + reach
    voxels = np.zeros((size, size, size), bool)
    for triangle, place in _candidates(corners, margin, size - margin - 1):
        centre = np.einsum("nax,nx->na", axes[triangle], place + 0.5)
        met = np.all((least[triangle] <= centre) & (centre <= most[triangle]), axis=-1)
        voxels[tuple(place[met].T)] = True
    return voxels


def _corners(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Return the corners of each triangle, ``(triangles, 3, 3)``."""
    if faces.dtype.kind not in "iu":
        raise TypeError(f"faces must be integers; got {faces.dtype}.")
    for name, array in (("vertices", vertices), ("faces", faces)):
        if array.ndim != 2 or array.shape[1] != 3 or len(array) == 0:
            raise ValueError(f"{name} must be of shape ({name}, 3), at least one of them; got {array.shape}.")
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise ValueError(
            f"faces must be numbers of vertices, 0 to {len(vertices) - 1}; got {faces.min()} to {faces.max()}."
        )
    corners = vertices[faces]
    if not np.isfinite(corners).all() or np.ptp(corners, axis=(0, 1)).max() == 0:
        raise ValueError("vertices must be finite and span a mesh; those of the faces are not, or are all one point.")
    return corners


def _candidates(corners: np.ndarray, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of a triangle's number and a voxel in its bounding box, ``(n,)`` and ``(n, 3)``, some at a time.

    Voxels are those from ``first`` to ``last`` along each axis.
    """
    low, high = (np.clip(np.floor(bound), first, last).astype(np.int64) for bound in (corners.min(1), corners.max(1)))
    sides = high - low + 1
    counts = sides.prod(axis=-1)
    for numbers in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(counts.cumsum() // _CANDIDATES)) + 1):
        triangle = np.repeat(numbers, counts[numbers])
        within = np.arange(len(triangle)) - np.repeat(counts[numbers].cumsum() - counts[numbers], counts[numbers])
        _, width, depth = sides[triangle].T
        place = np.stack([within // (width * depth), within // depth % width, within % depth], axis=-1)
        yield triangle, low[triangle] + place
