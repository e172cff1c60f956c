"""Files, plain or gzipped, as bytes and as lines of text; and where in them something is wrong."""

import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lp_jax.data._dataset import DataError

_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20


class Reader:
    """Reads on and knows where it is; no more memory than the file has content, whatever its header says."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, path: Path):
        self.stream, self.path, self.position = stream, path, 0

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, or fewer at the end of the file."""
        parts = []
        try:
            while size > 0 and (part := self.stream.read(min(size, _CHUNK))):
                parts.append(part)
                self.position += len(part)
                size -= len(part)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self.error(f"the gzip file is damaged or cut off ({error}); wanted an intact one") from error
        return b"".join(parts)

    def demand(self, size: int, what: str) -> bytes:
        """The next ``size`` bytes."""
        wanted = self.position + size
        content = self.take(size)
        if len(content) < size:
            raise self.error(f"the file ends in {what}; wanted {wanted} bytes")
        return content

    def error(self, message: str, position: int | None = None) -> DataError:
        """What is wrong here, or at another position."""
        return DataError(f"{self.path}: byte {self.position if position is None else position}: {message}.")


@contextmanager
def opened(path: Path, what: str) -> Iterator[Reader]:
    """The unpacked content of a file; one whose name ends in ``.gz`` must be gzipped, any other may be.

    Args:
        path: the file.
        what: it should be, for the messages: "an IDX file".
    """
    try:
        with path.open("rb") as raw:
            start = raw.read(2)
            raw.seek(0)
            if not start:
                raise DataError(f"{path}: byte 0: the file is empty; wanted {what}.")
            if start == _GZIP:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield Reader(unpacked, path)
            elif path.suffix == ".gz":
                wanted = f"wanted {_GZIP.hex()}, or a name without .gz"
                raise DataError(f"{path}: byte 0: starts with {start.hex()}, which is no gzip file; {wanted}.")
            else:
                yield Reader(raw, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror or error}; wanted {what}.") from error


def lines(path: Path, what: str) -> list[str]:
    """The lines of a text file in UTF-8, without their ends; only line feeds end one, with or without a return."""
    with opened(path, what) as file:
        content = file.take(sys.maxsize)
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise wrong(path, number, f"byte {content[error.start]:02x} is not UTF-8", "text in UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def wrong(path: Path, line: int, found: str, wanted: str) -> DataError:
    """What is wrong in a line, counted from 1."""
    return DataError(f"{path}: line {line}: {found}; wanted {wanted}.")


def find(folder: str | os.PathLike[str], name: str, wanted: str) -> Path:
    """The file of that name, or of that name with ``.gz``."""
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.exists():
            return path
    raise DataError(f"{folder}: has no file {name} or {name}.gz; wanted {wanted}.")
