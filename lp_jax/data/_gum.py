"""Tagging words: parts of speech and morphological features of a Universal Dependencies treebank."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_jax import _check
from lp_jax.data._bucketed import UNLABELLED, Sequences
from lp_jax.data._conllu import Sentence, read_conllu
from lp_jax.data._dataset import DataError
from lp_jax.data._vocabulary import FEATURES, Features

_SPLITS = ("train", "dev", "test")


class Tagging(NamedTuple):
    """Sentences as numbers, and the tags of their words.

    Attributes:
        train: sentences to train with; inputs ``(words, features)`` int32, labels ``(words,)`` int32 in [0, classes).
        dev: sentences to make choices by.
        test: sentences held out.
        tags: what the labels stand for.
        features: names of the columns of the inputs.
        vocabularies: what the numbers in each column stand for; number 0 is padding in all of them.
        unseen: how many words of each split have a tag that training does not have; their labels are -1.
        test_words: the words of the sentences held out, to show.
    """

    train: Sequences
    dev: Sequences
    test: Sequences
    tags: tuple[str, ...]
    features: tuple[str, ...]
    vocabularies: tuple[tuple[str, ...], ...]
    unseen: dict[str, int]
    test_words: list[tuple[str, ...]]

    @property
    def classes(self) -> int:
        """Number of tags."""
        return len(self.tags)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of an embedding table for each column."""
        return tuple(map(len, self.vocabularies))


def gum(
    folder: str | os.PathLike[str],
    task: str = "upos",
    *,
    min_count: int = 2,
    max_length: int | None = None,
    longer: str = "split",
    strict: bool = False,
) -> Tagging:
    """GUM, or another treebank of Universal Dependencies, as a problem of tagging words.

    The folder has one file each whose name ends in ``-train.conllu``, ``-dev.conllu`` and ``-test.conllu``, plain or
    gzipped with ``.gz`` at its end. For each word there are four numbers:

    ========  ==================================================================================================
    word      the word in lower case; one that training has fewer than ``min_count`` times is unknown, and there
              is an id for the unknown ones of each shape
    suffix    its last three characters, in lower case; 1 is unknown
    prefix    its first three
    shape     lower case, capitalised, upper case, mixed, number, letters and digits, or signs only
    ========  ==================================================================================================

    Vocabularies and tags are those of the training sentences alone. Everything is 0 in padding only.

    Args:
        folder: where the files are.
        task: "upos" for parts of speech, or "feats" for morphological features, each combination being a tag.
        min_count: how often training must have a word, or its beginning or end, to give it a number.
        max_length: the longest sentence that a model takes, or None.
        longer: what becomes of longer sentences. "split": parts of ``max_length`` words and what remains, no word is
            lost; "cut": the words beyond are left out; "refuse": an error.
        strict: refuse tags that training does not have, instead of counting them and giving them no label.

    Returns:
        A `Tagging`, whose parts are for `bucketed`.

    Raises:
        DataError: for files that are missing or malformed, and where asked to, for sentences that are too long and tags
            that training does not have.
        ValueError: for a task or a treatment that is not known, and for counts below 1.
        TypeError: for counts that are no integers.

    Example:
        >>> from lp_jax import data
        >>> data.gum("no/such/folder")
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder: has 0 files *-train.conllu or *-train.conllu.gz; wanted one.

    Reference:
        Zeldes, "The GUM corpus: creating multilayer resources in the classroom", Language Resources and Evaluation 51
        (2017).
    """
    _check.one_of("task", task, ("upos", "feats"))
    _check.one_of("longer", longer, ("split", "cut", "refuse"))
    _check.integer("min_count", min_count, least=1)
    if max_length is not None:
        _check.integer("max_length", max_length, least=1)
    paths = {split: _find(Path(folder), split) for split in _SPLITS}
    sentences = {split: read_conllu(path) for split, path in paths.items()}
    features = Features([word for sentence in sentences["train"] for word in sentence.words], min_count)
    tags = tuple(sorted({tag for sentence in sentences["train"] for tag in getattr(sentence, task)}))
    numbers = {tag: number for number, tag in enumerate(tags)}
    parts, unseen = {}, {}
    words: dict[str, list[tuple[str, ...]]] = {split: [] for split in _SPLITS}
    for split, path in paths.items():
        x: list[np.ndarray] = []
        y: list[np.ndarray] = []
        for at, sentence in enumerate(sentences[split], 1):
            labels = np.array([numbers.get(tag, UNLABELLED) for tag in getattr(sentence, task)], np.int32)
            if strict and UNLABELLED in labels:
                _refuse_tag(path, at, sentence, int(labels.argmin()), task)
            if longer == "refuse" and max_length is not None and len(labels) > max_length:
                found = f"{len(labels)} words, beginning with {' '.join(sentence.words[:4])!r}"
                raise DataError(f"{path}: sentence {at}: {found}; wanted at most {max_length}.")
            x += _pieces(features(sentence.words), max_length, longer)
            y += _pieces(labels, max_length, longer)
            words[split] += _pieces(tuple(sentence.words), max_length, longer)
        parts[split] = Sequences(x, y)
        unseen[split] = int(sum(np.sum(labels == UNLABELLED) for labels in y))
    return Tagging(
        **parts,
        tags=tags,
        features=FEATURES,
        vocabularies=features.vocabularies,
        unseen=unseen,
        test_words=words["test"],
    )


def _find(folder: Path, split: str) -> Path:
    ends = f"-{split}.conllu", f"-{split}.conllu.gz"
    found = sorted(path for end in ends for path in folder.glob(f"*{end}"))
    if len(found) != 1:
        raise DataError(f"{folder}: has {len(found)} files *{ends[0]} or *{ends[1]}; wanted one.")
    return found[0]


def _refuse_tag(path: Path, at: int, sentence: Sentence, word: int, task: str) -> None:
    found = f"{task} {getattr(sentence, task)[word]!r} of {sentence.words[word]!r}"
    raise DataError(f"{path}: sentence {at}: {found}; wanted one that the training sentences have, as strict=True.")


def _pieces(sequence: Any, max_length: int | None, longer: str) -> list[Any]:
    if max_length is None or len(sequence) <= max_length:
        return [sequence]
    if longer == "cut":
        return [sequence[:max_length]]
    return [sequence[start : start + max_length] for start in range(0, len(sequence), max_length)]
