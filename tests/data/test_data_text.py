"""Words, their features and tags, characters; and batches of sentences of different lengths."""

import gzip
import itertools

import numpy as np
import pytest
from data_files import conllu, ragged, refused, row, treebank, write

from lp_jax import data
from lp_jax.data._gum import SHAPES, read_conllu, shape

CATS = [("Cats", "NOUN"), ("sleep", "VERB"), (".", "PUNCT")]
DOGS = [("dogs", "NOUN"), ("sleep", "VERB"), ("and", "CCONJ"), ("cats", "NOUN")]


def test_sentences_of_a_file(tmp_path):
    one = [
        ("1-2", "Don't", "_"),
        (1, "Do", "AUX"),
        (2, "n't", "PART"),
        ("2.1", "you", "PRON"),
        (3, "go", "VERB"),
    ]
    two = [("0.1", "unsaid", "NOUN"), (1, "# 5", "SYM"), (2, "New York\u2028City", "PROPN")]
    one, two = (
        "\n".join(itertools.starmap(row, words)) for words in ([*one, (4, ".", "PUNCT")], two)
    )
    content = f"# sent_id = 1\n# text = Don't go.\n{one}\n\n\n{two}"
    for name in ("a.conllu", "a.conllu.gz"):
        for text in (content, content + "\n\n", content.replace("\n", "\r\n"), "\ufeff" + content):
            first, second = read_conllu(write(tmp_path / name, text))
            assert first.words == ("Do", "n't", "go", ".") and first.upos == (
                "AUX",
                "PART",
                "VERB",
                "PUNCT",
            )
            assert first.text == "Don't go."
            assert (
                second.words == ("# 5", "New York\u2028City")
                and second.text == "# 5 New York\u2028City"
            )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("# only\n# comments", "no sentence in the whole file; wanted at least one"),
        (
            "1\tword\tword\tNOUN",
            "sentence 1: 4 columns, word 'word'; wanted 10 columns and a word in the second",
        ),
        (
            "1 word word NOUN _ _ 0 root _ _",
            "cannot be read (Invalid line format, line must contain either tabs or",
        ),
        (row(2, "late"), "sentence 1: ids 2; wanted 1, 2, 3 and so on"),
        (row(1, "one") + "\n" + row(3, "three"), "sentence 1: ids 1 3; wanted 1, 2, 3"),
        (row("_", "none"), "sentence 1: ids None; wanted 1, 2, 3"),
        (row("1.1", "unsaid"), "sentence 1: ids ; wanted 1, 2, 3"),
        (
            row("one", "word"),
            "cannot be read (Failed parsing field 'id': 'one' is not a valid ID.)",
        ),
        (
            row(1, "word", "_"),
            "sentence 1: part of speech '_' of 'word'; wanted one of ADJ ADP ADV",
        ),
        (row(1, "word", "NN"), "sentence 1: part of speech 'NN' of 'word'; wanted one of ADJ"),
        (
            row(1, "", "NOUN"),
            "sentence 1: 10 columns, word ''; wanted 10 columns and a word in the second",
        ),
    ],
)
def test_a_malformed_sentence_is_refused(tmp_path, lines, expected):
    path = write(tmp_path / "a.conllu.gz", f"# first\n{lines}\n\n")
    refused(f"{path}: {expected}", read_conllu, path)
    write(path, f"# first\n{conllu(CATS)}{lines}\n\n")
    if expected.startswith("sentence"):
        refused(f"{path}: {expected.replace('sentence 1', 'sentence 2')}", read_conllu, path)


