"""Your own arrays, in a NumPy file."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lp_jax.data._dataset import Dataset, reading, stratified, wrong

_WANTED = "a file as numpy.savez writes it, with x of shape (samples, ...) and y, a class or values for each sample"


def arrays(path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load inputs ``x`` and classes or values ``y`` from a ``.npz`` file, as ``numpy.savez("mine.npz", x=x, y=y)`` writes it.

    Args:
        path: the file. ``x`` has shape ``(samples, *shape)``, numbers; pixels may be uint8. Integers or strings in ``y``,
            ``(samples,)``, are classes: their different values, in order. Floating-point numbers, ``(samples,)`` or
            ``(samples, values)``, are values. ``test_x`` and ``test_y``, if there are any, are held out; then all of ``x`` and
            ``y`` is for training.
        test_fraction: fraction of every class that is held out, in (0, 1), if the file has no test set.
        seed: seed of that split.

    Returns:
        A `Dataset` with the names of the classes; inputs are float32, or uint8 as they are. Values are as they are,
        ``(samples, values)``, and ``classes`` is 0.

    Raises:
        DataError: if the file cannot be read or has other arrays.
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
        stored = {name: file[name] for name in file.files}
    held_out = "test_x" in stored or "test_y" in stored
    pairs = [_pair(path, stored, prefix) for prefix in ("", "test_")[: 1 + held_out]]
    (_, y), (_, test_y) = pairs[0], pairs[-1]
    if (y.dtype.kind == "f") != (test_y.dtype.kind == "f"):
        raise wrong(path, f"y holds {y.dtype} and test_y {test_y.dtype}", "classes or values in both")
    targets, classes = _values(path, y) if y.dtype.kind == "f" else _classes(path, [y for _, y in pairs])
    parts = [(_inputs(x), targets(y)) for x, y in pairs]
    if held_out:
        for name, train, test in zip("xy", *parts, strict=True):
            if train.shape[1:] != test.shape[1:]:
                got = f"test_{name} has samples of shape {test.shape[1:]} and {name} {train.shape[1:]}"
                raise wrong(path, got, "the same shape")
    else:
        ((x, y),) = parts
        positions = stratified(y if len(classes) else np.zeros(len(y)), test_fraction, np.random.default_rng(seed))
        parts = [(x[at], y[at]) for at in positions]
    shape = parts[0][0].shape[1:]
    return Dataset(*parts[0], *parts[1], classes=len(classes), shape=shape, names=tuple(map(str, classes)))


def _pair(path: Path, stored: dict[str, np.ndarray], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, or test_x and test_y; refuse those that are missing or no data set."""
    a, b = f"{prefix}x", f"{prefix}y"
    if absent := [name for name in (a, b) if name not in stored]:
        raise wrong(path, f"has no {absent[0]}, but {', '.join(stored) or 'nothing'}", _WANTED)
    x, y = stored[a], stored[b]
    if x.ndim < 2 or y.shape[:1] != x.shape[:1] or y.ndim > 1 + (y.dtype.kind == "f") or y.size == 0:
        raise wrong(path, f"{a} has shape {x.shape} and {b} {y.shape}", _WANTED)
    if x.dtype.kind not in "iufb":
        raise wrong(path, f"{a} holds {x.dtype}", "numbers")
    if y.dtype.kind not in "iubUf":
        raise wrong(path, f"{b} holds {y.dtype}", "classes, integers or strings, or floating-point values")
    for name, array in ((a, x), (b, y)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise wrong(path, f"{name} holds numbers that are not finite", "finite ones")
    return x, y


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
