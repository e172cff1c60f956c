"""OFF files, the format of ModelNet's meshes: counts, vertices, polygons."""

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._read import lines, wrong


class Mesh(NamedTuple):
    """Triangles in space.

    Attributes:
        vertices: coordinates, ``(vertices, 3)`` float64.
        faces: numbers of the corners, ``(triangles, 3)`` int32.
    """

    vertices: np.ndarray
    faces: np.ndarray


def read_off(path: str | os.PathLike[str]) -> Mesh:
    r"""Read a mesh from an OFF file, plain or gzipped.

    Polygons become fans of triangles around their first corner; what follows the corners of a polygon, its colour, is
    skipped. The counts may stand on the first line, even right behind "OFF", as in some files of ModelNet.

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.

    Returns:
        A `Mesh`.

    Raises:
        DataError: for a file that is missing, damaged, no OFF file, shorter or longer than its counts say, or with lines that
            are no vertices or polygons.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "square.off"
        ...     _ = path.write_text("OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n")
        ...     data.read_off(path).faces.tolist()
        [[0, 1, 2], [0, 2, 3]]

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015 (ModelNet); the format: Rost,
        "OFF - a 3D object file format", 1989.
    """
    path = Path(path)
    content = lines(path, "an OFF file")
    entries = _entries(content)
    number, first = next(entries, (1, [""]))
    if not first[0].startswith("OFF"):
        raise wrong(path, number, f"{' '.join(first)[:20]!r}", "OFF")
    counts = [text for text in (first[0][3:], *first[1:]) if text]
    if not counts:
        number, counts = next(entries, (len(content), []))
    if len(counts) not in (2, 3) or not all(map(str.isdecimal, counts)):
        found = " ".join(counts)[:40]
        raise wrong(path, number, f"{found!r}", "the numbers of vertices, faces and edges")
    vertex_count, face_count = int(counts[0]), int(counts[1])
    vertices = [
        _vertex(path, *_entry(path, content, entries, "vertices", vertex_count, at)) for at in range(vertex_count)
    ]
    faces: list[list[int]] = []
    for at in range(face_count):
        number, entry = _entry(path, content, entries, "faces", face_count, at)
        polygon = _polygon(path, number, entry, vertex_count)
        faces += [[polygon[0], b, c] for b, c in itertools.pairwise(polygon[1:])]
    if after := next(entries, None):
        raise wrong(path, after[0], f"{' '.join(after[1])[:20]!r} after {face_count} faces", "the end of the file")
    return Mesh(np.array(vertices, np.float64).reshape(-1, 3), np.array(faces, np.int32).reshape(-1, 3))


def _entries(content: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Lines with something in them, comments apart."""
    for number, line in enumerate(content, 1):
        if entry := line.partition("#")[0].split():
            yield number, entry


def _entry(
    path: Path, content: list[str], entries: Iterator[tuple[int, list[str]]], what: str, count: int, at: int
) -> tuple[int, list[str]]:
    found = next(entries, None)
    if found is None:
        raise wrong(path, len(content), f"the file ends after {at} {what}", f"{count}")
    return found


def _vertex(path: Path, number: int, entry: list[str]) -> list[float]:
    try:
        vertex = list(map(float, entry))
    except ValueError:
        vertex = []
    if len(vertex) != 3 or not all(map(math.isfinite, vertex)):
        raise wrong(path, number, f"vertex {' '.join(entry)[:40]!r}", "three finite coordinates")
    return vertex


def _polygon(path: Path, number: int, entry: list[str], vertex_count: int) -> list[int]:
    try:
        size = int(entry[0])
        polygon = list(map(int, entry[1 : 1 + max(size, 0)]))
    except ValueError:
        size, polygon = 0, []
    if size < 3 or len(polygon) != size:
        raise wrong(
            path, number, f"face {' '.join(entry)[:40]!r}", "a number of corners, at least 3, and as many vertices"
        )
    for vertex in polygon:
        if not 0 <= vertex < vertex_count:
            raise wrong(path, number, f"vertex {vertex} in a face", f"0 to {vertex_count - 1}")
    return polygon
