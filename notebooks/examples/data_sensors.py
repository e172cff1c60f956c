r"""Measurements that papers train on: Indian Pines and UCI HAR. A script to read, to copy and to change.

    python notebooks/examples/data_sensors.py uci_har ~/"UCI HAR Dataset" har.npz

reads a data set that you have downloaded, prints what is in it, and writes the arrays ``x``, ``y``, ``test_x`` and ``test_y`` to
a file, which ``lp_jax.data.arrays("har.npz")`` reads. Each function says where its files come from. Copy the one that you need
into your own script.

Files from the network may be damaged, or made to do harm. So the parser of .mat files, which has crashed on damaged ones, runs in
a process of its own, with bounds on its memory and its time. Nothing is unpickled. A file that does not fit raises a ValueError
with the name of the file.
"""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from lp_jax.data import Dataset


@contextlib.contextmanager
def reading(path):
    """Say which file it was that could not be read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def check(true, said):
    """Refuse a file unless ``true``. An assertion would vanish under ``python -O``."""
    if not true:
        raise ValueError(said)


def indian_pines(folder):
    """Spectra of an aerial image and the crop in each pixel: https://purr.purdue.edu/publications/1947, as .mat files at
    https://www.ehu.eus/ccwintco/index.php/Hyperspectral_Remote_Sensing_Scenes. Every fifth pixel of a class is held out."""
    image = matlab(Path(folder, "Indian_pines_corrected.mat"), "indian_pines_corrected", axes=3)
    truth = matlab(Path(folder, "Indian_pines_gt.mat"), "indian_pines_gt", axes=2)
    check(truth.shape == image.shape[:2], f"classes of {truth.shape} pixels, not {image.shape[:2]}")
    check(0 == truth.min() <= truth.max() <= 16, f"classes {truth.min()} to {truth.max()}")
    order = np.random.default_rng(0).permutation(np.flatnonzero(truth))
    order = order[np.argsort(truth.ravel()[order], kind="stable")]
    x = image.reshape(truth.size, -1)[order].astype(float)
    y = truth.ravel()[order].astype(np.int32) - 1
    held = np.arange(len(y)) % 5 == 0
    x = ((x - x[~held].mean(0)) / x[~held].std(0)).astype(np.float32)
    return Dataset(x[~held], y[~held], x[held], y[held], classes=16, shape=x.shape[1:])


def matlab(path, name, axes):
    """Read a variable in a process of its own: scipy's reader has ended in a segmentation fault on damaged files."""
    with reading(path):
        path.open("rb").close()
        command = [sys.executable, "-P", "-c", _MATLAB, str(path), name]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # the memory of many is too much
        done = subprocess.run(command, capture_output=True, timeout=60, env=env)
        said = done.stderr.decode(errors="replace").strip() or f"code {done.returncode}"
        check(done.returncode == 0, said.splitlines()[-1])
        array = np.lib.format.read_array(io.BytesIO(done.stdout), allow_pickle=False)
        check(
            array.ndim == axes and array.size and array.dtype.kind in "uif",
            f"{name}: {array.dtype} of {array.shape}, not numbers along {axes} axes",
        )
        check(np.isfinite(array).all(), f"{name}: numbers that are not finite")
    return array


_MATLAB = """
import contextlib, sys
with contextlib.suppress(ImportError, ValueError):  # a system without such bounds
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
import numpy, scipy.io
path, name = sys.argv[1:]
array = numpy.asarray(scipy.io.loadmat(path, variable_names=[name])[name])
numpy.lib.format.write_array(sys.stdout.buffer, array, allow_pickle=False)
"""


def uci_har(folder):
    """Nine signals of a telephone over 128 steps, six activities, unpacked: https://archive.ics.uci.edu/dataset/240"""
    parts = []
    for split in ("train", "test"):
        sensors = "body_acc", "body_gyro", "total_acc"
        kinds = [f"{sensor}_{axis}" for sensor in sensors for axis in "xyz"]
        paths = [Path(folder, split, "Inertial Signals", f"{kind}_{split}.txt") for kind in kinds]
        with reading(Path(folder, split)):
            x = np.stack([np.loadtxt(path, np.float32) for path in paths], axis=-1)
            y = np.loadtxt(Path(folder, split, f"y_{split}.txt"), np.int32) - 1
            check(x.shape == (len(y), 128, 9), f"{x.shape} values and {y.shape} classes")
            check(y.min() >= 0 and y.max() < 6, f"classes {y.min() + 1} to {y.max() + 1}")
        parts += [x, y]
    return Dataset(*parts, classes=6, shape=(128, 9))


def main(reader, folder, out):
    found = {"indian_pines": indian_pines, "uci_har": uci_har}[reader](folder)
    arrays = {"x": found.train_x, "y": found.train_y}
    arrays |= {"test_x": found.test_x, "test_y": found.test_y}
    print(f"{found.classes} classes:", *found.names)
    print({key: array.shape for key, array in arrays.items()})
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
