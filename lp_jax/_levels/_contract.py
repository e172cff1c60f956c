"""The gradient from the solution of the adjoint system: for the operands of each layer, and for the shared ones."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import in_chunks
from lp_jax._arrays._types import Advance, PyTree, Slices, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._layer import Linearised
from lp_jax._levels._level import Level

_LEAST = 4  # fewest layers that are summed over at once


def emitting(chain: Chain, cotangents: Sequence[Stacked | None]) -> tuple[Advance, list[Stacked]]:
    """The layer on the finest level, emitting the inexact leaves of aux that the loss sees; and their cotangents.

    These are zero beyond the last layer.
    """
    layer, sources = chain.step(0, aux=True), [a for a in cotangents if a is not None]

    def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, list[jax.Array]]:
        u_next, aux = layer(u, x, shared)
        leaves, _ = _tree.partition(jax.tree.map(jnp.asarray, aux) if cotangents else None)
        return u_next, [leaf for leaf, a in zip(leaves, cotangents, strict=True) if a is not None]

    return advance, list(_tree.where_rows(chain.slices.index < chain.layers, sources)) if chain.padded else sources


def emit_gradient(chain: Chain, forward: Advance, linearised: Linearised | None, *, keep: bool) -> Advance:
    """An adjoint step of the finest level that emits the gradient for its slice, and the cotangent that enters, if ``keep``.

    Its operands have sources, cotangents of what ``forward`` emits; or the kept linearisation.
    """

    def advance(lam: State, x: tuple[Slices, State, PyTree], shared: PyTree) -> tuple[State, PyTree]:
        operand, u, more = x
        leaves, combine = _tree.partition(operand, chain.traced.differentiable)
        if linearised is not None:
            lam_next, gradient, _ = linearised.transpose(u, operand, shared, more)(lam)
        else:
            back = jax.vjp(lambda u, leaves: forward(u, combine(leaves), shared), u, leaves)[1]
            lam_next, gradient = back((lam, more))
        return lam_next, (combine(gradient, fill=None), lam if keep else None)

    return advance


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


def shared_gradient(
    fine: Level, adjoint: Level, cotangents: Stacked | None, forward: Advance, linearised: Linearised | None
) -> list[jax.Array]:
    """Gradient for the shared operands, as one contraction over this worker's layers.

    Layers are contracted in groups, of those that are evaluated at once and at least four; each group adds to the sum. Where
    linearisations are kept, and cover the weights, no layer is evaluated.
    """
    leaves, combine = _tree.partition(fine.shared)
    if not leaves:
        return []

    def contract(operands: Slices, states: Stacked, more: PyTree, lams: Stacked) -> list[jax.Array]:
        if linearised is not None and linearised.weights:
            try:
                return linearised.contract(states, operands, fine.shared, more, lams)
            except NotImplementedError:  # a custom gradient in the step cannot be transposed
                pass
        step, sources = (forward, more) if linearised is None else (fine.advance, None)

        def outputs(leaves: list[jax.Array]) -> tuple[Stacked, PyTree]:
            return jax.vmap(lambda u, x: step(u, x, combine(leaves)))(states, operands)

        return jax.vjp(outputs, leaves)[1]((lams, sources))[0]

    def sum_over(operands: PyTree) -> list[jax.Array]:
        def add(total: list[jax.Array], some: PyTree) -> tuple[list[jax.Array], None]:
            return _tree.add(total, contract(*some)), None

        return in_chunks(add, _tree.zeros_like(leaves), operands, most)[0]

    most, xs, expand = max(adjoint.at_once, _LEAST), adjoint.xs, adjoint.expand
    if adjoint.factor == 1:
        return sum_over((*xs, cotangents))
    if expand is not None:
        if most < adjoint.steps:

            def interval(total: list[jax.Array], one: tuple[PyTree, State]) -> tuple[list[jax.Array], None]:
                return _tree.add(total, sum_over((*expand(one[0], fine.shared), one[1]))), None

            return lax.scan(interval, _tree.zeros_like(leaves), (xs, cotangents))[0]
        xs = jax.vmap(expand, in_axes=(0, None))(xs, fine.shared)
    return sum_over(_tree.merge((*xs, cotangents)))