def test_real_sentences(shared_data):
    for split, sentences, words in (
        ("train", 5396, 101_701),
        ("dev", 588, 13_334),
        ("test", 615, 13_288),
    ):
        path = shared_data / "gum" / f"en_gum-ud-{split}.conllu.gz"
        got = read_conllu(path)
        assert len(got) == sentences and sum(len(sentence.words) for sentence in got) == words
        with gzip.open(path, "rt", encoding="utf-8") as lines:  # read without the loader
            rows = [line.split("\t") for line in lines if line.split("\t")[0].isdecimal()]
        read = [
            pair for sentence in got for pair in zip(sentence.words, sentence.upos, strict=True)
        ]
        assert read == [(row[1], row[3]) for row in rows]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("river e-mail", "lower"),
        ("Bernoulli I O'brien", "Capitalised"),
        ("NASA U.S.", "UPPER"),
        ("iPhone McCarthy 東京", "miXed"),
        ("1,700.5 -3", "number"),
        ("2nd", "letters and digits"),
        ("... –", "sign"),
    ],
)
def test_shapes_of_words(words, expected):
    assert {shape(word) for word in words.split()} == {expected}


def test_words_become_numbers(tmp_path):
    unseen = [("Birds", "NOUN"), ("sing", "VERB"), ("9", "NUM"), ("cats", "NOUN")]
    got = data.gum(treebank(tmp_path, [CATS, DOGS], dev=[CATS], test=[unseen]))
    assert got.classes == len(got.tags) == 4
    assert got.tags == ("CCONJ", "NOUN", "PUNCT", "VERB")
    words, suffixes, prefixes, shapes = got.vocabularies
    assert got.sizes == (10, 4, 4, 8)
    assert words == ("<padding>", *(f"<unknown {name}>" for name in SHAPES), "cats", "sleep")
    assert suffixes == ("<padding>", "<unknown>", "ats", "eep") and prefixes == (
        "<padding>",
        "<unknown>",
        "cat",
        "sle",
    )
    assert shapes == ("<padding>", *SHAPES)
    (cats, dogs), (test,) = got.train.x, got.test.x
    assert cats.tolist() == [[8, 2, 2, 2], [9, 3, 3, 1], [7, 1, 1, 7]]
    assert dogs.tolist() == [[1, 1, 1, 1], [9, 3, 3, 1], [1, 1, 1, 1], [8, 2, 2, 1]]
    assert test.tolist() == [[2, 1, 1, 2], [1, 1, 1, 1], [5, 1, 1, 5], [8, 2, 2, 1]]
    assert [labels.tolist() for labels in (*got.train.y, *got.test.y)] == [
        [1, 3, 2],
        [1, 3, 0, 1],
        [1, 3, -1, 1],
    ]
    for array in (*got.train, *got.dev, *got.test):
        assert all(part.dtype == np.int32 for part in array)
    every = data.gum(tmp_path, min_count=1)
    assert len(every.vocabularies[0]) == 8 + 5 and every.vocabularies[0][8:10] == ("cats", "sleep")


def test_longer_sentences_are_split(tmp_path):
    folder = treebank(tmp_path, [CATS, DOGS])
    whole, split = (data.gum(folder, max_length=n) for n in (4, 3))
    assert [len(x) for x in whole.train.x] == [3, 4]
    assert [len(x) for x in split.train.x] == [len(y) for y in split.train.y] == [3, 3, 1]
    assert [[len(words) for words in got.test_words] for got in (whole, split)] == [
        [3, 4],
        [3, 3, 1],
    ]
    for part in ("x", "y"):
        whole_part, split_part = (
            np.concatenate(getattr(tagging.train, part)) for tagging in (whole, split)
        )
        np.testing.assert_array_equal(whole_part, split_part)


def test_a_treebank_without_a_file_is_refused(tmp_path):
    folder = treebank(tmp_path, [CATS])
    write(folder / "yy-ud-dev.conllu.gz", conllu(CATS))
    refused(f"{folder}: has 2 files *-dev.conllu or *-dev.conllu.gz; wanted one", data.gum, folder)
    (folder / "xx-ud-dev.conllu").unlink()
    assert len(data.gum(folder).dev.x) == 1
    (folder / "xx-ud-test.conllu").unlink()
    refused(f"{folder}: has 0 files *-test.conllu or", data.gum, folder)


