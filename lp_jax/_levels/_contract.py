"""The gradient that follows from the solution of the adjoint system: of each layer's operands, and of what layers share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import in_chunks
from lp_jax._arrays._types import Advance, PyTree, Slices, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._linear import Linearised

_LEAST = 4  # layers that are summed over at once, where one is evaluated at a time


def with_cotangent(advance: Advance, *, keep: bool) -> Advance:
    """``advance``, emitting the cotangent that enters along with its own output, if that is to be kept."""

    def both(lam: State, x: PyTree, shared: PyTree) -> tuple[State, Any]:
        lam_next, emitted = advance(lam, x, shared)
        return lam_next, (emitted, lam if keep else None)

    return both


def emit_linearised_gradient(linearised: Linearised) -> Advance:
    """`emit_gradient` from what was kept of the step."""

    def advance(lam: State, x: tuple[Slices, State, PyTree], shared: PyTree) -> tuple[State, Slices]:
        operand, u, kept = x
        lam_next, leaves, _ = linearised.transpose(u, operand, shared, kept)(lam)
        return lam_next, linearised.combine(operand, leaves, fill=None)

    return advance


def emit_gradient(chain: Chain, forward: Advance) -> Advance:
    """One adjoint step of the finest level that emits the gradient of its slice."""

    def advance(lam: State, x: tuple[Slices, State, PyTree], shared: PyTree) -> tuple[State, Slices]:
        operand, u, source = x
        leaves, combine = _tree.partition(operand, chain.differentiable)
        pull = jax.vjp(lambda u, leaves: forward(u, combine(leaves), shared), u, leaves)[1]
        lam_next, gradient = pull((lam, source))
        slices: Slices = combine(gradient, fill=None)
        return lam_next, slices

    return advance


def sources_of(chain: Chain, cotangents: Sequence[Stacked | None]) -> list[Stacked]:
    """The cotangents of aux that the loss sees, zero beyond the last layer."""
    seen = [a for a in cotangents if a is not None]
    if not chain.padded:
        return seen
    inside = chain.slices.index < chain.layers
    return [jnp.where(inside.reshape(-1, *[1] * (a.ndim - 1)), a, 0) for a in seen]


class OfAux(NamedTuple):
    """Gradient of what the loss sees of aux, given the states that enter the layers.

    Attributes:
        states: with respect to these, ``(N, ...)``: the right-hand side of the adjoint system.
        slices: with respect to the layers' operands.
        shared: with respect to what all layers share, summed over this worker's.
    """

    states: Stacked
    slices: Slices
    shared: list[jax.Array]


def gradient_of_aux(chain: Chain, forward: Advance, states: Stacked, sources: list[Stacked], *, at_once: int) -> OfAux:
    """So many layers at once."""
    shared, combine_shared = _tree.partition(chain.shared)

    def layers(total: list[jax.Array], operands: tuple[Slices, Stacked, list[Stacked]]) -> tuple[Any, Any]:
        slices, states, sources = operands
        leaves, combine = _tree.partition(slices, chain.differentiable)

        def outputs(states: Stacked, leaves: list[jax.Array], shared: list[jax.Array]) -> list[Stacked]:
            weights = combine_shared(shared)
            return jax.vmap(lambda u, x: forward(u, x, weights)[1])(states, combine(leaves))

        states, leaves, shared_gradient = jax.vjp(outputs, states, leaves, shared)[1](sources)
        return _tree.add(total, shared_gradient), (states, combine(leaves, fill=None))

    operands = chain.slices, states, sources
    total, (of_states, of_slices) = in_chunks(layers, _tree.zeros_like(shared), operands, max(at_once, _LEAST))
    return OfAux(of_states, of_slices, total)


Contraction = Callable[[Slices, Stacked, PyTree, Stacked], list[jax.Array]]
"""Gradient with respect to what layers share, summed over those given: their operands, states, what else the adjoint's
operands hold, and cotangents."""


def of_steps(fine: Level, forward: Advance) -> Contraction:
    """From the layers themselves."""

    def contract(operands: Slices, states: Stacked, sources: PyTree, lams: Stacked) -> list[jax.Array]:
        leaves, combine = _tree.partition(fine.shared)

        def outputs(leaves: list[jax.Array]) -> tuple[Stacked, PyTree]:
            shared = combine(leaves)
            return jax.vmap(lambda u, x: forward(u, x, shared))(states, operands)

        return jax.vjp(outputs, leaves)[1]((lams, sources))[0]

    return contract


def of_linearised(fine: Level, linearised: Linearised) -> Contraction:
    """From what was kept of the layers, where that holds the weights."""

    def contract(operands: Slices, states: Stacked, kept: PyTree, lams: Stacked) -> list[jax.Array]:
        if linearised.weights:
            try:
                return linearised.contract(states, operands, fine.shared, kept, lams)
            except NotImplementedError:  # a custom gradient in the step cannot be transposed
                pass
        return of_steps(fine, fine.advance)(operands, states, None, lams)

    return contract


def shared_gradient(
    fine: Level, adjoint: Level, cotangents: Stacked | None, contraction: Contraction
) -> list[jax.Array]:
    """Gradient of what all layers share, as one contraction over this worker's layers.

    Layers are summed over in groups of those that are evaluated at once, of four at least: each group adds to the sum.
    """
    leaves, _ = _tree.partition(fine.shared)
    if not leaves:
        return []

    def expand(xs: PyTree) -> PyTree:
        return adjoint.expand(xs, fine.shared) if adjoint.expand else xs

    def interval(xs: PyTree, lams: State) -> list[jax.Array]:
        return summed(contraction, (*expand(xs), lams))

    def summed(gradient: Callable[..., list[jax.Array]], operands: PyTree) -> list[jax.Array]:
        def add(total: list[jax.Array], some: PyTree) -> tuple[list[jax.Array], None]:
            return _tree.add(total, gradient(*some)), None

        return in_chunks(add, _tree.zeros_like(leaves), operands, most)[0]

    most = max(adjoint.at_once, _LEAST)
    if adjoint.factor == 1:
        return summed(contraction, (*adjoint.xs, cotangents))
    if adjoint.expand is not None and most < adjoint.steps:
        zeros, groups = _tree.zeros_like(leaves), (adjoint.xs, cotangents)
        return lax.scan(lambda total, group: (_tree.add(total, interval(*group)), None), zeros, groups)[0]
    xs = jax.vmap(expand)(adjoint.xs) if adjoint.expand else adjoint.xs
    return summed(contraction, _tree.merge((*xs, cotangents)))
