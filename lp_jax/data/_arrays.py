"""Arrays of one's own, in a file of NumPy's."""

import os
from pathlib import Path

import numpy as np

from lp_jax.data._dataset import Dataset, reading, stratified, wrong

_WANTED = "a file as numpy.savez writes it, with x of shape (samples, ...) and y, a class for each sample"

_CLASSES = "classes, integers or strings (values need a loss of your own: docs/training.md)"


def arrays(path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Inputs ``x`` and classes ``y`` from a ``.npz`` file, as ``numpy.savez("mine.npz", x=x, y=y)`` writes it.

    Args:
        path: the file. ``x`` has shape ``(samples, *shape)``, numbers; pixels may be uint8. ``y`` has shape ``(samples,)``,
            integers or strings: their different values are the classes, in order. With ``test_x`` and ``test_y`` these are
            held out, and all others are trained with.
        test_fraction: fraction of every class that is held out, in (0, 1), where the file names no test set.
        seed: of that split.

    Returns:
        A `Dataset` with the names of the classes; inputs are float32, or uint8 as they are.

    Raises:
        DataError: for a file that cannot be read or has other arrays in it, and for values in the place of classes.
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
        if found[a].ndim < 2 or found[b].shape != found[a].shape[:1]:
            raise wrong(path, f"{a} has shape {found[a].shape} and {b} {found[b].shape}", _WANTED)
        if found[a].dtype.kind not in "iufb":
            raise wrong(path, f"{a} holds {found[a].dtype}", "numbers")
        if found[b].dtype.kind not in "iubU":
            raise wrong(path, f"{b} holds {found[b].dtype}", _CLASSES)
        if found[a].dtype.kind == "f" and not np.isfinite(found[a]).all():
            raise wrong(path, f"{a} holds numbers that are not finite", "finite ones")
    classes = np.unique(np.concatenate([found[b] for _, b in names]))
    if len(classes) < 2:
        raise wrong(path, f"y holds one class, {classes.tolist()}", "two or more")
    (x, y), *others = [(_inputs(found[a]), np.searchsorted(classes, found[b]).astype(np.int32)) for a, b in names]
    if others:
        test_x, test_y = others[0]
        if test_x.shape[1:] != x.shape[1:]:
            raise wrong(path, f"test_x has inputs of shape {test_x.shape[1:]} and x {x.shape[1:]}", "the same shape")
    else:
        train, test = stratified(y, test_fraction, np.random.default_rng(seed))
        x, y, test_x, test_y = x[train], y[train], x[test], y[test]
    return Dataset(x, y, test_x, test_y, classes=len(classes), shape=x.shape[1:], names=tuple(map(str, classes)))


def _inputs(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.uint8 else x.astype(np.float32)
