"""Haliax: a fold over a stack of blocks, arrays with named axes."""

from typing import Any

import jax

from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._scan import scan as scan_layers
from lp_jax._solvers._solver import Solver


def haliax_fold(
    stacked: Any,
    init: PyTree,
    *args: PyTree,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    comm: Comm | None = None,
    **kwargs: PyTree,
) -> PyTree:
    """Fold Haliax's ``Stacked`` like ``stacked.fold(init, ...)``, with a solver.

    Args:
        stacked: a ``haliax.nn.Stacked``.
        init: the state that passes through the blocks, ``block(carry, *args, **kwargs) -> carry``.
        *args: passed to every block; named arrays with the blocks' axis are sliced along it.
        solver: as for `lp_jax.scan`.
        adjoint_solver: as for `lp_jax.scan`.
        comm: as for `lp_jax.scan`.
        **kwargs: as ``args``.

    Example:
        >>> x = nn.haliax_fold(self.blocks, x, mask)  # doctest: +SKIP
    """
    import haliax

    axis = stacked.Block

    def is_named(x: object) -> bool:
        return isinstance(x, haliax.NamedArray)

    leaves, structure = jax.tree.flatten((stacked.stacked, args, kwargs), is_leaf=is_named)
    sliced = [is_named(x) and any(a.name == axis.name for a in x.axes) for x in leaves]
    first = [x.rearrange((axis, ...)) if mine else x for x, mine in zip(leaves, sliced, strict=True)]
    # in a block's parameters, an array without names has the axis of the blocks first
    inside = len(jax.tree.leaves(stacked.stacked, is_leaf=is_named))
    raw = [i < inside and not is_named(x) and isinstance(x, jax.Array) for i, x in enumerate(leaves)]
    xs = {i: x.array if sliced[i] else x for i, x in enumerate(first) if sliced[i] or raw[i]}

    def body(carry: PyTree, xs: dict[int, jax.Array]) -> tuple[PyTree, None]:
        parts = [haliax.named(xs[i], x.axes[1:]) if sliced[i] else xs.get(i, x) for i, x in enumerate(first)]
        block, args, kwargs = jax.tree.unflatten(structure, parts)
        return block(carry, *args, **kwargs), None

    return scan_layers(body, init, xs, axis.size, solver=solver, adjoint_solver=adjoint_solver, comm=comm)[0]
