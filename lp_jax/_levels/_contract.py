"""The gradient from the solution of the adjoint system: for the operands of each layer, and for the shared ones."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import in_chunks
from lp_jax._arrays._types import Advance, PyTree, Slices, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._linear import Linearised

_LEAST = 4  # fewest layers that are summed over at once


Pull = Callable[[State, Slices, PyTree, PyTree], Callable[[State], tuple[PyTree, ...]]]
"""The pullback of a layer, ``pull(u, operand, shared, more)``; ``more`` are sources, or the kept linearisation.

It returns the cotangent of ``u``, and those of the leaves of the operand that have a gradient."""


def pull_step(chain: Chain, forward: Advance) -> Pull:
    """The pullback of the layer itself, with the cotangents of what it emits as sources."""

    def pull(u: State, operand: Slices, shared: PyTree, source: PyTree) -> Callable[[State], tuple[PyTree, ...]]:
        leaves, combine = _tree.partition(operand, chain.traced.differentiable)
        back = jax.vjp(lambda u, leaves: forward(u, combine(leaves), shared), u, leaves)[1]
        return lambda lam: back((lam, source))

    return pull


def emit_gradient(chain: Chain, pull: Pull, *, keep: bool) -> Advance:
    """An adjoint step of the finest level that emits the gradient for its slice, and the cotangent that enters, if ``keep``."""

    def advance(lam: State, x: tuple[Slices, State, PyTree], shared: PyTree) -> tuple[State, PyTree]:
        operand, u, more = x
        _, combine = _tree.partition(operand, chain.traced.differentiable)
        lam_next, gradient, *_ = pull(u, operand, shared, more)(lam)
        return lam_next, (combine(gradient, fill=None), lam if keep else None)

    return advance


def sources_of(chain: Chain, cotangents: Sequence[Stacked | None]) -> list[Stacked]:
    """The cotangents of aux that the loss sees, zero beyond the last layer."""
    seen = [a for a in cotangents if a is not None]
    if not chain.padded:
        return seen
    return list(_tree.where_rows(chain.slices.index < chain.layers, seen))


def gradient_of_aux(
    chain: Chain, forward: Advance, states: Stacked, sources: list[Stacked], *, at_once: int
) -> tuple[Stacked, tuple[Slices, list[jax.Array]]]:
    """Pull ``sources``, the cotangents of aux, back: to the adjoint's right-hand side, and to own and shared operands."""
    shared, combine_shared = _tree.partition(chain.shared)

    def layers(
        total: list[jax.Array], operands: tuple[Slices, Stacked, list[Stacked]]
    ) -> tuple[list[jax.Array], tuple[Stacked, Slices]]:
        slices, states, sources = operands
        leaves, combine = _tree.partition(slices, chain.traced.differentiable)

        def outputs(states: Stacked, leaves: list[jax.Array], shared: list[jax.Array]) -> list[Stacked]:
            weights = combine_shared(shared)
            return jax.vmap(lambda u, x: forward(u, x, weights)[1])(states, combine(leaves))

        states, leaves, shared_gradient = jax.vjp(outputs, states, leaves, shared)[1](sources)
        return _tree.add(total, shared_gradient), (states, combine(leaves, fill=None))

    operands = chain.slices, states, sources
    total, (of_states, of_slices) = in_chunks(layers, _tree.zeros_like(shared), operands, max(at_once, _LEAST))
    return of_states, (of_slices, total)


Contraction = Callable[[Slices, Stacked, PyTree, Stacked], list[jax.Array]]
"""``contract(operands, states, sources, cotangents)``: the gradient for the shared operands, summed over these layers.

In the place of ``sources`` may stand the kept linearisations."""


def of_steps(fine: Level, forward: Advance) -> Contraction:
    """Contract by the pullback of the layers themselves."""

    def contract(operands: Slices, states: Stacked, sources: PyTree, lams: Stacked) -> list[jax.Array]:
        leaves, combine = _tree.partition(fine.shared)

        def outputs(leaves: list[jax.Array]) -> tuple[Stacked, PyTree]:
            shared = combine(leaves)
            return jax.vmap(lambda u, x: forward(u, x, shared))(states, operands)

        return jax.vjp(outputs, leaves)[1]((lams, sources))[0]

    return contract


def of_linearised(fine: Level, linearised: Linearised) -> Contraction:
    """Contract by the kept linearisations, where they cover the weights."""

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
    """Gradient for the shared operands, as one contraction over this worker's layers.

    Layers are contracted in groups, of those that are evaluated at once and at least four; each group adds to the sum.
    """
    leaves, _ = _tree.partition(fine.shared)
    if not leaves:
        return []

    def expand(xs: PyTree) -> PyTree:
        return adjoint.expand(xs, fine.shared) if adjoint.expand else xs

    def interval(xs: PyTree, lams: State) -> list[jax.Array]:
        return sum_over(contraction, (*expand(xs), lams))

    def sum_over(gradient: Callable[..., list[jax.Array]], operands: PyTree) -> list[jax.Array]:
        def add(total: list[jax.Array], some: PyTree) -> tuple[list[jax.Array], None]:
            return _tree.add(total, gradient(*some)), None

        return in_chunks(add, _tree.zeros_like(leaves), operands, most)[0]

    most = max(adjoint.at_once, _LEAST)
    if adjoint.factor == 1:
        return sum_over(contraction, (*adjoint.xs, cotangents))
    if adjoint.expand is not None and most < adjoint.steps:
        zeros, groups = _tree.zeros_like(leaves), (adjoint.xs, cotangents)
        return lax.scan(lambda total, group: (_tree.add(total, interval(*group)), None), zeros, groups)[0]
    xs = jax.vmap(expand)(adjoint.xs) if adjoint.expand else adjoint.xs
    return sum_over(contraction, _tree.merge((*xs, cotangents)))
