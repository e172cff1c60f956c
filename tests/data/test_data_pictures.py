"""Points of a plane, pixels of a field, photographs: peaks, Indian Pines, Tiny ImageNet."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.io
from data_files import PINES, photograph, photographs, pines, refused, write
from PIL import Image

from lp_jax import data
from lp_jax.data import contrib
from lp_jax.data.contrib import _indian_pines


def height(points):
    """MATLAB's peaks at points given in [-1, 1]²."""
    a, b = 3 * points.astype(float).T
    hills = 3 * (1 - a) ** 2 * np.exp(-(a**2) - (b + 1) ** 2) - np.exp(-((a + 1) ** 2) - b**2) / 3
    return hills - 10 * (a / 5 - a**3 - b**5) * np.exp(-(a**2) - b**2)


def test_peaks_are_five_balanced_level_sets():
    got = data.peaks()
    assert got.train_x.shape == (4000, 2) and got.test_x.shape == (1000, 2) and got.shape == (2,) and got.classes == 5
    assert got.train_x.dtype == np.float32 and got.train_y.dtype == np.int32
    assert np.bincount(got.train_y).tolist() == [800] * 5 and np.bincount(got.test_y).tolist() == [200] * 5
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


CUBE = np.random.default_rng(0).integers(900, 5000, (6, 5, 4)).astype(np.uint16)
TRUTH = np.array([0, 1, 2, 16, 1] * 6, np.uint8).reshape(6, 5)


@pytest.fixture
def field(tmp_path):
    return pines(tmp_path, CUBE, TRUTH)


def test_pixels_of_a_field(field):
    got = contrib.indian_pines(field, test_fraction=1 / 3, seed=4)
    assert got.train_x.shape == (16, 4) and got.test_x.shape == (8, 4) and got.shape == (4,)
    assert got.train_x.dtype == np.float32 and got.train_y.dtype == np.int32
    assert got.classes == len(got.names) == 16 and got.names[0] == "Alfalfa" and got.names[15] == "Stone-Steel-Towers"
    assert np.bincount(got.test_y).tolist() == [4, 2, *[0] * 13, 2]
    np.testing.assert_allclose(got.train_x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(got.train_x.std(0), 1, rtol=1e-6)
    # every pixel is there once, with its class: undo the scaling by two pixels of it
    x, y = np.concatenate([got.train_x, got.test_x]), np.concatenate([got.train_y, got.test_y])
    order, raw = np.argsort(x[:, 0]), CUBE[TRUTH != 0].astype(float)
    raw_order = np.argsort(raw[:, 0])
    assert len(np.unique(raw[:, 0])) == 24
    np.testing.assert_array_equal(y[order] + 1, TRUTH[TRUTH != 0][raw_order])
    for band in range(4):
        assert np.corrcoef(x[order, band], raw[raw_order, band])[0, 1] > 1 - 1e-6
    again, other = contrib.indian_pines(field, 1 / 3, 4), contrib.indian_pines(field, 1 / 3, 5)
    np.testing.assert_array_equal(again.test_x, got.test_x)
    assert not np.array_equal(other.test_x, got.test_x)


CORRECTED = "indian_pines_corrected"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"cube": CUBE}, f"cannot be read ('{CORRECTED}'); wanted a MATLAB file before version 7.3 with"),
        ({CORRECTED: CUBE[0]}, f"variable {CORRECTED}: uint16 of shape (5, 4); wanted numbers along 3 axes"),
        ({CORRECTED: np.array([["a"]], object)}, "cannot be read (Object arrays cannot be saved"),
        ({CORRECTED: np.zeros((0, 5, 4))}, f"variable {CORRECTED}: float64 of shape (0, 5, 4); wanted numbers"),
        (
            {CORRECTED: np.where(CUBE[1, 2, 3] == CUBE, np.nan, CUBE)},
            f"variable {CORRECTED} holds nan at [1, 2, 3]; wanted finite",
        ),
        (b"", "cannot be read ("),
        (150, "cannot be read ("),
        (None, "cannot be read (No such file or directory); wanted a MATLAB file"),
    ],
)
def test_variables_that_do_not_fit_are_refused(field, content, expected):
    path = field / f"{CORRECTED.capitalize()}.mat"
    if isinstance(content, dict):
        scipy.io.savemat(path, content)
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if content else b"")
    refused(f"{path}: {expected}", contrib.indian_pines, field)


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        (TRUTH.T, "5 x 6 pixels; wanted 6 x 5, like the image"),
        (TRUTH + 1, "values 1 to 17; wanted 0 to 16, not all of them 0"),
        (0 * TRUTH, "values 0 to 0; wanted 0 to 16, not all of them 0"),
    ],
)
def test_truth_that_does_not_fit_the_image_is_refused(field, truth, expected):
    path = pines(field, CUBE, truth) / list(PINES)[1]
    refused(f"{path}: {expected}", contrib.indian_pines, field)


