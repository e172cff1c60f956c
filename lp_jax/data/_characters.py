"""Text as characters, each to be guessed from those before it."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import Dataset, check_fraction, lines, wrong
from lp_jax.data._gum import PADDING, UNKNOWN, read_conllu

_RESERVED = (PADDING, UNKNOWN)


def characters(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    length: int = 128,
    test_fraction: float = 0.1,
    *,
    min_count: int = 2,
) -> Dataset:
    """Windows of a text. The class at each place is the next character.

    The last part of the text is held out. Windows follow each other without overlap; what does not fill a last one is
    left out. Of a treebank, a file whose name ends in ``.conllu`` or ``.conllu.gz``, the text is its sentences, one a
    line.

    The vocabulary is made of the training part: the characters that it has at least ``min_count`` times. All others, in
    either part, are one class, "<unknown>", number 1, an input and something to guess like any other; so that every
    character of the part held out counts. Number 0 is padding, of which there is none here.

    Args:
        path: a text file in UTF-8, plain or gzipped, or several of them, which are joined with a line feed.
        length: characters in a window.
        test_fraction: fraction of the characters that is held out, in (0, 1).
        min_count: how often training must have a character to give it a number.

    Returns:
        A `Dataset` of inputs ``(length,)`` int32 and classes ``(samples, length)`` int32, both in [0, classes); its
        ``names`` are the vocabulary.

    Raises:
        DataError: for a file that is missing, damaged or not in UTF-8, and for a text that has no window of this length
            for training or none to hold out.
        ValueError: for a fraction outside (0, 1), no paths, and a length or count below 1.
        TypeError: for a length or count that is no integer.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "song.txt"
        ...     _ = path.write_text("la la la la la, la la")
        ...     song = data.characters(path, length=4, test_fraction=0.3)
        >>> song.names
        ('<padding>', '<unknown>', ' ', 'a', 'l')
        >>> song.train_x[0], song.train_y[0]
        (array([4, 3, 2, 4], dtype=int32), array([3, 2, 4, 3], dtype=int32))

    Reference:
        Karpathy, Johnson, Li, "Visualizing and understanding recurrent networks", arXiv:1506.02078.
    """
    check_fraction(test_fraction)
    _check.integer("length", length, least=1)
    _check.integer("min_count", min_count, least=1)
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else list(map(Path, path))
    if not paths:
        raise ValueError("path must be a file or several; got none.")
    text = "\n".join(map(_text, paths))
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    held_out = round(test_fraction * len(codes))
    parts = codes[: len(codes) - held_out], codes[len(codes) - held_out :]
    for part, purpose in zip(parts, ("train with", "hold out"), strict=True):
        if len(part) <= length:
            wanted = f"more than {length}, a window and the character after it"
            raise wrong(paths[0], f"{len(part)} characters to {purpose}", wanted)
    seen, counts = np.unique(parts[0], return_counts=True)
    known = seen[counts >= min_count]
    (train_x, train_y), (test_x, test_y) = (_windows(_ids(part, known), length) for part in parts)
    names = (*_RESERVED, *map(chr, known))
    return Dataset(train_x, train_y, test_x, test_y, classes=len(names), shape=(length,), names=names)


def _text(path: Path) -> str:
    if path.name.removesuffix(".gz").endswith(".conllu"):
        return "\n".join(sentence.text for sentence in read_conllu(path))
    return "\n".join(lines(path, "text in UTF-8"))


def _ids(codes: np.ndarray, known: np.ndarray) -> np.ndarray:
    at = np.searchsorted(known, codes)
    found = np.append(known, np.uint32(0xFFFFFFFF))[at] == codes
    return np.where(found, at + len(_RESERVED), 1).astype(np.int32)


def _windows(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    count = (len(ids) - 1) // length
    size = count * length
    return ids[:size].reshape(count, length), ids[1 : size + 1].reshape(count, length)
