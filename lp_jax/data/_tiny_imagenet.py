"""Tiny ImageNet, from its folders of JPEG files."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import DataError, Dataset
from lp_jax.data._read import lines, wrong

_SIDE = 64
_ANNOTATIONS = "val/val_annotations.txt"


def tiny_imagenet(
    folder: str | os.PathLike[str], classes: Sequence[str] | None = None, *, per_class: int | None = None
) -> Dataset:
    """Tiny ImageNet: 200 classes of photographs of 64 x 64 pixels, 500 of each to train with, 50 held out.

    The folder, usually ``tiny-imagenet-200``, has ``train/WNID/images/*.JPEG``, ``val/images/*.JPEG`` and
    ``val/val_annotations.txt``, a line of which begins with a file's name and its class, a tab between them. The
    validation images are the ones held out; those of ``test`` have no public labels. Images in grey get three channels.

    Pixels stay bytes, 1.4 GB for all of them; as float32 they would take four times that. Turn each batch into numbers in
    [0, 1], best on the device: ``x.astype(jnp.float32) / 255``.

    Args:
        folder: where all that is.
        classes: names (WordNet ids, like "n01443537") of the classes to take, which are numbered in this order; by default
            all of them, in alphabetical order.
        per_class: how many images of each class to train with, the first ones; by default all.

    Returns:
        A `Dataset` of inputs ``(64, 64, 3)``, uint8.

    Raises:
        ImportError: without Pillow.
        DataError: for files that are missing or malformed, images of another size, and classes that are not there or have
            no images.
        ValueError: for no classes or one given twice, and for fewer than one image per class.

    Example:
        >>> from lp_jax import data
        >>> data.tiny_imagenet("no/such/folder")
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has no folders train/*/images; wanted one for each class.

    Reference:
        Le, Yang, "Tiny ImageNet visual recognition challenge", Stanford CS 231N, 2015.
    """
    folder = Path(folder)
    if classes is not None and not 0 < len(set(classes)) == len(classes):
        raise ValueError(f"classes must be at least one name, none of them twice; got {list(classes)}.")
    if per_class is not None and per_class < 1:
        raise ValueError(f"per_class must be at least 1; got {per_class}.")
    known = sorted(path.parent.name for path in folder.glob("train/*/images") if path.is_dir())
    if not known:
        raise DataError(f"{folder}: has no folders train/*/images; wanted one for each class.")
    names = tuple(known if classes is None else classes)
    for name in names:
        if name not in known:
            raise DataError(f"{folder}: has no folder train/{name}/images; wanted one for each class.")
    train, test = _training_files(folder, names, per_class), _validation_files(folder, names, known)
    train_x, test_x = _images([path for path, _ in train]), _images([path for path, _ in test])
    train_y, test_y = (np.array([label for _, label in files], np.int32) for files in (train, test))
    return Dataset(train_x, train_y, test_x, test_y, classes=len(names), shape=(_SIDE, _SIDE, 3), names=names)


def _training_files(folder: Path, names: tuple[str, ...], per_class: int | None) -> list[tuple[Path, int]]:
    files = []
    for label, name in enumerate(names):
        found = sorted((folder / "train" / name / "images").glob("*.JPEG"))[:per_class]
        if not found:
            raise DataError(f"{folder / 'train' / name / 'images'}: has no files *.JPEG; wanted at least one.")
        files += [(path, label) for path in found]
    return files


def _validation_files(folder: Path, names: tuple[str, ...], known: list[str]) -> list[tuple[Path, int]]:
    path, files = folder / _ANNOTATIONS, []
    for number, line in enumerate(lines(path, "names of files and their classes"), 1):
        image, _, rest = line.partition("\t")
        name = rest.split("\t")[0]
        if name not in known:
            raise wrong(path, number, f"class {name!r} of image {image!r}", "a class with a folder in train")
        if name in names:
            files.append((folder / "val" / "images" / image, names.index(name)))
    if absent := set(range(len(names))) - {label for _, label in files}:
        raise wrong(path, number, f"the end, no image of class {names[min(absent)]!r} before it", "at least one")
    return files


def _images(paths: list[Path]) -> np.ndarray:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise ImportError(
            f'tiny_imagenet needs Pillow, which is not here ({error}): pip install "lp_jax[train]".'
        ) from error
    pixels = np.empty((len(paths), _SIDE, _SIDE, 3), np.uint8)
    wanted = f"wanted a JPEG file of {_SIDE} x {_SIDE} pixels"
    for row, path in zip(pixels, paths, strict=True):
        try:
            with Image.open(path) as image:
                if image.size != (_SIDE, _SIDE):
                    raise DataError(f"{path}: {image.width} x {image.height} pixels; {wanted}.")
                row[...] = np.asarray(image.convert("RGB"))
        except UnidentifiedImageError as error:
            raise DataError(f"{path}: byte 0: no image; {wanted}.") from error
        except (OSError, SyntaxError) as error:
            raise DataError(
                f"{path}: cannot be read, {getattr(error, 'strerror', None) or error}; {wanted}."
            ) from error
    return pixels
