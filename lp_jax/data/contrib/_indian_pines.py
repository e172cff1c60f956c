"""Indian Pines: crops in fields, from the spectrum of a pixel of an aerial image."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import Dataset, Scaler, check_finite, check_fraction, reading, require, split, wrong

_NAMES = """Alfalfa Corn-notill Corn-mintill Corn Grass-pasture Grass-trees Grass-pasture-mowed Hay-windrowed Oats
Soybean-notill Soybean-mintill Soybean-clean Wheat Woods Buildings-Grass-Trees-Drives Stone-Steel-Towers"""


def indian_pines(folder: str | os.PathLike[str], test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load the hyperspectral image Indian Pines from a folder of ``Indian_pines_corrected.mat`` and ``Indian_pines_gt.mat``.

    A sample is the spectrum of a pixel whose ground truth is known (not 0). There are 10,249. Each band is scaled to mean 0
    and deviation 1 over the training pixels. Pixels are split at random by ``seed``; ``test_fraction`` of every class, in
    (0, 1), is held out.

    Returns:
        A `Dataset` of inputs ``(bands,)`` float32, 200 bands, in 16 classes.

    Raises:
        ModuleNotFoundError: if scipy is not installed.
        DataError: if a file is missing, damaged or without its variable, or shapes or values of the variables do not match.
        ValueError: if the fraction is outside (0, 1), or leaves a class without training or held-out samples.
        TypeError: if the seed is not an integer.

    Reference:
        Baumgardner, Biehl, Landgrebe, "220 band AVIRIS hyperspectral image data set: June 12, 1992 Indian Pine Test Site
        3", Purdue University Research Repository, 2015.
    """
    check_fraction(test_fraction)
    _check.integer("seed", seed, least=0)
    folder, names = Path(folder), tuple(_NAMES.split())
    truth_file = folder / "Indian_pines_gt.mat"
    image = _variable(folder / "Indian_pines_corrected.mat", "indian_pines_corrected", axes=3)
    truth = _variable(truth_file, "indian_pines_gt", axes=2)
    if truth.shape != image.shape[:2]:
        got, wanted = (" x ".join(map(str, array.shape[:2])) for array in (truth, image))
        raise wrong(truth_file, f"{got} pixels", f"{wanted}, like the image")
    if truth.min() < 0 or truth.max() > len(names) or not truth.any():
        raise wrong(truth_file, f"values {truth.min()} to {truth.max()}", f"0 to {len(names)}, not all of them 0")
    known = truth != 0
    x, y = image[known].astype(np.float64), truth[known].astype(np.int32) - 1
    train_x, train_y, test_x, test_y = split(x, y, test_fraction, seed)
    scaled = Scaler(train_x)
    return Dataset(scaled(train_x), train_y, scaled(test_x), test_y, classes=len(names), shape=x.shape[1:], names=names)


def _variable(path: Path, name: str, *, axes: int) -> np.ndarray:
    """Read a variable in another process: scipy's reader ends that of a damaged file by a segmentation fault."""
    require("scipy.io")
    wanted = f"a MATLAB file before version 7.3 with a variable {name}"
    with reading(path, wanted):
        path.open("rb").close()
        command = [sys.executable, "-P", "-c", _READER, str(path), name]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, env=env)
        except subprocess.TimeoutExpired:
            raise wrong(path, f"cannot be read in {_SECONDS} seconds", wanted) from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or f"its reader ended with code {done.returncode}"
            raise wrong(path, f"cannot be read ({said.splitlines()[-1]})", wanted)
        array = np.lib.format.read_array(io.BytesIO(done.stdout), allow_pickle=False)
    if array.ndim != axes or array.size == 0 or array.dtype.kind not in "uif":
        raise wrong(path, f"variable {name}: {array.dtype} of shape {array.shape}", f"numbers along {axes} axes")
    check_finite(path, f"variable {name}", array)
    return array


_SECONDS = 60

_READER = """
import contextlib, sys
import numpy, scipy.io

with contextlib.suppress(ImportError, ValueError):  # a system without such bounds, or with a lower one
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
try:
    path, name = sys.argv[1:]
    array = numpy.asarray(scipy.io.loadmat(path, variable_names=[name])[name])
    numpy.lib.format.write_array(sys.stdout.buffer, array, allow_pickle=False)
except Exception as error:
    sys.exit(str(error) or type(error).__name__)
"""
