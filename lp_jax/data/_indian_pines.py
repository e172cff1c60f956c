"""Indian Pines: what grows in a field, by the spectrum of one pixel of an image from the air."""

import io
import os
from pathlib import Path

import numpy as np

from lp_jax import _check
from lp_jax.data._dataset import DataError, Dataset
from lp_jax.data._scale import Scale
from lp_jax.data._split import stratified

_NAMES = (
    "Alfalfa",
    "Corn-notill",
    "Corn-mintill",
    "Corn",
    "Grass-pasture",
    "Grass-trees",
    "Grass-pasture-mowed",
    "Hay-windrowed",
    "Oats",
    "Soybean-notill",
    "Soybean-mintill",
    "Soybean-clean",
    "Wheat",
    "Woods",
    "Buildings-Grass-Trees-Drives",
    "Stone-Steel-Towers",
)


def indian_pines(folder: str | os.PathLike[str], test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Indian Pines, a hyperspectral image, from ``Indian_pines_corrected.mat`` and ``Indian_pines_gt.mat``.

    A sample is the spectrum of a pixel whose ground truth is known, that is, not 0: 10,249 of them. Each band is taken to
    mean 0 and deviation 1 over the training pixels.

    Args:
        folder: where the files are.
        test_fraction: fraction of the pixels that is held out, in (0, 1); the same of every class.
        seed: of the random split.

    Returns:
        A `Dataset` of inputs ``(bands,)`` float32, 200 bands, in 16 classes.

    Raises:
        ImportError: without scipy.
        DataError: for a file that is missing or damaged, without its variable, and for variables of shapes or values that
            do not fit.
        ValueError: for a fraction outside (0, 1), or one that leaves a class without samples on either side.
        TypeError: for a seed that is no integer.

    Example:
        >>> from lp_jax import data
        >>> data.indian_pines("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lp_jax.data._dataset.DataError: no/such/folder/Indian_pines_corrected.mat: cannot be read, No such file ...

    Reference:
        Baumgardner, Biehl, Landgrebe, "220 band AVIRIS hyperspectral image data set: June 12, 1992 Indian Pine Test Site
        3", Purdue University Research Repository, 2015.
    """
    _check.integer("seed", seed, least=0)
    folder = Path(folder)
    image_file, truth_file = folder / "Indian_pines_corrected.mat", folder / "Indian_pines_gt.mat"
    image = _variable(image_file, "indian_pines_corrected", "rows x columns x bands", 3)
    truth = _variable(truth_file, "indian_pines_gt", "rows x columns", 2)
    if truth.shape != image.shape[:2]:
        got, wanted = (" x ".join(map(str, array.shape[:2])) for array in (truth, image))
        raise DataError(f"{truth_file}: variable indian_pines_gt: {got} pixels; wanted {wanted}, like the image.")
    if truth.min() < 0 or truth.max() > len(_NAMES) or not truth.any():
        found = f"values {truth.min()} to {truth.max()}"
        raise DataError(
            f"{truth_file}: variable indian_pines_gt: {found}; wanted 0 to {len(_NAMES)}, not all of them 0."
        )
    known = truth != 0
    x, y = image[known].astype(np.float64), truth[known].astype(np.int32) - 1
    train, test = stratified(y, test_fraction, np.random.default_rng(seed))
    scale = Scale(x[train])
    return Dataset(
        scale(x[train]), y[train], scale(x[test]), y[test], classes=len(_NAMES), shape=x.shape[1:], names=_NAMES
    )


def _variable(path: Path, name: str, described: str, axes: int) -> np.ndarray:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ImportError(
            f'indian_pines needs scipy, which is not here ({error}): pip install "lp_jax[train]".'
        ) from error
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror or error}; wanted a MATLAB file.") from error
    try:
        content = loadmat(io.BytesIO(packed))
    except Exception as error:  # a damaged file raises whatever the parser stumbles on
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is damaged or no MATLAB file before version 7.3 ({reason}); wanted one.") from error
    if name not in content:
        names = ", ".join(key for key in content if not key.startswith("__")) or "none"
        raise DataError(f"{path}: has variables {names}; wanted {name}.")
    array = np.asarray(content[name])
    if array.ndim != axes or array.size == 0 or array.dtype.kind not in "uif":
        shape = " x ".join(map(str, array.shape))
        raise DataError(f"{path}: variable {name}: {array.dtype} of shape {shape}; wanted numbers, {described}.")
    return array
