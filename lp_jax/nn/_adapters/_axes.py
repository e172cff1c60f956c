"""The axis of the layers, which others do not put first."""

import jax
import jax.numpy as jnp

from lp_jax._arrays._types import PyTree


def moved(tree: PyTree, source: int | None, target: int | None) -> PyTree:
    """Move an axis of all leaves."""
    if source is None or target is None or source == target:
        return tree

    def leaf(x: jax.Array) -> jax.Array:
        if not all(-x.ndim <= axis < x.ndim for axis in (source, target)):
            raise ValueError(
                f"the axis of the layers, {target if source == 0 else source}, is out of range for an array of shape {x.shape}; "
                "name the axis that was made when the layers were stacked."
            )
        return jnp.moveaxis(x, source, target)

    return jax.tree.map(leaf, tree)
