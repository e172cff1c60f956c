"""Digits, peaks, arrays of one's own, the order of batches, and what is said of damaged files and missing packages."""

import functools
import io
import itertools
import os
import re
import sys
import zipfile

import numpy as np
import pytest
from data_files import PAGE, refused, run_page

from lp_jax import data


def test_digits_are_all_there_split_by_class():
    from sklearn.datasets import load_digits

    got = data.digits(seed=3, test_fraction=0.25)
    assert got.classes == 10 and got.shape == (8, 8, 1)
    assert got.train_x.shape == (1347, 8, 8, 1) and got.test_x.shape == (450, 8, 8, 1)
    assert (
        got.train_x.dtype == got.test_x.dtype == np.float32
        and got.train_y.dtype == got.test_y.dtype == np.int32
    )

    def rows(x, y):
        return sorted(map(tuple, np.column_stack([x.reshape(len(x), 64), y]).astype(float)))

    everything = load_digits()
    both = np.concatenate([got.train_x, got.test_x]), np.concatenate([got.train_y, got.test_y])
    assert rows(*both) == rows(everything.data / 16, everything.target)
    np.testing.assert_allclose(np.bincount(got.test_y) / np.bincount(both[1]), 0.25, atol=0.005)
    np.testing.assert_array_equal(data.digits(seed=3, test_fraction=0.25).test_x, got.test_x)
    assert not np.array_equal(data.digits(seed=2, test_fraction=0.25).test_x, got.test_x)


LABELS = np.arange(20) % 10


def test_a_packed_file_that_is_damaged_is_refused(tmp_path):
    archive = saved(tmp_path, x=np.ones((20, 3)), y=LABELS)
    whole = archive.read_bytes()
    for damaged in (b"", whole[:200], whole[:300] + b"\xff" * 100 + whole[400:]):
        archive.write_bytes(damaged)
        refused(f"{archive}: cannot be read (", data.arrays, archive)


