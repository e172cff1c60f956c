"""Points of a plane, pixels of a field, photographs: peaks, Indian Pines, Tiny ImageNet; and the page about data."""

import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from data_files import refusal, run_page, write
from PIL import Image

from lp_jax import data

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"test_fraction": 0.0}, ValueError, "test_fraction must be between 0 and 1, both excluded; got 0.0"),
        ({"samples": 8}, ValueError, "leaves class 0, of 2 samples, 0 of them to test with; wanted at least one to"),
        ({"samples": 3}, ValueError, "leaves class 0, of 1 samples"),
        ({"samples": 0}, ValueError, "samples must be at least 1; got 0"),
        ({"classes": 1}, ValueError, "classes must be at least 2; got 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0; got -1"),
        ({"samples": 10.0}, TypeError, "samples must be an integer"),
    ],
)
def test_peaks_refuse_senseless_numbers(options, error, message):
    with pytest.raises(error, match=message):
        data.peaks(**options)


CUBE = np.random.default_rng(0).integers(900, 5000, (6, 5, 4)).astype(np.uint16)
TRUTH = np.array([0, 1, 2, 16, 1] * 6, np.uint8).reshape(6, 5)
FILES = {"Indian_pines_corrected.mat": "indian_pines_corrected", "Indian_pines_gt.mat": "indian_pines_gt"}


@pytest.fixture
def field(tmp_path):
    """A small image and its ground truth."""
    for (name, variable), array in zip(FILES.items(), (CUBE, TRUTH), strict=True):
        scipy.io.savemat(tmp_path / name, {variable: array})
    return tmp_path


def test_pixels_of_a_field(field):
    got = data.indian_pines(field, test_fraction=1 / 3, seed=4)
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
    again, other = data.indian_pines(field, 1 / 3, 4), data.indian_pines(field, 1 / 3, 5)
    np.testing.assert_array_equal(again.test_x, got.test_x)
    assert not np.array_equal(other.test_x, got.test_x)


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        (0, {"cube": CUBE}, "has variables cube; wanted indian_pines_corrected"),
        (1, {}, "has variables none; wanted indian_pines_gt"),
        (
            0,
            {"indian_pines_corrected": CUBE[0]},
            "variable indian_pines_corrected: uint16 of shape 5 x 4; wanted numbers",
        ),
        (1, {"indian_pines_gt": CUBE}, "variable indian_pines_gt: uint16 of shape 6 x 5 x 4; wanted numbers, rows x"),
        (1, {"indian_pines_gt": np.array([["a"]], object)}, "variable indian_pines_gt: object of shape 1 x 1; wanted"),
        (1, {"indian_pines_gt": np.zeros((0, 5))}, "variable indian_pines_gt: float64 of shape 0 x 5; wanted numbers"),
        (1, {"indian_pines_gt": TRUTH.T}, "variable indian_pines_gt: 5 x 6 pixels; wanted 6 x 5, like the image"),
        (
            1,
            {"indian_pines_gt": TRUTH + 1},
            "variable indian_pines_gt: values 1 to 17; wanted 0 to 16, not all of them 0",
        ),
        (
            1,
            {"indian_pines_gt": 0 * TRUTH},
            "variable indian_pines_gt: values 0 to 0; wanted 0 to 16, not all of them 0",
        ),
    ],
)
def test_variables_that_do_not_fit_are_refused(field, name, variables, expected):
    path = field / list(FILES)[name]
    scipy.io.savemat(path, variables)
    assert refusal(data.indian_pines, field).startswith(f"{path}: {expected}")


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_matlab_files_are_refused(field, name):
    path = field / name
    content = path.read_bytes()
    for damaged in (b"", b"nothing", content[:150], content[:128] + b"\xff" * 60):
        path.write_bytes(damaged)
        assert refusal(data.indian_pines, field).startswith(
            f"{path}: is damaged or no MATLAB file before version 7.3 ("
        )
    path.unlink()
    assert refusal(data.indian_pines, field).startswith(f"{path}: cannot be read, No such file or directory; wanted a")


def test_indian_pines_refuses_senseless_options(field):
    with pytest.raises(ValueError, match=r"test_fraction 0.01 leaves class 0, of 12 samples, 0 of them to test with"):
        data.indian_pines(field, test_fraction=0.01)
    with pytest.raises(ValueError, match=r"test_fraction must be between 0 and 1, both excluded; got 1.5"):
        data.indian_pines(field, test_fraction=1.5)
    with pytest.raises(TypeError, match="seed must be an integer"):
        data.indian_pines(field, seed=0.5)


def test_without_a_package_the_extra_is_named(field, photographs, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ImportError, match=r'indian_pines needs scipy.* pip install "lp_jax\[train\]"'):
        data.indian_pines(field)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'tiny_imagenet needs Pillow.* pip install "lp_jax\[train\]"'):
        data.tiny_imagenet(photographs)


