"""A penalty in the loss that keeps a network solvable by a few sweeps."""

import functools

import jax
import jax.numpy as jnp

from lp_jax import Layer, Problem
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import State
from lp_jax._programs import _inputs


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
    times = _inputs.times(problem.t0, problem.t1, problem.layers, _tree.real_dtype(problem.y0))
    index = jnp.arange(problem.layers, dtype=jnp.int32)
    layers = Layer(problem.params, problem.shared, problem.data, *times, index, 0)
    # `vmap` takes a tree of axes in the structure of the argument; `shared` and
    # the last field have none, as all layers share them.
    stacked = Layer(0, None, 0, 0, 0, 0, None)  # type: ignore[arg-type]

    @functools.partial(jax.vmap, in_axes=(0, stacked))
    def increment(y: State, layer: Layer) -> State:
        stepped = problem.step(y, layer)
        return _tree.sub(stepped[0] if problem.has_aux else stepped, y)

    increments = increment(_tree.repeat(problem.y0, problem.layers), layers)
    first = last = _tree.sum_of_squares(increments)
    for _ in range(sweeps - 1):
        old = increments
        increments = increment(
            # A sweep is u_n = y0 + the sum of the increments of all layers before n: an exclusive prefix sum.
            jax.tree.map(lambda y, d: y[None] + jnp.cumsum(d, axis=0) - d, problem.y0, old),
            layers,
        )
        last = _tree.sum_of_squares(_tree.sub(increments, old))
    # The first increments are the residual r_1, because the constant guess has none; later residuals are changes of increments.
    missed = last > rtol**2 * first
    # where it is met the quotient is one, because that of two zeros would have no gradient
    one = jnp.ones_like(last)
    quotient = jnp.where(missed, last, one) / jnp.where(missed, rtol**2 * first, one)
    return jnp.log10(quotient) / 2