def test_real_parts_of_speech(shared_data):
    got = data.gum(shared_data / "gum")
    assert got.classes == 17 and all(
        y.min() >= 0 for part in (got.train, got.dev, got.test) for y in part.y
    )
    counts = dict(zip(got.tags, np.bincount(np.concatenate(got.train.y)).tolist(), strict=True))
    assert (counts["NOUN"], counts["PUNCT"], counts["SYM"]) == (16_673, 13_219, 177)  # by awk
    everything = np.concatenate([*got.train.x, *got.dev.x, *got.test.x])
    assert np.all(everything.min(0) == 1) and np.all(everything.max(0) < got.sizes)
    # the most frequent tag of each word tells most of it; of unknown ones in lower case the ending tells more
    train_x, train_y = np.concatenate(got.train.x), np.concatenate(got.train.y)
    test_x, test_y = np.concatenate(got.test.x), np.concatenate(got.test.y)

    def best(column):
        tags = np.zeros((got.sizes[column], got.classes))
        np.add.at(tags, (train_x[:, column], train_y), 1)
        return tags.argmax(1)[test_x[:, column]]

    unknown = test_x[:, 0] == 1
    assert np.mean(best(0) == test_y) > 0.87
    assert np.mean((best(1) == test_y)[unknown]) > np.mean((best(0) == test_y)[unknown]) + 0.1


@pytest.mark.parametrize("drop_last", [True, False])
def test_buckets_go_through_the_sentences_once(drop_last):
    sequences, lengths = ragged(), (8, 16, 64)
    seen, shapes = [], []
    for x, y in data.bucketed(sequences, 10, lengths=lengths, seed=0, epoch=0, drop_last=drop_last):
        shapes.append(x.shape)
        assert x.shape[1] in lengths and x.shape == (*y.shape, 2) and x.dtype == y.dtype == np.int32
        sizes = np.sum(y >= 0, axis=1)
        assert sizes.max() > max((n for n in lengths if n < x.shape[1]), default=0)
        for tokens, labels, size in zip(x, y, sizes, strict=True):
            number = labels[0]
            seen.append(number)
            np.testing.assert_array_equal(tokens[:size], sequences.x[number])
            np.testing.assert_array_equal(labels[:size], sequences.y[number])
            assert np.all(tokens[size:] == 0) and np.all(labels[size:] == -1)
    assert len(seen) == len(set(seen)) == (100 if drop_last else 103)
    assert sorted(shape[0] for shape in shapes) == [*([] if drop_last else [3]), *[10] * 10]
    assert len(set(shapes)) == (3 if drop_last else 4)
    # the batches of one length do not come one after another
    order = [shape[1] for shape in shapes]
    assert order not in (sorted(order), sorted(order, reverse=True))


def test_the_order_of_buckets_is_a_function_of_seed_and_epoch():
    def epoch(seed, number):
        batches = data.bucketed(ragged(), 10, lengths=(8, 16, 64), seed=seed, epoch=number)
        return [y[:, 0].tolist() for _, y in batches]

    orders = {(seed, number): epoch(seed, number) for seed in (0, 1) for number in (0, 1)}
    assert len({str(order) for order in orders.values()}) == 4
    assert epoch(1, 0) == orders[1, 0]
    x = [np.arange(n) for n in (1, 2, 3, 4, 5, 6)]
    got = data.bucketed(data.Sequences(x, x), 2, lengths=(3, 6), seed=0, epoch=0)
    # pinned: a checkpoint resumes to the same batches with another version of this library
    assert [np.sum(y >= 0, axis=1).tolist() for _, y in got] == [[3, 1], [2, 4], [6, 5]]


