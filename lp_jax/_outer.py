"""Short products of a batch as sums of outer products: the gradient of a weight, summed over a few examples."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from lp_jax._types import PyTree


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


_INLINED = ("jit", "pjit")


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
        same = equation.outvars[0].aval.dtype == x.dtype == y.dtype and x.dtype.itemsize >= 4
        plain = same and len(batch) == len(other) == 1 and len(left) == len(right) == 1 and batch[0] == other[0] == 0
        return (
            plain
            and x.ndim == y.ndim == 3
            and x.shape[left[0]] <= terms
            and left[0] == right[0] == 1
            and x.shape[0] > 1
        )

    return of


def _evaluate(
    program: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], short: Callable[[Any], bool]
) -> list:
    values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *arguments], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    for equation in program.eqns:
        operands = [read(v) for v in equation.invars]
        if short(equation):
            (out,) = equation.outvars
            turned = any(e.primitive.name == "transpose" and e.invars[0] is out for e in program.eqns)
            x, y = operands
            found = [_sum_of_outer_products(x, y, turned=turned)]
        elif equation.primitive.name in _INLINED:
            inner = equation.params["jaxpr"]
            found = _evaluate(inner.jaxpr, inner.consts, operands, short)
        else:
            given = {v: x for v, x in zip(equation.invars, operands, strict=True) if not isinstance(v, core.Literal)}
            alone = program.replace(constvars=[], invars=[*given], outvars=equation.outvars, eqns=[equation])
            found = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*given.values())
        values.update(zip(equation.outvars, found, strict=True))
    return [read(v) for v in program.outvars]


def _sum_of_outer_products(x: jax.Array, y: jax.Array, *, turned: bool) -> jax.Array:
    """``(n, terms, i), (n, terms, j) -> (n, i, j)``; formed as its transpose where that is what is wanted of it."""
    if turned:
        return outer_product_sum(y, x).swapaxes(1, 2)
    return outer_product_sum(x, y)


@jax.jit
def outer_product_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """``(n, terms, i), (n, terms, j) -> (n, i, j)``; `lp_jax._products` counts it as a product, by this name."""
    products = (x[:, k, :, None] * y[:, k, None, :] for k in range(x.shape[1]))
    total = next(products)
    for product in products:
        total += product
    return total
