"""Products of a few examples with a weight, whose gradient is computed as a sum of outer products."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from lp_jax._arrays._evaluate import bind, evaluate
from lp_jax._arrays._products import array_type

DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
"""Of ``dot_general``: the axes that are summed over, and those of a batch, in both operands."""


def with_few_terms(program: core.ClosedJaxpr, terms: int) -> Callable[..., list[jax.Array]]:
    """Turn a program into a function; products of at most ``terms`` rows with a matrix sum outer products for its gradient.

    A CPU calls a library for each product. For a gradient of a few terms this call takes several times as long as their sum,
    which is one loop. Values and all derivatives are the same, to rounding.
    """
    operation = functools.partial(_operation, terms=terms)
    return lambda *arguments: evaluate(program.jaxpr, program.consts, arguments, operation)


def has_few(program: core.Jaxpr, terms: int, *, least: int = 1) -> bool:
    """Whether a program has products that `with_few_terms` changes, of ``least`` rows or more."""
    return any(_few(equation, terms, least) for equation in _equations(program))


_INLINED = ("jit", "pjit")


def _equations(program: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in program.eqns:
        yield equation
        if equation.primitive.name in _INLINED:
            yield from _equations(equation.params["jaxpr"].jaxpr)


def _few(equation: core.JaxprEqn, terms: int, least: int = 1) -> bool:
    """Whether this is a product of ``least`` to ``terms`` rows with a matrix, in single or double precision.

    It is not one where the compiler, or the types, spread rows over devices; within `shard_map` each device has its own.
    """
    if equation.primitive.name != "dot_general":
        return False
    x, w, out = (array_type(v) for v in (*equation.invars, *equation.outvars))
    (left, _), (batch, _) = equation.params["dimension_numbers"]
    plain = w.ndim == 2 <= x.ndim and not batch and tuple(left) == (x.ndim - 1,)
    alike = x.dtype == w.dtype == out.dtype and x.dtype.itemsize >= 4
    mesh = out.sharding.mesh
    whole = not (mesh.explicit_axes or mesh.auto_axes)
    rows = math.prod(x.shape[:-1])  # a symbolic number of rows is not known to be few
    return plain and alike and whole and isinstance(rows, int) and least <= rows <= terms


def _operation(equation: core.JaxprEqn, operands: list[jax.Array], *, terms: int) -> Sequence[jax.Array]:
    if _few(equation, terms):
        return [_product(*operands, **equation.params)]
    if equation.primitive.name in _INLINED:
        inner = equation.params["jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, operands, functools.partial(_operation, terms=terms))
    return bind(equation, operands)


def _product(x: jax.Array, w: jax.Array, *, dimension_numbers: DimensionNumbers, **params: object) -> jax.Array:
    (_, (contracted,)), _ = dimension_numbers
    rows = _of_rows(x.reshape(-1, x.shape[-1]), w if contracted == 0 else w.T, **params)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _numbers(x: jax.Array, left: int, right: int) -> DimensionNumbers:
    """Dimension numbers for two matrices, or for a batch of both, summed over one axis of each."""
    first = x.ndim - 2
    batch = tuple(range(first))
    return ((first + left,), (first + right,)), (batch, batch)


def _dot(x: jax.Array, y: jax.Array, **params: object) -> jax.Array:
    product: jax.Array = lax.dot_general_p.bind(x, y, **params)
    return product


def _of_rows(x: jax.Array, w: jax.Array, **params: object) -> jax.Array:
    """``(k, i), (i, j) -> (k, j)``."""
    return few_terms.bind(x, w, **params | {"dimension_numbers": _numbers(x, 1, 0)})


def _outer(x: jax.Array, y: jax.Array, **params: object) -> jax.Array:
    """``(k, i), (k, j) -> (i, j)``."""
    return outer_terms.bind(x, y, **params | {"dimension_numbers": _numbers(x, 0, 0)})


def _back(y: jax.Array, w: jax.Array, **params: object) -> jax.Array:
    """``(k, j), (i, j) -> (k, i)``."""
    return _dot(y, w, **params | {"dimension_numbers": _numbers(w, 1, 1)})


def _sum_of_outer_products(x: jax.Array, y: jax.Array, **params: object) -> jax.Array:
    products = (x[..., k, :, None] * y[..., k, None, :] for k in range(x.shape[-2]))
    total = next(products)
    for product in products:
        total += product
    return total


def _bilinear(name: str, program: Callable[..., jax.Array]) -> core.Primitive:
    """Make a primitive for ``dot_general`` of two matrices, or of a batch of both (layers at once), run by ``program``."""
    primitive = core.Primitive(name)

    def at_once(
        operands: Sequence[jax.Array],
        axes: Sequence[int | None],
        *,
        dimension_numbers: DimensionNumbers,
        **params: object,
    ) -> tuple[jax.Array, int]:
        if None in axes or operands[0].ndim > 3:
            return jax.vmap(
                lambda x, y: _dot(x, y, dimension_numbers=dimension_numbers, **params), in_axes=tuple(axes)
            )(*operands), 0
        x, y = (jnp.moveaxis(x, cast(int, axis), 0) for x, axis in zip(operands, axes, strict=True))
        ((left,), (right,)), _ = dimension_numbers
        return primitive.bind(x, y, **params | {"dimension_numbers": _numbers(x, left, right)}), 0

    primitive.def_impl(program)
    primitive.def_abstract_eval(lambda x, y, **params: lax.dot_general_p.abstract_eval(x, y, **params)[0])
    mlir.register_lowering(primitive, mlir.lower_fun(program, multiple_results=False))
    batching.primitive_batchers[primitive] = at_once
    return primitive


few_terms = _bilinear("few_terms", _dot)
outer_terms = _bilinear("outer_terms", _sum_of_outer_products)
# for each operand, its cotangent from that of the product: `few_terms` of x and w, `outer_terms` of x and y
ad.defbilinear(
    few_terms, lambda y, x, w, **params: _back(y, w, **params), lambda y, x, w, **params: _outer(x, y, **params)
)
ad.defbilinear(
    outer_terms, lambda w, x, y, **params: _back(y, w, **params), lambda w, x, y, **params: _of_rows(x, w, **params)
)
