"""Meshes as voxels: those that a triangle meets."""

from collections.abc import Iterator

import numpy as np

from lp_jax import _check

_CANDIDATES = 1 << 18  # voxels looked at together: some 20 MB of projections


def voxelize(vertices: np.ndarray, faces: np.ndarray, size: int = 32, *, margin: int = 0) -> np.ndarray:
    """The voxels that the surface of a mesh goes through.

    The mesh is centred in a cube, its longest side from wall to wall. Whether a triangle meets a voxel is decided
    exactly, not by sampling: by projections on the ten axes that can separate the two, the triangle's normal and the
    products of its edges with the edges of a cube; the three axes of the cube itself bound the voxels looked at. A triangle
    that lies between two layers of voxels belongs to the upper one.

    Args:
        vertices: coordinates, ``(vertices, 3)``.
        faces: numbers of the corners, ``(triangles, 3)`` integers.
        size: voxels along each side of the cube.
        margin: voxels that stay empty at each wall.

    Returns:
        Booleans ``(size, size, size)`` along the coordinates' axes.

    Raises:
        ValueError: for arrays of other shapes, corners that are not there, coordinates that are not finite, no triangles,
            a mesh that is a single point, and a margin that leaves nothing.
        TypeError: for a size or margin that is no integer, and for corners that are no integers.

    Example:
        >>> import numpy as np
        >>> from lp_jax import data
        >>> corners = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> data.voxelize(corners, np.array([[0, 1, 2]]), size=4)[:, :, 2].astype(int)
        array([[1, 1, 1, 1],
               [1, 1, 1, 1],
               [1, 1, 1, 0],
               [1, 1, 0, 0]])

    Reference:
        Akenine-Möller, "Fast 3D triangle-box overlap testing", Journal of Graphics Tools 6 (2001).
    """
    _check.integer("size", size, least=1)
    _check.integer("margin", margin, least=0)
    if 2 * margin >= size:
        raise ValueError(f"margin must be less than half of the size, {size}; got {margin}.")
    corners = _corners(np.asarray(vertices, np.float64), np.asarray(faces))
    low, high = corners.min(axis=(0, 1)), corners.max(axis=(0, 1))
    extent = (high - low).max()
    corners = (corners - (low + high) / 2) * ((size - 2 * margin) / extent) + size / 2
    # rounding must not push what lies on a wall outside, nor a plane between two layers to the lower one
    corners = np.round(corners, 9)
    edges = np.roll(corners, -1, axis=1) - corners
    axes = np.cross(edges[:, :, None, :], np.eye(3)).reshape(-1, 9, 3)
    axes = np.concatenate([axes, np.cross(edges[:, 0], edges[:, 1])[:, None]], axis=1)
    projected = np.einsum("tax,tcx->tac", axes, corners)
    reach = np.abs(axes).sum(axis=-1) * (0.5 + 1e-9 * size)  # of a voxel from its centre, and rounding
    least, most = projected.min(axis=-1) - reach, projected.max(axis=-1) + reach
    voxels = np.zeros((size, size, size), bool)
    for triangle, place in _candidates(corners, margin, size - margin - 1):
        centre = np.einsum("nax,nx->na", axes[triangle], place + 0.5)
        met = np.all((least[triangle] <= centre) & (centre <= most[triangle]), axis=-1)
        voxels[tuple(place[met].T)] = True
    return voxels


def _corners(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Return the corners of each triangle, ``(triangles, 3, 3)``."""
    if faces.dtype.kind not in "iu":
        raise TypeError(f"faces must be integers; got {faces.dtype}.")
    for name, array in (("vertices", vertices), ("faces", faces)):
        if array.ndim != 2 or array.shape[1] != 3 or len(array) == 0:
            raise ValueError(f"{name} must be of shape ({name}, 3), at least one of them; got {array.shape}.")
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise ValueError(
            f"faces must be numbers of vertices, 0 to {len(vertices) - 1}; got {faces.min()} to {faces.max()}."
        )
    corners = vertices[faces]
    if not np.isfinite(corners).all() or np.ptp(corners, axis=(0, 1)).max() == 0:
        raise ValueError("vertices must be finite and span a mesh; those of the faces are not, or are all one point.")
    return corners


def _candidates(corners: np.ndarray, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of a triangle's number and a voxel in its bounding box, ``(n,)`` and ``(n, 3)``, some at a time.

    Voxels are those from ``first`` to ``last`` along each axis.
    """
    low, high = (np.clip(np.floor(bound), first, last).astype(np.int64) for bound in (corners.min(1), corners.max(1)))
    sides = high - low + 1
    counts = sides.prod(axis=-1)
    for numbers in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(counts.cumsum() // _CANDIDATES)) + 1):
        triangle = np.repeat(numbers, counts[numbers])
        within = np.arange(len(triangle)) - np.repeat(counts[numbers].cumsum() - counts[numbers], counts[numbers])
        _, width, depth = sides[triangle].T
        place = np.stack([within // (width * depth), within // depth % width, within % depth], axis=-1)
        yield triangle, low[triangle] + place
