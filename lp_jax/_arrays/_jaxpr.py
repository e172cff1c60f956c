"""Programs (jaxprs): read, followed, and evaluated in another way.

All that lp_jax knows of how JAX writes a program is in this module: names and parameters of its operations, scopes, types.
Other modules call its functions, and ``tests/core/test_jaxpr.py`` says in words which of these assumptions a version of JAX
breaks. Operations on numbers, such as ``add``, keep their names in the analyses that have a rule for each.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util
from jax.extend.core.primitives import closed_call_p
from jax.interpreters.partial_eval import dce_jaxpr

# As the loops of `_tree` they are the library's own, which a progress bar in the place of JAX's does not count.
from jax.lax import pcast, scan, switch, while_loop

Atom = core.Var | core.Literal
"""An operand or a result of an operation."""

Operation = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]
"""Evaluates an equation: it gives the values of the results, from those of the operands."""

ALONE = "key<rbg>", "key<urbg>"
"""Kinds of keys of which JAX takes the first for a whole batch."""

JITTED = {"jit"}
CALLS = JITTED | {closed_call_p.name, "remat2"}
"""Operations that call one program with their operands. The last one is `jax.checkpoint`; jax 0.12 renamed the second one."""
INLINED = CALLS | {"custom_jvp_call"}
"""Those, and functions with a forward derivative of the user's, where only the values count."""
NESTED = CALLS | {"cond", "while", "shard_map", "scan"}
"""Operations with programs within them that `rerun` can replace."""
PLACES = {"sharding_constraint", "reshard", "mesh_cast", "resharded", "retyped"}
"""Operations that only move an array."""


# --- types ----------------------------------------------------------------------------------------------------------


def array_type(v: Atom) -> Any:
    """The type of an array in a program. It exists for type checkers, which know ``aval`` as the type of any value."""
    return v.aval


def is_array(v: Atom) -> bool:
    """Whether a value of a program is an array. Others are tokens, references, and types of other libraries."""
    return isinstance(v.aval, jax.core.ShapedArray)


def size(v: Atom) -> int:
    """How many numbers an array in a program has; 1 for other values."""
    return array_type(v).size if is_array(v) else 1


def nbytes(v: Atom) -> int:
    """Bytes of an array in a program; 0 for other values."""
    return size(v) * array_type(v).dtype.itemsize if is_array(v) else 0


def varying_axes(*values: object) -> frozenset[Hashable]:
    """Axes of a mesh along which devices hold different numbers of some of these arrays or types, as ``shard_map`` checks it."""
    kinds = (jax.typeof(x) if isinstance(x, jax.core.Tracer) else x for x in values)
    # Arrays that exist are no types, and JAX knows no such axes of them; nor of shapes without a mesh.
    typed = (x for x in kinds if isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct))
    axes = (x.manual_axis_type.varying for x in typed if x.manual_axis_type)
    return frozenset().union(*axes)


def vary(x: Any, axes: Set[Hashable]) -> Any:
    """The array, marked as different between devices along these axes, too. Keys cannot be marked."""
    more = tuple(axes - varying_axes(x))
    numbers = more and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return pcast(x, more, to="varying") if numbers else x


# --- programs -------------------------------------------------------------------------------------------------------


def variables(values: Sequence[Any]) -> list[core.Var]:
    """The variables among the operands or results of operations, which may also be literals."""
    return [v for v in values if not isinstance(v, core.Literal)]


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """A program without the operations that no result needs."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def closes_over_tracers(program: core.ClosedJaxpr) -> bool:
    """Whether constants of a program are values of a trace, so that it cannot be used outside of that trace."""
    return any(isinstance(x, jax.core.Tracer) for x in program.consts)


def dependents(equations: Sequence[core.JaxprEqn], values: Sequence[core.Var]) -> set[core.Var]:
    """These values of a program, and all that are computed from them."""
    found = set(values)
    for equation in equations:
        if not found.isdisjoint(variables(equation.invars)):
            found.update(equation.outvars)
    return found


def part(program: core.ClosedJaxpr, **changed: Sequence[Any]) -> core.ClosedJaxpr:
    """A part of a program as a program: with other ``invars``, ``eqns`` and ``outvars``, those that are given."""
    return core.ClosedJaxpr(program.jaxpr.replace(**changed), program.consts)


def walk(
    equations: Sequence[core.JaxprEqn], into: Set[str] | None = None
) -> Iterator[core.JaxprEqn]:
    """Yield these equations and all in the programs within them. With ``into``, only operations of these names are entered."""
    for equation in equations:
        yield equation
        if into is None or equation.primitive.name in into:
            for program in inside(equation):
                yield from walk(program.eqns, into)


def inside(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Programs within an equation, such as a loop's body; of a loop of unknown length not its condition."""
    params = dict(equation.params)
    params.pop("cond_jaxpr", None)
    return list(core.jaxprs_in_params(params))


