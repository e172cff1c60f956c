"""The cost of a training step in matrix products: how many there are, and how many of them wait for each other.

On layers that are one product each (`layer`), a product is an evaluation of a layer, forward or transposed, or its share of
the parameters' gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import lp_jax
from lp_jax._arrays._jaxpr import live
from lp_jax._choice._cost import cost_of, depth_of
from lp_jax._solvers._solver import Solver


class Cost(NamedTuple):
    work: float
    depth: float


def cost(f, *arguments, unit: float = 1.0) -> Cost:
    """The cost of ``f(*arguments)`` in products of ``unit`` flops."""
    program = live(jax.make_jaxpr(f)(*arguments).jaxpr)
    return Cost(cost_of(program).flops / unit, depth_of(program))


def training_step(layers: int, solver: Solver, adjoint_solver: Solver | None = None) -> Cost:
    """The cost of value and gradient of a network whose layers are a product each, of one example."""
    width = 4

    def loss(params: jax.Array, y0: jax.Array) -> jax.Array:
        return jnp.sum(
            lp_jax.solve(layer, params, y0, solver=solver, adjoint_solver=adjoint_solver).y1 ** 2
        )

    shapes = (
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((1, width), jnp.float32),
    )
    return cost(jax.value_and_grad(loss), *shapes, unit=2 * width**2)


def layer(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
    """``y + dt tanh(y W)``."""
    return y + layer.dt * jnp.tanh(y @ layer.params)
