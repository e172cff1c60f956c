"""Programs (jaxprs): walked, followed, and evaluated in another way."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.interpreters.partial_eval import dce_jaxpr

from lp_jax._arrays import _tree


def array_type(v: core.Var | core.Literal) -> Any:
    """The type of an array in a program; a type checker knows ``aval`` as that of any value."""
    return v.aval


def variables(values: Sequence[Any]) -> list[core.Var]:
    """The variables among the operands or results of operations; the others are literals."""
    return [v for v in values if not isinstance(v, core.Literal)]


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """A program without the operations that no result needs."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def walk(
    equations: Sequence[core.JaxprEqn], into: Sequence[str] | None = None
) -> Iterator[core.JaxprEqn]:
    """These equations, and all in the programs within them; with ``into``, within operations of these names only."""
    for equation in equations:
        yield equation
        if into is None or equation.primitive.name in into:
            for program in inside(equation):
                yield from walk(program.eqns, into)


def exchanged_over(programs: Sequence[core.Jaxpr]) -> tuple[str, ...]:
    """Axes of a ``shard_map`` over which programs exchange something."""
    named = {
        axis
        for program in programs
        for equation in walk(program.eqns)
        # These two know the axis, and exchange nothing.
        if equation.primitive.name not in ("axis_index", "pvary")
        for axis in jax.tree.leaves([equation.params.get(key) for key in ("axes", "axis_name")])
    }
    return tuple(filter(named.__contains__, jax.sharding.get_abstract_mesh().manual_axes))


def scan_parts(equation: core.JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and carries of a scan, told by shapes: all other operands and results lose an axis in its body."""
    (body,) = inside(equation)

    def alike(
        outer: Sequence[core.Var | core.Literal], inner: Sequence[core.Var | core.Literal]
    ) -> int:
        return sum(
            array_type(a).ndim == array_type(b).ndim for a, b in zip(outer, inner, strict=True)
        )

    carries = alike(equation.outvars, body.outvars)
    return alike(equation.invars, body.invars) - carries, carries


def inside(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Programs within an equation, such as a loop's body."""
    programs = []
    for name, value in equation.params.items():
        for jaxpr in value if isinstance(value, tuple | list) else [value]:
            if isinstance(jaxpr, core.ClosedJaxpr):
                jaxpr = jaxpr.jaxpr
            if isinstance(jaxpr, core.Jaxpr) and name != "cond_jaxpr":
                programs.append(jaxpr)
    return programs


def called(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Programs that an equation calls with its operands: the branches of a switch, or one, such as the body of a scan."""
    name = equation.primitive.name
    programs = inside(equation)
    # The programs of a while loop and of a reduction do not get the operands one by one.
    if name == "while" or name.startswith("reduce"):
        return []
    arity = len(equation.invars) - (name == "cond"), len(equation.outvars)
    # A scatter holds its addition of two numbers, which is no program that it calls.
    programs = [p for p in programs if (len(p.invars), len(p.outvars)) == arity]
    return programs if name == "cond" else programs[:1]


Operation = Callable[
    [core.JaxprEqn, list[Any]], Sequence[Any]
]  # values of its results, from those of its operands


def follow(
    jaxpr: core.Jaxpr, inputs: Sequence[Any], operation: Operation, otherwise: Any
) -> list[Any]:
    """Propagate values from the inputs of a program to its results; literals and constants have the value ``otherwise``."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(v: core.Var | core.Literal) -> Any:
        return otherwise if isinstance(v, core.Literal) else known.get(v, otherwise)

    for equation in jaxpr.eqns:
        known.update(
            zip(equation.outvars, operation(equation, list(map(of, equation.invars))), strict=True)
        )
    return list(map(of, jaxpr.outvars))


def following(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Flag the results of a program that depend on the flagged inputs."""

    def operation(equation: core.JaxprEqn, operands: list[bool]) -> list[bool]:
        name = equation.primitive.name
        programs = called(equation)
        before = None
        results = [any(operands)] * len(equation.outvars)
        first = int(name == "cond")
        consts, carries = scan_parts(equation) if name == "scan" else (0, 0)
        # A carry that depends on a flagged input after one turn does so before the next one: repeat until nothing changes.
        while programs and operands != before:
            before = list(operands)
            flags = [following(program, operands[first:]) for program in programs]
            results = [any((*operands[:first], *each)) for each in zip(*flags, strict=True)]
            carry = slice(consts, consts + carries)
            operands[carry] = [a or b for a, b in zip(operands[carry], results, strict=False)]
        return results

    return follow(jaxpr, inputs, operation, False)


def is_product(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a matrix product, those of `lp_jax._arrays._outer` included."""
    return equation.primitive.name in ("dot_general", "few_terms", "outer_terms")


ALONE = "key<rbg>", "key<urbg>"
"""Kinds of keys of which JAX takes the first for a whole batch."""


CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"}


def evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], operation: Operation
) -> list[Any]:
    """Evaluate a program, with each operation's scopes and place in the source."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        # Scopes of the program go below those of whoever evaluates it, as profiles and `parallel` read them.
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            env.update(zip(eqn.outvars, operation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def through_calls(operation: Operation, calls: Set[str]) -> Operation:
    """The same operation, on the programs within calls of these names instead of on the calls."""

    def each(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name not in calls:
            return operation(eqn, ins)
        called = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]
        return evaluate(getattr(called, "jaxpr", called), getattr(called, "consts", ()), ins, each)

    return each


def bind(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    """The operation as it was."""
    if eqn.primitive.name == "pvary" and _tree.varying_axes(ins[0]) >= set(eqn.params["axes"]):
        return ins  # within a solve all states vary between the devices of a shard_map
    p = eqn.params
    kinds = [_tree.varying_axes(v.aval) for v in eqn.invars]
    # As `lax.add` and the like do, operands of equal types are made to vary over the same axes.
    if len(set(kinds)) == 1:
        ins = list(_tree.varying(tuple(ins), tuple(ins)))
    if "jaxpr" in p and any(
        _tree.varying_axes(x) != kind for x, kind in zip(ins, kinds, strict=True)
    ):
        # A call's program holds the types of its trace, so with other types its operations are bound one by one.
        return evaluate(p["jaxpr"].jaxpr, p["jaxpr"].consts, ins, bind)
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))
    return out if eqn.primitive.multiple_results else [out]
