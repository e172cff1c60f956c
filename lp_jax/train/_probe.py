"""Error of the layer-parallel gradient during training.

`lp_jax.gradient_error` is for any function in one process, and compiles for each call. This one compiles once for a run, and
sums over MPI ranks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays._types import PyTree
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.planning._gradient_error import inner_products, relative_error
from lp_jax.train._ranks import Ranks
from lp_jax.train._types import Batch, LossFn


class GradientError(NamedTuple):
    """Relative distance of a gradient from the exact one in the 2-norm, the cosine of their angle, the distance of each group.

    A group is the parameters below one key, "trunk" for example.
    """

    relative: jax.Array
    cosine: jax.Array
    groups: dict[str, jax.Array]


def gradient_error(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    *,
    ranks: Ranks | None = None,
) -> GradientError:
    """Compare the gradient under ``solver`` with the exact one, by serial propagation, on a batch; this costs two gradients."""
    pairs = (solver, adjoint_solver), (Serial(), Serial())
    return _compare(*(_gradient(loss_fn, params, batch, *pair) for pair in pairs), ranks)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(loss_fn: LossFn, *args: Any) -> PyTree:
    return jax.grad(loss_fn, has_aux=True)(*args)[0]


@functools.partial(jax.jit, static_argnums=2)
def _compare(g: PyTree, e: PyTree, ranks: Ranks | None) -> GradientError:
    sums = jax.tree.map(inner_products, g, e)
    groups: dict[str, jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(sums if ranks is None else ranks.sums(sums)):
        name = jax.tree_util.keystr(path[:1], simple=True)
        groups[name] = groups[name] + leaf if name in groups else leaf
    relative, cosine = relative_error(jax.tree.reduce(jnp.add, groups))
    return GradientError(relative, cosine, {name: relative_error(group)[0] for name, group in groups.items()})
