"""The user's step as solvers call it. Its Python code runs when it is traced; solvers evaluate or linearise its program.

The code runs twice per level. The first trace finds the structure of what it returns; a `LayerStep` with that structure is
another function to JAX, so it is traced once more. A step that closes over traced values is traced once, and its program is
kept. A step with a derivative rule that may use such values runs in every trace.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh

from lp_jax._arrays import _tree
from lp_jax._arrays._jaxpr import (
    array_type,
    bind,
    closes_over_tracers,
    evaluate,
    following,
    has_rule,
    walk,
)
from lp_jax._arrays._outer import with_few_terms
from lp_jax._arrays._place import placed_here, retyped
from lp_jax._arrays._types import Layer, PyTree, Shared, Slices, State, Static, Step, StepKey
from lp_jax._arrays._weak import strong

Kept = dict[str, jax.Array]
"""Arrays of a step's linearisation that depend on its state, by the operations that compute them."""

Signature = tuple[tuple[tuple[int, ...], np.dtype], ...]
"""Shapes and dtypes of the leaves of a state."""


def signature(u: PyTree) -> Signature:
    """Shapes and dtypes of a state, or of its shapes, as a hashable value."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(u))


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """The program of a step with the traced values that it closes over as operands: ``custom_vjp`` takes no other functions."""

    jaxpr: core.Jaxpr
    positions: tuple[int, ...]  # of its constants among the values that are closed over


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """The user's step on one level. A call runs its Python code; `evaluate` takes the program that JAX cached, where possible."""

    step: Step
    level: int
    has_aux: bool
    structure: jax.tree_util.PyTreeDef | None = None  # of its output; None before the first trace
    # in products of at most this many rows, a weight's gradient is a sum of outer products, which is faster on a CPU; 0 for none
    terms: int = 0
    # the step's programs by the state's signature, if it closes over traced values
    hoisted: tuple[tuple[Signature, Hoisted], ...] = ()
    # mesh that it is traced on; None for the mesh of whoever evaluates it
    home: AbstractMesh | None = None
    retraced: bool = False  # whether its code must run in every trace: see `needs_its_trace`

    def __call__(self, u: State, x: Slices, shared: PyTree) -> PyTree:
        params, shared, data = _tree.with_fresh_keys((x.params, shared, x.data))
        out = strong(self.step)(
            u, Layer(params, shared, data, x.t, x.dt, x.index, Static(self.level))
        )
        if self.structure is not None and jax.tree.structure(out) != self.structure:
            raise TypeError(
                f"step must return the same structure in every call; got {self.structure} and then "
                f"{jax.tree.structure(out)}. Let it depend on nothing but its arguments."
            )
        return out

    def evaluate(
        self, u: State, x: Slices, shared: Shared, *, aux: bool, in_turn: bool, layers: int | None
    ) -> PyTree:
        """Return ``u_next``, or ``(u_next, aux)`` with ``aux``. A slice with an index >= ``layers`` does nothing.

        With ``in_turn`` no other layer is evaluated at the same time.
        """
        before = u
        if layers is not None:
            # A step may have no finite derivative at the state after the last layer, and zero times infinity is NaN.
            u, x = _constant_unless(x.index < layers, (u, x))
            # A batch of layers would get a copy of the shared operands for each layer, so `without_padding` takes care of those.
            shared = _constant_unless(x.index < layers, shared) if in_turn else shared
        # For another shape of the state the step may close over other values, or over none.
        hoisted = dict(self.hoisted).get(signature(u))
        if self.retraced and hoisted is None:
            out = self(u, x, shared[0])
        else:
            # Types of a program hold the mesh of its trace, so JAX's cache of traces serves only the same mesh.
            here = jax.sharding.get_abstract_mesh()
            home, like = self.home or here, (u, x, shared[0])
            with jax.sharding.use_abstract_mesh(home):
                if hoisted is not None:
                    constants = _tree.with_fresh_keys([shared[1][i] for i in hoisted.positions])
                    program = core.ClosedJaxpr(hoisted.jaxpr, constants)
                else:
                    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
                    # JAX caches the trace by this step and the types of its arguments, so the user's code does not run again.
                    program = jax.make_jaxpr(self)(*(like if here == home else shapes))
            evaluated = with_few_terms(program, self.terms, home)
            out = jax.tree.unflatten(self.structure, evaluated(*jax.tree.leaves((u, x, shared[0]))))
        u_next, emitted = out if self.has_aux else (out, None)
        # A slot beyond the last layer passes the state on unchanged.
        if layers is not None:
            u_next = _tree.where(x.index < layers, u_next, before)
        return (u_next, emitted) if aux else u_next


