"""Tiny ImageNet, from its folders of JPEG files."""

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lp_jax.data._dataset import Dataset, lines, reading, require, wrong

_SIDE = 64
_ANNOTATIONS = "val/val_annotations.txt"


def tiny_imagenet(folder: str | os.PathLike[str], classes: Sequence[str] | None = None) -> Dataset:
    """Load Tiny ImageNet: 200 classes of photographs of 64 x 64 pixels, 500 of each for training, 50 held out.

    The folder, usually ``tiny-imagenet-200``, has ``train/WNID/images/*.JPEG``, ``val/images/*.JPEG`` and
    ``val/val_annotations.txt``, whose lines begin with a file's name and its class, separated by a tab. The validation images
    are held out, as those of ``test`` have no public labels. Images in grey get three channels.

    Args:
        folder: folder of the files.
        classes: names (WordNet ids, like "n01443537") of the classes to take, numbered in this order; by default all, in
            alphabetical order.

    Returns:
        A `Dataset` of inputs ``(64, 64, 3)``, uint8: 1.4 GB for all images. Scale each batch to [0, 1], best on the device:
        ``x.astype(jnp.float32) / 255``.

    Raises:
        ModuleNotFoundError: if Pillow is not installed.
        DataError: if files are missing or malformed, images have another size, or a class is missing or has no images.
        ValueError: if there are no classes or one is given twice.

    Reference:
        Le, Yang, "Tiny ImageNet visual recognition challenge", Stanford CS 231N, 2015.
    """
    folder, opened = Path(folder), require("PIL.Image").open
    known = sorted(path.parent.name for path in folder.glob("train/*/images") if path.is_dir())
    if not known:
        raise wrong(folder, "has no folders train/*/images", "one for each class")
    names = tuple(known if classes is None else classes)
    if not 0 < len(set(names)) == len(names):
        raise ValueError(f"classes must be at least one name, none of them twice; got {list(names)}.")
    if absent := set(names) - set(known):
        raise wrong(folder, f"has no class {min(absent)!r}", f"one of {textwrap.shorten(', '.join(known), 100)}")
    train = [(path, name) for name in names for path in _of_class(folder / "train" / name / "images")]
    test = [(path, name) for path, name in _held_out(folder, known) if name in names]
    if absent := set(names) - {name for _, name in test}:
        raise wrong(folder / _ANNOTATIONS, f"no image of class {min(absent)!r}", "at least one")
    train_x, test_x = (_images([path for path, _ in files], opened) for files in (train, test))
    train_y, test_y = (np.array([names.index(name) for _, name in files], np.int32) for files in (train, test))
    return Dataset(train_x, train_y, test_x, test_y, classes=len(names), shape=(_SIDE, _SIDE, 3), names=names)


def _of_class(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.JPEG"))
    if not paths:
        raise wrong(folder, "has no files *.JPEG", "at least one")
    return paths


def _held_out(folder: Path, known: list[str]) -> Iterator[tuple[Path, str]]:
    for number, line in enumerate(lines(folder / _ANNOTATIONS, "names of files and their classes"), 1):
        image, name, *_ = [*line.split("\t"), ""]
        if name not in known:
            place = f"{folder / _ANNOTATIONS}: line {number}"
            raise wrong(place, f"class {name!r} of image {image!r}", "a class with a folder in train")
        if image != Path(image).name:
            raise wrong(
                f"{folder / _ANNOTATIONS}: line {number}", f"image {image!r}", "the name of a file in val/images"
            )
        yield folder / "val" / "images" / image, name


def _images(paths: list[Path], opened: Callable[..., Any]) -> np.ndarray:
    pixels = np.empty((len(paths), _SIDE, _SIDE, 3), np.uint8)
    wanted = f"a JPEG file of {_SIDE} x {_SIDE} pixels"
    for row, path in zip(pixels, paths, strict=True):
        with reading(path, wanted), opened(path, formats=["JPEG"]) as image:
            if image.size != (_SIDE, _SIDE):
                raise wrong(path, f"{image.width} x {image.height} pixels", wanted)
            row[...] = np.asarray(image.convert("RGB"))
    return pixels
