"""Words as numbers: their ids, those of their beginnings and ends, and their shapes."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PADDING, UNKNOWN = "<padding>", "<unknown>"
SHAPES = ("lower", "Capitalised", "UPPER", "miXed", "number", "letters and digits", "sign")
FEATURES = ("word", "suffix", "prefix", "shape")


def shape(word: str) -> str:
    """Return what a word looks like, one of `SHAPES`."""
    letters = any(map(str.isalpha, word))
    if any(map(str.isdigit, word)):
        return "letters and digits" if letters else "number"
    if not letters:
        return "sign"
    if word.islower():
        return "lower"
    if word[0].isupper() and not any(map(str.isupper, word[1:])):
        return "Capitalised"
    return "UPPER" if word.isupper() else "miXed"


class Features:
    """Turns words into rows of numbers, one column for each of `FEATURES`."""

    def __init__(self, words: Iterable[str], min_count: int):
        unknown = (tuple(f"<unknown {shape}>" for shape in SHAPES), (UNKNOWN,), (UNKNOWN,), SHAPES)
        tables = []
        for column, reserved in zip(zip(*map(_columns, words), strict=True), unknown, strict=True):
            counts = Counter(entry for entry in column if entry not in reserved)
            frequent = sorted(counts, key=lambda entry: (-counts[entry], entry))
            tables.append((PADDING, *reserved, *(entry for entry in frequent if counts[entry] >= min_count)))
        self.vocabularies = tuple(tables)
        self._ids = [{entry: number for number, entry in enumerate(entries)} for entries in tables]

    def __call__(self, words: Sequence[str]) -> np.ndarray:
        """Return the features of words, ``(words, columns)`` int32; those of an unknown word begin with its shape's."""
        rows = []
        for word, suffix, prefix, kind in map(_columns, words):
            of_word, of_suffix, of_prefix, of_shape = self._ids
            number = of_shape[kind]
            rows.append((of_word.get(word, number), of_suffix.get(suffix, 1), of_prefix.get(prefix, 1), number))
        return np.array(rows, np.int32)


def _columns(word: str) -> tuple[str, str, str, str]:
    lower = word.lower()
    return lower, lower[-3:], lower[:3], shape(word)
