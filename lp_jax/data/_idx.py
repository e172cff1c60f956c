"""IDX files, the format of MNIST: a magic number, the sizes of the axes, the values; all big-endian."""

import math
import os
from pathlib import Path

import numpy as np

from lp_jax.data._read import content, reading, wrong

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: "i2", 0x0C: "i4", 0x0D: "f4", 0x0E: "f8"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file, plain or gzipped.

    Byte 2 of the file is the type of the values, byte 3 the number of axes; then the size of each axis in 4 bytes, then
    the values, the last axis fastest.

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.

    Returns:
        The array, in the machine's byte order.

    Raises:
        DataError: for a file that is missing, damaged, not an IDX file, or shorter or longer than its header says.

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
    path = Path(path)
    raw = content(path, "an IDX file")
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        types = ", ".join(f"{code:02x}" for code in _TYPES)
        raise wrong(path, f"starts with {raw[:4].hex()!r}", f"an IDX file: 0000, a type ({types}), the number of axes")
    dtype, axes = np.dtype(_TYPES[raw[2]]).newbyteorder(">"), raw[3]
    with reading(path, "an IDX file"):
        shape = np.frombuffer(raw, ">u4", axes, offset=4).tolist()
        size = 4 + 4 * axes + math.prod(shape) * dtype.itemsize
        if len(raw) != size:
            described = f"{' x '.join(map(str, shape))} values of {dtype.itemsize} byte(s) that its header announces"
            raise wrong(path, f"{len(raw)} bytes", f"{size}, for the {described}")
        return np.frombuffer(raw, dtype, offset=4 + 4 * axes).reshape(shape).astype(dtype.newbyteorder("="))
