"""Data sets: what the files say, every way in which they can be wrong, and the order of the batches."""

import gzip
import itertools
import struct
import sys

import numpy as np
import pytest
from data_files import refusal

from lp_jax import data

NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array):
    """An array as the bytes of an IDX file."""
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def images(count=20, rows=4, columns=3):
    return np.arange(count * rows * columns).reshape(count, rows, columns).astype(np.uint8)


def labels(count=20):
    return (np.arange(count) % 10).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """A small data set in MNIST's format."""
    for name in NAMES:
        count = 20 if name.startswith("train") else 10
        (tmp_path / name).write_bytes(idx(images(count) if "images" in name else labels(count)))
    return tmp_path


def test_digits_are_all_there_split_by_class():
    from sklearn.datasets import load_digits

    got = data.digits(seed=3, test_fraction=0.25)
    assert got.classes == 10 and got.shape == (8, 8, 1)
    assert got.train_x.shape == (1347, 8, 8, 1) and got.test_x.shape == (450, 8, 8, 1)
    assert got.train_x.dtype == got.test_x.dtype == np.float32
    assert got.train_y.dtype == got.test_y.dtype == np.int32
    assert got.train_x.min() == 0.0 and got.train_x.max() == 1.0

    def rows(x, y):
        return sorted(map(tuple, np.column_stack([x.reshape(len(x), 64), y]).astype(float)))

    everything = load_digits()
    both = np.concatenate([got.train_x, got.test_x]), np.concatenate([got.train_y, got.test_y])
    assert rows(*both) == rows(everything.data / 16, everything.target)
    share = np.bincount(got.test_y) / np.bincount(both[1])
    np.testing.assert_allclose(share, 0.25, atol=0.005)


def test_digits_depend_on_the_seed_alone():
    first, again, other = data.digits(seed=1), data.digits(seed=1), data.digits(seed=2)
    np.testing.assert_array_equal(first.test_x, again.test_x)
    assert not np.array_equal(first.test_x, other.test_x)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 5])
def test_digits_refuse_a_senseless_fraction(fraction):
    with pytest.raises(ValueError, match=f"test_fraction must be between 0 and 1, both excluded; got {fraction}"):
        data.digits(test_fraction=fraction)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "lp_jax\[train\]"'):
        data.digits()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 0, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_round_trip(tmp_path, dtype, shape, packed):
    array = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    path = tmp_path / ("file.gz" if packed else "file")
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    got = data.read_idx(path)
    np.testing.assert_array_equal(got, array)
    assert got.dtype == np.dtype(dtype) and got.flags.writeable


def test_a_gzipped_file_needs_no_suffix(tmp_path):
    (tmp_path / "file").write_bytes(gzip.compress(idx(labels())))
    np.testing.assert_array_equal(data.read_idx(str(tmp_path / "file")), labels())


GOOD = idx(labels())  # 8 bytes of header, 20 of values


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD[:3], "byte 3: the file ends in its magic number; wanted 4 bytes"),
        (GOOD[:6], "byte 6: the file ends in its header; wanted 8 bytes"),
        (GOOD[:-1], "byte 27: the file ends in the 20 values of 1 byte(s) that its header announces; wanted 28 bytes"),
        (GOOD[:8], "byte 8: the file ends in the 20 values"),
        (GOOD + b"xyz", "byte 28: the file goes on after the 20 values"),
        (
            b"P5\n28 28",
            "byte 0: magic number 50350a32 is none of an IDX file; wanted 0000, a type (08, 09, 0b, 0c, 0d, ",
        ),
        (b"\0\0\x0a\x01" + GOOD[4:], "byte 0: magic number 00000a01"),
        (b"\0\0\x08\0" + GOOD[4:], "byte 0: magic number 00000800"),
        (b"\0\0\x08\xff" + GOOD[4:], "byte 0: magic number 000008ff"),
        (b"\0\0\x0e\x03" + b"\xff" * 12, "4294967295 x 4294967295 x 4294967295 values of 8 byte(s)"),
    ],
)
def test_malformed_idx_is_refused_with_the_place(tmp_path, content, expected):
    for name, written in (("plain", content), ("packed.gz", gzip.compress(content))):
        path = tmp_path / name
        path.write_bytes(written)
        message = refusal(data.read_idx, path)
        assert message.startswith(f"{path}: byte ") and expected in message


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    assert "byte 0: the file is empty; wanted an IDX file" in refusal(data.read_idx, tmp_path / name)


