"""Programs that were traced on another mesh than the one on which they are evaluated."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lp_jax._arrays._jaxpr import (
    JITTED,
    PLACES,
    Operation,
    array_type,
    bind,
    evaluate,
    has_rule,
    through_calls,
)


def at_home(
    program: core.ClosedJaxpr, home: AbstractMesh, args: Sequence[Any], operation: Operation
) -> list[Any]:
    """Evaluate a program as where it was traced, on the mesh ``home``.

    The types of its operations, of all programs within, and of derivative rules that JAX traces later hold that mesh. JAX
    refuses them beside the types of a ``shard_map``. So the arguments are given the types that the program knows, and its
    results those of the caller. Nothing of this is left in what is compiled.
    """
    here = jax.sharding.get_abstract_mesh()
    if here == home:
        return evaluate(program, args, operation)
    # without axes of the compiler, JAX has no rule for a constraint under vmap
    return in_its_types(program, args, operation if here.auto_axes else _unconstrained(operation))


def in_its_types(program: core.ClosedJaxpr, args: Sequence[Any], operation: Operation) -> list[Any]:
    """Evaluate a program on arrays of the types that it knows. Its results get types of the caller's mesh."""
    n, variables = len(program.consts), [*program.jaxpr.constvars, *program.jaxpr.invars]
    pairs = zip([*program.consts, *args], variables, strict=True)
    values = [retyped(x, array_type(v).sharding) for x, v in pairs]
    return list(map(placed_here, evaluate(program, values[n:], operation, values[:n])))


def _unconstrained(operation: Operation) -> Operation:
    """The same without what only says where arrays are, and without calls."""

    def each(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        # Operations that only move an array are the identity here.
        return ins if eqn.primitive.name in PLACES else operation(eqn, ins)

    return through_calls(each, JITTED)


def automatic(program: Any) -> Any:
    """Trace a program again, on `NO_MESH`, so that its types and those of the programs within it hold no places.

    JAX refuses types with explicit axes in loops of a ``shard_map``, and places that its own rules do not keep. Derivative
    rules, and a user's ``shard_map``, know the types of their trace. Other parameters of operations are returned as they are.
    """
    if not isinstance(program, core.ClosedJaxpr):  # in newer versions of JAX, all programs are
        if isinstance(program, core.Jaxpr):
            return automatic(core.ClosedJaxpr(program, ())).jaxpr
        return None if isinstance(program, NamedSharding) else program

    def operation(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        with jax.sharding.use_abstract_mesh(NO_MESH):
            if has_rule(eqn) or eqn.primitive.name == "shard_map":
                # Rules of these operations were traced on the old mesh, so they get operands of its types.
                types = [array_type(v).sharding for v in eqn.invars]
                return list(map(placed_here, bind(eqn, list(map(retyped, ins, types)))))
            return bind(eqn.replace(params=jax.tree.map(automatic, eqn.params)), ins)

    def again(*args: jax.Array) -> list[Any]:
        consts = list(map(placed_here, program.consts))
        return evaluate(program, args, _unconstrained(operation), consts)

    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(again)(*(x.update(sharding=nowhere(x)) for x in program.in_avals))


NO_MESH = AbstractMesh((), ())


def placed_here(x: Any) -> Any:
    """The array, with a type of the caller's mesh."""
    return retyped(x, nowhere(jax.typeof(x)))


def nowhere(x: Any) -> NamedSharding:
    """The place of an array that no axis of the caller's mesh divides."""
    return NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * x.ndim))


def gathered(x: Any) -> Any:
    """The type of an array whose first axis is on no axis of a mesh, as JAX wants those that it scans over."""
    kind = jax.typeof(x)
    place = kind.sharding
    spec = PartitionSpec(None, *place.spec[1:])
    return kind.update(sharding=NamedSharding(place.mesh, spec))


def retyped(x: Any, place: NamedSharding) -> Any:
    """The array, with another place in its type."""
    now = jax.typeof(x).sharding
    if now.mesh == place.mesh:
        return x
    # JAX checks the types of operands against the mesh of the context.
    with jax.sharding.use_abstract_mesh(now.mesh):
        return _retyped.bind(x, place=place)


def batch_with_place(
    move: Callable[..., Any], operands: Sequence[Any], axes: Sequence[int], place: NamedSharding
) -> tuple[Any, int]:
    """A batch of ``move(x, place)``."""
    (x,), spec = operands, [*place.spec]
    # The axis of the batch is on no axis of the mesh.
    spec.insert(axes[0], None)
    return move(x, NamedSharding(place.mesh, PartitionSpec(*spec))), axes[0]


_retyped = core.Primitive("retyped")
_retyped.def_impl(lambda x, place: x)
_retyped.def_abstract_eval(lambda x, place: x.update(sharding=place))
mlir.register_lowering(_retyped, lambda context, x, place: [x])
ad.deflinear2(_retyped, lambda cotangent, x, place: [retyped(cotangent, x.aval.sharding)])
batching.primitive_batchers[_retyped] = functools.partial(batch_with_place, retyped)
