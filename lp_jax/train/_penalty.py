"""A penalty in the loss that keeps a network solvable by a few sweeps."""

import math

import jax
import jax.numpy as jnp

from lp_jax import Picard, Problem, multigrid
from lp_jax._arrays import _check


def depth_penalty(problem: Problem, *, sweeps: int, rtol: float = 1e-3) -> jax.Array:
    r"""Measure by how many decades a number of sweeps misses a tolerance.

    As training goes on, a network needs more sweeps. This penalty in the loss keeps a given number of sweeps sufficient. It is
    zero, with a gradient of zero, where ``Picard(sweeps=sweeps, rtol=rtol)`` converges:

    .. math:: \max\left(0, \log_{10} \frac{|r_s|}{\mathrm{rtol} \, |r_1|}\right),

    where r_1, ..., r_s are the residuals of the sweeps, from the constant guess, over all layers and examples. Penalised networks
    end at this tolerance, so ask for half that of your solver. The penalty takes ``sweeps`` evaluations of each layer, all layers
    at once, and their transposes; a part of the batch is enough for a rough measure.

    Args:
        problem: the problem; ``trunk.problem(y)`` of an `lp_jax.nn.LayerParallel`.
        sweeps: number of sweeps, at least 2.
        rtol: tolerance of the residual norm, relative to that of the first sweep.

    Returns a scalar. Weights of a few hundredths are a good start for losses near 1. ValueError if the layers are spread over MPI
    ranks.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(0))
        >>> def loss(trunk, x):
        ...     penalty = train.depth_penalty(trunk.problem(x), sweeps=4, rtol=1e-4)
        ...     return jnp.mean(trunk(x) ** 2) + 0.02 * penalty
        >>> gradient = nnx.grad(loss)(trunk, jnp.ones((4, 8), "float32"))

    Reference:
        A penalty on the squared defect of one sweep, which does less (docs/benchmarks.md): arXiv:2605.17842.
    """
    _check.integer("sweeps", sweeps, least=2)
    if not 0 < rtol < 1:
        raise ValueError(f"rtol must lie between 0 and 1; got {rtol!r}.")
    if problem.comm.splits:
        raise ValueError(
            f"depth_penalty sums over all layers; got {problem.comm.size} ranks. Use a mesh "
            f"(MeshComm) instead."
        )
    solver = Picard(sweeps=sweeps, at_once=math.inf)
    # Arrays of a mesh are global, and the compiler spreads what is computed with them.
    levels = multigrid.hierarchy(problem.replace(comm=None), solver)
    state = solver.init(levels, None).state
    squares = []
    for _ in range(sweeps):
        state, residual = solver.improve(levels, state)
        squares.append(jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, residual.total)))
    first, *_, last = squares
    missed = last > rtol**2 * first
    # where it is met the quotient is one, because that of two zeros would have no gradient
    one = jnp.ones_like(last)
    quotient = jnp.where(missed, last, one) / jnp.where(missed, rtol**2 * first, one)
    return jnp.log10(quotient) / 2
