"""Programs that were traced on another mesh than the one on which they are evaluated."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lp_jax._arrays._products import Operation, array_type, bind, evaluate


def at_home(
    program: core.ClosedJaxpr, home: AbstractMesh, args: Sequence[Any], operation: Operation
) -> list[Any]:
    """Evaluate a program as where it was traced, on the mesh ``home``.

    The types of its operations, of all programs within, and of derivative rules that JAX traces later hold that mesh. JAX
    refuses them beside the types of a ``shard_map``. So the arguments are given the types that the program knows, and its
    results those of the caller. Nothing of this is left in what is compiled.
    """
    here, inner = jax.sharding.get_abstract_mesh(), program.jaxpr
    if here == home:
        return evaluate(inner, program.consts, args, operation)
    variables, n = [*inner.constvars, *inner.invars], len(program.consts)
    pairs = zip([*program.consts, *args], variables, strict=True)
    values = [retyped(x, array_type(v).sharding) for x, v in pairs]

    def unconstrained(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in ("jit", "pjit"):
            within = eqn.params["jaxpr"]
            return evaluate(within.jaxpr, within.consts, ins, unconstrained)
        return ins if eqn.primitive.name == "sharding_constraint" else operation(eqn, ins)

    # without axes of the compiler, JAX has no rule for a constraint under vmap
    out = evaluate(inner, values[:n], values[n:], operation if here.auto_axes else unconstrained)
    return list(map(placed_here, out))


def is_explicit(program: core.ClosedJaxpr) -> bool:
    """Whether types of a program's operands hold their places."""
    variables = *program.jaxpr.constvars, *program.jaxpr.invars
    return any(array_type(v).sharding.mesh.explicit_axes for v in variables)


def automatic(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Trace a program again, on `NO_MESH`: its types, and those of the programs within, hold no places.

    JAX refuses types with explicit axes in the loops of a ``shard_map``, and places that its own rules do not keep. Derivative
    rules, and a user's ``shard_map``, know the types of their trace.
    """

    def operation(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        name, within = eqn.primitive.name, eqn.params.get("jaxpr")
        if name in ("reshard", "mesh_cast", "sharding_constraint"):
            return ins
        if name in ("jit", "pjit"):
            return evaluate(within.jaxpr, within.consts, ins, operation)
        if name.startswith("custom_") or name == "shard_map":
            types = [array_type(v).sharding for v in eqn.invars]
            out = bind(eqn, list(map(retyped, ins, types)))
            with jax.sharding.use_abstract_mesh(NO_MESH):
                return list(map(placed_here, out))
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return bind(eqn.replace(params=jax.tree.map(_without_places, eqn.params)), ins)

    def again(*args: jax.Array) -> list[Any]:
        consts = list(map(placed_here, program.consts))
        return evaluate(program.jaxpr, consts, args, operation)

    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(again)(*(x.update(sharding=_nowhere(x)) for x in program.in_avals))


def _without_places(parameter: Any) -> Any:
    if isinstance(parameter, NamedSharding):
        return None
    if isinstance(parameter, core.Jaxpr):
        return automatic(core.ClosedJaxpr(parameter, ())).jaxpr
    return automatic(parameter) if isinstance(parameter, core.ClosedJaxpr) else parameter


NO_MESH = AbstractMesh((), ())


def placed_here(x: Any) -> Any:
    """The array, with a type of the caller's mesh."""
    return retyped(x, _nowhere(jax.typeof(x)))


def _nowhere(x: Any) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * x.ndim))


def retyped(x: Any, place: NamedSharding) -> Any:
    """The array, with another place in its type."""
    now = jax.typeof(x).sharding
    if now.mesh == place.mesh:
        return x
    with jax.sharding.use_abstract_mesh(now.mesh):
        return _retyped.bind(x, place=place)


def _batch(operands: Sequence[Any], axes: Sequence[int], place: NamedSharding) -> tuple[Any, int]:
    (x,), spec = operands, [*place.spec]
    spec.insert(axes[0], None)
    return retyped(x, NamedSharding(place.mesh, PartitionSpec(*spec))), axes[0]


_retyped = core.Primitive("retyped")
_retyped.def_impl(lambda x, place: x)
_retyped.def_abstract_eval(lambda x, place: x.update(sharding=place))
mlir.register_lowering(_retyped, lambda context, x, place: [x])
ad.deflinear2(_retyped, lambda cotangent, x, place: [retyped(cotangent, x.aval.sharding)])
batching.primitive_batchers[_retyped] = _batch
