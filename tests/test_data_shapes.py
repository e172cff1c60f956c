"""Shapes: OFF files, meshes as voxels, ModelNet."""

import itertools
import shutil

import numpy as np
import pytest
from data_files import refused, run_page, same, write

from lp_jax.data import contrib

CORNERS = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
SIDES = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
CUBE = "OFF\n8 6 0\n{}\n{}\n".format(
    "\n".join(" ".join(f"{value:g}" for value in corner) for corner in CORNERS),
    "\n".join("4 " + " ".join(map(str, side)) for side in SIDES),
)
SQUARE = "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n"


FACES = [[side[0], *pair] for side in SIDES for pair in itertools.pairwise(side[1:])]


def triangles(faces):
    """Triangles in an order of their own, each from its smallest corner on."""
    return sorted(tuple(np.roll(face, -np.argmin(face)).tolist()) for face in np.asarray(faces))


def test_meshes_of_files(tmp_path):
    for name in ("cube.off", "cube.off.gz"):
        for text in (
            CUBE,
            CUBE.replace("OFF\n8", "OFF8"),
            CUBE.replace("OFF\n8", "OFF 8"),
            CUBE.replace("8 6 0", "8 6"),
            "# made by hand\n\n" + CUBE.replace("OFF", "OFF # a cube").replace("\n", "\r\n"),
            CUBE.replace("3 2\n", "3 2 0.5 0.5 0.5\n") + "\n# end\n",
        ):
            got = contrib.read_off(write(tmp_path / name, text))
            np.testing.assert_array_equal(got.vertices, CORNERS)
            assert triangles(got.faces) == triangles(FACES)
            assert got.vertices.dtype == np.float64 and got.faces.dtype == np.int32
    heptagon = "OFF\n7 1 0\n" + "".join(f"{number} {number**2} 0\n" for number in range(7)) + "7 6 5 4 3 2 1 0\n"
    fan = [[6, 5, 4], [6, 4, 3], [6, 3, 2], [6, 2, 1], [6, 1, 0]]
    assert triangles(contrib.read_off(write(tmp_path / "a.off", heptagon)).faces) == triangles(fan)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# a comment\nPLY\n", "starts with 'PLY'; wanted OFF and the numbers of vertices, faces and edges"),
        ("COFF\n4 1 0\n", "starts with 'COFF 4 1 0'; wanted OFF"),
        ("OFF\n4\n", "starts with 'OFF 4'; wanted OFF and the numbers"),
        ("OFF4 -1 0\n", "starts with 'OFF4 -1 0'; wanted OFF and the numbers"),
        (SQUARE.replace("1 1 0\n", "1 1\n"), "cannot be read (setting an array element with a sequence"),
        (SQUARE.replace("1 1 0\n", "1 one 0\n"), "cannot be read (could not convert string to float: 'one')"),
        (SQUARE.replace("2 3\n", "2 4\n"), "cannot be read (OFF file has a face index outside the range"),
        (SQUARE.replace("2 3\n", "2 -1\n"), "cannot be read (OFF file has a face index outside the range"),
        (SQUARE.replace("4 0 1 2 3\n", "2 0 1\n"), "a face with fewer corners than it announces, or fewer than 3;"),
        (SQUARE.replace("4 0 1 2 3\n", "3 0 1\n"), "a face with fewer corners than it announces, or fewer than 3;"),
        (SQUARE.replace("4 1 0", "4 2 0"), "5 lines after the counts; wanted 4 vertices and 2 faces"),
        (SQUARE[:22], "2 lines after the counts; wanted 4 vertices and 1 faces"),
        (SQUARE + "3 0 1 2\n", "6 lines after the counts; wanted 4 vertices and 1 faces"),
    ],
)
def test_malformed_meshes_are_refused(tmp_path, content, expected):
    path = write(tmp_path / "a.off.gz", content)
    refused(f"{path}: {expected}", contrib.read_off, path)


def meets(triangle, low):
    """Whether a triangle meets the unit cube at ``low``: what is left of it when the cube's six planes cut it."""
    polygon = list(triangle)
    for axis, sign in itertools.product(range(3), (1, -1)):
        bound = low[axis] if sign > 0 else low[axis] + 1
        kept = []
        for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True):
            inside, following = sign * (a[axis] - bound), sign * (b[axis] - bound)
            if inside >= 0:
                kept.append(a)
            if inside * following < 0:
                kept.append(a + (b - a) * inside / (inside - following))
        polygon = kept
    return bool(polygon)


