"""The data sets that networks of the benchmarks are trained on, from a folder with mnist10k/, gum/ and ucr/.

Images and series are read by functions of scripts that users copy, data_pictures.py and data_sequences.py in
``notebooks/examples``. Here are words of a treebank with their parts of speech, batches of sentences of about one length, and a
text as characters.
"""

import gzip
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_jax.data import Dataset

_SCRIPTS = Path(__file__).resolve().parents[1] / "notebooks" / "examples"
SHAPES = ("lower", "Capitalised", "UPPER", "miXed", "number", "letters and digits", "sign")
PADDING, UNKNOWN = "<padding>", "<unknown>"
UNLABELLED = -1

Sentence = list[tuple[str, str]]
"""Words and their parts of speech."""


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, _SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mnist(folder: Path) -> Dataset:
    """MNIST's images, with pixels from 0 to 1."""
    found: Dataset = _script("data_pictures").mnist(folder)
    return found


def timeseries(folder: Path, name: str) -> Dataset:
    """A problem of the UCR and UEA archives: pairs of padded series and their lengths."""
    found: Dataset = _script("data_sequences").series(folder / name)
    return found


class Sequences(NamedTuple):
    """Sequences and their labels, each of its own length: ``(length, *features)``; and ``(length,)``, -1 for none."""

    x: list[np.ndarray]
    y: list[np.ndarray]


class Tagging(NamedTuple):
    """Sentences as numbers, four for each word, and the tags of their words."""

    train: Sequences
    test: Sequences
    tags: tuple[str, ...]
    sizes: tuple[int, ...]
    """Rows of an embedding table for each of the four numbers."""

    @property
    def classes(self) -> int:
        return len(self.tags)


def sentences(path: Path) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file, without multiword tokens and empty words."""
    import conllu

    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [
            [(token["form"], token["upos"]) for token in tokens if isinstance(token["id"], int)]
            for tokens in conllu.parse_incr(file)
        ]


def shape(word: str) -> str:
    """Return the shape of a word, one of `SHAPES`."""
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


def _columns(word: str) -> tuple[str, str, str, str]:
    lower = word.lower()
    return lower, lower[-3:], lower[:3], shape(word)


def _vocabularies(words: Iterable[str]) -> list[dict[str, int]]:
    """Return the numbers of the entries of each column: padding, unknown ones, then the others, most frequent first."""
    unknown = (tuple(f"<unknown {shape}>" for shape in SHAPES), (UNKNOWN,), (UNKNOWN,), SHAPES)
    tables = []
    for column, reserved in zip(zip(*map(_columns, words), strict=True), unknown, strict=True):
        counts = Counter(entry for entry in column if entry not in reserved)
        frequent = sorted(counts, key=lambda entry: (-counts[entry], entry))
        known = (PADDING, *reserved, *(entry for entry in frequent if counts[entry] > 1))
        tables.append({entry: number for number, entry in enumerate(known)})
    return tables


def gum(folder: Path, *, max_length: int) -> Tagging:
    """Return a treebank's sentences, longer ones in pieces of ``max_length`` words.

    A word has four numbers: of itself in lower case, of its last three letters, of its first three, and of its shape. Those
    that occur once in training are unknown, and an unknown word has the number of its shape. 0 is padding.
    """
    train, test = (
        sentences(next(Path(folder).glob(f"*-{part}.conllu*"))) for part in ("train", "test")
    )
    tables = _vocabularies(word for sentence in train for word, _ in sentence)
    tags = sorted({tag for sentence in train for _, tag in sentence})

    def row(word: str) -> Sequence[int]:
        *parts, kind = _columns(word)
        number = tables[3][kind]
        known = zip(tables[:3], parts, (number, 1, 1), strict=True)
        return *(table.get(part, unknown) for table, part, unknown in known), number

    def numbers(whole: list[Sentence]) -> Sequences:
        pieces = [s[at : at + max_length] for s in whole for at in range(0, len(s), max_length)]
        labels = [[tags.index(t) if t in tags else UNLABELLED for _, t in s] for s in pieces]
        x = [np.array([row(word) for word, _ in piece], np.int32) for piece in pieces]
        return Sequences(x, [np.array(each, np.int32) for each in labels])

    return Tagging(numbers(train), numbers(test), tuple(tags), tuple(map(len, tables)))


def padded(sequences: Sequence[np.ndarray], length: int, *, fill: int = 0) -> np.ndarray:
    """Return sequences as one array ``(sequences, length, *features)`` with ``fill`` after short ones."""
    result = np.full((len(sequences), length, *sequences[0].shape[1:]), fill, sequences[0].dtype)
    for row, sequence in zip(result, sequences, strict=True):
        row[: len(sequence)] = sequence
    return result


def bucketed(
    data: Sequences, batch_size: int, *, lengths: Sequence[int], seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return the shuffled batches of an epoch, each padded to one of a few lengths: 0 in the inputs, -1 in the labels."""
    random = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    buckets = np.searchsorted(lengths, list(map(len, data.x)))
    order = random.permutation(len(data.x))
    order = order[np.argsort(buckets[order], kind="stable")]
    whole = len(order) - len(order) % batch_size
    parts = [order[start : start + batch_size] for start in range(0, whole, batch_size)]
    for part in (parts[number] for number in random.permutation(len(parts))):
        length = lengths[buckets[part[-1]]]
        x, y = ([each[i] for i in part] for each in data)
        yield padded(x, length), padded(y, length, fill=UNLABELLED)


def characters(path: Path, length: int = 128, test_fraction: float = 0.1) -> Dataset:
    """Return the words of a treebank as windows of characters; the class at each place is the next character.

    Words are joined by spaces, and sentences by line feeds. The last part is held out. Characters that occur once in the
    training part are one class, number 1; 0 is padding.
    """
    lines = [" ".join(word for word, _ in sentence) for sentence in sentences(path)]
    codes = np.frombuffer("\n".join(lines).encode("utf-32-le"), "<u4")
    first_held_out = len(codes) - round(test_fraction * len(codes))
    seen, counts = np.unique(codes[:first_held_out], return_counts=True)
    known = seen[counts > 1]

    def windows(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(known, part)
        is_known = np.append(known, np.uint32(0xFFFFFFFF))[at] == part
        ids = np.where(is_known, at + 2, 1).astype(np.int32)
        size = (len(ids) - 1) // length * length
        return ids[:size].reshape(-1, length), ids[1 : size + 1].reshape(-1, length)

    parts = *windows(codes[:first_held_out]), *windows(codes[first_held_out:])
    names = (PADDING, UNKNOWN, *map(chr, known))
    return Dataset(*parts, classes=len(names), shape=(length,), names=names)
