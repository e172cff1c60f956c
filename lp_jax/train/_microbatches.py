"""Batches whose states do not fit into memory at once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.train._types import Batch, Info, LossFn, Restart, combined_info


def microbatches(loss_fn: LossFn, count: int) -> LossFn:
    """Return the same loss, taken over one part of the batch after another.

    Its gradient holds the states of one part only, and repeats each forward solve. In `one_shot` each part begins where it ended
    in the last step. Loss and gradient are those of the whole batch; solvers with a tolerance stop separately for each part.

    Args:
        loss_fn: the loss, as for `make_train_step`; a mean over ``info.total``.
        count: number of parts. It divides the number of examples. A typed random key gives each part a key of its own.

    Returns:
        The loss. Of its `Info`, counts and squares of norms are sums over the parts; iterations and result are the largest.

    Raises:
        ValueError: if ``count`` is below 1; when called, if it does not divide the examples, or layers have running
            statistics, which each part would change.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver)
        ...     return jnp.mean(solution.y1**2), train.Info(len(batch), solution.stats, solution.result)
        >>> arguments = jnp.ones(16), jnp.arange(12.0), lp_jax.Serial(), None
        >>> in_parts = train.microbatches(loss_fn, 4)
        >>> bool(jnp.allclose(loss_fn(*arguments)[0], in_parts(*arguments)[0]))
        True
    """
    _check.integer("count", count, least=1)

    def loss(
        params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None, restart: Restart | None = None
    ) -> tuple[jax.Array, Info]:
        @jax.checkpoint
        def part(params: PyTree, operands: tuple[Batch, Restart | None]) -> tuple[jax.Array, Info]:
            batch, restart = operands
            loss, info = loss_fn(params, batch, solver, adjoint_solver, *(() if restart is None else (restart,)))
            if info.replace is not None:
                raise ValueError(
                    "microbatches of layers with running statistics would normalise each part by itself. Use a norm "
                    "without statistics (nnx.LayerNorm), or a smaller batch."
                )
            return loss * info.total, info

        def body(total: jax.Array, operands: PyTree) -> tuple[jax.Array, Info]:
            loss, info = part(params, operands)
            return total + loss, info

        operands = jax.tree.map(functools.partial(_parts, count), batch), restart
        first = jax.eval_shape(part, params, jax.tree.map(lambda x: x[0], operands))[0]
        total, infos = lax.scan(body, jnp.zeros(first.shape, first.dtype), operands)
        info = combined_info(infos)
        return total / info.total.astype(total.dtype), info

    return loss


def _parts(count: int, x: jax.Array) -> jax.Array:
    """Cut a leaf of a batch along its examples; a key is split."""
    if jnp.ndim(x) == 0:
        return jax.random.split(x, count)
    if len(x) % count:
        raise ValueError(
            f"microbatches cut a batch into {count} parts of the same size, and this one has {len(x)} examples. Take another "
            "count, or leave examples out."
        )
    return jnp.reshape(x, (count, len(x) // count, *jnp.shape(x)[1:]))
