"""Cost of a program in matrix products: their number, and the length of their longest chain.

Both are read from the jaxpr, as if loops were unrolled. They do not depend on the machine.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
from jax.extend import core

from lp_jax._arrays._types import PyTree

if TYPE_CHECKING:
    from jax.core import ShapedArray


def array_type(v: core.Var | core.Literal) -> "ShapedArray":
    """The type of an array in a program."""
    return cast("ShapedArray", v.aval)


class Cost(NamedTuple):
    """Cost of a computation.

    Attributes:
        work: number of products; every one of a batch counts.
        depth: length of the longest chain of products in which each needs the one before; a batch counts once.
    """

    work: float
    depth: float


def cost(f: Callable[..., PyTree], *arguments: PyTree, unit: float = 1.0) -> Cost:
    """Return the cost of ``f(*arguments)`` in products of ``unit`` flops. Unused results do not count."""
    return cost_of(jax.make_jaxpr(f)(*arguments).jaxpr, unit=unit)


def cost_of(jaxpr: core.Jaxpr, *, unit: float = 1.0, terms: int | None = None) -> Cost:
    """Return the cost of a program.

    Args:
        jaxpr: the program.
        unit: flops of a product.
        terms: count only products whose entries are sums of this number of terms; None counts all.
    """
    live = (True,) * len(jaxpr.outvars)
    depths = _depths(jaxpr, (0.0,) * len(jaxpr.invars), live, terms)
    total = Cost(_work(jaxpr, live, terms) / unit, max(depths, default=0.0))
    _live.cache_clear()
    _work.cache_clear()
    return total


Flags = tuple[bool, ...]


def used_inputs(jaxpr: core.Jaxpr, outputs: Flags) -> Flags:
    """Flag the inputs of a program that the flagged outputs depend on."""
    return _live(jaxpr, outputs)[0]


def used_equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations of a program that its results depend on."""
    flags = _live(jaxpr, (True,) * len(jaxpr.outvars))[1]
    _live.cache_clear()
    return [equation for equation, used in zip(jaxpr.eqns, flags, strict=True) if any(used)]


@functools.cache
def _live(jaxpr: core.Jaxpr, out: Flags) -> tuple[Flags, tuple[Flags, ...]]:
    """Flag the inputs, and the outputs of each equation, that the flagged outputs depend on."""
    wanted = {v for v, flag in zip(jaxpr.outvars, out, strict=True) if flag and not isinstance(v, core.Literal)}
    outs: list[Flags] = []
    for equation in reversed(jaxpr.eqns):
        flags = tuple(v in wanted for v in equation.outvars)
        if any(flags):
            used = _inputs(equation, flags)
            operands = zip(equation.invars, used, strict=True)
            wanted |= {v for v, flag in operands if flag and not isinstance(v, core.Literal)}
        outs.append(flags)
    return tuple(v in wanted for v in jaxpr.invars), tuple(reversed(outs))


def _inputs(equation: core.JaxprEqn, out: Flags) -> Flags:
    """Flag the inputs of an equation that its flagged outputs depend on."""
    inner, name = inside(equation), equation.primitive.name
    if name == "scan":
        return _live(inner[0], _scan_outputs(equation, out))[0]
    if name == "cond":
        branches = [_live(branch, out)[0] for branch in inner]
        return (True, *(any(flags) for flags in zip(*branches, strict=True)))
    if (program := _callee(equation)) is not None:
        return _live(program, out)[0]
    return (True,) * len(equation.invars)


def _scan_outputs(equation: core.JaxprEqn, out: Flags) -> Flags:
    """Flag the outputs of a scan's body that are needed, by the flagged outputs or by a later turn."""
    consts, carries = scan_parts(equation)
    (body,) = inside(equation)
    while True:
        used = _live(body, out)[0][consts : consts + carries]
        more = (*(a or b for a, b in zip(out[:carries], used, strict=True)), *out[carries:])
        if more == out:
            return out
        out = more