def test_characters_follow_each_other(tmp_path):
    text = "the cat sat on the mat;\r\nthe rat sat.\n" * 10 + "QQ"
    path = write(tmp_path / "a.txt.gz", text)
    got = data.characters(path, length=7, test_fraction=0.25)
    text = text.replace("\r", "")
    split = len(text) - round(0.25 * len(text))
    assert got.names[:2] == ("<padding>", "<unknown>") and set(got.names[2:]) == set(text[:split])
    assert (
        got.classes == len(got.names)
        and got.shape == (7,)
        and list(got.names[2:]) == sorted(got.names[2:])
    )
    for x, y, part in (
        (got.train_x, got.train_y, text[:split]),
        (got.test_x, got.test_y, text[split:]),
    ):
        assert x.shape == y.shape == ((len(part) - 1) // 7, 7) and x.dtype == y.dtype == np.int32
        read = "".join(got.names[i] for i in x.ravel())
        assert read == part[: len(read)].replace("Q", "<unknown>")
        np.testing.assert_array_equal(x.ravel()[1:], y.ravel()[:-1])
        assert got.names[y[-1, -1]] == part[len(read)].replace("Q", "<unknown>")


def test_rare_characters_are_one_class(tmp_path):
    path = write(tmp_path / "a.txt", "abababab€ababa\U0001f600b" + "ab\x00ababa")
    got = data.characters(path, length=4, test_fraction=8 / 24)
    assert got.names == ("<padding>", "<unknown>", "a", "b")
    assert got.train_x.tolist() == [[2, 3, 2, 3], [2, 3, 2, 3], [1, 2, 3, 2]]
    assert got.train_y.tolist() == [[3, 2, 3, 2], [3, 2, 3, 1], [2, 3, 2, 3]]
    assert got.test_x.tolist() == [[2, 3, 1, 2]] and got.test_y.tolist() == [[3, 1, 2, 3]]
    everything = data.characters(path, length=4, test_fraction=8 / 24, min_count=1)
    assert everything.names[2:] == ("a", "b", "€", "\U0001f600") and everything.test_x[0, 2] == 1


def test_characters_of_several_files_and_treebanks(tmp_path):
    paths = [
        write(tmp_path / "a.txt", "one\ntwo\n"),
        write(tmp_path / "b.conllu", conllu(CATS, DOGS)),
    ]
    got = data.characters(paths, length=1, test_fraction=0.1, min_count=1)
    read = "".join(got.names[i] for i in got.train_x.ravel())
    assert (
        read == "one\ntwo\nCats sleep .\ndogs sleep and cats"[:35]
    )  # 36 to train with, 4 held out
    joined = data.characters(tmp_path / "a.txt", length=1, test_fraction=0.5)
    assert joined.train_x.size == 2


def test_real_characters(shared_data):
    paths = [shared_data / "gum" / f"en_gum-ud-{split}.conllu.gz" for split in ("dev", "test")]
    got = data.characters(paths, length=64, test_fraction=0.1)
    size = sum(len(sentence.text) + 1 for path in paths for sentence in read_conllu(path)) - 1
    held_out = round(0.1 * size)
    assert (
        len(got.train_x) == (size - held_out - 1) // 64 and len(got.test_x) == (held_out - 1) // 64
    )
    assert "".join(got.names[i] for i in got.train_x[0]).startswith(
        read_conllu(paths[0])[0].text[:64]
    )
    assert np.mean(got.train_y == 1) < 1e-3 and got.train_x.max() < got.classes


def test_a_text_too_short_for_a_window_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 100)
    assert data.characters(path, length=9, test_fraction=0.1).test_x.shape == (1, 9)
    wanted = "wanted more than 10, a window and the character after it"
    refused(
        f"{path}: 10 characters to hold out; {wanted}",
        data.characters,
        path,
        length=10,
        test_fraction=0.1,
    )
    refused(
        f"{path}: 10 characters to train with; {wanted}",
        data.characters,
        path,
        length=10,
        test_fraction=0.9,
    )
