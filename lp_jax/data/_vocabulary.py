"""Words as numbers: their ids, those of their beginnings and ends, and their shapes."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PADDING, UNKNOWN = "<padding>", "<unknown>"
SHAPES = ("lower", "Capitalised", "UPPER", "miXed", "number", "letters and digits", "sign")
FEATURES = ("word", "suffix", "prefix", "shape")
_AFFIX = 3  # characters


def shape(word: str) -> str:
    """What a word looks like, one of `SHAPES`."""
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


def vocabulary(items: Iterable[str], min_count: int, reserved: Sequence[str]) -> tuple[str, ...]:
    """The reserved entries, then what there is at least ``min_count`` times, the most frequent first."""
    counts = Counter(items)
    kept = (item for item, count in counts.items() if count >= min_count)
    return (*reserved, *sorted(kept, key=lambda item: (-counts[item], item)))


class Features:
    """Turns words into rows of numbers, one column for each of `FEATURES`.

    Args:
        words: those to learn the vocabularies from.
        min_count: how often a word, a beginning or an end must be there to get an id of its own.
    """

    def __init__(self, words: Sequence[str], min_count: int):
        lower = [word.lower() for word in words]
        self.vocabularies = (
            vocabulary(lower, min_count, (PADDING, *(f"<unknown {shape}>" for shape in SHAPES))),
            vocabulary((word[-_AFFIX:] for word in lower), min_count, (PADDING, UNKNOWN)),
            vocabulary((word[:_AFFIX] for word in lower), min_count, (PADDING, UNKNOWN)),
            (PADDING, *SHAPES),
        )
        self._ids = [{entry: number for number, entry in enumerate(entries)} for entries in self.vocabularies]

    def __call__(self, words: Sequence[str]) -> np.ndarray:
        """The features of words, ``(words, columns)`` int32."""
        rows = []
        words_, suffixes, prefixes, shapes = self._ids
        for word in words:
            lower, number = word.lower(), shapes[shape(word)]
            rows.append(
                (
                    words_.get(lower, number),
                    suffixes.get(lower[-_AFFIX:], 1),
                    prefixes.get(lower[:_AFFIX], 1),
                    number,
                )
            )
        return np.array(rows, np.int32)
