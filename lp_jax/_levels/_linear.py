"""Linearisation of a step, kept by the forward solve: the adjoint transposes it without evaluating the step again."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree, Slices, State


@dataclasses.dataclass(frozen=True)
class Linearised:
    """A step, linearised where it is evaluated.

    JAX's pullback is a pytree of the arrays that the transposed step needs. Arrays that depend on the state, such as the
    output of a tanh, are kept. Arrays that depend on parameters only, such as the matrix of a product, are available
    anyway, and keeping them would copy the parameters.

    Attributes:
        step: ``step(u, x, shared) -> (u_next, aux)``.
        differentiable: which leaves of ``x`` have a gradient.
        weights: whether ``shared`` is differentiated, too, for `contract`.
    """

    step: Callable[[State, Slices, PyTree], tuple[State, PyTree]]
    differentiable: tuple[bool, ...]
    weights: bool = False

    def evaluate(self, u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree, list[jax.Array]]:
        """Return the next state, aux, and the arrays to keep."""
        u_next, pullback, aux = self._vjp(u, x, shared)
        leaves = jax.tree.leaves(pullback)
        return u_next, aux, [leaves[i] for i in self._from_state(u, x, shared)]

    def transpose(
        self, u: State, x: Slices, shared: PyTree, kept: Sequence[jax.Array]
    ) -> Callable[[State], tuple[State, list[jax.Array], list[jax.Array]]]:
        """Return the pullback at ``u``, from a cotangent of the next state to those of ``u``, leaves of ``x`` and weights.

        The step is traced again for its structure. Its values that depend on the state are not used, so the compiler drops
        their computation.
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
        r"""Cotangents of the weights, summed over steps stacked along the leading axes. No step is evaluated.

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

    def _vjp(self, u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree, PyTree]:
        leaves, combine = _tree.partition(x, self.differentiable)
        weights, combine_shared = _tree.partition(shared)

        def step(u: State, leaves: list[jax.Array], weights: list[jax.Array]) -> tuple[State, PyTree]:
            return self.step(u, combine(leaves), combine_shared(weights) if self.weights else shared)

        return jax.vjp(step, u, leaves, weights if self.weights else [], has_aux=True)

    def _from_state(self, u: State, x: Slices, shared: PyTree) -> list[int]:
        """Positions of the leaves of the pullback that depend on the state, without the state itself."""

        def residuals(u: State, x: Slices, shared: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(self._vjp(u, x, shared)[1])

        jaxpr = jax.make_jaxpr(residuals)(u, x, shared).jaxpr
        states = jaxpr.invars[: len(jax.tree.leaves(u))]
        following = set(states)
        for equation in jaxpr.eqns:
            if any(v in following for v in equation.invars if not isinstance(v, core.Literal)):
                following.update(equation.outvars)
        out = [None if isinstance(v, core.Literal) else v for v in jaxpr.outvars]
        return [i for i, v in enumerate(out) if v in following and v not in states]