def test_a_file_that_ends_its_reader_or_keeps_it_busy_is_refused(field, monkeypatch):
    """One flipped bit makes scipy's reader end by a segmentation fault: an array of characters instead of bytes."""
    path = field / list(PINES)[1]
    content = bytearray(path.read_bytes())
    content[193] ^= 1
    path.write_bytes(content)
    refused(f"{path}: cannot be read (its reader ended with code -11); wanted", contrib.indian_pines, field)
    monkeypatch.setattr(_indian_pines, "_SECONDS", 0.01)
    with pytest.raises(data.DataError, match=r"cannot be read in 0\.01 seconds; wanted"):
        contrib.indian_pines(field)


def test_a_system_may_allow_its_reader_less_memory_than_it_asks_for(field):
    command = [sys.executable, "-P", "-c", _indian_pines._READER, field / list(PINES)[1], "indian_pines_gt"]
    low = f'ulimit -v {1_900_000}; exec "$@"'
    done = subprocess.run(["bash", "-c", low, "bash", *command], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
def tiny(tmp_path):
    return photographs(tmp_path / "tiny", {"n02": 40, "n01": 200})


def test_photographs_from_folders(tiny):
    got = contrib.tiny_imagenet(tiny)
    assert got.train_x.shape == (6, 64, 64, 3) and got.test_x.shape == (2, 64, 64, 3) and got.shape == (64, 64, 3)
    assert got.train_x.dtype == got.test_x.dtype == np.uint8 and got.train_y.dtype == np.int32
    assert got.names == ("n01", "n02") and got.classes == 2
    assert got.train_y.tolist() == [0, 0, 0, 1, 1, 1] and got.test_y.tolist() == [1, 0]
    red, green, blue = np.moveaxis(got.train_x.astype(int), -1, 0)
    expected = np.array([200, 201, 202, 40, 41, 42])[:, None, None]
    assert np.abs(red - expected).max() <= 2
    grey = np.array([False, False, True, False, False, True])[:, None, None]
    assert np.abs(green - np.where(grey, expected, 0)).max() <= 2
    assert np.abs(blue - np.where(grey, expected, 255 - expected)).max() <= 2
    fewer = contrib.tiny_imagenet(tiny, ["n02"])
    np.testing.assert_array_equal(fewer.train_x, got.train_x[3:])
    np.testing.assert_array_equal(fewer.test_x, got.test_x[:1])
    assert fewer.names == ("n02",) and fewer.test_y.tolist() == [0]


ANNOTATIONS = "val/val_annotations.txt"
IMAGE, VALIDATION = "train/n01/images/n01_1.JPEG", "val/images/val_0.JPEG"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"  # Pillow would start gs
LINES = "val_0.JPEG\tn02\nval_1.JPEG\tn01\n"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (IMAGE, lambda path: photograph(path, 7, size=(64, 63)), "64 x 63 pixels; wanted a JPEG file of 64 x 64"),
        (
            IMAGE,
            lambda path: Image.new("RGB", (64, 64)).save(path, "PNG"),
            "cannot be read (cannot identify image file",
        ),
        (IMAGE, lambda path: path.write_bytes(POSTSCRIPT), "cannot be read (cannot identify image file"),
        (IMAGE, lambda path: path.write_bytes(b"no image"), "cannot be read (cannot identify image file"),
        (IMAGE, lambda path: path.write_bytes(path.read_bytes()[:300]), "cannot be read ("),
        (IMAGE, lambda path: path.write_bytes(path.read_bytes()[:500]), "cannot be read ("),
        (IMAGE, lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
        (VALIDATION, lambda path: path.unlink(), "cannot be read (No such file or directory); wanted a JPEG file"),
        (ANNOTATIONS, lambda path: path.unlink(), "cannot be read (No such file or directory); wanted names of files"),
        (ANNOTATIONS, lambda path: write(path, LINES + "a.JPEG\tn03\n"), "line 3: class 'n03' of image 'a.JPEG'; want"),
        (ANNOTATIONS, lambda path: write(path, LINES + "a.JPEG n01\n"), "line 3: class '' of image 'a.JPEG n01'; want"),
        (
            ANNOTATIONS,
            lambda path: write(path, LINES + "../b\tn01\n"),
            "line 3: image '../b'; wanted the name of a file",
        ),
        (
            ANNOTATIONS,
            lambda path: write(path, LINES + "/b\tn01\n"),
            "line 3: image '/b'; wanted the name of a file in",
        ),
        (ANNOTATIONS, lambda path: write(path, LINES[:15]), "no image of class 'n01'; wanted at least one"),
        ("train/n01/images", lambda path: [file.unlink() for file in path.iterdir()], "has no files *.JPEG; wanted at"),
    ],
)
def test_folders_that_are_no_tiny_imagenet_are_refused(tiny, name, change, expected):
    change(tiny / name)
    refused(f"{tiny / name}: {expected}", contrib.tiny_imagenet, tiny)


def test_classes_that_are_not_there_are_refused(tiny):
    refused(f"{tiny}: has no class 'n05'; wanted one of n01, n02", contrib.tiny_imagenet, tiny, ["n05"])
    with pytest.raises(ValueError, match=r"classes must be at least one name, none of them twice; got \[\]"):
        contrib.tiny_imagenet(tiny, [])
