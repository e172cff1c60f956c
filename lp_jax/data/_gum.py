"""Tagging the words of a Universal Dependencies treebank, in CoNLL-U files: one word per line, ten columns."""

import io
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._batches import UNLABELLED, Sequences
from lp_jax.data._dataset import StrPath, lines, reading, require, wrong

_UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"


Strings = tuple[str, ...]
"""Words, tags, or entries of a vocabulary."""


class Sentence(NamedTuple):
    """Words, their parts of speech, and the comment ``# text``, or the words joined by spaces."""

    words: Strings
    upos: Strings
    text: str


def read_conllu(path: Path) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file in their order, without multiword tokens (1-2) and empty words (1.1)."""
    wanted = "a CoNLL-U file"
    raw = dict.fromkeys(("xpos", "feats", "head", "deps", "misc"), lambda row, column: row[column])
    parsed = require("conllu").parse_incr(
        io.StringIO("\n".join(lines(path, wanted))), field_parsers=raw
    )
    sentences: list[Sentence] = []
    with reading(path, wanted):
        for tokens in filter(None, parsed):
            place = f"{path}: sentence {len(sentences) + 1}"
            words = [token for token in tokens if not isinstance(token["id"], tuple)]
            ids = [token["id"] for token in words]
            if not words or ids != list(range(1, len(ids) + 1)):
                raise wrong(place, f"ids {' '.join(map(str, ids))}", "1, 2, 3 and so on")
            for token in words:
                if len(token) != 10 or not token["form"]:
                    got = f"{len(token)} columns, word {token.get('form')!r}"
                    raise wrong(place, got, "10 columns and a word in the second")
                if token["upos"] not in _UPOS.split():
                    raise wrong(
                        place,
                        f"part of speech {token['upos']!r} of {token['form']!r}",
                        f"one of {_UPOS}",
                    )
            form, upos = (tuple(token[column] for token in words) for column in ("form", "upos"))
            sentences.append(Sentence(form, upos, tokens.metadata.get("text") or " ".join(form)))
    if not sentences:
        raise wrong(path, "no sentence in the whole file", "at least one")
    return sentences


PADDING = "<padding>"
UNKNOWN = "<unknown>"
SHAPES = ("lower", "Capitalised", "UPPER", "miXed", "number", "letters and digits", "sign")


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


def vocabularies(words: Iterable[str], min_count: int) -> list[Strings]:
    """Return the entries of each column by number: padding, unknown ones, then the others, most frequent first."""
    unknown = (tuple(f"<unknown {shape}>" for shape in SHAPES), (UNKNOWN,), (UNKNOWN,), SHAPES)
    tables = []
    for column, reserved in zip(zip(*map(_columns, words), strict=True), unknown, strict=True):
        counts = Counter(entry for entry in column if entry not in reserved)
        frequent = sorted(counts, key=lambda entry: (-counts[entry], entry))
        tables.append(
            (PADDING, *reserved, *(entry for entry in frequent if counts[entry] >= min_count))
        )
    return tables


def _columns(word: str) -> tuple[str, str, str, str]:
    lower = word.lower()
    return lower, lower[-3:], lower[:3], shape(word)


class Tagging(NamedTuple):
    """Sentences as numbers, and the tags of their words; `gum` says what each part is."""

    train: Sequences
    dev: Sequences
    test: Sequences
    tags: Strings
    vocabularies: tuple[Strings, ...]
    test_words: list[Strings]

    @property
    def classes(self) -> int:
        """Number of tags."""
        return len(self.tags)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of an embedding table for each column."""
        return tuple(map(len, self.vocabularies))


