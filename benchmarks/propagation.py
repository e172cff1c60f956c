"""Ways to go through N residual layers, by hand and by the library."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import lp_jax

Layer = Callable[[jax.Array, Any, Any], jax.Array]
"""``layer(y, weights, h)``: the state after one residual layer."""

Propagate = Callable[[Layer, Any, jax.Array], tuple[jax.Array, jax.Array]]
"""``propagate(layer, weights, y)``, leaves of the weights ``(N, ...)``, h = 1/N: the last state, and the last residual
norm that was measured (NaN where there is none)."""


def scan(layer: Layer, weights: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What one writes by hand."""
    h = 1 / len(jax.tree.leaves(weights)[0])
    y, _ = lax.scan(lambda y, w: (layer(y, w, h), None), y, weights)
    return y, jnp.full((), jnp.nan, y.dtype)


def solved(solver: Any, adjoint_solver: Any = None, comm: Any = None) -> Propagate:
    """The library; with ``comm`` on several workers."""

    def propagate(layer: Layer, weights: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        solution = lp_jax.solve(
            lambda y, at: layer(y, at.params, at.dt),
            weights,
            y,
            solver=solver,
            adjoint_solver=adjoint_solver,
            comm=comm,
        )
        norms = solution.stats.residual_norms
        return solution.y1, norms[-1] if norms.size else jnp.full((), jnp.nan, y.dtype)

    return propagate


Pair = tuple[Any, Any]
"""A forward and an adjoint solver."""


def two_one(**settings: Any) -> Pair:
    """MGRIT, two cycles forward and one backward, each with a skipped down-cycle; F on the finest level, FCF below."""
    solver = lp_jax.MGRIT(iterations=2, relaxation=("F", "FCF"), skip_downcycle=True, **settings)
    return solver, dataclasses.replace(solver, iterations=1)
