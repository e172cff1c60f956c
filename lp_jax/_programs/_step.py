"""The user's step as solvers call it: Python code that runs once, and the program that it left."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._outer import with_few_terms
from lp_jax._arrays._types import Layer, PyTree, Shared, Slices, State, Static, Step
from lp_jax._programs import _inputs

Signature = tuple[tuple[tuple[int, ...], Any], ...]
"""Shapes and dtypes of the leaves of a state."""


def signature(u: State) -> Signature:
    """Shapes and dtypes of a state, hashable."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(u))


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """The program of a step that closes over traced values: they are operands, so that they can be differentiated.

    ``custom_vjp`` refuses functions that close over tracers; a jaxpr whose constants are arguments closes over none.
    """

    jaxpr: core.Jaxpr
    positions: tuple[int, ...]  # of its constants among the values that are closed over


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """The user's step on one level, as a function of (state, slice, shared).

    Calling it runs the user's Python code. `advance` does not, if it can: JAX keeps the program that this code left for the
    same shapes, and `advance` evaluates that, so that the code runs once, however often a solve has the step in it.

    Attributes:
        step: what the user wrote.
        level: ``layer.level`` of the step.
        has_aux: whether it returns ``(y_next, aux)``.
        structure: of what it returns, which is the same in every call; None before it was traced.
        terms: products of at most ``terms`` rows have the gradient of their weight as a sum of outer products; 0 for none.
        layers: number of layers, where slots may lie beyond the last one; None where every slot is a layer.
        hoisted: the program for every state, where the step closes over traced values.
    """

    step: Step
    level: int
    has_aux: bool
    structure: Any = None
    terms: int = 0
    layers: int | None = None
    hoisted: tuple[tuple[Signature, Hoisted], ...] = ()

    def __call__(self, u: State, x: Slices, shared: PyTree) -> Any:
        params, shared, data = _tree.with_fresh_keys((x.params, shared, x.data))
        out = self.step(u, Layer(params, shared, data, x.t, x.dt, x.index, Static(self.level)))
        if self.structure is not None:
            _inputs.same_output(out, self.structure)
        return out

    def advance(self, u: State, x: Slices, shared: Shared) -> tuple[State, PyTree]:
        """``(u_next, aux)``; aux is None for a step that has none. The identity on a slot beyond the last layer."""
        if self.hoisted:
            hoisted = dict(self.hoisted)[signature(u)]
            constants: Sequence[Any] = [shared[1][i] for i in hoisted.positions]
            program = core.ClosedJaxpr(hoisted.jaxpr, _tree.with_fresh_keys(constants))
        else:
            with jax.sharding.use_abstract_mesh(
                jax.sharding.get_abstract_mesh()
            ):  # None and an empty one are two to JAX
                program = jax.make_jaxpr(self)(u, x, shared[0])
        evaluate = with_few_terms(program, self.terms) if self.terms else core.jaxpr_as_fun(program)
        out = jax.tree.unflatten(self.structure, evaluate(*jax.tree.leaves((u, x, shared[0]))))
        u_next, aux = out if self.has_aux else (out, None)
        return u_next if self.layers is None else _tree.where(x.index < self.layers, u_next, u), aux