def test_a_missing_file_and_one_of_another_kind_are_refused(tmp_path):
    refused(
        f"{tmp_path / 'nowhere'}: cannot be read (No such file or directory)",
        data.arrays,
        tmp_path / "nowhere",
    )
    refused(f"{tmp_path}: cannot be read (Is a directory)", data.arrays, tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe")  # and does not wait for one
    refused(f"{pipe}: cannot be read (it is no regular file)", data.arrays, pipe)


def height(points):
    """MATLAB's peaks at points given in [-1, 1]²."""
    a, b = 3 * points.astype(float).T
    hills = 3 * (1 - a) ** 2 * np.exp(-(a**2) - (b + 1) ** 2) - np.exp(-((a + 1) ** 2) - b**2) / 3
    return hills - 10 * (a / 5 - a**3 - b**5) * np.exp(-(a**2) - b**2)


def test_peaks_are_five_balanced_level_sets():
    got = data.peaks()
    assert (
        got.train_x.shape == (4000, 2)
        and got.test_x.shape == (1000, 2)
        and got.shape == (2,)
        and got.classes == 5
    )
    assert got.train_x.dtype == np.float32 and got.train_y.dtype == np.int32
    assert (
        np.bincount(got.train_y).tolist() == [800] * 5
        and np.bincount(got.test_y).tolist() == [200] * 5
    )
    x, y = np.concatenate([got.train_x, got.test_x]), np.concatenate([got.train_y, got.test_y])
    assert len(np.unique(x, axis=0)) == 5000 and -1 <= x.min() < -0.99 and 0.99 < x.max() <= 1
    # known: the maximum of peaks is 8.1062 and its minimum -6.5511
    level = np.floor((height(x) + 6.5511) / (8.1062 + 6.5511) * 5).clip(0, 4)
    assert np.mean(level == y) > 0.999
    assert np.all(np.abs(level - y) <= 1)
    # uniform within a level set: the middle one covers most of the square, and its corners as much as the rest
    middle = x[y == 2]
    corners = np.all(np.abs(middle) > 2 / 3, axis=1)
    assert abs(corners.mean() - (4 / 36) / 0.7246) < 0.03


def test_peaks_depend_on_seed_and_numbers_alone():
    first, again, other = data.peaks(seed=1), data.peaks(seed=1), data.peaks(seed=2)
    np.testing.assert_array_equal(first.train_x, again.train_x)
    assert not np.array_equal(first.train_x, other.train_x)
    got = data.peaks(samples=103, classes=3, test_fraction=0.5)
    assert np.bincount(np.concatenate([got.train_y, got.test_y])).tolist() == [35, 34, 34]
    assert np.bincount(got.test_y).tolist() == [18, 17, 17]


def epoch(count, size, **options):
    return [batch.tolist() for (batch,) in data.batches((np.arange(count),), size, **options)]


def test_batches_go_through_the_data_once():
    got = epoch(23, 5, seed=0, epoch=0)
    assert [len(batch) for batch in got] == [5, 5, 5, 5] and len(set(itertools.chain(*got))) == 20
    whole = epoch(23, 5, seed=0, epoch=0, drop_last=False)
    assert (
        whole[:4] == got
        and len(whole[4]) == 3
        and sorted(itertools.chain(*whole)) == list(range(23))
    )
    assert len(epoch(20, 5, seed=0, epoch=0, drop_last=False)) == 4


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {
        (seed, number): epoch(40, 8, seed=seed, epoch=number)
        for seed in (0, 1, 2)
        for number in (0, 1, 2)
    }
    assert len({str(order) for order in orders.values()}) == 9
    np.random.seed(5)
    assert epoch(40, 8, seed=1, epoch=2) == orders[1, 2]
    # pinned: a checkpoint resumes to the same batches with another version of this library
    assert epoch(6, 3, seed=0, epoch=0) == [[3, 2, 5], [4, 0, 1]]


def test_batches_keep_samples_lengths_and_labels_together():
    x, lengths, y = np.arange(20).reshape(10, 2), np.arange(10), np.arange(10) % 3
    dataset = data.Dataset((x, lengths), y, (x[:2], lengths[:2]), y[:2], classes=3, shape=(2,))
    plain = list(data.batches((x, lengths, y), 4, seed=3, epoch=1))
    assert len(plain) == 2
    for part in plain:
        np.testing.assert_array_equal(part[0][:, 0], 2 * part[1])
        np.testing.assert_array_equal(part[2], part[1] % 3)
    nested = [((padded, length), label) for padded, length, label in plain]
    for arrays in (dataset, ((x, lengths), y)):
        got = list(data.batches(arrays, 4, seed=3, epoch=1))
        assert isinstance(got[0][0], tuple)
        np.testing.assert_equal(got, nested)


BATCHES = functools.partial(data.batches, data=(np.arange(5),), batch_size=2, seed=0, epoch=0)
FIVE, FOUR = np.arange(5), np.arange(4)
SPLIT = data.digits, data.peaks


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (BATCHES, {"data": FIVE}, r"got one array: pass \(array,\)"),
        (
            BATCHES,
            {"data": [[1, 2, 3]]},
            "arrays; got a list: pad sequences of different lengths",
        ),
        (
            BATCHES,
            {"data": (FIVE, FOUR)},
            r"data must be arrays with one leading length, .*; got lengths \[5, 4\]",
        ),
        (BATCHES, {"data": ()}, r"got lengths \[\]"),
        (BATCHES, {"data": ((FIVE, FOUR), FIVE)}, r"got lengths \[5, 4, 5\]"),
        (BATCHES, {"batch_size": 6}, "batch_size must be at most the number of samples, 5; got 6"),
        (BATCHES, {"batch_size": 0}, "batch_size must be at least 1; got 0"),
        (BATCHES, {"batch_size": 2.0}, "batch_size must be an integer"),
        (BATCHES, {"seed": -1}, "seed must be at least 0; got -1"),
        (BATCHES, {"epoch": 0.5}, "epoch must be an integer"),
        (data.peaks, {"samples": 10}, "leaves 8 to train with and 2 to hold out, for 5 classes"),
        (data.peaks, {"samples": 5}, "each class must have two samples or more"),
        (data.peaks, {"samples": 0}, "samples must be at least 1; got 0"),
        (data.peaks, {"samples": 10.0}, "samples must be an integer"),
        (data.peaks, {"classes": 1}, "classes must be at least 2; got 1"),
        (data.peaks, {"seed": -1}, "seed must be at least 0; got -1"),
        *(
            (load, {"test_fraction": n}, f"both excluded; got {n}")
            for load in SPLIT
            for n in (0.0, 1.0, -0.1, 5)
        ),
    ],
)
def test_senseless_arguments_are_refused_at_once(call, options, message):
    kind = "must be (an )?integer|got one array|got a list"
    with pytest.raises(
        TypeError if re.search(kind, message) else ValueError, match=message
    ) as caught:
        call(**options)
    assert not isinstance(caught.value, data.DataError)


def test_without_a_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs sklearn.datasets.* pip install 'lp_jax\[train\]'"
    ):
        data.digits()


def test_the_page_names_every_loader():
    names = [
        name for name in vars(data) if not name.startswith("_") and callable(getattr(data, name))
    ]
    assert len(names) == 6 and not [name for name in names if f"`{name}" not in PAGE]


@pytest.mark.parametrize("package", ["optax", "grain"])
def test_the_examples_of_the_page_run(package, standard_promotion):
    pytest.importorskip(package)
    run_page(package)


def saved(folder, **arrays):
    np.savez(folder / "mine.npz", **arrays)
    return folder / "mine.npz"


def test_arrays_of_ones_own(tmp_path):
    x, y = np.arange(60.0).reshape(20, 3), np.array(["b", "a"] * 10)
    got = data.arrays(saved(tmp_path, x=x, y=y), seed=1, test_fraction=0.3)
    assert (got.classes, got.names, got.shape) == (2, ("a", "b"), (3,)) and got.test_x.shape == (
        6,
        3,
    )
    rows = np.concatenate([got.train_x, got.test_x]), np.concatenate([got.train_y, got.test_y])
    order = np.argsort(rows[0][:, 0])
    np.testing.assert_array_equal(rows[0][order], x)
    assert [got.names[label] for label in rows[1][order]] == y.tolist()
    path = saved(
        tmp_path, x=x.astype(np.uint8), y=[7, 3] * 10, test_x=x[:2].astype(np.uint8), test_y=[3, 7]
    )
    got = data.arrays(path)
    assert got.train_x.dtype == np.uint8 and len(got.train_x) == 20 and got.names == ("3", "7")
    assert got.test_y.tolist() == [0, 1]