def gum(folder: StrPath, *, min_count: int = 2, max_length: int | None = None) -> Tagging:
    """Load GUM, or another treebank of Universal Dependencies, to tag words with their parts of speech.

    The folder has one file each whose name ends in ``-train.conllu``, ``-dev.conllu`` and ``-test.conllu``, plain or
    gzipped with ``.gz`` at its end. Each word has four numbers:

    ========  ==================================================================================================
    word      the word in lower case; a word with fewer than ``min_count`` occurrences in training is unknown, with
              one number for each shape
    suffix    its last three characters, in lower case; 1 is unknown
    prefix    its first three
    shape     lower case, capitalised, upper case, mixed, number, letters and digits, or signs only
    ========  ==================================================================================================

    Vocabularies and tags come only from the training sentences. Only padding has number 0.

    Args:
        folder: folder of the files.
        min_count: smallest number of occurrences in training for a word, a prefix or a suffix of the vocabulary.
        max_length: longer sentences are split into parts of this length, the last one shorter. None leaves them whole.

    Returns:
        A named tuple. ``train``, ``dev`` and ``test`` are for `bucketed`: inputs ``(words, 4)`` and labels ``(words,)``, int32,
        -1 for a tag that does not occur in training. ``tags`` are the names of the ``classes`` labels. ``vocabularies`` are the
        entries of each column, and ``sizes`` their numbers. ``test_words`` are the words of the held-out sentences.

    Raises:
        ModuleNotFoundError: if conllu is not installed.
        DataError: if files are missing or malformed, or a part of speech is none of Universal Dependencies' 17.
        ValueError: if a count is below 1.
        TypeError: if a count is not an integer.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for split in ("train", "dev", "test"):
        ...     rows = ["1 Rivers _ NOUN _ _ _ _ _ _", "2 flow _ VERB _ _ _ _ _ _", "", ""]
        ...     _ = (folder / f"two-{split}.conllu").write_text(chr(10).join(rows).replace(" ", chr(9)))
        >>> data.gum(folder).tags
        ('NOUN', 'VERB')

    Reference:
        Zeldes, "The GUM corpus: creating multilayer resources in the classroom", Language Resources and Evaluation 51
        (2017); the format: https://universaldependencies.org/format.html
    """
    _check.integer("min_count", min_count, least=1)
    if max_length is not None:
        _check.integer("max_length", max_length, least=1)
    sentences = {
        split: read_conllu(_find(Path(folder), split)) for split in ("train", "dev", "test")
    }
    known = vocabularies(
        (word for sentence in sentences["train"] for word in sentence.words), min_count
    )
    ids = [{entry: number for number, entry in enumerate(entries)} for entries in known]
    tags = tuple(sorted({tag for sentence in sentences["train"] for tag in sentence.upos}))
    numbers = {tag: number for number, tag in enumerate(tags)}

    def row(word: str) -> tuple[int, ...]:
        word, suffix, prefix, kind = _columns(word)
        number = ids[3][kind]  # an unknown word has the number of its shape
        return ids[0].get(word, number), ids[1].get(suffix, 1), ids[2].get(prefix, 1), number

    def pieces(whole: Iterable[Strings]) -> list[Strings]:
        longest = max_length or sys.maxsize
        return [
            entries[start : start + longest]
            for entries in whole
            for start in range(0, len(entries), longest)
        ]

    parts = {}
    words = {}
    for split, found in sentences.items():
        words[split] = pieces(sentence.words for sentence in found)
        x = [np.array(list(map(row, piece)), np.int32) for piece in words[split]]
        labels = [
            [numbers.get(tag, UNLABELLED) for tag in piece]
            for piece in pieces(s.upos for s in found)
        ]
        parts[split] = Sequences(x, [np.array(piece, np.int32) for piece in labels])
    return Tagging(**parts, tags=tags, vocabularies=tuple(known), test_words=words["test"])


def _find(folder: Path, split: str) -> Path:
    ends = f"-{split}.conllu", f"-{split}.conllu.gz"
    paths = [path for end in ends for path in folder.glob(f"*{end}")]
    if len(paths) != 1:
        raise wrong(folder, f"has {len(paths)} files *{ends[0]} or *{ends[1]}", "one")
    return paths[0]
