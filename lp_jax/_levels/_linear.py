"""A step's linearisation, kept from the forward solve for the adjoint: its transpose without evaluating it again."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree, Slices, State


@dataclasses.dataclass(frozen=True)
class Linearised:
    """A step, linearised where it is evaluated.

    JAX's pullback is a pytree: the arrays that the transposed step needs. Those that follow from the state (the output
    of a tanh, say) are kept; those that follow from parameters only (the matrix of a product) are at hand anyway, and
    keeping them would copy the parameters.

    Attributes:
        step: ``step(u, x, shared) -> (u_next, aux)``.
        differentiable: which leaves of ``x`` have a gradient.
        weights: whether ``shared`` is differentiated along with them, for `contract`.
    """

    step: Callable[[State, Slices, PyTree], tuple[State, PyTree]]
    differentiable: tuple[bool, ...]
    weights: bool = False

    def evaluate(self, u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree, list[jax.Array]]:
        """The next state, aux, and what is to be kept."""
        u_next, pullback, aux = self._vjp(u, x, shared)
        leaves = jax.tree.leaves(pullback)
        return u_next, aux, [leaves[i] for i in self._from_state(u, x, shared)]

    def transpose(
        self, u: State, x: Slices, shared: PyTree, kept: Sequence[jax.Array]
    ) -> Callable[[State], tuple[State, list[jax.Array], list[jax.Array]]]:
        """The pullback at ``u``: from a cotangent of the next state to those of ``u``, of the leaves of ``x`` and of weights.

        The step is traced again for its structure; as none of its values that follow from the state are used, the
        compiler drops their computation.
        """
        _, pullback, _ = self._vjp(u, x, shared)
        leaves, structure = jax.tree.flatten(pullback)
        for i, value in zip(self._from_state(u, x, shared), kept, strict=True):
            leaves[i] = value
        pull: Callable[[State], tuple[State, list[jax.Array], list[jax.Array]]] = jax.tree.unflatten(structure, leaves)
        return pull

    def contract(
        self, us: State, xs: Slices, shared: PyTree, kept: Sequence[jax.Array], lams: State
    ) -> list[jax.Array]:
        r"""Cotangents of the weights, summed over steps that are stacked along the leading axes, without evaluating any.

        The sum of :math:`J_n^T \lambda_n` is the transpose of :math:`\dot w \mapsto (J_n \dot w)_n`: transposed as a whole, a
        product with weights becomes one contraction over all steps, and no step's own gradient is ever formed.
        """
        weights, _ = _tree.partition(shared)

        def directional(dot: list[jax.Array]) -> State:
            def one(u: State, x: Slices, kept: Sequence[jax.Array], lam: State) -> State:
                pull = self.transpose(u, x, shared, kept)
                push = jax.linear_transpose(lambda lam: pull(lam)[2], lam)
                (u_dot,) = push(dot)
                return u_dot

            return jax.vmap(one)(us, xs, kept, lams)

        (total,) = jax.linear_transpose(directional, weights)(lams)
        return total

    def combine(self, x: Slices, new: Sequence[Any], fill: Any = ...) -> Slices:
        """``x`` with its differentiable leaves exchanged, and the others kept, or all set to ``fill``."""
        values, (leaves, structure) = iter(new), jax.tree.flatten(x)
        pairs = zip(leaves, self.differentiable, strict=True)
        return jax.tree.unflatten(structure, [next(values) if m else (v if fill is ... else fill) for v, m in pairs])

    def _vjp(self, u: State, x: Slices, shared: PyTree) -> tuple[State, Any, PyTree]:
        leaves = [v for v, m in zip(jax.tree.leaves(x), self.differentiable, strict=True) if m]
        weights, combine = _tree.partition(shared)

        def step(u: State, leaves: list[jax.Array], weights: list[jax.Array]) -> tuple[State, PyTree]:
            return self.step(u, self.combine(x, leaves), combine(weights) if self.weights else shared)

        return jax.vjp(step, u, leaves, weights if self.weights else [], has_aux=True)

    def _from_state(self, u: State, x: Slices, shared: PyTree) -> list[int]:
        """Which leaves of the pullback follow from the state, the state itself aside."""

        def residuals(u: State, x: Slices, shared: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(self._vjp(u, x, shared)[1])

        jaxpr = jax.make_jaxpr(residuals)(u, x, shared).jaxpr
        states = jaxpr.invars[: len(jax.tree.leaves(u))]
        following: set[Any] = set(states)
        for equation in jaxpr.eqns:
            if any(v in following for v in equation.invars if not isinstance(v, jex_core.Literal)):
                following.update(equation.outvars)
        out = [None if isinstance(v, jex_core.Literal) else v for v in jaxpr.outvars]
        return [i for i, v in enumerate(out) if v in following and v not in states]