def scan_parts(equation: core.JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and carries of a scan, told by shapes: all other operands and results lose an axis in its body."""
    (body,) = inside(equation)

    def alike(outer: Sequence[core.Var | core.Literal], inner: Sequence[core.Var | core.Literal]) -> int:
        return sum(array_type(a).ndim == array_type(b).ndim for a, b in zip(outer, inner, strict=True))

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


def _callee(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """The program that an equation calls with its own operands; None for a loop, and for the addition of a scatter."""
    if equation.primitive.name == "while":
        return None
    arity = len(equation.invars), len(equation.outvars)
    return next((p for p in inside(equation) if (len(p.invars), len(p.outvars)) == arity), None)


@functools.cache
def _work(jaxpr: core.Jaxpr, out: Flags, terms: int | None) -> float:
    """Flops of the products."""
    total = 0.0
    for equation, flags in zip(jaxpr.eqns, _live(jaxpr, out)[1], strict=True):
        if not any(flags):
            continue
        inner, name = inside(equation), equation.primitive.name
        if is_product(equation):
            total += _flops(equation, terms)
        elif name == "scan":
            total += equation.params["length"] * _work(inner[0], _scan_outputs(equation, flags), terms)
        elif name == "cond":
            total += max(_work(branch, flags, terms) for branch in inner)
        elif name == "while":
            raise ValueError("A loop whose length is data has no cost before it runs; leave tolerances out.")
        elif (program := _callee(equation)) is not None:
            total += _work(program, flags, terms)
    return total


def is_product(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a matrix product, those of `lp_jax._arrays._outer` included."""
    return equation.primitive.name in ("dot_general", "few_terms", "outer_terms")


def _flops(equation: core.JaxprEqn, terms: int | None) -> float:
    """Flops of a product; 0 for other equations, and for a product that does not count."""
    if not is_product(equation):
        return 0.0
    shape = array_type(equation.invars[0]).shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    summed = math.prod(shape[i] for i in contracted)
    return 0.0 if terms not in (None, summed) else 2.0 * math.prod(array_type(equation.outvars[0]).shape) * summed


def _depths(jaxpr: core.Jaxpr, entering: Sequence[float], out: Flags, terms: int | None) -> tuple[float, ...]:
    """Depth of each output, given the depths of the inputs."""
    depth: dict[core.Var, float] = dict(zip(jaxpr.invars, entering, strict=True))

    def of(v: core.Var | core.Literal) -> float:
        return 0.0 if isinstance(v, core.Literal) else depth.get(v, 0.0)

    for equation, flags in zip(jaxpr.eqns, _live(jaxpr, out)[1], strict=True):
        if not any(flags):
            continue
        operands, inner, name = tuple(map(of, equation.invars)), inside(equation), equation.primitive.name
        if is_product(equation):
            reached = (max(operands, default=0.0) + (_flops(equation, terms) > 0),) * len(equation.outvars)
        elif name == "scan":
            reached = _scan_depths(equation, inner[0], operands, flags, terms)
        elif name == "cond":
            branches = [_depths(branch, operands[1:], flags, terms) for branch in inner]
            reached = tuple(max(operands[0], *ends) for ends in zip(*branches, strict=True))
        elif (program := _callee(equation)) is not None:
            reached = _depths(program, operands, flags, terms)
        else:
            reached = (max(operands, default=0.0) + (_flops(equation, terms) > 0),) * len(equation.outvars)
        depth.update(zip(equation.outvars, reached, strict=True))
    return tuple(map(of, jaxpr.outvars))


def _scan_depths(
    equation: core.JaxprEqn, body: core.Jaxpr, entering: tuple[float, ...], out: Flags, terms: int | None
) -> tuple[float, ...]:
    (consts, carries), length = scan_parts(equation), equation.params["length"]
    out = _scan_outputs(equation, out)
    fixed, state, xs = entering[:consts], entering[consts : consts + carries], entering[consts + carries :]
    history: list[tuple[float, ...]] = []
    for turn in range(length):
        reached = _depths(body, (*fixed, *state, *xs), out, terms)
        state = reached[:carries]
        history.append(reached)
        if len(history) >= 4:  # regular from here on, if three differences agree
            steps = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(history[-4:])]
            if steps[0] == steps[1] == steps[2]:
                return tuple(r + (length - 1 - turn) * s for r, s in zip(reached, steps[0], strict=True))
    return history[-1] if history else (*state, *(0.0,) * (len(out) - carries))


def switches(jaxpr: core.Jaxpr) -> bool:
    """Whether a program chooses between branches. A batch evaluates all of them."""
    return any(e.primitive.name == "cond" or any(map(switches, inside(e))) for e in jaxpr.eqns)


_OPAQUE = ("callback", "ffi_call", "custom_call", "custom_partitioning", "pallas_call")


def opaque(jaxpr: core.Jaxpr) -> bool:
    """Whether a program calls code of unknown cost, printing aside."""
    return any(
        (any(name in equation.primitive.name for name in _OPAQUE) and equation.primitive.name != "debug_callback")
        or any(map(opaque, inside(equation)))
        for equation in jaxpr.eqns
    )


def elementwise(jaxpr: core.Jaxpr) -> tuple[float, int]:
    """Numbers that operations other than products compute, and the number of kernels: products and reductions, and one more.

    A convolution counts each of its products as a number. Loops count once for each turn.
    """
    numbers, kernels = 0.0, 1
    for equation in jaxpr.eqns:
        name, turns = (
            equation.primitive.name,
            equation.params.get("length", 1) if equation.primitive.name == "scan" else 1,
        )
        programs = inside(equation)
        within = [elementwise(program) for program in programs[:1] if not name.startswith("reduce")]
        if is_product(equation):
            kernels += 2
        elif within and name not in ("scatter-add", "scatter_add"):
            numbers += turns * within[0][0]
            kernels += turns * (within[0][1] - (turns == 1))
        elif name == "conv_general_dilated":
            shape = array_type(equation.invars[1]).shape
            out = equation.params["dimension_numbers"].rhs_spec[0]
            numbers += math.prod(array_type(equation.outvars[0]).shape) * math.prod(shape) / shape[out]
            kernels += 2
        else:
            numbers += sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
            kernels += name.startswith(("reduce", "arg", "cum", "sort"))
    return numbers, kernels


def most_alive(jaxpr: core.Jaxpr) -> int:
    """Most bytes of arrays that are alive at the same time in a program. Inputs do not count."""
    last: dict[core.Var, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update((v, number) for v in equation.invars if not isinstance(v, core.Literal))
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not isinstance(v, core.Literal))
    alive: dict[core.Var, int] = {}
    most = 0
    for number, equation in enumerate(jaxpr.eqns):
        alive.update((v, _nbytes(v)) for v in equation.outvars if v in last)
        within = max(map(most_alive, inside(equation)), default=0)
        most = max(most, sum(alive.values()) + max(0, within - sum(map(_nbytes, equation.outvars))))
        alive = {v: size for v, size in alive.items() if last[v] > number}
    return most


def _nbytes(v: core.Var) -> int:
    size = math.prod(getattr(v.aval, "shape", ()))
    return size * getattr(getattr(v.aval, "dtype", None), "itemsize", 0)
