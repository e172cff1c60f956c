"""The scripts that read the data sets of papers: each reader on small files, on damaged ones, and on real data."""

import gzip
import re
import struct

import numpy as np
import pytest
import scipy.io
import trimesh
from data_files import write
from examples import load, run
from PIL import Image

from lp_jax import data

KINDS = "pictures", "sequences", "shapes", "sensors"
pictures, sequences, shapes, sensors = (load(f"data_{kind}") for kind in KINDS)


def refused(expected, call, *arguments):
    """A ValueError that begins with the file, and goes on as expected."""
    with pytest.raises(ValueError, match=re.escape(str(expected))):
        call(*arguments)


# MNIST

IMAGES = np.arange(240).reshape(20, 4, 3).astype(np.uint8)
LABELS = (np.arange(20) % 10).astype(np.uint8)
MNIST = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def idx(array):
    """An array of bytes as an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def digits(tmp_path):
    for name, array in zip(MNIST, (IMAGES, LABELS, IMAGES[:10], LABELS[:10]), strict=True):
        write(tmp_path / (f"{name}.gz" if name == MNIST[0] else name), idx(array))
    return tmp_path


def test_mnist(digits):
    got = pictures.mnist(str(digits))
    np.testing.assert_array_equal(got.train_x, IMAGES[..., None] / np.float32(255))
    np.testing.assert_array_equal(got.test_y, LABELS[:10])
    assert got.train_x.dtype == np.float32 and got.train_y.dtype == np.int32
    assert got.classes == 10 and got.shape == (4, 3, 1)


GOOD = idx(LABELS)  # 8 bytes of header, 20 of values


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "no IDX file of bytes along 1 axes"),
        (b"\0\0\x0d\x01" + GOOD[4:], "no IDX file"),
        (idx(IMAGES), "no IDX file"),
        (GOOD[:6], "buffer is smaller than requested size"),
        (GOOD[:-1], "cannot reshape array of size 19"),
        (GOOD + b"xyz", "cannot reshape array of size 23"),
        (GOOD[:4] + b"\xff" * 24, "cannot reshape array of size 20"),
    ],
)
def test_malformed_idx_is_refused(digits, raw, expected):
    write(digits / MNIST[1], raw)
    refused(f"{digits / MNIST[1]} cannot be read: {expected}", pictures.mnist, digits)


def test_files_that_do_not_fit_are_refused(digits):
    for array in (LABELS[:19], np.where(LABELS == 3, np.uint8(11), LABELS)):
        write(digits / MNIST[1], idx(array))
        refused(f"train: 20 images, {len(array)} labels", pictures.mnist, digits)
    write(digits / MNIST[1], idx(LABELS))
    write(digits / MNIST[2], idx(IMAGES.reshape(10, 8, 3)[:, :5]))
    refused("images of two sizes", pictures.mnist, digits)
    (digits / MNIST[2]).unlink()
    refused(f"{digits / MNIST[2]} cannot be read: [Errno 2] No such file", pictures.mnist, digits)


def test_packed_files_have_bounds(tmp_path):
    """Damaged ones are named, and a small one that unpacks to a large one is not unpacked."""
    path = tmp_path / "file.gz"

    def read():
        with pictures.content(tmp_path / "file"):
            pass

    packed = gzip.compress(np.random.default_rng(0).bytes(5000))
    changed = packed[:999] + bytes(200) + packed[1199:]
    for damaged in (GOOD, packed[:5], packed[:999], packed[:-3], changed):
        path.write_bytes(damaged)
        refused(f"{path} cannot be read: ", read)
    write(path, bytes(2**28 + 1))
    refused(f"{path} cannot be read: it unpacks to more than 268,435,456 bytes", read)


def test_real_mnist(shared_data, tmp_path):
    """As a program, whose file `data.arrays` reads."""
    out = tmp_path / "mnist.npz"
    printed = run("data_pictures", "mnist", shared_data / "mnist10k", out, folder=tmp_path)
    assert "'x': (9000, 28, 28, 1)" in printed and "10 classes" in printed
    got = data.arrays(out)
    assert got.classes == 10 and np.all(np.bincount(got.train_y) > 700)
    # a digit is where its label says: each class's mean image is nearest to held-out images of that class
    means = np.stack([got.train_x[got.train_y == label].mean(0).ravel() for label in range(10)])
    distance = ((got.test_x.reshape(-1, 1, 784) - means) ** 2).sum(-1)
    assert np.mean(distance.argmin(1) == got.test_y) > 0.75


# Time series

HEADER = "# a comment\n@problemName P\n@timeStamps false\n@classLabel true up Down\n@data\n"
BODY = "1,2,3:4,5,6:up\n7:8:Down\n\n# between\n1.5,-2e1:0,.5:Down\n"


def problem(folder, train=BODY, test=BODY):
    write(folder / "P_TRAIN.ts", HEADER + train)
    write(folder / "P_TEST.ts.gz", (HEADER + test).replace("\n", "\r\n"))
    return folder / "P"


def test_series_are_scaled_by_training_and_padded(tmp_path):
    got = sequences.series(
        problem(tmp_path, "0,2:5,5:up\n4,6,8:5,5,5:Down\n", "4,14,4,4:5,6,7,8:up\n")
    )
    (x, lengths), (test_x, test_lengths) = got.train_x, got.test_x
    assert got.shape == (4, 2) and got.classes == 2 and got.names == ("up", "Down")
    assert x.shape == (2, 4, 2) and test_x.shape == (1, 4, 2) and x.dtype == np.float32
    assert lengths.tolist() == [2, 3] and test_lengths.tolist() == [4] and lengths.dtype == np.int32
    assert got.train_y.tolist() == [0, 1] and got.test_y.tolist() == [0]
    deviation = np.sqrt((16 + 4 + 0 + 4 + 16) / 5)  # of 0 2 4 6 8 about 4
    np.testing.assert_allclose(x[0, :, 0], [-4 / deviation, -2 / deviation, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(test_x[0, :, 0], [0, 10 / deviation, 0, 0], rtol=1e-6)
    # a channel that never changes in training
    assert np.all(x[..., 1] == 0) and test_x[0, :, 1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("", "no series after @data"),
        ("1,2:3:up\n", "inhomogeneous"),
        ("1,2:3,x:up\n", "could not convert string to float: 'x'"),
        ("1,?:3,4:up\n", "could not convert string to float: '?'"),
        ("1,2:3,nan:up\n", "values are missing"),
        ("1,2:3,-inf:up\n", "values are missing"),
    ],
)
def test_malformed_series_are_refused(tmp_path, train, expected):
    name = problem(tmp_path, train)
    with pytest.raises(
        ValueError, match=f"{name}_TRAIN.ts cannot be read: .*{re.escape(expected)}"
    ):
        sequences.series(name)


def test_series_that_do_not_fit_are_refused(tmp_path):
    name = problem(tmp_path, "1:2:left\n")
    path = tmp_path / "P_TRAIN.ts"
    refused(f"{path} cannot be read: 'left' is not in list", sequences.series, name)
    problem(tmp_path, "1:2:up\n3:up\n")
    refused(f"{path} cannot be read: unlike numbers of channels", sequences.series, name)
    problem(tmp_path, test="1:2:3:up\n")
    refused(f"{name}: other classes or channels in the test", sequences.series, name)
    for header, expected in (
        (HEADER.replace("up", "down"), "other classes or channels in the test series"),
        (HEADER.replace("@classLabel true", "@targetLabel true"), "no classes in the header"),
        (HEADER.replace("@data\n", ""), "not enough values to unpack"),
    ):
        write(path, header + BODY.replace("up", "down"))
        refused(expected, sequences.series, name)


@pytest.mark.parametrize(
    ("name", "train", "test", "classes", "lengths"),
    [
        ("BasicMotions", (40, 100, 6), (40, 100, 6), 4, (100, 100)),
        ("JapaneseVowels", (270, 29, 12), (370, 29, 12), 9, (7, 29)),
        ("ACSF1", (100, 1460, 1), (100, 1460, 1), 10, (1460, 1460)),
    ],
)
def test_real_series(shared_data, name, train, test, classes, lengths):
    got = sequences.series(shared_data / "ucr" / name)
    (x, n), (test_x, test_n) = got.train_x, got.test_x
    assert x.shape == train and test_x.shape == test and got.classes == classes
    assert min(n.min(), test_n.min()) == lengths[0] and max(n.max(), test_n.max()) == lengths[1]
    assert np.all(np.bincount(got.train_y) == train[0] // classes)
    inside = np.arange(train[1]) < n[:, None]
    # sums of many numbers in float32
    np.testing.assert_allclose(x[inside].mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(x[inside].std(0), 1, rtol=1e-4)
    assert np.all(x[~inside] == 0) and np.all(test_x[np.arange(train[1]) >= test_n[:, None]] == 0)
    # as it stands in the file, up to scale
    with gzip.open(shared_data / "ucr" / f"{name}_TRAIN.ts.gz", "rt") as lines:
        line = next(line for line in iter(lines.readline, "") if not line.startswith(("#", "@")))
    raw = np.array([channel.split(",") for channel in line.split(":")[:-1]], float).T
    for channel, values in enumerate(raw.T):
        assert np.corrcoef(values, x[0, : len(raw), channel])[0, 1] > 1 - 1e-6


# Treebanks


def row(number, word, upos="NOUN"):
    """A line of CoNLL-U."""
    return "\t".join([str(number), word, word.lower(), upos, "_", "_", "0", "root", "_", "_"])


def sentences(*words):
    return "".join("".join(f"{line}\n" for line in rows) + "\n" for rows in words)


CATS = row(1, "Cats"), row(2, "sleep", "VERB"), row(3, ".", "PUNCT")
DONT = (
    *(row("1-2", "don't", "_"), row(1, "do", "AUX"), row(2, "n't", "PART")),
    *(row("2.1", "you", "PRON"), row(3, "sleep", "VERB"), row(4, "cats", "X")),
)


def test_words_become_numbers(tmp_path):
    write(tmp_path / "xx-train.conllu.gz", sentences(CATS, DONT))
    write(tmp_path / "xx-test.conllu", sentences((row(1, "Birds"), row(2, "sleep", "INTJ"))))
    got = sequences.treebank(tmp_path / "xx")
    assert got.names == ("AUX", "NOUN", "PART", "PUNCT", "VERB", "X") and got.shape == (4,)
    assert got.train_x.tolist() == [[2, 3, 1, 0], [1, 1, 3, 2]]
    assert got.train_y.tolist() == [[1, 4, 3, -1], [0, 2, 4, 5]]
    assert got.test_x.tolist() == [[1, 3, 0, 0]] and got.test_y.tolist() == [[1, -1, -1, -1]]
    assert got.train_x.dtype == got.train_y.dtype == np.int32
    write(tmp_path / "xx-test.conllu", "1 word word NOUN _ _ 0 root _ _\n\n")
    refused(
        f"{tmp_path / 'xx-test.conllu'} cannot be read: Invalid line format",
        sequences.treebank,
        tmp_path / "xx",
    )
    (tmp_path / "xx-test.conllu").unlink()
    refused(
        f"{tmp_path / 'xx-test.conllu'} cannot be read: [Errno 2] No such file",
        sequences.treebank,
        tmp_path / "xx",
    )


def test_real_sentences(shared_data):
    got = sequences.treebank(shared_data / "gum" / "en_gum-ud")
    assert len(got.train_x) == 5396 and len(got.test_x) == 615 and got.classes == 17
    counts = dict(zip(got.names, np.bincount(got.train_y[got.train_y >= 0]).tolist(), strict=True))
    assert (counts["NOUN"], counts["PUNCT"], counts["SYM"]) == (16_673, 13_219, 177)  # by awk
    assert (got.train_x > 0).sum() == 101_701 and (got.test_y >= 0).sum() == 13_288
    # the most frequent tag of each word tells most of it; words that are unknown are one word
    tags = np.zeros((got.train_x.max() + 1, 17))
    known = got.train_y >= 0
    np.add.at(tags, (got.train_x[known], got.train_y[known]), 1)
    known = got.test_y >= 0
    assert np.mean(tags.argmax(1)[got.test_x[known]] == got.test_y[known]) > 0.8


# Shapes

CUBE = trimesh.creation.box().export(file_type="off")
SQUARE = "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n"


@pytest.fixture
def meshes(tmp_path):
    """Two classes: cubes and squares."""
    for split, count in (("train", 2), ("test", 1)):
        for number in range(count):
            write(tmp_path / "cube" / split / f"cube_{number}.off", CUBE.replace("OFF\n", "OFF"))
            write(tmp_path / "square" / split / f"square_{number}.off", SQUARE)
    write(tmp_path / "README.txt", "nothing")
    return tmp_path


def test_meshes_become_voxels(meshes, tmp_path_factory):
    got = shapes.meshes(meshes, size=8)
    assert got.shape == (8, 8, 8, 1) and got.train_x.shape == (4, 8, 8, 8, 1)
    assert got.names == ("cube", "square") and got.train_x.dtype == np.float32
    assert got.train_y.tolist() == [0, 0, 1, 1] and got.test_y.tolist() == [0, 1]
    assert got.train_x.sum((1, 2, 3, 4)).tolist() == [8**3 - 6**3] * 2 + [64] * 2
    folder = tmp_path_factory.mktemp("packed")
    for split, x, y in (("train", got.train_x, got.train_y), ("test", got.test_x, got.test_y)):
        voxels = np.packbits(x[..., 0] > 0, axis=-1)
        np.savez(folder / f"voxels_{split}.npz", voxels=voxels, labels=y, classes=got.names)
    again = shapes.voxels(folder)
    np.testing.assert_equal(again._asdict(), got._asdict())


@pytest.mark.parametrize(
    "content",
    [
        "PLY\n",
        "OFF\n4\n",
        SQUARE.replace("1 1 0\n", "1 one 0\n"),
        SQUARE.replace("2 3\n", "2 4\n"),
        SQUARE.replace("4 0 1 2 3\n", ""),
        SQUARE.replace("4 0 1 2 3\n", "4 0 1 2\n"),
        SQUARE.replace("1 1 0", "1 nan 0"),
        SQUARE.replace("1 1 0", "1 1e308 0"),
        SQUARE.replace("4 1 0", "1000000000 1 0"),
        re.sub(r"\d \d 0\n", "1 1 0\n", SQUARE).replace("1 1 0", "4 1 0", 1),
        b"OFF\n\xff",
    ],
)
def test_malformed_meshes_are_refused(meshes, content):
    path = write(meshes / "square" / "test" / "square_0.off", content)
    refused(f"{path} cannot be read: ", shapes.meshes, meshes, 8)


def test_voxels_that_do_not_fit_are_refused(tmp_path):
    fine = {
        "voxels": np.zeros((2, 8, 8, 1), np.uint8),
        "labels": np.zeros(2, int),
        "classes": ["a"],
    }
    for changed in (
        {"voxels": np.zeros((3, 8, 8, 1), np.uint8)},
        {"labels": np.array([0, 1])},
        {"labels": np.array([0, None])},  # pickled
    ):
        np.savez(tmp_path / "voxels_train.npz", **(fine | changed))
        refused(f"{tmp_path / 'voxels_train.npz'} cannot be read: ", shapes.voxels, tmp_path)


def test_real_voxels(shared_data):
    got = shapes.voxels(shared_data / "modelnet32")
    assert got.train_x.shape == (1084, 32, 32, 32, 1) and got.test_x.shape == (272, 32, 32, 32, 1)
    assert got.names == ("chair", "monitor") and set(np.unique(got.test_x)) == {0.0, 1.0}
    with np.load(shared_data / "modelnet32" / "voxels_test.npz", allow_pickle=False) as archive:
        ones = np.bitwise_count(archive["voxels"]).sum((1, 2, 3))
        np.testing.assert_array_equal(got.test_y, archive["labels"])
    np.testing.assert_array_equal(got.test_x.sum((1, 2, 3, 4)), ones)


# Photographs, spectra, signals


def test_photographs(tmp_path):
    """Their names stay within the folder, and only JPEG is read."""
    colours = {"n01": (200, 30, 30), "n02": (30, 200, 30)}

    def image(path, colour, kind="JPEG", side=64, mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (side, side), colour).save(path, kind)

    for name, colour in colours.items():
        image(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", colour)
    image(tmp_path / "val" / "images" / "val_0.JPEG", colours["n02"])
    image(tmp_path / "val" / "images" / "val_1.JPEG", 90, mode="L")
    lines = "val_0.JPEG\tn02\t0\t0\nval_1.JPEG\tn01\t0\t0\n"
    write(tmp_path / "val" / "val_annotations.txt", lines)
    got = pictures.tiny_imagenet(tmp_path)
    assert (
        got.names == ("n01", "n02") and got.shape == (64, 64, 3) and got.train_x.dtype == np.uint8
    )
    assert got.train_y.tolist() == [0, 1] and got.test_y.tolist() == [1, 0]
    assert np.abs(got.train_x[0, 5, 5].astype(int) - colours["n01"]).max() < 9
    assert np.abs(got.test_x[1].astype(int) - 90).max() < 9
    for options in ({"side": 65}, {"kind": "PNG"}):
        image(tmp_path / "val" / "images" / "val_0.JPEG", colours["n02"], **options)
        path = tmp_path / "val" / "images" / "val_0.JPEG"
        refused(f"{path} cannot be read: ", pictures.tiny_imagenet, tmp_path)
    image(tmp_path / "outside.JPEG", colours["n01"])
    write(tmp_path / "val" / "val_annotations.txt", lines.replace("val_0", "../../outside"))
    refused(
        f"{tmp_path / 'val' / 'images' / 'outside.JPEG'} cannot be read: ",
        pictures.tiny_imagenet,
        tmp_path,
    )


def spectra(folder, image, truth):
    scipy.io.savemat(folder / "Indian_pines_corrected.mat", {"indian_pines_corrected": image})
    scipy.io.savemat(folder / "Indian_pines_gt.mat", {"indian_pines_gt": truth})
    return folder


def test_spectra(tmp_path):
    random = np.random.default_rng(0)
    truth = np.repeat([[0, 1, 2, 16]], 10, axis=0)
    image = random.integers(900, 1100, (10, 4, 5)).astype(np.uint16) + 100 * truth[..., None]
    got = sensors.indian_pines(spectra(tmp_path, image, truth))
    assert got.train_x.shape == (24, 5) and got.test_x.shape == (6, 5) and got.classes == 16
    assert np.bincount(got.test_y)[[0, 1, 15]].tolist() == [2, 2, 2]
    np.testing.assert_allclose(got.train_x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(got.train_x.std(0), 1, rtol=1e-5)
    assert got.train_x[got.train_y == 15].min() > got.train_x[got.train_y == 1].max()


def test_damaged_matlab_files_do_not_end_the_process(tmp_path):
    """Their reader is a process of its own, which may crash, or take all memory that it may have."""
    truth = np.ones((4, 4), np.uint8)
    folder = spectra(tmp_path, np.ones((4, 4, 2)), truth)
    path = folder / "Indian_pines_corrected.mat"
    whole = path.read_bytes()
    for damaged in (b"", whole[:200], whole[:-20], whole[:128] + b"\xff" * 60 + whole[188:]):
        path.write_bytes(damaged)
        refused(f"{path} cannot be read: ", sensors.indian_pines, folder)
    scipy.io.savemat(path, {"other": truth})
    refused(
        f"{path} cannot be read: KeyError: 'indian_pines_corrected'", sensors.indian_pines, folder
    )
    refused("not numbers along 3 axes", sensors.indian_pines, spectra(tmp_path, truth, truth))
    refused(
        "not finite", sensors.indian_pines, spectra(tmp_path, np.full((4, 4, 2), np.nan), truth)
    )
    refused(
        "classes of (3, 4) pixels",
        sensors.indian_pines,
        spectra(tmp_path, np.ones((4, 4, 2)), truth[:3]),
    )


@pytest.mark.parametrize("code", ["import os; os.abort()", "import sys; sys.exit('said so')"])
def test_a_reader_that_ends_is_an_error(tmp_path, monkeypatch, code):
    monkeypatch.setattr(sensors, "_MATLAB", code)
    spectra(tmp_path, np.ones((4, 4, 2)), np.ones((4, 4)))
    expected = "said so" if "said" in code else "code -6"
    refused(f"cannot be read: {expected}", sensors.indian_pines, tmp_path)


def test_signals(tmp_path):
    random = np.random.default_rng(0)
    kinds = [f"{k}_{axis}" for k in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    stored = {}
    for split, count in (("train", 6), ("test", 2)):
        (tmp_path / split / "Inertial Signals").mkdir(parents=True)
        for kind in kinds:
            stored[split, kind] = random.normal(size=(count, 128))
            path = tmp_path / split / "Inertial Signals" / f"{kind}_{split}.txt"
            np.savetxt(path, stored[split, kind])
        np.savetxt(tmp_path / split / f"y_{split}.txt", 1 + np.arange(count), fmt="%d")
    got = sensors.uci_har(tmp_path)
    assert got.train_x.shape == (6, 128, 9) and got.test_y.tolist() == [0, 1] and got.classes == 6
    for at, kind in enumerate(kinds):
        np.testing.assert_allclose(got.train_x[..., at], stored["train", kind], rtol=1e-6)
    np.savetxt(tmp_path / "test" / "y_test.txt", [1, 7], fmt="%d")
    refused(f"{tmp_path / 'test'} cannot be read: ", sensors.uci_har, tmp_path)


@pytest.mark.parametrize(
    ("kind", "reader", "source"),
    [
        ("sequences", "series", "ucr/JapaneseVowels"),
        ("sequences", "treebank", "gum/en_gum-ud"),
        ("shapes", "voxels", "modelnet32"),
    ],
)
def test_a_program_writes_what_it_reads(shared_data, tmp_path, kind, reader, source):
    out = tmp_path / "arrays.npz"
    printed = run(f"data_{kind}", reader, shared_data / source, out, folder=tmp_path)
    with np.load(out, allow_pickle=False) as stored:
        assert {"x", "y", "test_x", "test_y"} <= set(stored)
        for name in stored:
            assert f"'{name}': {stored[name].shape}" in printed
    if kind == "shapes":
        assert data.arrays(out).shape == (32, 32, 32, 1)