def photograph(path, level, size=(64, 64), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 255 - level)).save(path, "JPEG", quality=95)
    return path


@pytest.fixture
def photographs(tmp_path):
    """Two classes: three images each of 40 to 42 and 200 to 202 red, one of them grey; and one of each held out."""
    folder = tmp_path / "tiny"
    for name, level in (("n02", 40), ("n01", 200)):
        for number in range(3):
            path = folder / "train" / name / "images" / f"{name}_{number}.JPEG"
            photograph(path, level + number, mode="L" if number == 2 else "RGB")
    photograph(folder / "val" / "images" / "val_0.JPEG", 41)
    photograph(folder / "val" / "images" / "val_1.JPEG", 201)
    write(folder / "val" / "val_annotations.txt", "val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    write(folder / "wnids.txt", "n02\nn01\n")
    return folder


def test_photographs_from_folders(photographs):
    got = data.tiny_imagenet(photographs)
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
    fewer = data.tiny_imagenet(photographs, ["n02"], per_class=2)
    np.testing.assert_array_equal(fewer.train_x, got.train_x[3:5])
    np.testing.assert_array_equal(fewer.test_x, got.test_x[:1])
    assert fewer.names == ("n02",) and fewer.test_y.tolist() == [0]


def test_images_that_are_none_are_refused(photographs):
    path = photograph(photographs / "train" / "n01" / "images" / "n01_1.JPEG", 7, size=(64, 63))
    assert refusal(data.tiny_imagenet, photographs).startswith(f"{path}: 64 x 63 pixels; wanted a JPEG file of 64 x 64")
    content = photograph(path, 7).read_bytes()
    path.write_bytes(b"no image")
    assert refusal(data.tiny_imagenet, photographs).startswith(
        f"{path}: byte 0: no image; wanted a JPEG file of 64 x 64"
    )
    for cut in (300, len(content) // 2):
        path.write_bytes(content[:cut])
        assert refusal(data.tiny_imagenet, photographs).startswith(f"{path}: ")
    path.unlink()
    path.with_name("n01_3.JPEG").mkdir()
    assert refusal(data.tiny_imagenet, photographs).startswith(f"{path.with_name('n01_3.JPEG')}: cannot be read, Is a")


def test_folders_that_are_no_tiny_imagenet_are_refused(photographs):
    annotations = photographs / "val" / "val_annotations.txt"
    lines = annotations.read_text()
    write(annotations, lines + "val_2.JPEG\tn03\n")
    assert refusal(data.tiny_imagenet, photographs).startswith(
        f"{annotations}: line 3: class 'n03' of image 'val_2.JPEG'; wanted a class with a folder in train"
    )
    write(annotations, lines + "val_2.JPEG n01\n")
    assert refusal(data.tiny_imagenet, photographs).startswith(
        f"{annotations}: line 3: class '' of image 'val_2.JPEG n"
    )
    write(annotations, lines.splitlines()[0] + "\n")
    assert refusal(data.tiny_imagenet, photographs).startswith(
        f"{annotations}: line 1: the end, no image of class 'n01' before it; wanted at least one"
    )
    write(annotations, lines + "val_9.JPEG\tn01\n")
    missing = photographs / "val" / "images" / "val_9.JPEG"
    assert refusal(data.tiny_imagenet, photographs).startswith(f"{missing}: cannot be read, No such file or directory;")
    annotations.unlink()
    assert refusal(data.tiny_imagenet, photographs).startswith(f"{annotations}: cannot be read, No such file")
    expected = "has no folder train/n05/images; wanted one for each class"
    assert refusal(data.tiny_imagenet, photographs, ["n05"]).startswith(f"{photographs}: {expected}")
    for path in (photographs / "train" / "n01" / "images").iterdir():
        path.unlink()
    assert refusal(data.tiny_imagenet, photographs).startswith(f"{photographs}/train/n01/images: has no files *.JPEG;")
    with pytest.raises(ValueError, match=r"classes must be at least one name, none of them twice; got \[\]"):
        data.tiny_imagenet(photographs, [])
    with pytest.raises(ValueError, match="per_class must be at least 1; got 0"):
        data.tiny_imagenet(photographs, per_class=0)


def test_the_page_names_every_loader():
    loaders = {name for name in vars(data) if not name.startswith("_") and callable(getattr(data, name))}
    for name in loaders:
        assert f"`{name}" in PAGE, name


@pytest.mark.parametrize("package", ["optax", "grain"])
def test_the_examples_of_the_page_run(package, standard_promotion):
    pytest.importorskip(package)
    run_page(package)