def test_voxels_are_those_that_a_triangle_meets():
    random, size = np.random.default_rng(0), 7  # odd: many triangles go through the middle, where corners would meet
    for kind in range(24):
        triangle = random.normal(size=(3, 3))
        if kind % 3 == 1:
            triangle[2] = triangle[0] + 0.7 * (triangle[1] - triangle[0])  # a segment
        if kind % 3 == 2:
            triangle[:, kind % 2] *= 0.05  # nearly flat
        got = contrib.voxelize(triangle, np.array([[0, 1, 2]]), size)
        low, high = triangle.min(0), triangle.max(0)
        placed = (triangle - (low + high) / 2) * size / (high - low).max() + size / 2
        # slightly smaller, so that what touches the walls of the whole is not a matter of rounding
        placed = size / 2 + (placed - size / 2) * (1 - 1e-7)
        expected = np.array([meets(placed, place) for place in np.ndindex(size, size, size)]).reshape(got.shape)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("margin", [0, 2])
def test_a_cube_becomes_a_shell(margin):
    got = contrib.voxelize(CORNERS * 0.3 + [10, -5, 0.1], np.array(FACES), 12, margin=margin)
    inner = 12 - 2 * margin
    assert got.dtype == bool and got.shape == (12, 12, 12) and got.sum() == inner**3 - (inner - 2) ** 3
    inside = got[margin : 12 - margin, margin : 12 - margin, margin : 12 - margin]
    assert inside.sum() == got.sum() and not inside[1:-1, 1:-1, 1:-1].any()


def test_voxels_of_many_triangles_are_those_of_each():
    random = np.random.default_rng(1)
    vertices, faces = random.normal(size=(60, 3)), random.integers(0, 60, (400, 3))
    got = contrib.voxelize(vertices, faces, 24)
    low, high = vertices[faces].min((0, 1)), vertices[faces].max((0, 1))
    scale = 24 / (high - low).max()
    # dense points on every triangle lie in voxels that are set
    weights = random.dirichlet(np.ones(3), 500)
    points = np.einsum("nc,tcx->tnx", weights, vertices[faces]).reshape(-1, 3)
    place = np.clip(np.floor((points - (low + high) / 2) * scale + 12), 0, 23).astype(int)
    assert got[tuple(place.T)].all()
    assert got.sum() < 1.3 * len(np.unique(place, axis=0))
    # in any order, and apart from vertices that no face uses
    shuffled = random.permutation(faces)
    np.testing.assert_array_equal(contrib.voxelize(np.concatenate([vertices, [[99, 99, 99]]]), shuffled, 24), got)


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
    assert got.shape == (8, 8, 8, 1) and got.train_x.shape == (4, 8, 8, 8, 1) and got.test_x.shape == (2, 8, 8, 8, 1)
    assert got.names == ("cube", "square") and got.classes == 2 and got.train_x.dtype == np.float32
    assert got.train_y.tolist() == [0, 0, 1, 1] and got.test_y.tolist() == [0, 1] and got.train_y.dtype == np.int32
    assert got.train_x.sum((1, 2, 3, 4)).tolist() == [8**3 - 6**3] * 2 + [64] * 2
    one = contrib.modelnet(meshes, ["square"], size=8, margin=1)
    assert one.names == ("square",) and one.test_x.sum() == 36 and one.test_y.tolist() == [0]


def ready(folder, size=8, **arrays):
    """Three training and two test shapes as voxels."""
    random = np.random.default_rng(0)
    for split, labels in (("train", [0, 1, 1]), ("test", [1, 0])):
        voxels = random.integers(0, 2, (len(labels), size, size, size)).astype(np.uint8)
        content = {"voxels": np.packbits(voxels, axis=-1), "labels": np.array(labels), "classes": np.array(["a", "b"])}
        content |= arrays if split == "test" else {}
        np.savez(folder / f"voxels_{split}.npz", **{k: v for k, v in content.items() if v is not None})
    return folder


def test_modelnet_from_voxels(tmp_path):
    got = contrib.modelnet(ready(tmp_path), size=8)
    with np.load(tmp_path / "voxels_train.npz") as archive:
        bits = np.unpackbits(archive["voxels"], axis=-1)
    np.testing.assert_array_equal(got.train_x[..., 0], bits)
    assert got.train_x.dtype == np.float32 and got.train_y.tolist() == [0, 1, 1] and got.test_y.tolist() == [1, 0]
    other = contrib.modelnet(tmp_path, ["b", "a"], size=8)
    assert other.names == ("b", "a") and other.train_y.tolist() == [1, 0, 0] and other.test_y.tolist() == [0, 1]
    one = contrib.modelnet(tmp_path, ["b"], size=8)
    np.testing.assert_array_equal(one.train_x, got.train_x[1:])
    assert one.test_y.tolist() == [0] and one.classes == 1
    # a test file that numbers the classes in another order
    ready(tmp_path, classes=np.array(["b", "a"]))
    assert contrib.modelnet(tmp_path, size=8).test_y.tolist() == [0, 1]


