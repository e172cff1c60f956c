"""Shapes: ModelNet, from meshes and from voxels."""

import shutil

import numpy as np
import pytest
import scipy.spatial
import trimesh
from data_files import refused, run_page, write

from lp_jax.data import contrib

CUBE = trimesh.creation.box().export(file_type="off")
SQUARE = "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n"
POINT = SQUARE.replace("\n1 ", "\n1e-200 ").replace(" 1 0\n", " 0 0\n").replace("4 0 0", "4 1 0")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("PLY\n", "cannot be read ("),
        (
            "OFF\n4\n",
            "cannot be read (OFF file has a malformed vertex/face count line); wanted an OFF file",
        ),
        (
            SQUARE.replace("1 1 0\n", "1 1\n"),
            "cannot be read (setting an array element with a sequence",
        ),
        (
            SQUARE.replace("1 1 0\n", "1 one 0\n"),
            "cannot be read (could not convert string to float: 'one')",
        ),
        (
            SQUARE.replace("2 3\n", "2 4\n"),
            "cannot be read (OFF file has a face index outside the range",
        ),
        (SQUARE[:22], "cannot be read ("),
        (
            SQUARE.replace("4 0 1 2 3\n", ""),
            "0 faces of three corners or more; wanted an OFF file of a mesh, with the",
        ),
        (SQUARE.replace("4 0 1 2 3\n", "4 0 1 2\n"), "0 faces of three corners or more"),
        (SQUARE.replace("4 0 1 2 3\n", "-1 0 1 2\n"), "0 faces of three corners or more"),
        (
            SQUARE.replace("1 1 0", "1 nan 0"),
            "the list of corners holds nan at [2, 1]; wanted finite numbers below",
        ),
        (
            SQUARE.replace("1 1 0", "1 1e308 0"),
            "the list of corners holds 1e+308 at [2, 1]; wanted finite numbers",
        ),
        (SQUARE.replace("4 1 0", "1000000000 1 0"), "cannot be read (cannot reshape array"),
        (POINT, "a single point; wanted"),
        (b"OFF\n\xff", "cannot be read ("),
    ],
)
def test_malformed_meshes_are_refused(meshes, content, expected):
    path = write(meshes / "square" / "test" / "square_1.off", content)
    refused(f"{path}: {expected}", contrib.modelnet, meshes, size=8)


@pytest.fixture
def meshes(tmp_path):
    """Two classes: cubes and squares."""
    for split, count in (("train", 2), ("test", 1)):
        for number in range(count):
            write(tmp_path / "cube" / split / f"cube_{number}.off", CUBE.replace("OFF\n", "OFF"))
            write(tmp_path / "square" / split / f"square_{number}.off.gz", SQUARE)
    write(tmp_path / "README.txt", "nothing")
    return tmp_path


def test_modelnet_from_meshes(meshes):
    got = contrib.modelnet(meshes, size=8)
    assert (
        got.shape == (8, 8, 8, 1)
        and got.train_x.shape == (4, 8, 8, 8, 1)
        and got.test_x.shape == (2, 8, 8, 8, 1)
    )
    assert got.names == ("cube", "square") and got.classes == 2 and got.train_x.dtype == np.float32
    assert (
        got.train_y.tolist() == [0, 0, 1, 1]
        and got.test_y.tolist() == [0, 1]
        and got.train_y.dtype == np.int32
    )
    assert got.train_x.sum((1, 2, 3, 4)).tolist() == [8**3 - 6**3] * 2 + [64] * 2


def test_voxels_are_where_the_surface_is(tmp_path):
    """Random triangles: a dense sample of their points lies in voxels that are set, but for 5 % at corners; no voxel is far."""
    random, size = np.random.default_rng(1), 24
    corners = random.normal(size=(90, 3))
    soup = trimesh.Trimesh(corners, np.arange(90).reshape(30, 3), process=False).export(
        file_type="off"
    )
    for split in ("train", "test"):
        write(tmp_path / "soup" / split / "soup.off", soup)
    voxels = contrib.modelnet(tmp_path, size).train_x[0, ..., 0].astype(bool)
    points = np.einsum(
        "nc,tcx->tnx", random.dirichlet(np.ones(3), 2000), corners.reshape(30, 3, 3)
    ).reshape(-1, 3)
    low, high = corners.min(0), corners.max(0)
    points = (points - (low + high) / 2) * size / (high - low).max() + size / 2
    assert voxels[tuple(np.clip(points.astype(int), 0, size - 1).T)].mean() > 0.95
    distances, _ = scipy.spatial.KDTree(points).query(np.argwhere(voxels) + 0.5)
    assert distances.max() < 1.2  # half of a voxel's diagonal, and the distance between points


