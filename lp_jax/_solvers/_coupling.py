"""Find out, from its program, which numbers of a state a linear function combines."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from lp_jax._arrays._jaxpr import (
    INLINED,
    array_type,
    axes_of,
    called,
    follow,
    is_product,
    is_scan,
    scan_parts,
    settled,
)
from lp_jax._arrays._types import PyTree, State

Linear = Callable[[State], State]

Property = bool | tuple[int, ...] | str | None
"""Property of an array in a program: axes of examples, `COUPLED` or `UNKNOWN`; or whether it is computed in place."""

Rule = Callable[[core.JaxprEqn, list[Property]], Property]
"""Property of an equation's results from those of its operands."""

_ONE_BY_ONE = """retyped mul div neg add sub add_any
    convert_element_type select_n copy reduce_precision""".split()  # noqa: SIM905


def acts_in_place(linear: Linear, state: State) -> bool:
    """Whether a linear function combines only numbers at equal positions. False where its program does not show it."""

    def rule(equation: core.JaxprEqn, inputs: list[Property]) -> Property:
        return equation.primitive.name in _ONE_BY_ONE and False not in inputs

    return all(_through(linear, [(state, True)], rule))


def shares_weights(step: Callable[..., State], y: State, x: PyTree, shared: PyTree) -> bool:
    """Whether a step multiplies by arrays that depend neither on the state nor on the layer: weights that all layers share."""
    found = []

    def rule(equation: core.JaxprEqn, inputs: list[Property]) -> Property:
        # A product with a scalar is no weight, but an elementwise product may be one, such as the diagonal of a recurrence.
        numbers = equation.primitive.name == "mul" and all(
            array_type(v).ndim for v in equation.invars
        )
        found.append((numbers or is_product(equation)) and None in inputs)
        return True

    # None marks what depends neither on the state nor on the layer, so a product of both kinds multiplies by shared weights.
    _through(step, [(y, True), (x, True), (shared, None)], rule)
    return any(found)


def couplings(step: Callable[..., State], y: State, x: PyTree, shared: PyTree) -> tuple[int, int]:
    """Count the examples along the first axis of the state, and its leaves, where a step's program keeps them apart; else 0.

    Leaves count if only numbers at equal positions are combined.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(y)}
    leading = {shape[0] if len(shape) > 1 else 0 for shape in shapes}

    def linear(y: State, x: PyTree, shared: PyTree, v: State) -> State:
        return jax.jvp(lambda y: step(y, x, shared), (y,), (v,))[1]

    try:
        axes = example_axes(linear, (y, x, shared), y, 1) if len(leading) == 1 else [None]
        in_place = len(shapes) == 1 and acts_in_place(lambda v: linear(y, x, shared, v), y)
    # JAX raises these for a step without a derivative in forward mode: callbacks and foreign calls, operations without a rule,
    # and rules that return something else than a tangent.
    except (ValueError, NotImplementedError, TypeError):
        return 0, 0
    return leading.pop() if all(each == (0,) for each in axes) else 0, in_place * len(
        jax.tree.leaves(y)
    )


def example_axes(
    linear: Callable[..., PyTree], fixed: Sequence[PyTree], state: State, axes: int
) -> list[Property]:
    """Follow the first axes of a state's leaves, those of examples, to the leaves of ``linear(*fixed, state)``.

    It returns the axes of each leaf; `COUPLED` if it combines numbers along them, `UNKNOWN` where the program does not show it,
    None if it does not depend on the state.
    """
    # if there is one axis of examples, it may also be the slow part of a longer axis
    number = jax.tree.leaves(state)[0].shape[0] if axes == 1 else None
    operands = *((x, None) for x in fixed), (state, tuple(range(axes)))
    return _through(linear, operands, functools.partial(_examples, number))


def _through(
    function: Callable[..., PyTree], operands: Sequence[tuple[PyTree, Property]], rule: Rule
) -> list[Property]:
    """Propagate properties of operands through a function, to the leaves of its result."""
    program = jax.make_jaxpr(function)(*(x for x, _ in operands)).jaxpr
    return _follow(program, [p for x, p in operands for _ in jax.tree.leaves(x)], rule)


def _follow(jaxpr: core.Jaxpr, inputs: Sequence[Property], rule: Rule) -> list[Property]:
    """Propagate a property through a program, from its inputs to its results.

    ``rule(equation, properties)`` gives the property of an equation's results from those of its operands. Numbers that
    depend on no input have the property None.
    """
    through = functools.partial(_follow, rule=rule)

    def operation(equation: core.JaxprEqn, operands: list[Property]) -> list[Property]:
        # What does not depend on the state has no property to propagate.
        if all(x is None for x in operands):
            return [None] * len(equation.outvars)
        if equation.primitive.name in INLINED:
            return through(called(equation)[0], operands)
        if is_scan(equation):
            *_, start, carries = scan_parts(equation)
            end = start + carries
            # The body of a scan sees one entry of the scanned arrays, so their axes move by one.
            operands = [*operands[:end], *(_shifted(x, -1) for x in operands[end:])]
            results = settled(equation, operands, through, _both)
            return [*results[:carries], *(_shifted(x, 1) for x in results[carries:])]
        return [rule(equation, operands)] * len(equation.outvars)

    return follow(jaxpr, inputs, operation, None)


def _shifted(x: Property, by: int) -> Property:
    """The property of one entry of an array's leading axis (-1), or of the array of such entries (1)."""
    if not isinstance(x, tuple):
        return x
    return UNKNOWN if by < 0 and 0 in x else tuple(i + by for i in x)


