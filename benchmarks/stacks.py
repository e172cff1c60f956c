"""Training steps of stacks of the library's own modules, loss half the mean of (y - target)^2, h = 1/N.

The encoder has pre-norm layers of four heads over 32 tokens; voxels have layers of two convolutions over 16 x 16 x 16 points.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import lp_jax
from benchmarks.training import Trainer
from lp_jax import nn

HEADS, TOKENS, POINTS = 4, 32, 16


class Problem(NamedTuple):
    """What all contenders start from.

    Attributes:
        step: of one layer, by the library's module.
        params: leaves ``(layers, ...)``.
        y: the state that enters, ``(batch, ..., width)``.
        target: of the same shape.
    """

    step: Any
    params: Any
    y: np.ndarray
    target: np.ndarray


def encoder(width: int, layers: int, batch: int) -> Problem:
    """Parameters as the library draws them."""
    return _random(
        lambda rngs: nn.EncoderLayer(width, min(HEADS, width), depth=layers, rngs=rngs), layers, (batch, TOKENS, width)
    )


def voxels(width: int, layers: int, batch: int) -> Problem:
    """Parameters as the library draws them, and smooth states: what a coarser grid in space is for."""
    problem = _random(
        lambda rngs: nn.ConvResidual(width, kernel=(3, 3, 3), rngs=rngs), layers, (batch, *(POINTS,) * 3, width)
    )
    waves = np.sin(np.arange(POINTS) * (2 * np.pi / POINTS)).astype(np.float32)
    return problem._replace(y=problem.y[:, :1, :1, :1] * (waves[:, None, None] * waves[:, None] * waves)[..., None])


def _random(make: Any, layers: int, shape: tuple[int, ...]) -> Problem:
    rng = np.random.default_rng(0)
    step, params = nn.stack(make, layers, rngs=nnx.Rngs(0))
    y, target = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    return Problem(step, jax.tree.map(np.asarray, params), y, target)


def trainer(problem: Problem, solvers: tuple[Any, Any] | None) -> Trainer:
    """Training steps by the library, or by a scan over its layer where no solvers are given."""
    layers = len(jax.tree.leaves(problem.params)[0])

    def loss(params: Any, y: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing = jnp.full((), jnp.nan, y.dtype)
        if solvers is None:
            h = jnp.asarray(1 / layers, y.dtype)

            def body(y: jax.Array, params: Any) -> tuple[jax.Array, None]:
                return problem.step(y, lp_jax.Layer(params, None, None, 0 * h, h, jnp.int32(0), 0)), None

            y1, norms = lax.scan(body, y, params)[0], nothing[None]
        else:
            solution = lp_jax.solve(problem.step, params, y, solver=solvers[0], adjoint_solver=solvers[1])
            y1, norms = solution.y1, solution.stats.residual_norms
        return 0.5 * jnp.mean((y1 - target) ** 2), norms[-1] if norms.size else nothing

    params, y, target = jax.tree.map(jnp.array, problem[1:])
    return Trainer(loss, params, (y, target), lambda params: params)