def ready(folder, size=8, **arrays):
    """Three training and two test shapes as voxels."""
    random = np.random.default_rng(0)
    for split, labels in (("train", [0, 1, 1]), ("test", [1, 0])):
        voxels = random.integers(0, 2, (len(labels), size, size, size)).astype(np.uint8)
        content = {
            "voxels": np.packbits(voxels, axis=-1),
            "labels": np.array(labels),
            "classes": np.array(["a", "b"]),
        }
        content |= arrays if split == "test" else {}
        np.savez(
            folder / f"voxels_{split}.npz", **{k: v for k, v in content.items() if v is not None}
        )
    return folder


def test_modelnet_from_voxels(tmp_path):
    got = contrib.modelnet(ready(tmp_path), size=8)
    with np.load(tmp_path / "voxels_train.npz") as archive:
        bits = np.unpackbits(archive["voxels"], axis=-1)
    np.testing.assert_array_equal(got.train_x[..., 0], bits)
    assert (
        got.train_x.dtype == np.float32
        and got.train_y.tolist() == [0, 1, 1]
        and got.test_y.tolist() == [1, 0]
    )


def test_voxels_made_once_are_read_again(meshes, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("ready")
    (folder / "ModelNet10").symlink_to(meshes)
    monkeypatch.chdir(folder)
    run_page("numpy as np")
    np.testing.assert_equal(contrib.modelnet(folder), contrib.modelnet(meshes))


NO_LISTS = "; wanted a list of integers and a list of names"


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"voxels": None}, "cannot be read ('voxels'); wanted a NumPy archive with voxels"),
        (
            {"labels": np.array([0, 1], object)},
            "cannot be read (Object arrays cannot be loaded when allow_pickle=Fal",
        ),
        (
            {"labels": np.ones(3, int)},
            "voxels: uint8 of shape (2, 8, 8, 1); wanted uint8 of shape (labels, 8, 8, 1",
        ),
        (
            {"labels": np.zeros(0, int), "voxels": np.zeros((0, 8, 8, 1), np.uint8)},
            "voxels: uint8 of shape (0, 8, 8",
        ),
        (
            {"voxels": np.zeros((2, 8, 8, 8), np.uint8)},
            "voxels: uint8 of shape (2, 8, 8, 8); wanted uint8",
        ),
        ({"voxels": np.zeros((2, 8, 8, 1))}, "voxels: float64 of shape (2, 8, 8, 1); wanted uint8"),
        (
            {"labels": np.array([0.0, 1.0])},
            f"float64 labels of 1 axes and <U1 classes of 1{NO_LISTS}",
        ),
        (
            {"labels": np.array([[0], [1]])},
            f"int64 labels of 2 axes and <U1 classes of 1{NO_LISTS}",
        ),
        ({"classes": np.array(["a", "a"])}, "classes a, a; wanted names, none of them twice"),
        ({"classes": np.array([1, 2])}, f"int64 labels of 1 axes and int64 classes of 1{NO_LISTS}"),
        ({"labels": np.array([0, 2])}, "labels 0 to 2; wanted 0 to 1, numbers of classes"),
        ({"classes": np.array(["b", "a"])}, "classes b, a; wanted a, b, those of voxels_train.npz"),
    ],
)
def test_voxels_that_do_not_fit_are_refused(tmp_path, arrays, expected):
    folder = ready(tmp_path, **arrays)
    refused(f"{folder / 'voxels_test.npz'}: {expected}", contrib.modelnet, folder, size=8)


def test_folders_without_all_files_of_a_modelnet_are_refused(meshes):
    refused(
        "nowhere: has no file voxels_train.npz and no folder */train of",
        contrib.modelnet,
        "nowhere",
    )
    path = meshes / "square" / "test" / "square_0.off.gz"
    shutil.rmtree(path.parent)
    refused(
        f"{path.parent}: has no files *.off; wanted at least one", contrib.modelnet, meshes, size=8
    )
    (ready(meshes) / "voxels_test.npz").unlink()
    refused(
        f"{meshes / 'voxels_test.npz'}: cannot be read (No such file",
        contrib.modelnet,
        meshes,
        size=8,
    )


def test_real_voxels(shared_data):
    got = contrib.modelnet(shared_data / "modelnet32")
    assert got.train_x.shape == (1084, 32, 32, 32, 1) and got.test_x.shape == (272, 32, 32, 32, 1)
    assert got.names == ("chair", "monitor") and set(np.unique(got.test_x)) == {0.0, 1.0}
    with np.load(shared_data / "modelnet32" / "voxels_test.npz", allow_pickle=False) as archive:
        ones = np.bitwise_count(archive["voxels"]).sum((1, 2, 3))
        np.testing.assert_array_equal(got.test_y, archive["labels"])
    np.testing.assert_array_equal(got.test_x.sum((1, 2, 3, 4)), ones)