def _constant_unless(condition: jax.Array, tree: PyTree) -> PyTree:
    """Return ``tree``. Unless ``condition`` holds, its cotangents become zeros, even those that are not finite."""
    leaves, combine = _tree.partition(tree)
    return combine([_differentiated_if(condition, x) for x in leaves])


# For the gradient JAX keeps the leaf itself. It would keep a copy, too, for ``where(condition, x, stop_gradient(x))``.
@jax.custom_jvp
def _differentiated_if(condition: jax.Array, x: jax.Array) -> jax.Array:
    return x


@_differentiated_if.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (condition, x), (_, dot) = primals, tangents
    # The type of the condition may hold another mesh.
    return x, retyped(jnp.where(condition, dot, jnp.zeros_like(dot)), jax.typeof(x).sharding)


def needs_its_trace(program: core.ClosedJaxpr, *arguments: PyTree) -> bool:
    """Whether a derivative rule in a step's program may close over values of the trace, so that no other trace can use it."""

    def transpose(*arguments: jax.Array) -> PyTree:
        leaves, combine = _tree.partition(list(arguments))
        out, pull = jax.vjp(
            lambda new: _tree.partition(core.jaxpr_as_fun(program)(*combine(new)))[0], leaves
        )
        return pull(_tree.zeros_like(out))

    if not any(map(has_rule, walk(program.eqns))):
        return False
    try:
        # A rule that needs a value of its own trace leaves a tracer among the constants of the transposed program.
        return closes_over_tracers(jax.make_jaxpr(transpose)(*jax.tree.leaves(arguments)))
    # A rule is a user's code that sees values of another trace, so it may raise anything.
    except Exception:
        return True


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced layers of a network: all that is static about them."""

    # the layer on each level, and other steps of the solvers
    steps: tuple[tuple[StepKey, LayerStep], ...]
    layers: int
    # cost and memory of a layer, by `lp_jax._choice`. Devices read it; solvers read whether a layer has random bits (`alone`)
    # and whether its cost is known (`counted`)
    footprint: Any
    # the leaves of the slices with a gradient; times only where they are traced
    differentiable: tuple[bool, ...]
    # whether all its weights are shared: their gradient is one contraction over all steps
    recurrent: bool = False


@dataclasses.dataclass(frozen=True)
class Linearised:
    """A step, linearised where it is evaluated: the adjoint transposes it without evaluating the step again.

    JAX's pullback is a pytree of the arrays that the transposed step needs. Arrays that depend on the state, such as the
    output of a tanh, are kept. Arrays that depend on parameters only, such as the matrix of a product, are available
    anyway, and keeping them would copy the parameters.
    """

    step: Callable[[State, Slices, PyTree], tuple[State, PyTree]]  # with aux
    differentiable: tuple[bool, ...]  # the leaves of the slices that have a gradient
    weights: bool = False  # whether shared operands are differentiated, too, for `contract`
    emits: tuple[bool, ...] = ()  # the leaves of aux that are differentiated, too

    def evaluate(self, u: State, x: Slices, shared: PyTree) -> tuple[PyTree, Kept]:
        """Return the pair of the next state and aux, and the arrays to keep."""
        return self._run({}, u, x, shared)

    def transpose(
        self,
        u: State,
        x: Slices,
        shared: PyTree,
        kept: Kept,
        lam: State,
        sources: Sequence[jax.Array | None] = (),
    ) -> PyTree:
        """Pull a cotangent of the next state back: to those of ``u``, of leaves of ``x``, and of weights.

        ``sources`` are the cotangents of the leaves of aux that are differentiated, None for zeros. The step is traced again.
        Its values that depend on the state are not used, so the compiler drops their computation.
        """
        return self._run(kept, u, x, shared, lam, sources)[0]

    def contract(
        self, us: State, xs: Slices, shared: PyTree, kept: Kept, lams: State
    ) -> list[jax.Array]:
        r"""Cotangents of the weights, summed over steps stacked along the leading axes. No step is evaluated.

        The sum of :math:`J_n^T \lambda_n` is the transpose of :math:`\dot w \mapsto (J_n \dot w)_n`: transposed as a whole, a
        product with weights becomes one contraction over all steps, and no step's own gradient is ever formed.
        """
        weights, _ = _tree.partition(shared)

        def directional(dot: list[jax.Array]) -> State:
            def one(u: State, x: Slices, kept: Kept, lam: State) -> State:
                def pull(lam: State) -> PyTree:
                    return self.transpose(u, x, shared, kept, lam)[2]

                # The transpose of the pullback is the forward derivative J_n along the weights.
                push = jax.linear_transpose(pull, lam)
                (u_dot,) = push(dot)
                return u_dot

            return jax.vmap(one)(us, xs, kept, lams)

        (total,) = jax.linear_transpose(directional, weights)(lams)
        return total

    def _linearise(
        self, u: State, x: Slices, shared: PyTree, *cotangents: PyTree
    ) -> tuple[list[jax.Array], PyTree]:
        """Return the arrays of the pullback, and the next state and aux; with cotangents those that they are pulled back to."""
        leaves, combine = _tree.partition(x, self.differentiable)
        weights, combine_shared = _tree.partition(shared)

        def step(
            u: State, leaves: list[jax.Array], weights: list[jax.Array]
        ) -> tuple[tuple[State, list[jax.Array]], PyTree]:
            seen = combine_shared(weights) if self.weights else shared
            u_next, aux = self.step(u, combine(leaves), seen)
            emitted, _ = _tree.partition(
                jax.tree.map(jnp.asarray, aux) if self.emits else (), self.emits
            )
            return (u_next, emitted), aux

        primals = u, leaves, weights if self.weights else []
        (u_next, emitted), pullback, aux = jax.vjp(step, *primals, has_aux=True)
        out = u_next, aux
        if cotangents:
            lam, sources = cotangents
            pairs = zip(sources or [None] * len(emitted), emitted, strict=True)
            out = pullback((lam, [jnp.zeros_like(x) if a is None else a for a, x in pairs]))
        return jax.tree.leaves(pullback), out

    def _run(self, kept: Kept, *operands: PyTree) -> tuple[PyTree, Kept]:
        """Run `_linearise` from its program. Return its second result, and by name those arrays that depend on the state.

        The arrays that were ``kept`` take the places of those that are computed again. All traces compute them by the same
        operations in the same order, so an array is known by its operation, and the order in which JAX keeps arrays does not
        matter.
        """
        closed, (leaves, out) = jax.make_jaxpr(self._linearise, return_shape=True)(*operands)
        program, count = closed.jaxpr, len(leaves)
        names = _from_state(program, len(jax.tree.leaves(operands[0])), count)
        if kept and (unlike := kept.keys() ^ names.values()):
            raise RuntimeError(
                f"the gradient of a step has other operations than the step in the solve: "
                f"{sorted(unlike)}. Let the step depend on nothing but its arguments."
            )
        given = {program.outvars[i]: kept[name] for i, name in names.items() if kept}

        def operation(equation: core.JaxprEqn, ins: list[Any]) -> list[Any]:
            pairs = zip(equation.outvars, bind(equation, ins), strict=True)
            return [
                retyped(given[v], array_type(v).sharding) if v in given else x for v, x in pairs
            ]

        values = evaluate(closed, jax.tree.leaves(operands), operation)
        found = {name: placed_here(values[i]) for i, name in names.items()}
        return jax.tree.unflatten(jax.tree.structure(out), values[count:]), found


def _from_state(jaxpr: core.Jaxpr, states: int, leaves: int) -> dict[int, str]:
    """Name those of the first results of a program, the pullback's arrays, that depend on its first inputs, the state.

    The state itself gets no name, because the solver has it anyway.
    A name is the operation that computes the result, numbered in the order in which the program computes such results. Other
    operations may differ from trace to trace, as where a number of a layer is converted.
    """
    own = jaxpr.invars[:states]
    for equation in jaxpr.eqns:
        if equation.primitive.name == "retyped" and equation.invars[0] in own:
            own = [*own, *equation.outvars]
    # The state itself is kept apart, as the solver has it.
    follows = following(jaxpr, [v in own for v in jaxpr.invars])
    results = enumerate(jaxpr.outvars[:leaves])
    places = {v: i for i, v in results if follows[i] and v not in own}
    computed = [(v, equation.primitive.name) for equation in jaxpr.eqns for v in equation.outvars]
    named = enumerate((places[v], name) for v, name in computed if v in places)
    return {i: f"{number} {name}" for number, (i, name) in named}
