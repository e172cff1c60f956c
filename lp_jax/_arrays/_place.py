"""Programs that were traced on another mesh than the one on which they are evaluated."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lp_jax._arrays._products import Operation, array_type, evaluate


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
    consts, args = (
        [retyped(x, array_type(v).sharding) for x, v in zip(values, variables, strict=True)]
        for values, variables in ((program.consts, inner.constvars), (args, inner.invars))
    )

    def unconstrained(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in ("jit", "pjit"):
            within = eqn.params["jaxpr"]
            return evaluate(within.jaxpr, within.consts, ins, unconstrained)
        return ins if eqn.primitive.name == "sharding_constraint" else operation(eqn, ins)

    # without axes of the compiler, JAX has no rule for a constraint under vmap
    out = evaluate(inner, consts, args, operation if here.auto_axes else unconstrained)
    return list(map(placed_here, out))


def placed_here(x: Any) -> Any:
    """The array, with a type of the caller's mesh."""
    return retyped(x, NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()))


def retyped(x: Any, place: NamedSharding) -> Any:
    """The array, with another place in its type."""
    now = jax.typeof(x).sharding
    if now.mesh == place.mesh:
        return x
    with jax.sharding.use_abstract_mesh(now.mesh):
        return _retyped.bind(x, place=place)


def _batch(operands: Sequence[Any], axes: Sequence[int], place: NamedSharding) -> tuple[Any, int]:
    (x,), (axis,) = operands, axes
    spec = [*place.spec, *[None] * (x.ndim - 1 - len(place.spec))]
    spec = PartitionSpec(*spec[:axis], None, *spec[axis:])
    return retyped(x, NamedSharding(place.mesh, spec)), axis


def _type(x: Any, place: NamedSharding) -> Any:
    spec = [*place.spec, *[None] * (x.ndim - len(place.spec))]
    return x.update(sharding=NamedSharding(place.mesh, PartitionSpec(*spec)))


_retyped = core.Primitive("retyped")
_retyped.def_impl(lambda x, place: x)
_retyped.def_abstract_eval(_type)
mlir.register_lowering(_retyped, lambda context, x, place: [x])
ad.deflinear2(_retyped, lambda cotangent, x, place: [retyped(cotangent, x.aval.sharding)])
batching.primitive_batchers[_retyped] = _batch
