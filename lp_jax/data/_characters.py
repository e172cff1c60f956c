"""Text as characters; the task is to predict the next one."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import Dataset, Samples, StrPath, check_fraction, lines, wrong
from lp_jax.data._gum import PADDING, UNKNOWN, read_conllu

_RESERVED = (PADDING, UNKNOWN)


def characters(
    path: StrPath | Sequence[StrPath],
    length: int = 128,
    test_fraction: float = 0.1,
    *,
    min_count: int = 2,
) -> Dataset:
    """Load a text as windows of characters. The class at each position is the next character.

    The last part of the text is held out. Windows follow each other without overlap; a last window that is not full is left
    out. The text of a treebank, a file whose name ends in ``.conllu`` or ``.conllu.gz``, is its sentences, one per line.

    The vocabulary is the characters that occur at least ``min_count`` times in the training part. All others, in both parts,
    are one class, "<unknown>", number 1. It is an input and a class like any other, so every character of the held-out part
    counts. Number 0 is for padding, which this data set does not have.

    Args:
        path: a text file in UTF-8, plain or gzipped, or several files, which are joined with a line feed.
        length: characters in a window.
        test_fraction: fraction of the characters that is held out, in (0, 1).
        min_count: smallest number of occurrences in the training part for a character of the vocabulary.

    Returns:
        A `Dataset` of inputs ``(length,)`` int32 and classes ``(samples, length)`` int32, both in [0, classes); its
        ``names`` are the vocabulary.

    Raises:
        DataError: if a file is missing, damaged or not in UTF-8, or the text has no window of this length for training or none
            to hold out.
        ValueError: if the fraction is outside (0, 1), there are no paths, or a length or count is below 1.
        TypeError: if a length or count is not an integer.

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
    codes = np.frombuffer("\n".join(map(_text, paths)).encode("utf-32-le"), "<u4")
    first_held_out = len(codes) - round(test_fraction * len(codes))
    seen, counts = np.unique(codes[:first_held_out], return_counts=True)
    known = seen[counts >= min_count]

    def windows(part: np.ndarray, purpose: str) -> Samples:
        if len(part) <= length:
            wanted = f"more than {length}, a window and the character after it"
            raise wrong(paths[0], f"{len(part)} characters to {purpose}", wanted)
        at = np.searchsorted(known, part)
        is_known = np.append(known, np.uint32(0xFFFFFFFF))[at] == part
        ids = np.where(is_known, at + len(_RESERVED), 1).astype(np.int32)
        size = (len(ids) - 1) // length * length
        return ids[:size].reshape(-1, length), ids[1 : size + 1].reshape(-1, length)

    train = windows(codes[:first_held_out], "train with")
    test = windows(codes[first_held_out:], "hold out")
    names = (*_RESERVED, *map(chr, known))
    return Dataset(*train, *test, classes=len(names), shape=(length,), names=names)


def _text(path: Path) -> str:
    if path.name.removesuffix(".gz").endswith(".conllu"):
        return "\n".join(sentence.text for sentence in read_conllu(path))
    return "\n".join(lines(path, "text in UTF-8"))
