"""Files, plain or gzipped, what is said of bad ones, and the packages that read them."""

import gzip
import importlib
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lp_jax.data._dataset import DataError


def wrong(place: object, got: str, wanted: str) -> DataError:
    """Return the error for a file, or for a line of one."""
    return DataError(f"{place}: {got}; wanted {wanted}.")


@contextmanager
def reading(path: Path, wanted: str) -> Iterator[None]:
    """Turn whatever a parser stumbles on in a missing or damaged file into a `DataError`."""
    try:
        yield
    except (DataError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise wrong(path, f"cannot be read ({reason})", wanted) from error


def content(path: Path, wanted: str) -> bytes:
    """Return the unpacked bytes of a file; one whose name ends in ``.gz`` must be gzipped, any other may be."""
    with reading(path, wanted):
        packed = path.read_bytes()
        return gzip.decompress(packed) if path.suffix == ".gz" or packed[:2] == b"\x1f\x8b" else packed


def lines(path: Path, wanted: str) -> list[str]:
    """Return the lines of a text in UTF-8; only line feeds end one, with or without a return."""
    with reading(path, wanted):
        text = content(path, wanted).decode("utf-8-sig")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def find(folder: Path, name: str, wanted: str) -> Path:
    """Return the file of that name, or of that name with ``.gz``."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise wrong(folder, f"has no file {name} or {name}.gz", wanted)


def chosen(classes: Sequence[str] | None, known: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the names of the classes to take: those asked for, which must be known, or all."""
    names = tuple(known if classes is None else classes)
    if not 0 < len(set(names)) == len(names):
        raise ValueError(f"classes must be at least one name, none of them twice; got {list(names)}.")
    for name in names:
        if name not in known:
            raise wrong(folder, f"has no class {name!r}", f"one of {textwrap.shorten(', '.join(known), 100)}")
    return names


def needed(module: str) -> Any:
    """Return a module of the extra that `lp_jax.data` has."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lp_jax.data needs {error.name}, of the extra lp_jax[data]: pip install 'lp_jax[data]'", name=error.name
        ) from None
