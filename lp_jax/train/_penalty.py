"""A regulariser that keeps layers solvable by sweeps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lp_jax import _check, _inputs, _tree
from lp_jax._mpi import MPIComm
from lp_jax._problem import Problem
from lp_jax._solution import Solution
from lp_jax._solve import solve
from lp_jax._types import Layer, Points, State


def depth_penalty(problem: Problem, *, every: int = 4, **options: Any) -> tuple[jax.Array, Solution]:
    r"""Solve, and measure by how much one sweep over a block of layers misses the state behind the block.

    Layers are cut into blocks of ``every``. One Picard sweep evaluates all layers of a block at the state that enters the
    block. With the states u of the forward solve and the increments D of the layers, the penalty is

    .. math:: \frac{1}{B} \sum_{n = 0, k, 2k, ...} \frac{|u_n + \sum_{i=n}^{n+k-1} D_i(u_n) - u_{n+k}|^2}{|u_{n+k}|^2},

    k being ``every`` and B the number of blocks. It is differentiable, through the states too. Added to a loss, it keeps
    layers from depending too much on those just before them, so that few sweeps solve the network: in training, and when the
    trained network is used. It costs one evaluation of each layer, all at once, and its transpose.

    Args:
        problem: what to solve; ``trunk.problem(y)`` of an `lp_jax.nn.LayerParallel`. With ``has_aux`` as well.
        every: number of layers of a block, at least 2. The last block may have fewer.
        **options: arguments of `lp_jax.solve` that a problem does not have: ``solver``, ``adjoint_solver``, ``guess``,
            ``adjoint_guess``.

    Returns:
        The penalty, a scalar of the state's real dtype, and the `Solution`.

    Raises:
        ValueError: if ``every`` is below 2, or the layers are spread over MPI ranks; and as for `lp_jax.solve`.
        TypeError: as for `lp_jax.solve`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(0))
        >>> def loss(trunk, x):
        ...     penalty, solution = train.depth_penalty(trunk.problem(x), solver=lp_jax.Picard(sweeps=4))
        ...     return jnp.mean(solution.y1**2) + 0.1 * penalty
        >>> gradient = nnx.grad(loss)(trunk, jnp.ones((4, 8), "float32"))

    Reference:
        Defects at every k-th layer, to use a network by a few sweeps: arXiv:2605.17842.
    """
    _check.integer("every", every, least=2)
    if isinstance(problem.comm, MPIComm) and problem.comm.size > 1:
        raise ValueError(
            f"depth_penalty compares states of different ranks, and the layers are spread over {problem.comm.size} ranks. Use a "
            "mesh (MeshComm) instead."
        )

    @functools.wraps(problem.step)
    def emitting(y: State, layer: Layer) -> tuple[State, Any]:
        y, aux = problem.step(y, layer) if problem.has_aux else (problem.step(y, layer), None)
        return y, (aux, y)

    solution = solve(**vars(dataclasses.replace(problem, step=emitting, has_aux=True)), **options)
    aux, states = solution.aux
    return _defects(problem, states, every), solution._replace(aux=aux)


def _defects(problem: Problem, states: Points, every: int) -> jax.Array:
    """Mean over the blocks of the relative squared defect; ``states`` are those behind the layers."""
    count = problem.layers
    blocks = -(-count // every)
    starts = [block * every for block in range(blocks)]
    ends = [min(start + every, count) for start in starts]
    entering = jax.tree.map(
        lambda y, x: jnp.concatenate([y[None], x[jnp.asarray(starts[1:], int) - 1]]), problem.y0, states
    )
    leaving = jax.tree.map(lambda x: x[jnp.asarray(ends) - 1], states)
    at = jnp.arange(count) // every
    times = _inputs.times(problem.t0, problem.t1, count, _tree.real_dtype(problem.y0))
    layers = Layer(problem.params, problem.shared, problem.data, *times, jnp.arange(count, dtype=jnp.int32), 0)

    def increment(y: State, layer: Layer) -> State:
        stepped = problem.step(y, layer)
        return _tree.sub(stepped[0] if problem.has_aux else stepped, y)

    stacked = Layer(0, None, 0, 0, 0, 0, None)  # type: ignore[arg-type]
    increments = jax.vmap(increment, in_axes=(0, stacked))(jax.tree.map(lambda y: y[at], entering), layers)
    swept = jax.tree.map(lambda y, d: y + jax.ops.segment_sum(d, at, blocks), entering, increments)
    missed, sizes = jax.vmap(_tree.sum_of_squares)(_tree.sub(swept, leaving)), jax.vmap(_tree.sum_of_squares)(leaving)
    return jnp.mean(missed / jnp.where(sizes == 0, jnp.ones_like(sizes), sizes))
