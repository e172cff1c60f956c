"""Error of the layer-parallel gradient."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays._types import PyTree
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.train._ranks import Ranks, all_sums
from lp_jax.train._types import Batch, LossFn


class GradientError(NamedTuple):
    """Distance of two gradients, ``g`` the layer-parallel one and ``e`` the exact one.

    The distance is ``|g - e| / |e|`` in the 2-norm, over all parameters (``relative``) and over each group of parameters, by
    name (``groups``). ``cosine`` is the cosine of the angle between ``g`` and ``e``, 1 for the same direction.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import train
        >>> error = train.GradientError(relative=jnp.float32(0.01), cosine=jnp.float32(1), groups={"trunk": jnp.float32(0.01)})
        >>> float(error.cosine), list(error.groups)
        (1.0, ['trunk'])
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
    depth: int = 1,
    ranks: Ranks | None = None,
) -> GradientError:
    """Compare the gradient under ``solver`` with the exact one, by serial propagation, on a batch.

    This costs two gradients. Each is compiled once for a ``loss_fn`` and the structure of the solvers. The arguments are those
    of `make_train_step` and of its training step. ``depth`` is the number of keys of a parameter's path that name its group.

    Returns:
        A `GradientError` of scalars.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(step, params["trunk"], batch, solver=solver, adjoint_solver=adjoint_solver)
        ...     info = train.Info(jnp.int32(len(batch)), solution.stats, solution.result)
        ...     return jnp.sum(solution.y1), info
        >>> error = train.gradient_error(loss_fn, {"trunk": jnp.ones(8)}, jnp.ones(2), lp_jax.MGRIT(iterations=1))
        >>> bool(error.relative < 0.5), list(error.groups)
        (True, ['trunk'])
    """
    g = _gradient(loss_fn, params, batch, solver, adjoint_solver)
    return _compare(g, _gradient(loss_fn, params, batch, Serial(), Serial()), depth, ranks)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    loss_fn: LossFn, params: PyTree, batch: Batch, solver: Solver | None, adjoint_solver: Solver | None
) -> PyTree:
    return jax.grad(loss_fn, has_aux=True)(params, batch, solver, adjoint_solver)[0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _compare(g: PyTree, e: PyTree, depth: int, ranks: Ranks | None) -> GradientError:
    def products(a: jax.Array, b: jax.Array) -> jax.Array:  # of one parameter: |a - b|^2, |a|^2, |b|^2, (a, b)
        return jnp.stack([jnp.sum(x * y) for x, y in ((a - b, a - b), (a, a), (b, b), (a, b))])

    sums = jax.tree.map(products, g, e)
    groups: dict[str, jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(all_sums(ranks, sums)):
        name = jax.tree_util.keystr(path[:depth], simple=True, separator="/")
        groups[name] = groups[name] + leaf if name in groups else leaf
    relative, cosine = _error(jax.tree.reduce(jnp.add, groups))
    return GradientError(relative, cosine, {name: _error(group)[0] for name, group in groups.items()})


def _error(products: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return relative error and cosine; both are 0 for a group without gradient."""
    error, gg, ee, ge = products
    return _ratio(jnp.sqrt(error), jnp.sqrt(ee)), _ratio(ge, jnp.sqrt(gg) * jnp.sqrt(ee))


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where((a == 0) & (b == 0), jnp.zeros_like(a), a / b)
