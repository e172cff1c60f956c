"""The cost of a training step in matrix products: how many there are, and how many of them wait for each other.

On layers that are one product each (`layer`), a product is an evaluation of a layer, forward or transposed, or its share of
the parameters' gradient.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import lp_jax
from lp_jax._arrays._jaxpr import called, follow, is_product, is_scan, is_switch, live, scan_parts
from lp_jax._choice._cost import cost_of
from lp_jax._solvers._solver import Solver


class Cost(NamedTuple):
    work: float
    depth: float


def cost(f, *arguments, unit: float = 1.0) -> Cost:
    """The cost of ``f(*arguments)`` in products of ``unit`` flops."""
    program = live(jax.make_jaxpr(f)(*arguments).jaxpr)
    depth = max(depths(program, [0] * len(program.invars)), default=0)
    return Cost(cost_of(program).flops / unit, depth)


def depths(jaxpr, entering):
    """The length of the longest chain of products that ends in each output, where each product needs the one before."""

    def operation(equation, operands):
        if is_scan(equation):
            return _scan_depths(equation, operands)
        # The first operand of a switch is the index, which its branches do not get but its results wait for.
        first = int(is_switch(equation))
        if ends := [depths(program, operands[first:]) for program in called(equation)]:
            return [max((*operands[:first], *each)) for each in zip(*ends, strict=True)]
        return [max(operands, default=0) + is_product(equation)] * len(equation.outvars)

    return follow(jaxpr, entering, operation, 0)


def _scan_depths(equation, entering):
    body, length, *_, consts, carries = scan_parts(equation)
    fixed = entering[:consts]
    state = entering[consts : consts + carries]
    xs = entering[consts + carries :]
    history = []
    for turn in range(length):
        reached = depths(body.jaxpr, (*fixed, *state, *xs))
        state = reached[:carries]
        history.append(reached)
        if len(history) >= 4:  # regular from here on, if three differences agree
            steps = [
                [b - a for a, b in zip(*pair, strict=True)]
                for pair in itertools.pairwise(history[-4:])
            ]
            if steps[0] == steps[1] == steps[2]:
                return [r + (length - 1 - turn) * s for r, s in zip(reached, steps[0], strict=True)]
    return history[-1] if history else [*state, *[0] * (len(equation.outvars) - carries)]


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
