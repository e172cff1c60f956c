"""Which numbers of a state a linear function combines, as its program says."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from lp_jax._arrays._products import is_product
from lp_jax._arrays._types import State

Linear = Callable[[State], State]

_ONE_BY_ONE = {
    "mul",
    "div",
    "neg",
    "add",
    "sub",
    "add_any",
    "convert_element_type",
    "select_n",
    "copy",
    "reduce_precision",
}
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"}


def acts_in_place(linear: Linear, state: State) -> bool:
    """Whether it combines numbers with others at their own place only; where its program does not tell, no."""
    program = jax.make_jaxpr(linear)(state).jaxpr
    return all(_follow(program, [True] * len(program.invars), _in_place))


def couples_examples(linear: Linear, state: State, axes: int) -> bool:
    """Whether it combines numbers along one of the first axes of the leaves; where its program does not tell, no."""
    return COUPLED in example_axes(linear, (), state, axes)


def example_axes(linear: Callable[..., Any], fixed: Sequence[Any], state: State, axes: int) -> list:
    """Where the first axes of a state's leaves, those of examples, are in the leaves of ``linear(*fixed, state)``.

    Tuples of axes; `COUPLED` for a leaf that combines numbers along them, `UNKNOWN` where the program does not tell, None for
    what does not depend on the state.
    """
    program = jax.make_jaxpr(linear)(*fixed, state).jaxpr
    of_state = len(jax.tree.leaves(state))
    given = [None] * (len(program.invars) - of_state) + [tuple(range(axes))] * of_state
    return _follow(program, given, _examples)


def _follow(jaxpr: core.Jaxpr, given: Sequence[Any], rule: Callable[[Any, list], Any]) -> list:
    """Go through a program by a rule ``rule(equation, known) -> known``, and return what it finds of each result.

    ``known`` is whatever the rule tells of a number; ``given`` says it of the inputs. None is for what depends on none of them.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Any:
        return None if isinstance(atom, core.Literal) else known.get(atom)

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr")
        if all(x is None for x in inputs):
            results = [None] * len(equation.outvars)
        elif equation.primitive.name in _CALLS and inner is not None:
            results = _follow(getattr(inner, "jaxpr", inner), inputs, rule)
        else:
            results = [rule(equation, inputs)] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _in_place(equation: Any, inputs: list) -> bool:
    return equation.primitive.name in _ONE_BY_ONE and False not in inputs


COUPLED, UNKNOWN = "coupled", "unknown"


def _examples(equation: Any, inputs: list) -> Any:
    """Which axes of the result are those of the examples, given those of the operands."""
    if COUPLED in inputs:
        return COUPLED
    alike = {x for x in inputs if x is not None}
    if UNKNOWN in alike or len(alike) > 1:
        return UNKNOWN
    axes, name, params = alike.pop(), equation.primitive.name, equation.params
    if name in _ONE_BY_ONE:
        return axes
    if is_product(equation):
        return _of_product(equation, inputs, axes)
    x, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == "reduce_sum":
        gone = [i for i in params["axes"] if x[i] > 1]
        return COUPLED if set(gone) & set(axes) else _moved(axes, [i for i in range(len(x)) if i not in params["axes"]])
    if name == "transpose":
        return _moved(axes, params["permutation"])
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"][i] for i in axes)
    if name in ("reshape", "squeeze"):
        begins = {math.prod(out[:i]): i for i in reversed(range(len(out))) if out[i] > 1}
        found = [begins.get(math.prod(x[:i])) for i in axes]
        same = all(i is not None and out[i] == x[k] for i, k in zip(found, axes, strict=True))
        return tuple(found) if same else UNKNOWN
    if name in ("slice", "split", "pad", "concatenate") and all(x[i] == out[i] for i in axes):
        return axes
    return UNKNOWN


def _of_product(equation: Any, inputs: list, axes: tuple[int, ...]) -> Any:
    contracted, batched = equation.params["dimension_numbers"]
    side = 0 if inputs[0] is not None else 1
    here, shape = set(axes), equation.invars[side].aval.shape
    if any(i in here and shape[i] > 1 for i in contracted[side]):
        return COUPLED
    free = [i for i in range(len(shape)) if i not in (*contracted[side], *batched[side])]
    before = len(equation.invars[0].aval.shape) - len(contracted[0]) if side else len(batched[0])
    return tuple(batched[side].index(i) if i in batched[side] else before + free.index(i) for i in axes)


def _moved(axes: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(list(order).index(i) for i in axes if i in order)
