"""ModelNet: shapes as voxels, from meshes or from files of voxels."""

import functools
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_jax import _check
from lp_jax.data._dataset import DataError, Dataset
from lp_jax.data._off import read_off
from lp_jax.data._voxels import voxelize

_READY = "voxels_{}.npz"


def modelnet(
    folder: str | os.PathLike[str], classes: Sequence[str] | None = None, size: int = 32, *, margin: int = 0
) -> Dataset:
    """ModelNet10, ModelNet40 or the like: the surfaces of shapes on a grid of ``size``³ voxels.

    The folder holds either meshes, ``CLASS/train/*.off`` and ``CLASS/test/*.off``, which are turned into voxels by
    `voxelize`; or, where the file ``voxels_train.npz`` is there, ready voxels: in it and in ``voxels_test.npz`` the arrays
    ``voxels``, uint8 ``(samples, size, size, size / 8)`` with eight voxels packed into each byte of the last axis as by
    ``numpy.packbits``, ``labels`` ``(samples,)`` and ``classes``, the names.

    Args:
        folder: where the files are.
        classes: names of the classes to take, which are numbered in this order; by default all of them, of meshes in
            alphabetical order.
        size: voxels along each side; that of ready voxels must be the same.
        margin: voxels that stay empty at each wall, for meshes.

    Returns:
        A `Dataset` of inputs ``(size, size, size, 1)``, float32: 1 on the surface, 0 elsewhere. It takes 128 KiB for each
        sample of size 32.

    Raises:
        DataError: for files that are missing or malformed, and for classes that are not there or have no shapes.
        ValueError: for no classes or one given twice, and for a size or margin that is senseless.
        TypeError: for a size or margin that is no integer.

    Example:
        >>> from lp_jax import data
        >>> data.modelnet("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no file voxels_train.npz and no folder */train ...

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015.
    """
    folder = Path(folder)
    _check.integer("size", size, least=1)
    if classes is not None and not 0 < len(set(classes)) == len(classes):
        raise ValueError(f"classes must be at least one name, none of them twice; got {list(classes)}.")
    if (folder / _READY.format("train")).exists():
        known = tuple(str(name) for name in _arrays(folder, "train", size)[2])
        load = functools.partial(_ready, size=size)
    else:
        known = tuple(sorted(path.parent.name for path in folder.glob("*/train") if path.is_dir()))
        load = functools.partial(_meshes, size=size, margin=margin)
        if not known:
            wanted = "wanted one of the two"
            raise DataError(
                f"{folder}: has no file {_READY.format('train')} and no folder */train of meshes; {wanted}."
            )
    names = known if classes is None else tuple(classes)
    for name in names:
        if name not in known:
            raise DataError(f"{folder}: has no class {name!r}; wanted one of {', '.join(known)}.")
    (train_x, train_y), (test_x, test_y) = (load(folder, split, names) for split in ("train", "test"))
    return Dataset(train_x, train_y, test_x, test_y, classes=len(names), shape=(size, size, size, 1), names=names)


def _meshes(
    folder: Path, split: str, names: tuple[str, ...], *, size: int, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    paths = [(path, label) for label, name in enumerate(names) for path in _off_files(folder / name / split)]
    x = np.zeros((len(paths), size, size, size, 1), np.float32)
    for voxels, (path, _) in zip(x, paths, strict=True):
        mesh = read_off(path)
        try:
            voxels[..., 0] = voxelize(mesh.vertices, mesh.faces, size, margin=margin)
        except ValueError as error:
            raise DataError(f"{path}: cannot be made into voxels ({error}); wanted a mesh.") from error
    return x, np.array([label for _, label in paths], np.int32)


def _off_files(folder: Path) -> list[Path]:
    found = sorted([*folder.glob("*.off"), *folder.glob("*.off.gz")])
    if not found:
        raise DataError(f"{folder}: has no files *.off; wanted at least one.")
    return found


def _ready(folder: Path, split: str, names: tuple[str, ...], *, size: int) -> tuple[np.ndarray, np.ndarray]:
    voxels, labels, classes = _arrays(folder, split, size)
    path = folder / _READY.format(split)
    numbers = {str(name): number for number, name in enumerate(classes)}
    y = np.full(len(labels), -1, np.int32)
    for label, name in enumerate(names):
        at = labels == numbers.get(name, -1)
        if not at.any():
            raise DataError(f"{path}: array labels: no shape of class {name!r}; wanted at least one.")
        y[at] = label
    kept = y >= 0
    x = np.unpackbits(voxels[kept], axis=-1)[..., None]
    return x.astype(np.float32), y[kept]


def _arrays(folder: Path, split: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path = folder / _READY.format(split)
    wanted = "wanted a NumPy archive with voxels, labels and classes"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            voxels, labels, classes = (archive[name] for name in ("voxels", "labels", "classes"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror or error}; {wanted}.") from error
    except KeyError as error:
        raise DataError(f"{path}: {' '.join(map(str, error.args))}; {wanted}.") from error
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is damaged or no NumPy archive without pickles ({reason}); {wanted}.") from error
    shape = (len(labels) if labels.ndim == 1 else -1, size, size, size / 8)
    if voxels.dtype != np.uint8 or voxels.shape != shape or not len(labels):
        described = f"wanted uint8 of shape (labels, {size}, {size}, {size / 8:g}), the last axis packed"
        raise DataError(f"{path}: array voxels: {voxels.dtype} of shape {voxels.shape}; {described}.")
    if labels.dtype.kind not in "iu" or classes.dtype.kind != "U" or classes.ndim != 1:
        found = f"{labels.dtype} labels and {classes.dtype} classes of {classes.ndim} axes"
        raise DataError(f"{path}: {found}; wanted integers and a list of names.")
    if labels.min() < 0 or labels.max() >= len(classes):
        found = f"labels {labels.min()} to {labels.max()}"
        raise DataError(f"{path}: array labels: {found}; wanted 0 to {len(classes) - 1}, numbers of classes.")
    return voxels, labels, classes