def test_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(GOOD)
    assert "byte 0: starts with 0000, which is no gzip file; wanted 1f8b" in refusal(data.read_idx, path)
    packed = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)))
    middle = len(packed) // 2
    for damaged in (
        packed[:5],
        packed[:middle],
        packed[:-3],
        packed[:-6] + b"\0\0" + packed[-4:],
        packed[:middle] + bytes(200) + packed[middle + 200 :],
        packed[:2] + b"\7" + packed[3:],
    ):
        path.write_bytes(damaged)
        assert "the gzip file is damaged or cut off" in refusal(data.read_idx, path)


def test_missing_idx_is_refused(tmp_path):
    assert "No such file" in refusal(data.read_idx, tmp_path / "nowhere")
    assert "directory" in refusal(data.read_idx, tmp_path)


def test_mnist_from_a_folder(folder):
    (folder / f"{NAMES[0]}.gz").write_bytes(gzip.compress((folder / NAMES[0]).read_bytes()))
    (folder / NAMES[0]).unlink()
    got = data.mnist(str(folder))
    np.testing.assert_array_equal(got.train_x, images()[..., None] / np.float32(255))
    np.testing.assert_array_equal(got.test_y, labels(10))
    assert got.train_x.dtype == np.float32 and got.train_y.dtype == np.int32
    assert got.classes == 10 and got.shape == (4, 3, 1)


def test_real_mnist(shared_data):
    got = data.mnist(shared_data / "mnist10k")
    assert got.train_x.shape == (9000, 28, 28, 1) and got.test_x.shape == (1000, 28, 28, 1)
    assert got.train_x.min() == 0.0 and got.train_x.max() == 1.0
    assert np.all(np.bincount(got.train_y, minlength=10) > 700)
    # a digit is where its label says: each class's mean image is nearest to held-out images of that class
    means = np.stack([got.train_x[got.train_y == label].mean(0).ravel() for label in range(10)])
    distance = ((got.test_x.reshape(-1, 1, 784) - means) ** 2).sum(-1)
    assert np.mean(distance.argmin(1) == got.test_y) > 0.75


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_mnist_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{folder}: has no file {name} or {name}.gz" in refusal(data.mnist, folder)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        (NAMES[0], labels(), "byte 2: uint8 values along 1 axes; wanted uint8 along 3"),
        (NAMES[1], images(), "byte 2: uint8 values along 3 axes; wanted uint8 along 1"),
        (NAMES[0], images().astype(np.int32), "byte 2: int32 values along 3 axes"),
        (NAMES[1], labels(19), f"byte 4: 19 labels; wanted 20, one for each image of {NAMES[0]}"),
        (NAMES[3], labels(11), f"byte 4: 11 labels; wanted 10, one for each image of {NAMES[2]}"),
        (NAMES[1], np.where(np.arange(20) == 13, 11, labels()).astype(np.uint8), "byte 21: label 11; wanted 0 to 9"),
        (NAMES[0], images(0), "byte 4: 0 x 4 x 3 pixels; wanted at least one image"),
        (NAMES[0], images(20, 0), "byte 4: 20 x 0 x 3 pixels; wanted at least one image"),
        (NAMES[2], images(10, 5), "byte 8: images of 5 x 3 pixels; wanted 4 x 3"),
    ],
)
def test_mnist_files_that_do_not_fit_are_refused(folder, name, array, expected):
    (folder / name).write_bytes(idx(array))
    assert refusal(data.mnist, folder).startswith(f"{folder / name}: {expected}")


def test_a_truncated_mnist_file_is_refused(folder):
    path = folder / NAMES[2]
    path.write_bytes(path.read_bytes()[:100])
    assert refusal(data.mnist, folder).startswith(f"{path}: byte 100: the file ends")