def called(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Programs that an equation calls with its operands: the branches of a switch, or one, such as the body of a scan."""
    name = equation.primitive.name
    # The programs of a while loop and of a reduction do not get the operands one by one.
    if name == "while" or name.startswith("reduce"):
        return []
    arity = len(equation.invars) - is_switch(equation), len(equation.outvars)
    # A scatter holds its addition of two numbers, which is no program that it calls.
    programs = [p for p in inside(equation) if (len(p.invars), len(p.outvars)) == arity]
    return programs if is_switch(equation) else programs[:1]


def exchanged_over(programs: Sequence[core.Jaxpr]) -> tuple[str, ...]:
    """Axes of a ``shard_map`` over which programs exchange something."""
    named = [
        [equation.params.get(key) for key in ("axes", "axis_name")]
        for program in programs
        for equation in walk(program.eqns)
        # These two know the axis, and exchange nothing.
        if equation.primitive.name not in ("axis_index", "pvary")
    ]
    devices = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(filter(jax.tree.leaves(named).__contains__, devices))


def opened_axes(program: core.Jaxpr) -> set[str]:
    """Axes of meshes over which a program opens a ``shard_map``, or several."""
    opened = (one.params for one in walk(program.eqns) if one.primitive.name == "shard_map")
    return {axis for params in opened for axis in _manual_axes(params)}


def _manual_axes(params: Mapping[str, Any]) -> Set[str]:
    """The axes over which a ``shard_map`` is opened, of its parameters. jax 0.10.2 renamed them."""
    axes: Set[str] = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return axes


# --- operations -----------------------------------------------------------------------------------------------------


def is_scan(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a loop of known length, `jax.lax.scan`."""
    return equation.primitive.name == "scan"


def is_switch(equation: core.JaxprEqn) -> bool:
    """Whether an equation takes one of several branches. Its first operand is the index, which the branches do not get."""
    return equation.primitive.name == "cond"


def has_rule(equation: core.JaxprEqn, kind: str = "") -> bool:
    """Whether an operation has a rule of the user's, of a kind such as "vjp" for `jax.custom_vjp`, or of any."""
    return equation.primitive.name.startswith("custom_" + kind)


def is_product(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a matrix product, those of `lp_jax._arrays._outer` included."""
    return equation.primitive.name in ("dot_general", "few_terms", "outer_terms")


_AXES = "axes", "axis", "dimensions", "permutation", "broadcast_dimensions", "dimension_numbers"


def axes_of(equation: core.JaxprEqn) -> Any:
    """The axes that an operation has as its parameter: those that it sums over or reverses, their order, or where they go.

    Of a matrix product, the axes that it sums over and those of a batch, each a pair for the left and the right operand; of a
    convolution, `jax.lax.ConvDimensionNumbers`.
    """
    (axes,) = (equation.params[name] for name in _AXES if name in equation.params)
    return (axes,) if isinstance(axes, int) else axes


class ScanParts(NamedTuple):
    """The parameters of a scan. Its operands are constants, carries and scanned arrays; its results carries and arrays."""

    body: core.ClosedJaxpr
    length: int
    reverse: bool
    unroll: int
    consts: int
    carries: int


def scan_parts(equation: core.JaxprEqn) -> ScanParts:
    """The parameters of a scan.

    Versions of JAX write numbers of constants and carries in several ways, so that these are told by shapes: all other operands
    and results lose an axis in the body.
    """
    p = equation.params
    body = p["jaxpr"].jaxpr
    # Values that are no arrays have no axes to lose.
    fixed, carries = (
        sum(getattr(a.aval, "ndim", 0) == getattr(b.aval, "ndim", 0) for a, b in pairs)
        for pairs in (
            zip(equation.invars, body.invars, strict=True),
            zip(equation.outvars, body.outvars, strict=True),
        )
    )
    return ScanParts(p["jaxpr"], p["length"], p["reverse"], p["unroll"], fixed - carries, carries)


# --- scopes and places in the source --------------------------------------------------------------------------------


def scopes(equation: core.JaxprEqn) -> str:
    """The scopes that an operation is in, of `jax.named_scope` and of transformations."""
    return str(equation.source_info.name_stack)


def in_gradient(equation: core.JaxprEqn) -> bool:
    """Whether an operation is part of a derivative, which JAX puts into a scope of this name."""
    return "jvp(" in scopes(equation)


def source(equation: core.JaxprEqn) -> str:
    """File, line and function of the caller that is in no installed package, nor in a module directly in lp_jax."""
    for frame in getattr(equation.source_info.traceback, "frames", ()):
        file = Path(frame.file_name)
        if "site-packages" not in file.parts and file.parent != Path(__file__).parents[1]:
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return source_info_util.summarize(equation.source_info)


# --- followed -------------------------------------------------------------------------------------------------------


def follow(
    jaxpr: core.Jaxpr, inputs: Sequence[Any], operation: Operation, otherwise: Any
) -> list[Any]:
    """Propagate values from the inputs of a program to its results. Literals and constants have the value ``otherwise``."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(values: Sequence[Any]) -> list[Any]:
        return [
            otherwise if isinstance(v, core.Literal) else known.get(v, otherwise) for v in values
        ]

    for equation in jaxpr.eqns:
        results = operation(equation, of(equation.invars))
        known.update(zip(equation.outvars, results, strict=True))
    return of(jaxpr.outvars)


def settled(
    equation: core.JaxprEqn,
    operands: list[Any],
    of_body: Callable[[core.Jaxpr, list[Any]], list[Any]],
    join: Callable[[Any, Any], Any],
) -> list[Any]:
    """Propagate values through the body of a scan until its carry has the same ones before and after.

    ``join`` gives the value of an array that has one or the other.
    """
    body, *_, start, carries = scan_parts(equation)
    end = start + carries
    while True:
        results = of_body(body.jaxpr, operands)
        carry = list(map(join, operands[start:end], results))
        if carry == operands[start:end]:
            return results
        operands = [*operands[:start], *carry, *operands[end:]]


def following(jaxpr: core.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Flag the results of a program that depend on the flagged inputs."""

    def operation(equation: core.JaxprEqn, operands: list[bool]) -> list[bool]:
        if is_scan(equation):
            return settled(equation, operands, following, operator.or_)
        first = int(is_switch(equation))
        ends = [following(program, operands[first:]) for program in called(equation)]
        # Without a program that is called, a result depends on all operands.
        of_each = [any((*operands[:first], *each)) for each in zip(*ends, strict=True)]
        return of_each or [any(operands)] * len(equation.outvars)

    return follow(jaxpr, inputs, operation, False)


# --- evaluated ------------------------------------------------------------------------------------------------------


def evaluate(
    program: core.ClosedJaxpr,
    args: Sequence[Any],
    operation: Operation,
    consts: Sequence[Any] | None = None,
) -> list[Any]:
    """Evaluate a program, with each operation's scopes and place in the source, and with other constants if these are given."""
    jaxpr = program.jaxpr
    consts = program.consts if consts is None else consts
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(values: Sequence[Any]) -> list[Any]:
        return [v.val if isinstance(v, core.Literal) else env[v] for v in values]

    for eqn in jaxpr.eqns:
        # Scopes of the program go below those of whoever evaluates it, as profiles and `parallel` read them.
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            env.update(zip(eqn.outvars, operation(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def through_calls(operation: Operation, calls: Set[str]) -> Operation:
    """The same operation, on the programs within calls of these names instead of on the calls."""

    def each(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name not in calls:
            return operation(eqn, ins)
        return evaluate(_callee(eqn), ins, each)

    return each


def _callee(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """The program of a call. That of a checkpoint has no constants, and is open before jax 0.12."""
    program = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


def bind(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    """The operation as it was."""
    p = eqn.params
    if eqn.primitive.name == "pvary" and varying_axes(ins[0]) >= set(p["axes"]):
        return ins  # within a solve all states vary between the devices of a shard_map
    kinds = [varying_axes(v.aval) for v in eqn.invars]
    retyped = eqn.primitive.name in NESTED and kinds != list(map(varying_axes, ins))
    # As `lax.add` and the like do, operands of equal types are made to vary over the same axes; carries of loops, too, as they
    # have to start with the types that they end with.
    if retyped or len(set(kinds)) == 1:
        axes = varying_axes(*ins)
        ins = [vary(x, axes) for x in ins]
    if retyped:
        # Programs hold the types of their trace, so with other types their operations are bound one by one.
        return rerun(eqn, ins, lambda program, *args: evaluate(program, args, bind), inline=True)
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))
    return out if eqn.primitive.multiple_results else [out]


def as_scan(
    eqn: core.JaxprEqn, ins: list[Any], run: Callable[..., list[Any]]
) -> tuple[Any, Any, Any, Any, Any]:
    """The first arguments of `jax.lax.scan`, for a scan: body, by ``run(program, *operands)``, carry, arrays, length, reverse."""
    program, length, reverse, _, start, carries = scan_parts(eqn)
    end = start + carries

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = run(program, *ins[:start], *carry, *x)
        return out[:carries], out[carries:]

    return body, ins[start:end], ins[end:], length, reverse


def rerun(
    eqn: core.JaxprEqn, ins: list[Any], run: Callable[..., list[Any]], *, inline: bool
) -> Sequence[Any]:
    """Evaluate an operation of `NESTED`, the programs within it by ``run(program, *operands)``.

    With ``inline``, jitted functions are evaluated at once, which keeps the values of arrays.
    """
    name, p = eqn.primitive.name, eqn.params
    if is_scan(eqn):
        return jax.tree.leaves(scan(*as_scan(eqn, ins, run), unroll=scan_parts(eqn).unroll))
    if is_switch(eqn):
        branches = [functools.partial(run, branch) for branch in p["branches"]]
        return switch(ins[0], branches, *ins[1:])
    if name == "while":
        start = p["cond_nconsts"]
        end = start + p["body_nconsts"]
        # Only the body is evaluated by `run`.
        return while_loop(
            lambda carry: evaluate(p["cond_jaxpr"], [*ins[:start], *carry], bind)[0],
            lambda carry: tuple(run(p["body_jaxpr"], *ins[start:end], *carry)),
            tuple(ins[end:]),
        )
    program = functools.partial(run, _callee(eqn))
    if eqn.primitive is closed_call_p or (name in JITTED and inline):
        return program(*ins)
    if name in JITTED:
        # A jitted function stays one, with another program.
        inner = jax.make_jaxpr(program)(*(v.aval for v in eqn.invars))
        # a context around the function may bring tracers
        if closes_over_tracers(inner):
            return jax.jit(
                core.jaxpr_as_fun(inner),
                in_shardings=p["in_shardings"],
                out_shardings=[*p["out_shardings"]],
            )(*ins)
        return eqn.primitive.bind(*ins, **{**p, "jaxpr": inner})
    if name == "shard_map":
        spread = jax.shard_map(
            program,
            mesh=p["mesh"],
            in_specs=p["in_specs"],
            out_specs=[*p["out_specs"]],
            axis_names=_manual_axes(p),
            check_vma=p["check_vma"],
        )
        return jax.jit(spread)(*ins)  # outside of jit, JAX has no symbolic zeros within one
    # What is left is a checkpoint, which keeps its policy.
    return jax.checkpoint(program, prevent_cse=p["prevent_cse"], policy=p["policy"])(*ins)
