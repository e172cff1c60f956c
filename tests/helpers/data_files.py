"""Small files for the loaders to read, and what they say about bad ones."""

import contextlib
import gzip
import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from lp_jax import data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def write(path, content):
    """Text or bytes in a file, packed where its name says so; folders are made."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def refused(expected, call, *arguments, **options):
    """A DataError: one line that begins as expected, the file first, and says what is wanted."""
    with pytest.raises(data.DataError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in message and message.endswith(".")
    assert message.startswith(str(expected)) and "; wanted " in message


MNIST = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def idx(array):
    """An array of bytes as an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(folder, *arrays):
    """Images and labels to train with and to test with, as MNIST's four files, the first of them gzipped."""
    for name, array in zip((f"{MNIST[0]}.gz", *MNIST[1:]), arrays, strict=True):
        write(folder / name, idx(array.astype(np.uint8)))
    return folder


def row(number, word, upos="NOUN"):
    """A line of CoNLL-U."""
    return "\t".join([str(number), word, word.lower(), upos, "_", "_", "0", "root", "_", "_"])


def conllu(*sentences):
    """CoNLL-U of sentences, each a list of (word, part of speech)."""
    return "".join(
        "".join(row(i, *token) + "\n" for i, token in enumerate(s, 1)) + "\n" for s in sentences
    )


def treebank(folder, train, dev=None, test=None):
    for split, sentences in (("train", train), ("dev", dev or train), ("test", test or train)):
        write(folder / f"xx-ud-{split}.conllu", conllu(*sentences))
    return folder


def ragged(seed=0, count=103, longest=60):
    """Sequences of many lengths and their labels, those of sequence i all i."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    x = [
        np.stack([np.full(n, i + 1), np.arange(1, n + 1)], 1).astype(np.int32)
        for i, n in enumerate(lengths)
    ]
    return data.Sequences(x, [np.full(n, i, np.int32) for i, n in enumerate(lengths)])


def run_page(package):
    """The example of docs/data.md that imports a package, and what it should print."""
    (code,) = (
        c
        for c in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        if f"import {package}\n" in c
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"docs/data.md: {package}", "exec"), {"__name__": "example"})
    promised = re.findall(r"print.*# (.*)", code)
    assert out.getvalue().splitlines() == promised and promised
