"""Ready-made transfers between a state on a grid and one on a grid of every other point.

The grids are vertex-centred: every coarse point is a fine point, and convolutions are centred at the same positions on both.
ceil(n / 2) of n points are coarse: an odd n keeps both ends; for an even n the last point lies beyond the last coarse one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check
from lp_jax._arrays._types import State


def spatial(dims: int) -> tuple["Restriction", "Prolongation"]:
    """Return transfers for ``MGRIT(spatial=...)``: half as many points along each axis of space on the next coarser level.

    A layer that takes a state of any size, such as a convolution, costs :math:`2^{-d}` of its evaluation there. The
    solution stays the same. Every array of the state has the axes ``(..., *space, channels)``; sizes
    may be odd or even, and differ from array to array. Coarse points are the points 0, 2, 4, ... of the fine grid.

    The prolongation P is linear interpolation: points between coarse points get the mean of their neighbours, the last one
    of an even number that of its left neighbour. The restriction is full weighting, the transpose with rows scaled to sum to
    1, :math:`R = D^{-1} P^T`, in one dimension (1/4, 1/2, 1/4) inside, (2/3, 1/3) at an end and (1/5, 2/5, 2/5) where a point
    lies beyond. Then :math:`P R` is symmetric with eigenvalues in [0, 1], so that :math:`I - P R`, the part of an
    error that exact coarse steps leave, enlarges none. Injection, ``lambda u: u[:, ::2]``, may enlarge it.

    The level needs C-relaxation, ``relaxation="FCF"``: with F-relaxation only, a cycle corrects P R r of a residual r at
    the first C-point. It leaves (I - P R) r, which is not small where r varies from point to point. With FCF the states of
    one more interval are exact after each cycle.

    The number of cycles depends on the states. Where they are smooth in space, the gradient after two cycles is as good as
    without transfers (relative error 0.10 against 0.13, kernels that blur); a coarse grid does not help with random kernels
    on noise (0.95). ``layer.level`` gives the grid of a step, to scale kernels that approximate derivatives, for example.

    Args:
        dims: number of axes of space.

    Returns:
        ``(restrict, prolong)``, hashable, and equal for equal arguments. Outside a solve ``prolong`` doubles all sizes; a
        solve fits it to the state.

    Raises:
        ValueError: for dims below 1; when called, for an array with too few axes.
        TypeError: for dims that are not an integer.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> restrict, prolong = lp_jax.spatial(1)
        >>> coarse = restrict(3 * jnp.arange(7.0).reshape(1, 7, 1))
        >>> coarse.ravel().tolist()
        [1.0, 6.0, 12.0, 17.0]
        >>> prolong(coarse).ravel().tolist()
        [1.0, 3.5, 6.0, 9.0, 12.0, 14.5, 17.0, 17.0]

        On the second of three levels only; on all levels it would be ``spatial=lp_jax.spatial(2)``:

        >>> solver = lp_jax.MGRIT(levels=3, relaxation="FCF", spatial=(None, lp_jax.spatial(2)))

    References:
        Trottenberg, Oosterlee, Schueller, "Multigrid", Academic Press (2001), section 2.3; Cyr, Hahne, Moore, Schroder,
        Southworth, Vargas, "TorchBraid: High-performance layer-parallel training of deep neural networks with MPI and
        GPU acceleration", ACM Trans. Math. Softw. 51 (2025), which combines layer-parallel with spatial coarsening.
    """
    _check.integer("dims", dims, least=1)
    return Restriction(dims), Prolongation(dims)


@dataclasses.dataclass(frozen=True)
class Restriction:
    """A state at every other point along each axis of space."""

    dims: int

    def __call__(self, u: State) -> State:
        """Leaves ``(..., *space, channels)`` to ``(..., *ceil(space / 2), channels)``."""

        def leaf(u: jax.Array) -> jax.Array:
            for axis in _space(u, self.dims):
                u = _full_weighting(u, axis)
            return u

        return jax.tree.map(leaf, u)


@dataclasses.dataclass(frozen=True)
class Prolongation:
    """A state at all points along each axis of space, from one at every other point.

    ``shapes`` are those of the leaves on the fine grid, which may lack leading axes; None is twice as many points.
    """

    dims: int
    shapes: tuple[tuple[int, ...], ...] | None = None

    def fit(self, fine: State) -> "Prolongation":
        """Set the sizes to those of a state on the fine grid: 8 and 7 points have equally many coarse points."""
        return dataclasses.replace(self, shapes=tuple(u.shape for u in jax.tree.leaves(fine)))

    def __call__(self, v: State) -> State:
        """Leaves ``(..., *ceil(space / 2), channels)`` to ``(..., *space, channels)``."""
        leaves, structure = jax.tree.flatten(v)
        for i, x in enumerate(leaves):
            for axis in _space(x, self.dims):
                points = 2 * x.shape[axis] if self.shapes is None else self.shapes[i][axis - x.ndim]
                leaves[i] = _interpolate(leaves[i], axis, points)
        return jax.tree.unflatten(structure, leaves)


def _space(u: jax.Array, dims: int) -> range:
    """The axes of space: those before the last one."""
    if u.ndim <= dims:
        raise ValueError(
            f"spatial(dims={dims}) needs states with {dims} axes of space before the channels, (..., *space, channels); got "
            f"one of shape {u.shape}."
        )
    return range(u.ndim - 1 - dims, u.ndim - 1)


def _interpolate(v: jax.Array, axis: int, n: int) -> jax.Array:
    """Make n points along ``axis`` from ceil(n / 2): each coarse point, and the mean with the one to the right of it."""
    following = [lax.slice_in_dim(v, start, None, axis=axis) for start in (1, v.shape[axis] - 1)]
    pairs = jnp.stack([v, (v + jnp.concatenate(following, axis)) / 2], axis + 1)
    points = pairs.reshape(*v.shape[:axis], -1, *v.shape[axis + 1 :])
    return lax.slice_in_dim(points, 0, n, axis=axis)


def _full_weighting(u: jax.Array, axis: int) -> jax.Array:
    """The transpose of `_interpolate`, with rows scaled to sum to 1."""

    def transpose(u: jax.Array) -> jax.Array:
        coarse = jax.ShapeDtypeStruct((*u.shape[:axis], -(-u.shape[axis] // 2), *u.shape[axis + 1 :]), u.dtype)
        return jax.linear_transpose(lambda v: _interpolate(v, axis, u.shape[axis]), coarse)(u)[0]

    ones = jnp.ones([n if i == axis else 1 for i, n in enumerate(u.shape)], u.dtype)
    return transpose(u) / transpose(ones)
