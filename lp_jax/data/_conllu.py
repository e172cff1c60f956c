"""CoNLL-U files, the format of Universal Dependencies: a word a line, ten columns, a blank line after a sentence."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from lp_jax.data._dataset import DataError
from lp_jax.data._read import lines, wrong

UPOS = (
    "ADJ",
    "ADP",
    "ADV",
    "AUX",
    "CCONJ",
    "DET",
    "INTJ",
    "NOUN",
    "NUM",
    "PART",
    "PRON",
    "PROPN",
    "PUNCT",
    "SCONJ",
    "SYM",
    "VERB",
    "X",
)
_COLUMNS = 10
_ID = re.compile(r"([0-9]+)(?:([-.])([0-9]+))?")
_TEXT = re.compile(r"# *text *= *(.*)")


class Sentence(NamedTuple):
    """A sentence and what is known of its words.

    Attributes:
        words: as they are written.
        upos: their universal parts of speech, like ``NOUN``.
        feats: their morphological features as they stand in the file, like ``Case=Nom|Number=Sing``; ``_`` for none.
        text: the sentence as it was written, of the comment ``# text``; without one the words, joined by spaces.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    feats: tuple[str, ...]
    text: str


def read_conllu(path: str | os.PathLike[str]) -> list[Sentence]:
    r"""Read the sentences of a CoNLL-U file, plain or gzipped.

    Comments are skipped, and so are the lines of several words in one (1-2) and of words that are not written (1.1).

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.

    Returns:
        The sentences in the order of the file.

    Raises:
        DataError: for a file that is missing, without a sentence, damaged or not in UTF-8, and for a line that has not 10
            columns, no word, an id out of order, or a part of speech that is none of the 17 of Universal Dependencies.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> rows = ["1 Rivers river NOUN _ Number=Plur 2 nsubj _ _", "2 flow flow VERB _ _ 0 root _ _", "", ""]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "two-words.conllu"
        ...     _ = path.write_text("\n".join(rows).replace(" ", "\t"))
        ...     data.read_conllu(path)
        [Sentence(words=('Rivers', 'flow'), upos=('NOUN', 'VERB'), feats=('Number=Plur', '_'), text='Rivers flow')]

    Reference:
        De Marneffe, Manning, Nivre, Zeman, "Universal Dependencies", Computational Linguistics 47 (2021); the format:
        https://universaldependencies.org/format.html
    """
    path = Path(path)
    sentences: list[Sentence] = []
    rows: list[tuple[str, str, str]] = []
    text = ""
    for number, line in enumerate([*lines(path, "a CoNLL-U file"), ""], 1):
        if line.startswith("#"):
            if comment := _TEXT.fullmatch(line):
                text = comment[1]
        elif line:
            row = _row(path, number, line, len(rows) + 1)
            rows += [row] if row else []
        else:
            if rows:
                words, upos, feats = zip(*rows, strict=True)
                sentences.append(Sentence(words, upos, feats, text or " ".join(words)))
            rows, text = [], ""
    if not sentences:
        raise DataError(f"{path}: line 1: no sentence in the whole file; wanted at least one.")
    return sentences


def _row(path: Path, number: int, line: str, following: int) -> tuple[str, str, str] | None:
    """Word, part of speech and features; None for a line that is no word."""
    columns = line.split("\t")
    if len(columns) != _COLUMNS:
        raise wrong(path, number, f"{len(columns)} columns", f"{_COLUMNS}, with tabs between them")
    match = _ID.fullmatch(columns[0])
    if not match:
        raise wrong(path, number, f"id {columns[0]!r}", "a number, several words in one (1-2) or an empty node (1.1)")
    first, kind, last = int(match[1]), match[2], int(match[3] or 0)
    if kind == "-":
        in_order = following == first < last
    elif kind == ".":
        in_order = first == following - 1
    else:
        in_order = first == following
    if not in_order:
        raise wrong(path, number, f"id {columns[0]}", f"ids in order, the next word being {following}")
    if kind:
        return None
    if not columns[1]:
        raise wrong(path, number, "a word without letters", "one in the second column")
    if columns[3] not in UPOS:
        tags = ", ".join(UPOS)
        raise wrong(path, number, f"part of speech {columns[3]!r} of {columns[1]!r}", f"one of {tags}")
    return columns[1], columns[3], columns[5]
