"""OFF files, the format of ModelNet's meshes: counts, vertices, polygons."""

import io
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp_jax.data._read import lines, needed, reading, wrong


class Mesh(NamedTuple):
    """Triangles in space.

    Attributes:
        vertices: coordinates, ``(vertices, 3)`` float64.
        faces: numbers of the corners, ``(triangles, 3)`` int32.
    """

    vertices: np.ndarray
    faces: np.ndarray


def read_off(path: str | os.PathLike[str]) -> Mesh:
    r"""Read a mesh from an OFF file, plain or gzipped, with the package ``trimesh``.

    Polygons become triangles. What follows the corners of a polygon, its colour, is skipped. The counts may stand on the
    first line, even right behind "OFF", as in some files of ModelNet.

    Args:
        path: the file; one whose name ends in ``.gz`` must be gzipped.

    Returns:
        A `Mesh`.

    Raises:
        ModuleNotFoundError: without trimesh.
        DataError: for a file that is missing, damaged, not an OFF file, or shorter or longer than its counts say.

    Example:
        >>> import pathlib, tempfile
        >>> from lp_jax import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "triangle.off"
        ...     _ = path.write_text("OFF\n3 1 0\n0 0 0\n1 0 0\n1 1 0\n3 0 1 2\n")
        ...     data.read_off(path).faces.tolist()
        [[0, 1, 2]]

    Reference:
        Wu et al., "3D ShapeNets: a deep representation for volumetric shapes", CVPR 2015 (ModelNet); the format: Rost,
        "OFF - a 3D object file format", 1989.
    """
    path, wanted = Path(path), "an OFF file"
    trimesh = needed("trimesh")
    entries = [entry for line in lines(path, wanted) if (entry := line.partition("#")[0].strip())]
    header = re.match(r"OFF\s*(\d+) +(\d+)( +\d+)?\n", "\n".join([*entries, ""]))
    if not header:
        raise wrong(path, f"starts with {' '.join(entries)[:20]!r}", "OFF and the numbers of vertices, faces and edges")
    vertices, faces = int(header[1]), int(header[2])
    found = len(entries) - header[0].count("\n")
    if found != vertices + faces:
        # trimesh reads as much as there is
        raise wrong(path, f"{found} lines after the counts", f"{vertices} vertices and {faces} faces")
    with reading(path, wanted):
        mesh = trimesh.load_mesh(io.StringIO("\n".join(entries)), file_type="off", process=False)
    if len(mesh.faces) < faces:
        raise wrong(path, "a face with fewer corners than it announces, or fewer than 3", "polygons")
    return Mesh(np.array(mesh.vertices, np.float64), np.array(mesh.faces, np.int32))
