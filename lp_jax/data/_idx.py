"""IDX files, the format of MNIST: a magic number, the sizes of the axes, the values; all big-endian."""

import math
import os
from pathlib import Path

import numpy as np

from lp_jax.data._read import Reader, opened

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: "i2", 0x0C: "i4", 0x0D: "f4", 0x0E: "f8"}
_MOST_AXES = 32  # what any NumPy can have


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file, plain or gzipped.

    Byte 2 of the file is the type of the values, byte 3 the number of axes; then the size of each axis in 4 bytes, then
    the values, the last axis fastest.

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.

    Returns:
        The array, in the machine's byte order.

    Raises:
        DataError: for a file that is missing, empty, no IDX file, no gzip file, damaged, or shorter or longer than its
            header says. Positions are bytes of the unpacked content.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "labels-idx1-ubyte"
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        ...     data.read_idx(path)
        array([7, 2, 1], dtype=uint8)

    Reference:
        LeCun, Cortes, Burges, "The MNIST database of handwritten digits", 1998, section "File formats".
    """
    with opened(Path(path), "an IDX file") as file:
        return _parse(file)


def _parse(file: Reader) -> np.ndarray:
    magic = file.demand(4, "its magic number")
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES or not 1 <= magic[3] <= _MOST_AXES:
        types = ", ".join(f"{code:02x}" for code in _TYPES)
        raise file.error(
            f"magic number {magic.hex()} is none of an IDX file; wanted 0000, a type ({types}) and the number of axes",
            0,
        )
    axes = magic[3]
    shape = tuple(np.frombuffer(file.demand(4 * axes, "its header"), ">u4").tolist())
    dtype = np.dtype(_TYPES[magic[2]]).newbyteorder(">")
    size = math.prod(shape) * dtype.itemsize
    described = f"{' x '.join(map(str, shape))} values of {dtype.itemsize} byte(s) that its header announces"
    values = np.frombuffer(file.demand(size, f"the {described}"), dtype).reshape(shape)
    if file.take(1):
        raise file.error(f"the file goes on after the {described}; wanted its end", file.position - 1)
    return values.astype(dtype.newbyteorder("="))
