"""CoNLL-U files, the format of Universal Dependencies: a word a line, ten columns, a blank line after a sentence."""

import io
import os
from pathlib import Path
from typing import Any, NamedTuple

from lp_jax.data._read import lines, needed, reading, wrong

_UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"
_COLUMNS = 10


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
    r"""Read the sentences of a CoNLL-U file, plain or gzipped (``.gz``), in their order, with the package ``conllu``.

    Lines of several words in one (1-2) and of words that are not written (1.1) are left out.

    Raises:
        ModuleNotFoundError: without conllu.
        DataError: for a file that is missing, without a sentence, damaged or not in UTF-8, and for a sentence with fewer
            than 10 columns, a word without letters, ids out of order, or a part of speech that is none of the 17 of
            Universal Dependencies.

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
    path, wanted = Path(path), "a CoNLL-U file"
    raw = dict.fromkeys(("xpos", "feats", "head", "deps", "misc"), lambda row, column: row[column])
    parsed = needed("conllu").parse_incr(io.StringIO("\n".join(lines(path, wanted))), field_parsers=raw)
    sentences: list[Sentence] = []
    with reading(path, wanted):
        for tokens in parsed:
            if tokens:
                sentences.append(_sentence(f"{path}: sentence {len(sentences) + 1}", tokens))
    if not sentences:
        raise wrong(path, "no sentence in the whole file", "at least one")
    return sentences


def _sentence(place: str, tokens: Any) -> Sentence:
    words = [token for token in tokens if not isinstance(token["id"], tuple)]
    ids = [token["id"] for token in words]
    if not words or ids != list(range(1, len(ids) + 1)):
        raise wrong(place, f"ids {' '.join(map(str, ids))}", "1, 2, 3 and so on")
    for token in words:
        if len(token) != _COLUMNS or not token["form"]:
            raise wrong(
                place, f"{len(token)} columns, word {token.get('form')!r}", "10 columns and a word in the second"
            )
        if token["upos"] not in _UPOS.split():
            raise wrong(place, f"part of speech {token['upos']!r} of {token['form']!r}", f"one of {_UPOS}")
    form, upos, feats = (tuple(token[column] for token in words) for column in ("form", "upos", "feats"))
    return Sentence(form, upos, feats, tokens.metadata.get("text") or " ".join(form))
