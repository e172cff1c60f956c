"""Your own arrays, in a NumPy file."""

import zipfile
from pathlib import Path

import numpy as np

from lp_jax._arrays._types import StrPath
from lp_jax.data._dataset import DataError, Dataset, split

_WANTED = (
    "a file as numpy.savez writes it, with x of shape (samples, ...) and y, a class or values "
    "for each sample"
)


def arrays(path: StrPath, *, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Load inputs ``x`` and classes or values ``y`` from a ``.npz`` file, as ``numpy.savez("mine.npz", x=x, y=y)`` writes it.

    Args:
        path: the file. ``x`` has shape ``(samples, *shape)``, numbers; pixels may be uint8. Integers or strings in ``y``,
            ``(samples,)``, are classes: their different values, in order. Floating-point numbers, ``(samples,)`` or
            ``(samples, values)``, are values. ``test_x`` and ``test_y``, if there are any, are held out; then all of ``x`` and
            ``y`` is for training.
        test_fraction: fraction of every class that is held out, in (0, 1), if the file has no test set.
        seed: seed of that split.

    Returns:
        A `Dataset`. Inputs of one or two bytes are float32, or uint8 as they are; float32 and float64 stay, and longer integers
        are float64: scale such inputs before they become float32. For values, ``classes`` is 0.

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
    stored = _stored(path)
    x, y = _pair(path, stored, "")
    values = y.dtype.kind == "f"
    if "test_x" in stored or "test_y" in stored:
        test_x, test_y = _pair(path, stored, "test_")
        kinds = {y.dtype.kind, test_y.dtype.kind}
        if len(kinds) > 1 and kinds != {"i", "u"}:
            got = f"y holds {y.dtype} and test_y {test_y.dtype}"
            raise _wrong(path, got, "classes or values in both, of one kind")
        for name, train, test in (("x", x, test_x), ("y", y, test_y)):
            if train.shape[1:] != test.shape[1:]:
                got = (
                    f"test_{name} has samples of shape {test.shape[1:]} "
                    f"and {name} {train.shape[1:]}"
                )
                raise _wrong(path, got, "the same shape")
    else:
        x, y, test_x, test_y = split(x, y, test_fraction, seed, by_class=not values)
    # NumPy compares int64 with uint64 as floating-point numbers, by which large labels would become one
    if np.result_type(y, test_y).kind == "f" and not values:
        y = y.astype(object)
        test_y = test_y.astype(object)
    # Classes are numbered over both parts, so that a class has one number also if only one of them has it.
    known = np.unique(np.concatenate([y, test_y]))
    if len(known) < 2:
        raise _wrong(
            path, f"y holds one {'value' if values else 'class'}, {known[0]}", "two or more"
        )
    names = () if values else tuple(map(str, known))
    if not values:
        # `known` is sorted and has every label, so the place that `searchsorted` finds is the number of the class.
        y, test_y = (np.searchsorted(known, labels).astype(np.int32) for labels in (y, test_y))
    return Dataset(
        _inputs(x), y, _inputs(test_x), test_y, classes=len(names), shape=x.shape[1:], names=names
    )


def _pair(path: Path, stored: dict[str, np.ndarray], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, or test_x and test_y; refuse those that are missing or no data set."""
    a = f"{prefix}x"
    b = f"{prefix}y"
    if absent := [name for name in (a, b) if name not in stored]:
        raise _wrong(path, f"has no {absent[0]}, but {', '.join(stored) or 'nothing'}", _WANTED)
    x = stored[a]
    y = stored[b]
    if (
        x.ndim < 2
        or y.shape[:1] != x.shape[:1]
        or y.ndim > 1 + (y.dtype.kind == "f")
        or not x.size * y.size
    ):
        raise _wrong(path, f"{a} has shape {x.shape} and {b} {y.shape}", _WANTED)
    if x.dtype.kind not in "iufb":
        raise _wrong(path, f"{a} holds {x.dtype}", "numbers")
    if y.dtype.kind not in "iubUf":
        raise _wrong(
            path, f"{b} holds {y.dtype}", "classes, integers or strings, or floating-point values"
        )
    for name, array in ((a, x), (b, y)):
        # the square of 1e150 is a number, so that a deviation can be computed
        if array.dtype.kind == "f" and not (fine := np.abs(array) < np.float64(1e150)).all():
            at = np.argwhere(~fine)[0].tolist()
            raise _wrong(path, f"{name} holds {array[*at]} at {at}", "finite numbers below 1e+150")
    return x, y.reshape(len(y), -1) if y.dtype.kind == "f" else y


def _inputs(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint8 or (x.dtype.kind == "f" and x.dtype.itemsize in (4, 8)):
        return x
    return x.astype(np.float32 if x.dtype.itemsize < 4 else np.float64)


def _stored(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file. Their checksums and sizes are checked, and none is unpickled."""
    try:
        if path.is_fifo() or path.is_char_device():  # waits, or never ends
            raise OSError("it is no regular file")
        with zipfile.ZipFile(path) as file:
            # A small archive may unpack to more than the memory holds, so the sizes that it claims are bounded first.
            most = max(2**28, 100 * path.stat().st_size)
            if sum(member.file_size for member in file.infolist()) > most:
                raise ValueError(f"it unpacks to more than {most:,} bytes")
            return {
                member.filename.removesuffix(".npy"): _member(file, member)
                for member in file.infolist()
            }
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise _wrong(path, f"cannot be read ({reason or type(error).__name__})", _WANTED) from error


def _member(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with file.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        # The checksum of a member is checked only at its end, which `read_array` may not reach.
        if stream.read(1):
            raise ValueError(f"{member.filename} is longer than its header says")
    return array


def _wrong(path: Path, got: str, wanted: str) -> DataError:
    return DataError(f"{path}: {got}; wanted {wanted}.")
