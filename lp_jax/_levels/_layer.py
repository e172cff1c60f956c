"""The user's step as solvers call it: its Python code runs once, and its program is evaluated."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import Footprint
from lp_jax._arrays._outer import with_few_terms
from lp_jax._arrays._products import inside
from lp_jax._arrays._types import Layer, PyTree, Shared, Slices, State, Static, Step, Which

Signature = tuple[tuple[tuple[int, ...], np.dtype], ...]
"""Shapes and dtypes of the leaves of a state."""


def signature(u: PyTree) -> Signature:
    """Shapes and dtypes of a state, or of its shapes, as a hashable value."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(u))


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """The program of a step that closes over traced values. They are operands, so that they can be differentiated.

    ``custom_vjp`` refuses functions that close over tracers; a jaxpr whose constants are arguments closes over none.
    """

    jaxpr: core.Jaxpr
    positions: tuple[int, ...]  # of its constants among the values that are closed over


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """The user's step on one level, as a function of (state, slice, shared).

    A call runs the user's Python code. `evaluate` takes the program that JAX cached for the same shapes instead, where
    possible, so that the code runs once, however often a solve contains the step.
    """

    step: Step
    level: int
    has_aux: bool
    structure: jax.tree_util.PyTreeDef | None = None  # of its output; None before the first trace
    terms: int = 0  # most rows of a product whose weight's gradient is a sum of outer products; 0 for none
    hoisted: tuple[tuple[Signature, Hoisted], ...] = ()  # by the state's signature, if it closes over traced values
    in_place: bool = False  # whether its code must run in every trace: see `needs_its_trace`

    def __call__(self, u: State, x: Slices, shared: PyTree) -> PyTree:
        params, shared, data = _tree.with_fresh_keys((x.params, shared, x.data))
        out = self.step(u, Layer(params, shared, data, x.t, x.dt, x.index, Static(self.level)))
        if self.structure is not None and jax.tree.structure(out) != self.structure:
            raise TypeError(
                f"step must return the same structure in every call; got {self.structure} and then "
                f"{jax.tree.structure(out)}. Let it depend on nothing but its arguments."
            )
        return out

    def evaluate(self, u: State, x: Slices, shared: Shared, *, aux: bool, layers: int | None) -> PyTree:
        """Return ``u_next``, with ``aux`` ``(u_next, aux)``; padding, slices with an index >= ``layers``, does nothing."""
        if self.in_place:
            out = self(u, x, shared[0])
        else:
            mesh = jax.sharding.get_abstract_mesh()  # JAX does not treat None as an empty one
            with jax.sharding.use_abstract_mesh(mesh):
                program = self._of_hoisted(u, shared[1]) if self.hoisted else jax.make_jaxpr(self)(u, x, shared[0])
            evaluate = with_few_terms(program, self.terms) if self.terms else core.jaxpr_as_fun(program)
            out = jax.tree.unflatten(self.structure, evaluate(*jax.tree.leaves((u, x, shared[0]))))
        u_next, emitted = out if self.has_aux else (out, None)
        if layers is not None:
            u_next = _tree.where(x.index < layers, u_next, u)
        return (u_next, emitted) if aux else u_next

    def _of_hoisted(self, u: State, closed_over: Sequence[jax.Array]) -> core.ClosedJaxpr:
        hoisted = dict(self.hoisted)[signature(u)]
        constants: Sequence[jax.Array] = [closed_over[i] for i in hoisted.positions]
        return core.ClosedJaxpr(hoisted.jaxpr, _tree.with_fresh_keys(constants))


def _cotangent(x: jax.Array) -> jax.Array | np.ndarray:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)


def needs_its_trace(program: core.ClosedJaxpr, *arguments: PyTree) -> bool:
    """Whether a derivative rule in a step's program uses a value of the trace that the program came from.

    Such a rule (``jax.custom_vjp`` within the step, for example on ``layer.dt``) cannot be evaluated later. True if in doubt.
    """

    def rules(jaxpr: core.Jaxpr) -> bool:
        return any(e.primitive.name.startswith("custom_") or any(map(rules, inside(e))) for e in jaxpr.eqns)

    def transpose(*arguments: jax.Array) -> PyTree:
        leaves, combine = _tree.partition(list(arguments))
        out, pull = jax.vjp(lambda leaves: core.jaxpr_as_fun(program)(*combine(leaves)), leaves)
        return pull([_cotangent(x) for x in out])

    if not rules(program.jaxpr):
        return False
    try:
        constants = jax.make_jaxpr(transpose)(*jax.tree.leaves(arguments)).consts
    except Exception:
        return True
    return any(isinstance(c, jax.core.Tracer) for c in constants)


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced layers of a network: all that is static about them.

    In a ``recurrent`` network all differentiable operands of a step except its inputs are shared: the weights. Their gradient is
    one contraction over all steps.
    """

    steps: tuple[tuple[Which, LayerStep], ...]  # the layer on each level, and other steps of the solvers
    layers: int
    differentiable: tuple[bool, ...]  # the leaves of the slices with a gradient; times only where they are traced
    recurrent: bool = False
    footprint: Footprint = Footprint(0, 0, 0.0)  # cost and memory of a layer
    single_example: bool = False  # whether the step also takes a single example, for a solver that averages examples

    @property
    def has_aux(self) -> bool:
        """Whether the step returns ``(y_next, aux)``."""
        return self.steps[0][1].has_aux
