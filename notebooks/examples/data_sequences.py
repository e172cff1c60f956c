r"""Sequences that papers train on: time series, and sentences with parts of speech. A script to read, to copy and to change.

    python notebooks/examples/data_sequences.py series ~/ucr/BasicMotions motions.npz

reads the two files whose names begin so, prints what is in them, and writes it as arrays for ``numpy.load``. Each function says
where its files come from. Copy the one that you need into your own script.

Files from the network may be damaged, or made to do harm. So a packed file may unpack to 256 MiB, or to 100 times its size, and
to no more. Nothing is unpickled. A file that does not fit raises a ValueError with the name of the file.
"""

import contextlib
import gzip
import re
import sys
from pathlib import Path

import conllu
import numpy as np
from sklearn.preprocessing import StandardScaler

from lp_jax.data import Dataset


@contextlib.contextmanager
def content(name):
    """Yield the text of a file, or of the one with ``.gz`` behind its name; an error in what is done with it names the file."""
    path = Path(f"{name}.gz") if Path(f"{name}.gz").exists() else Path(name)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            most = max(2**28, 100 * path.stat().st_size)
            raw = file.read(most + 1)
        check(len(raw) <= most, f"it unpacks to more than {most:,} bytes")
        yield raw.decode()
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def check(true, said):
    """Refuse a file unless ``true``. An assertion would vanish under ``python -O``."""
    if not true:
        raise ValueError(said)


def padded(sequences, dtype, fill=0):
    """Return sequences as one array ``(sequences, length of the longest, ...)``, with ``fill`` behind the others."""
    shape = len(sequences), max(map(len, sequences)), *np.shape(sequences[0])[1:]
    rows = np.full(shape, fill, dtype)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def series(name):
    """A problem of the UCR and UEA archives, NAME_TRAIN.ts and NAME_TEST.ts: https://timeseriesclassification.com

    Inputs are pairs, series padded with zeros ``(samples, time, channels)`` and their lengths, as `lp_jax.nn.GRU` takes them.
    Each channel is scaled to mean 0 and deviation 1 over the training series.
    """

    def read(split):
        with content(f"{name}_{split}.ts") as text:
            header, body = re.split(r"(?mi)^@data\s*$", text, maxsplit=1)
            classes = re.search(r"(?mi)^@classlabel\s+true\s+(.*)", header)
            check(classes, "no classes in the header")
            # A line is a series: its channels and its class, with colons between them.
            rows = [line.split(":") for line in body.splitlines() if line and line[0] != "#"]
            check(rows, "no series after @data")
            x = [np.array([c.split(",") for c in channels], float).T for *channels, _ in rows]
            check(all(np.isfinite(each).all() for each in x), "values are missing")
            names, channels = classes[1].split(), {each.shape[1] for each in x}
            check(len(channels) == 1, "unlike numbers of channels")
            return x, [names.index(row[-1].strip()) for row in rows], names, channels

    (x, y, names, channels), (test_x, test_y, *test) = read("TRAIN"), read("TEST")
    check([names, channels] == test, f"{name}: other classes or channels in the test series")
    scaler = StandardScaler().fit(np.concatenate(x))
    every, n = x + test_x, len(x)
    lengths = np.array([len(one) for one in every], np.int32)
    scaled = padded([scaler.transform(one) for one in every], np.float32)
    y = np.array(y + test_y, np.int32)
    parts = (scaled[:n], lengths[:n]), y[:n], (scaled[n:], lengths[n:]), y[n:]
    return Dataset(*parts, classes=len(names), shape=scaled.shape[1:], names=tuple(names))


def treebank(name):
    """Words and their parts of speech, NAME-train.conllu and NAME-test.conllu: https://universaldependencies.org (GUM, EWT)

    Inputs are numbers of words ``(sentences, words)``, 0 in the padding and 1 for words that occur once; labels are -1 there.
    """

    def read(split):
        with content(f"{name}-{split}.conllu") as text:
            # A token whose number is no integer stands for several words, or for none.
            words = [[t for t in s if isinstance(t["id"], int)] for s in conllu.parse(text)]
            return [[(t["form"].lower(), t["upos"]) for t in sentence] for sentence in words]

    train, test = read("train"), read("test")
    every, counts = np.unique([word for s in train for word, _ in s], return_counts=True)
    words = {word: number for number, word in enumerate(every[counts > 1].tolist(), start=2)}
    tags = sorted({tag for sentence in train for _, tag in sentence})
    x = [[words.get(word, 1) for word, _ in sentence] for sentence in train + test]
    y = [[tags.index(t) if t in tags else -1 for _, t in sentence] for sentence in train + test]
    x, y, n = padded(x, np.int32), padded(y, np.int32, fill=-1), len(train)
    parts = x[:n], y[:n], x[n:], y[n:]
    return Dataset(*parts, classes=len(tags), shape=x.shape[1:], names=tuple(tags))


def main(reader, name, out):
    found = {"series": series, "treebank": treebank}[reader](name)
    arrays = {"y": found.train_y, "test_y": found.test_y}
    for key, x in (("x", found.train_x), ("test_x", found.test_x)):
        arrays |= {key: x[0], f"{key}_lengths": x[1]} if reader == "series" else {key: x}
    print(f"{found.classes} classes:", *found.names)
    print({key: array.shape for key, array in arrays.items()})
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
