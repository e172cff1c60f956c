"""Arrays of one's own, in a file of NumPy's."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lp_jax.data._dataset import Dataset, reading, stratified, wrong

_WANTED = "a file as numpy.savez writes it, with x of shape (samples, ...) and y, a class or values for each sample"


def arrays(path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Inputs ``x`` and classes or values ``y`` from a ``.npz`` file, as ``numpy.savez("mine.npz", x=x, y=y)`` writes it.

    Args:
        path: the file. ``x`` has shape ``(samples, *shape)``, numbers; pixels may be uint8. Integers or strings in ``y``,
            ``(samples,)``, are classes: their different values, in order. Floating-point numbers, ``(samples,)`` or
            ``(samples, values)``, are values. With ``test_x`` and ``test_y`` these are held out, and all others are trained
            with.
        test_fraction: fraction that is held out, of every class, in (0, 1), where the file names no test set.
        seed: of that split.

    Returns:
        A `Dataset` with the names of the classes; inputs are float32, or uint8 as they are. Values are as they are,
        ``(samples, values)``, and ``classes`` is 0.

    Raises:
        DataError: for a file that cannot be read or has other arrays in it.
        ValueError: for a fraction outside (0, 1), or one that leaves a class without samples on either side.

    Example:
        >>> import numpy as np, tempfile, pathlib
        >>> from lp_jax import data
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(path, x=np.ones((10, 3)), y=["no", "yes"] * 5)
        >>> mine = data.arrays(path)
        >>> mine.train_x.shape, mine.names
        ((8, 3), ('no', 'yes'))
    """
    path = Path(path)
    with reading(path, _WANTED), np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    held_out = "test_x" in found or "test_y" in found
    names = [("x", "y"), *([("test_x", "test_y")] if held_out else [])]
    for a, b in names:
        for name in (a, b):
            if name not in found:
                raise wrong(path, f"has no {name}, but {', '.join(found) or 'nothing'}", _WANTED)
        samples, of_values = found[a].shape[:1], found[b].dtype.kind == "f"
        if found[a].ndim < 2 or found[b].shape[:1] != samples or found[b].ndim > 1 + of_values or found[b].size == 0:
            raise wrong(path, f"{a} has shape {found[a].shape} and {b} {found[b].shape}", _WANTED)
        if found[a].dtype.kind not in "iufb":
            raise wrong(path, f"{a} holds {found[a].dtype}", "numbers")
        if found[b].dtype.kind not in "iubUf":
            raise wrong(path, f"{b} holds {found[b].dtype}", "classes, integers or strings, or floating-point values")
        for name in (a, b):
            if found[name].dtype.kind == "f" and not np.isfinite(found[name]).all():
                raise wrong(path, f"{name} holds numbers that are not finite", "finite ones")
    kinds = {found[b].dtype.kind == "f" for _, b in names}
    if len(kinds) > 1:
        raise wrong(path, f"y holds {found['y'].dtype} and test_y {found['test_y'].dtype}", "classes or values in both")
    targets, classes = _values(path, found["y"]) if True in kinds else _classes(path, [found[b] for _, b in names])
    parts = [(_inputs(found[a]), targets(found[b])) for a, b in names]
    if held_out:
        (x, y), (test_x, test_y) = parts
        for name, one, other in (("x", x, test_x), ("y", y, test_y)):
            if one.shape[1:] != other.shape[1:]:
                got = f"test_{name} has samples of shape {other.shape[1:]} and {name} {one.shape[1:]}"
                raise wrong(path, got, "the same shape")
    else:
        ((x, y),) = parts
        generator = np.random.default_rng(seed)
        train, test = stratified(y if len(classes) else np.zeros(len(y)), test_fraction, generator)
        x, y, test_x, test_y = x[train], y[train], x[test], y[test]
    return Dataset(x, y, test_x, test_y, classes=len(classes), shape=x.shape[1:], names=tuple(map(str, classes)))


Targets: TypeAlias = Callable[[np.ndarray], np.ndarray]


def _classes(path: Path, labels: Sequence[np.ndarray]) -> tuple[Targets, np.ndarray]:
    classes = np.unique(np.concatenate(labels))
    if len(classes) < 2:
        raise wrong(path, f"y holds one class, {classes.tolist()}", "two or more")
    return lambda y: np.searchsorted(classes, y).astype(np.int32), classes


def _values(path: Path, y: np.ndarray) -> tuple[Targets, np.ndarray]:
    if (y == y[:1]).all():
        raise wrong(path, f"y holds one value, {y.reshape(-1)[0]:g}", "values that differ")
    return lambda y: y.reshape(len(y), -1), np.empty(0)


def _inputs(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.uint8 else x.astype(np.float32)