def _both(a: Property, b: Property) -> Property:
    """The property of an array that has one or the other."""
    if a == b or b is None:
        return a
    worst: list[Property] = [x for x in (COUPLED, False) if x in (a, b)]
    return b if a is None else [*worst, UNKNOWN][0]


COUPLED, UNKNOWN = "coupled", "unknown"


def _examples(number: int | None, equation: core.JaxprEqn, inputs: list[Property]) -> Property:
    """Axes of the examples in the result, from those in the operands."""
    if COUPLED in inputs:
        return COUPLED
    # Operands whose examples lie along different axes are not understood.
    axes, *others = {x for x in inputs if x is not None}
    if others or not isinstance(axes, tuple):
        return UNKNOWN
    name = equation.primitive.name
    if name in _ONE_BY_ONE:
        return axes
    if is_product(equation):
        return _of_product(equation, inputs, axes)
    x, out = array_type(equation.invars[0]).shape, array_type(equation.outvars[0]).shape
    summed = name == "reduce_sum"
    if summed or name.startswith("cum") or name == "rev":
        along = axes_of(equation)
        # Along an axis of length 1 nothing can be combined.
        if any(i in axes and x[i] > 1 for i in along):
            return COUPLED
        return _reorder(axes, [i for i in range(len(x)) if not (summed and i in along)])
    if name == "transpose":
        return _reorder(axes, axes_of(equation))
    if name == "broadcast_in_dim":
        return tuple(axes_of(equation)[i] for i in axes)
    if name in ("reshape", "squeeze"):
        # An axis survives a reshape if equally many entries lie before it, and if it keeps its length. With one axis of examples
        # it may also become the slow part of a merged axis.
        begins = {math.prod(out[:i]): i for i in reversed(range(len(out))) if out[i] > 1}
        places = [begins.get(math.prod(x[:i])) for i in axes]
        kept = tuple(
            i
            for i, k in zip(places, axes, strict=True)
            if i is not None and (out[i] == x[k] or (number and out[i] % number == 0))
        )
        return kept if len(kept) == len(axes) else UNKNOWN
    if name in ("slice", "split", "pad", "concatenate") and all(x[i] == out[i] for i in axes):
        return axes
    return UNKNOWN


def _of_product(equation: core.JaxprEqn, inputs: list[Property], axes: tuple[int, ...]) -> Property:
    """`_examples` of a product."""
    contracted, batched = axes_of(equation)
    # One operand depends on the state, the other one does not.
    side = 0 if inputs[0] is not None else 1
    here, shape = set(axes), array_type(equation.invars[side]).shape
    if any(i in here and shape[i] > 1 for i in contracted[side]):
        return COUPLED
    free = [i for i in range(len(shape)) if i not in (*contracted[side], *batched[side])]
    # A dot_general has its batch axes first, then the free axes of the left operand, then those of the right one.
    start = array_type(equation.invars[0]).ndim - len(contracted[0]) if side else len(batched[0])
    # A contracted axis of length 1, that of a single example, has no place in the result.
    return tuple(
        batched[side].index(i) if i in batched[side] else start + free.index(i)
        for i in axes
        if i not in contracted[side]
    )


def _reorder(axes: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Axes after the axes ``order`` of an array are taken, in this order."""
    return tuple(list(order).index(i) for i in axes if i in order)