def test_voxels_made_once_are_read_again(meshes, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("ready")
    (folder / "ModelNet10").symlink_to(meshes)
    monkeypatch.chdir(folder)
    run_page("numpy as np")
    assert same((contrib.modelnet(meshes), contrib.modelnet(folder)))


NO_LISTS = "; wanted a list of integers and a list of names"


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (
            {"voxels": None},
            "cannot be read ('voxels is not a file in the archive'); wanted a NumPy archive with voxels",
        ),
        (
            {"labels": np.array([0, 1], object)},
            "cannot be read (Object arrays cannot be loaded when allow_pickle=False",
        ),
        ({"labels": np.ones(3, int)}, "voxels: uint8 of shape (2, 8, 8, 1); wanted uint8 of shape (labels, 8, 8, 1"),
        ({"labels": np.zeros(0, int), "voxels": np.zeros((0, 8, 8, 1), np.uint8)}, "voxels: uint8 of shape (0, 8, 8"),
        ({"voxels": np.zeros((2, 8, 8, 8), np.uint8)}, "voxels: uint8 of shape (2, 8, 8, 8); wanted uint8"),
        ({"voxels": np.zeros((2, 8, 8, 1))}, "voxels: float64 of shape (2, 8, 8, 1); wanted uint8"),
        ({"labels": np.array([0.0, 1.0])}, f"float64 labels of 1 axes and <U1 classes of 1{NO_LISTS}"),
        ({"labels": np.array([[0], [1]])}, f"int64 labels of 2 axes and <U1 classes of 1{NO_LISTS}"),
        ({"classes": np.array([1, 2])}, f"int64 labels of 1 axes and int64 classes of 1{NO_LISTS}"),
        ({"labels": np.array([0, 2])}, "labels 0 to 2; wanted 0 to 1, numbers of classes"),
        ({"labels": np.array([1, 1])}, "no shape of class 'a'; wanted at least one"),
    ],
)
def test_voxels_that_do_not_fit_are_refused(tmp_path, arrays, expected):
    folder = ready(tmp_path, **arrays)
    refused(f"{folder / 'voxels_test.npz'}: {expected}", contrib.modelnet, folder, size=8)


def test_damaged_archives_are_refused(tmp_path):
    path = ready(tmp_path) / "voxels_test.npz"
    content = path.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    cut = (content[:200], content[:60] + b"\xff" * 100 + content[160:])
    for damaged in (b"", b"no archive", *cut, (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(damaged)
        refused(f"{path}: cannot be read (", contrib.modelnet, tmp_path, size=8)
    path.unlink()
    refused(f"{path}: cannot be read (No such file", contrib.modelnet, tmp_path, size=8)


def test_folders_that_are_no_modelnet_are_refused(meshes):
    refused(
        "nowhere: has no file voxels_train.npz and no folder */train of meshes; wanted", contrib.modelnet, "nowhere"
    )
    refused(f"{meshes}: has no class 'sofa'; wanted one of cube, square", contrib.modelnet, meshes, ["cube", "sofa"])
    with pytest.raises(ValueError, match=r"classes must be at least one name, none of them twice; got \['a', 'a'\]"):
        contrib.modelnet(meshes, ["a", "a"])
    path = write(meshes / "square" / "test" / "square_1.off", SQUARE.replace("4 0 1 2 3", "4 0 0 0 0"))
    refused(f"{path}: cannot be read (vertices must be finite and span a mesh", contrib.modelnet, meshes, size=8)
    write(path, SQUARE.replace("1 1 0", "1 nan 0"))
    refused(f"{path}: cannot be read (vertices must be finite and span a mesh", contrib.modelnet, meshes, size=8)
    shutil.rmtree(path.parent)
    refused(f"{path.parent}: has no files *.off; wanted at least one", contrib.modelnet, meshes, size=8)


def test_real_voxels(shared_data):
    got = contrib.modelnet(shared_data / "modelnet32")
    assert got.train_x.shape == (1084, 32, 32, 32, 1) and got.test_x.shape == (272, 32, 32, 32, 1)
    assert got.names == ("chair", "monitor") and set(np.unique(got.test_x)) == {0.0, 1.0}
    with np.load(shared_data / "modelnet32" / "voxels_test.npz", allow_pickle=False) as archive:
        ones = np.bitwise_count(archive["voxels"]).sum((1, 2, 3))
        np.testing.assert_array_equal(got.test_y, archive["labels"])
    np.testing.assert_array_equal(got.test_x.sum((1, 2, 3, 4)), ones)
    # chairs and monitors look different on average
    means = np.stack([got.train_x[got.train_y == label].mean(0).ravel() for label in range(2)])
    test = got.test_x.reshape(272, -1)
    distance = (means**2).sum(1) - 2 * test @ means.T
    assert np.mean(distance.argmin(1) == got.test_y) > 0.9
    small = contrib.modelnet(shared_data / "modelnet32", ["monitor"])
    assert len(small.test_x) == np.sum(got.test_y == 1)