def epoch(count, size, **options):
    return [batch.tolist() for (batch,) in data.batches((np.arange(count),), size, **options)]


def test_batches_go_through_the_data_once():
    got = epoch(23, 5, seed=0, epoch=0)
    assert [len(batch) for batch in got] == [5, 5, 5, 5]
    assert len(set(itertools.chain(*got))) == 20
    whole = epoch(23, 5, seed=0, epoch=0, drop_last=False)
    assert whole[:4] == got and len(whole[4]) == 3
    assert sorted(itertools.chain(*whole)) == list(range(23))
    assert len(epoch(20, 5, seed=0, epoch=0, drop_last=False)) == 4


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {(seed, number): epoch(40, 8, seed=seed, epoch=number) for seed in (0, 1, 2) for number in (0, 1, 2)}
    assert len({str(order) for order in orders.values()}) == 9
    np.random.seed(5)
    assert epoch(40, 8, seed=1, epoch=2) == orders[1, 2]
    resumed = data.batches((np.arange(40),), 8, seed=1, epoch=2)
    assert [batch.tolist() for (batch,) in itertools.islice(resumed, 3, None)] == orders[1, 2][3:]
    # pinned: a checkpoint resumes to the same batches with another version of this library
    assert epoch(6, 3, seed=0, epoch=0) == [[3, 2, 5], [4, 0, 1]]


def test_batches_of_a_dataset_keep_samples_and_labels_together(folder):
    dataset = data.mnist(folder)
    label_of = {x.tobytes(): int(y) for x, y in zip(dataset.train_x, dataset.train_y, strict=True)}
    assert len(label_of) == 20
    seen = 0
    for x, y in data.batches(dataset, 6, seed=0, epoch=0):
        assert x.shape == (6, 4, 3, 1) and y.shape == (6,)
        assert [label_of[image.tobytes()] for image in x] == y.tolist()
        seen += len(y)
    assert seen == 18


def test_batches_of_padded_samples_keep_their_lengths():
    x, lengths, y = np.arange(20).reshape(10, 2), np.arange(10), np.arange(10) % 3
    dataset = data.Dataset((x, lengths), y, (x[:2], lengths[:2]), y[:2], classes=3, shape=(2,))
    plain = list(data.batches((x, lengths, y), 4, seed=3, epoch=1))
    for got in (data.batches(dataset, 4, seed=3, epoch=1), data.batches(((x, lengths), y), 4, seed=3, epoch=1)):
        for ((padded, length), label), wanted in zip(got, plain, strict=True):
            for array, expected in zip((padded, length, label), wanted, strict=True):
                np.testing.assert_array_equal(array, expected)
            np.testing.assert_array_equal(padded[:, 0], 2 * length)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.arange(5), 2), {}, TypeError, r"got one array: pass \(array,\)"),
        (
            ((np.arange(5), np.arange(4)), 2),
            {},
            ValueError,
            r"one leading length, the number of samples; got lengths \[5, 4\]",
        ),
        (((), 2), {}, ValueError, r"got lengths \[\]"),
        ((((np.arange(5), np.arange(4)), np.arange(5)), 2), {}, ValueError, r"got lengths \[5, 4, 5\]"),
        (([[1, 2, 3]], 2), {}, TypeError, "got a list: sequences of different lengths are for data.bucketed"),
        (((np.arange(5),), 6), {}, ValueError, "batch_size must be at most the number of samples, 5; got 6"),
        (((np.arange(5),), 0), {}, ValueError, "batch_size must be at least 1; got 0"),
        (((np.arange(5),), 2.0), {}, TypeError, "batch_size must be an integer"),
        (((np.arange(5),), 2), {"seed": -1}, ValueError, "seed must be at least 0; got -1"),
        (((np.arange(5),), 2), {"epoch": 0.5}, TypeError, "epoch must be an integer"),
    ],
)
def test_batches_refuse_at_once(arguments, options, error, message):
    with pytest.raises(error, match=message):
        data.batches(*arguments, **({"seed": 0, "epoch": 0} | options))
