"""How many layers are evaluated at once, and the other choices between programs that compute the same numbers.

All of them go by size: what a layer costs and holds is read off its program when it is traced, and `Processor` has the
numbers that were measured. Nothing else in the library asks what it runs on.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lp_jax import _check, _tree
from lp_jax._products import cost_of, opaque
from lp_jax._types import PyTree


class Footprint(NamedTuple):
    """What one evaluation of a layer costs and holds.

    Attributes:
        operands: bytes of the layer's own parameters and data.
        state: bytes of the state.
        flops: of its products.
        counted: whether its program tells all of that; not with a callback or a foreign call in it.
    """

    operands: int
    state: int
    flops: float
    counted: bool = True


def footprint(program: core.Jaxpr, state: PyTree, operands: PyTree) -> Footprint:
    """Read a layer's program, traced for one ``state`` and one layer's ``operands``."""
    try:
        flops = cost_of(program).work
    except ValueError:  # a loop whose length is data
        flops = math.inf
    counted = math.isfinite(flops) and not opaque(program)
    return Footprint(_nbytes(operands), _nbytes(state), flops, counted)


def _nbytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """What a device does well, where programs for the same numbers differ in it.

    Attributes:
        room: bytes of layers' operands and states that are evaluated at once; None for all layers at once.
        short: turns up to which a loop is written out as a whole.
        some: turns of a longer loop that are written out; 1 for none.
        terms: number of terms up to which a product of a batch is a sum of outer products.
    """

    room: int | None
    short: int
    some: int
    terms: int

    def at_once(self, layer: Footprint, steps: int) -> int:
        """How many of ``steps`` layers are evaluated at once."""
        if not layer.counted:
            return 1
        if self.room is None:
            return max(steps, 1)
        return max(1, min(steps, self.room // max(1, layer.operands + 3 * layer.state)))


CPU = Processor(room=2**20, short=1, some=1, terms=16)
ACCELERATOR = Processor(room=None, short=16, some=8, terms=0)


def processor(platform: str) -> Processor:
    """The numbers for a kind of device."""
    return CPU if platform == "cpu" else ACCELERATOR


def check(name: str, value: Any) -> None:
    """Refuse what is no number of layers."""
    if isinstance(value, str):
        _check.one_of(name, value, ("auto",), otherwise="or a number of layers")
    elif not (isinstance(value, float) and value == math.inf):
        _check.integer(name, value, least=1)


def in_chunks(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], carry: PyTree, xs: PyTree, size: int, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """``carry, ys = f(carry, xs)`` on ``size`` entries of ``xs`` after the other; what is left over comes last in order.

    Leaves of ``xs`` and ``ys`` have the same leading axis, those that ``f`` gets and returns at most ``size`` of it.
    """
    n = _tree.leading(xs)
    size = chunk(n, size)
    if size >= n:
        return f(carry, xs)
    whole = n - n % size
    start, rest = (n - whole, None) if reverse else (0, None)
    middle = jax.tree.map(lambda x: x[start : start + whole], xs) if whole < n else xs
    left = jax.tree.map(lambda x: x[: n - whole] if reverse else x[whole:], xs) if whole < n else None
    carry, ys = lax.scan(f, carry, _tree.split(middle, size), reverse=reverse)
    ys = _tree.merge(ys)
    if left is None:
        return carry, ys
    carry, rest = f(carry, left)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([b, a] if reverse else [a, b]), ys, rest)


def chunk(n: int, most: int) -> int:
    """Entries at once: ``most``, or somewhat fewer, where all chunks are then equally long."""
    if most >= n:
        return n
    even = max(size for size in range(1, most + 1) if n % size == 0)
    return even if 2 * even > most else most


def several(one: Callable[..., PyTree], size: int, terms: int) -> Callable[..., PyTree]:
    """``one`` for ``size`` entries of the leading axis of all its arguments."""
    if size > 1:
        return batched(one, None, terms)
    alone = functools.partial(jax.tree.map, lambda x: x[0])
    return lambda *operands: jax.tree.map(lambda x: x[None], one(*map(alone, operands)))


def batched(one: Callable[..., PyTree], layer_axes: Sequence[int | None] | None, terms: int) -> Callable[..., PyTree]:
    """``jax.vmap(one, layer_axes)``, with short products formed otherwise: see `outer_products`."""
    at_once = jax.vmap(one, in_axes=0 if layer_axes is None else tuple(layer_axes))
    return at_once if terms == 0 else outer_products(at_once, terms)


def outer_products(f: Callable[..., PyTree], terms: int) -> Callable[..., PyTree]:
    """``f``, with each product of a batch that sums up few terms written as a sum of outer products.

    The gradient of a weight is such a product, over the examples. A library of products is called for each of the batch, on
    a CPU, and takes 5 to 15 times as long as the sum, which is one loop.
    """

    def call(*arguments: Any) -> PyTree:
        program, out = jax.make_jaxpr(f, return_shape=True)(*arguments)
        if not any(map(_short(terms), _equations(program.jaxpr))):
            return f(*arguments)
        found = _evaluate(program.jaxpr, program.consts, jax.tree.leaves(arguments), _short(terms))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return call


_INLINED = ("jit", "pjit", "closed_call")


def _equations(program: core.Jaxpr) -> list[Any]:
    found = []
    for equation in program.eqns:
        found.append(equation)
        if equation.primitive.name in _INLINED:
            found += _equations(equation.params["jaxpr"].jaxpr)
    return found


def _short(terms: int) -> Callable[[Any], bool]:
    def of(equation: Any) -> bool:
        if equation.primitive.name != "dot_general":
            return False
        (left, right), (batch, other) = equation.params["dimension_numbers"]
        x, y = (v.aval for v in equation.invars)
        plain = len(batch) == len(other) == 1 and len(left) == len(right) == 1 and batch[0] == other[0] == 0
        return (
            plain and x.ndim == y.ndim == 3 and x.shape[left[0]] <= terms and left[0] == right[0] == 1 and x.shape[0] > 1
        )

    return of


def _evaluate(program: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], short: Callable[[Any], bool]) -> list:
    values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *arguments], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    for equation in program.eqns:
        operands = [read(v) for v in equation.invars]
        if short(equation):
            (out,) = equation.outvars
            turned = any(e.primitive.name == "transpose" and e.invars[0] is out for e in program.eqns)
            found = [_sum_of_outer_products(*operands, out.aval.dtype, turned=turned)]
        elif equation.primitive.name in _INLINED:
            inner = equation.params["jaxpr"]
            found = _evaluate(inner.jaxpr, inner.consts, operands, short)
        else:
            given = {v: x for v, x in zip(equation.invars, operands, strict=True) if not isinstance(v, core.Literal)}
            alone = program.replace(constvars=[], invars=[*given], outvars=equation.outvars, eqns=[equation])
            found = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*given.values())
        values.update(zip(equation.outvars, found, strict=True))
    return [read(v) for v in program.outvars]


def _sum_of_outer_products(x: jax.Array, y: jax.Array, dtype: Any, *, turned: bool) -> jax.Array:
    """``(n, terms, i), (n, terms, j) -> (n, i, j)``; formed as its transpose where that is what is wanted of it."""
    if turned:
        return _sum_of_outer_products(y, x, dtype, turned=False).swapaxes(1, 2)
    x, y = x.astype(dtype), y.astype(dtype)
    products = (x[:, k, :, None] * y[:, k, None, :] for k in range(x.shape[1]))
    total = next(products)
    for product in products:
        total += product
    return total
