"""Evaluate a program operation by operation, some of them in another way."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core, source_info_util

from lp_jax._arrays import _tree

Operation = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]
"""The results of an operation, from its operands."""

CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"}


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], operation: Operation) -> list[Any]:
    """Evaluate a program, with each operation's scopes and place in the source."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            env.update(zip(eqn.outvars, operation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def bind(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    """The operation as it was."""
    if eqn.primitive.name == "pvary" and _tree.varying_axes(ins[0]) >= set(eqn.params["axes"]):
        return ins  # within a solve all states vary between the devices of a shard_map
    p, kinds = eqn.params, [_tree.varying_axes(v.aval) for v in eqn.invars]
    if len(set(kinds)) == 1:  # as lax.add and the like make their operands
        ins = list(_tree.varying(tuple(ins), tuple(ins)))
    if "jaxpr" in p and any(_tree.varying_axes(x) != kind for x, kind in zip(ins, kinds, strict=True)):
        return evaluate(p["jaxpr"].jaxpr, p["jaxpr"].consts, ins, bind)
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))
    return out if eqn.primitive.multiple_results else [out]