def test_large_labels_stay_apart(tmp_path):
    y, test_y = np.array([2**53, 2**53 + 1] * 2), np.array([2**53 + 1, 2**63], np.uint64)
    got = data.arrays(
        saved(tmp_path, x=np.ones((4, 2)), y=y, test_x=np.ones((2, 2)), test_y=test_y)
    )
    assert got.names == (str(2**53), str(2**53 + 1), str(2**63)) and got.test_y.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_short_numbers_are_read_without_a_warning(tmp_path, dtype):
    x = np.ones((10, 3), dtype)
    assert data.arrays(saved(tmp_path, x=x, y=[0, 1] * 5)).train_x.dtype == np.float32
    x[3, 1] = np.inf
    with pytest.raises(data.DataError, match=r"x holds inf at \[3, 1\]"):
        data.arrays(saved(tmp_path, x=x, y=[0, 1] * 5))


@pytest.mark.parametrize("shape", [(20,), (20, 3)])
def test_values_of_ones_own(tmp_path, shape):
    x, y = np.arange(60.0).reshape(20, 3), 1e9 + np.arange(np.prod(shape)).reshape(shape) / 7
    got = data.arrays(saved(tmp_path, x=x, y=y), seed=1)
    assert (got.classes, got.names, got.test_y.shape) == (0, (), (4, y.size // 20))
    inputs, values = (
        np.concatenate([got.train_x, got.test_x]),
        np.concatenate([got.train_y, got.test_y]),
    )
    np.testing.assert_array_equal(
        values[np.argsort(inputs[:, 0])], y.reshape(20, -1)
    )  # as they are, to the last bit


ONES, NAN = np.ones((4, 2)), np.full((4, 2), np.nan)


@pytest.mark.parametrize(
    "x, y, test, message",
    [
        (ONES, None, {}, "has no y, but x"),
        (FOUR, FOUR, {}, r"x has shape \(4,\)"),
        (ONES[:, :0], FOUR, {}, r"x has shape \(4, 0\)"),
        (ONES, ONES.astype(int), {}, r"y \(4, 2\)"),
        (
            ONES,
            1j * FOUR,
            {},
            "y holds complex128; wanted classes, integers or strings, or floating-point values",
        ),
        (
            ONES,
            np.array([1, np.nan, 2, 3]),
            {},
            r"y holds nan at \[1\]; wanted finite numbers below 1e\+150",
        ),
        (ONES, np.array([1, 2e160, 2, 3]), {}, r"y holds 2e\+160 at \[1\]"),
        (NAN, FOUR, {}, r"x holds nan at \[0, 0\]; wanted finite"),
        (ONES, np.full(4, 2.5), {}, "y holds one value, 2.5; wanted two or more"),
        (ONES, np.ones(4, int), {}, "y holds one class"),
        (ONES, FOUR, {"test_x": ONES}, "has no test_y"),
        (
            ONES,
            0.5 * FOUR,
            {"test_x": ONES, "test_y": FOUR},
            "y holds float64 and test_y int64; wanted classes or val",
        ),
        (
            ONES,
            FOUR,
            {"test_x": ONES, "test_y": np.array([*"0123"])},
            "int64 and test_y <U1; wanted classes or val",
        ),
        (
            ONES,
            0.5 * FOUR,
            {"test_x": ONES, "test_y": ONES},
            r"test_y has samples of shape \(2,\) and y \(1,\)",
        ),
    ],
)
def test_arrays_that_are_no_data_set(tmp_path, x, y, test, message):
    with pytest.raises(data.DataError, match=message):
        data.arrays(saved(tmp_path, x=x, **({} if y is None else {"y": y}), **test))


NPY = io.BytesIO()
np.save(NPY, np.ones((4, 2)))


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (None, r"cannot be read \(File is not a zip file\)"),
        (b"abc", r"cannot be read \(EOF: reading magic string"),
        (
            NPY.getvalue().replace(b"(4, 2)", b"(2, 2)"),
            r"cannot be read \(x.npy is longer than its header says\)",
        ),
        (
            NPY.getvalue().replace(b"(4, 2), }" + 11 * b" ", b"(99999999999, 2), } "),
            r"cannot be read \(Unable to al",
        ),
        (
            bytes(2**28 + 1),
            "it unpacks to more than 268,435,456 bytes",
        ),
    ],
)
def test_a_file_that_is_no_archive_of_arrays_is_refused(tmp_path, member, message):
    path = tmp_path / "mine.npz"
    path.write_text("x, y")
    if member is not None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr("x.npy", member)
    with pytest.raises(data.DataError, match=message) as caught:
        data.arrays(path)
    assert str(caught.value).startswith(f"{path}: ")
