"""Products of a few examples with a weight, whose gradient is computed as a sum of outer products."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh

from lp_jax._arrays._jaxpr import JITTED, array_type, axes_of, bind, through_calls, walk
from lp_jax._arrays._place import at_home


def with_few_terms(
    program: core.ClosedJaxpr, terms: int, home: AbstractMesh
) -> Callable[..., list[jax.Array]]:
    """Turn a program into a function that forms gradients of weights as sums of outer products where ``terms`` rows are enough.

    ``home`` is the mesh that it was traced on.
    """

    def operation(equation: core.JaxprEqn, operands: list[jax.Array]) -> Sequence[jax.Array]:
        if _few(equation, terms):
            return [_product(*operands, **equation.params)]
        return bind(equation, operands)

    # Products within jitted functions are found, too; where none is wanted, calls stay calls.
    of_each = through_calls(operation, JITTED) if terms else bind
    return lambda *arguments: at_home(program, home, arguments, of_each)


def has_few(program: core.Jaxpr, terms: int, *, least: int = 1) -> bool:
    """Whether a program has products that `with_few_terms` changes, of ``least`` rows or more."""
    return any(_few(equation, terms, least) for equation in walk(program.eqns, into=JITTED))


def _few(equation: core.JaxprEqn, terms: int, least: int = 1) -> bool:
    """Whether this is a product of ``least`` to ``terms`` rows with a matrix, in at least single precision, on one device."""
    if equation.primitive.name != "dot_general":
        return False
    x, w, out = (array_type(v) for v in (*equation.invars, *equation.outvars))
    (left, _), (batch, _) = axes_of(equation)
    plain = w.ndim == 2 <= x.ndim and not batch and tuple(left) == (x.ndim - 1,)
    alike = x.dtype == w.dtype == out.dtype and x.dtype.itemsize >= 4
    mesh = out.sharding.mesh
    whole = not (mesh.explicit_axes or mesh.auto_axes)
    rows = math.prod(x.shape[:-1])  # a symbolic number of rows is not known to be few
    return plain and alike and whole and isinstance(rows, int) and least <= rows <= terms


def _product(x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
    # The first pair of axes are those that are summed over, the second one those of a batch.
    (_, (contracted,)), _ = params["dimension_numbers"]
    # All leading axes are rows: (k, i) times (i, j).
    matrix = w if contracted == 0 else w.T
    rows = _dot(few_terms, x.reshape(-1, x.shape[-1]), matrix, 1, 0, **params)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _dot(
    primitive: core.Primitive, x: jax.Array, y: jax.Array, left: int, right: int, **params: object
) -> jax.Array:
    """The product of two matrices, or of a batch of both, summed over the axes ``left`` and ``right``."""
    first = x.ndim - 2
    batch = tuple(range(first))
    numbers = ((first + left,), (first + right,)), (batch, batch)
    product = primitive.bind(x, y, **params | {"dimension_numbers": numbers})
    return product


def _sum_of_outer_products(x: jax.Array, y: jax.Array, **params: object) -> jax.Array:
    return functools.reduce(
        jnp.add, (x[..., k, :, None] * y[..., k, None, :] for k in range(x.shape[-2]))
    )


def _bilinear(name: str, program: Callable[..., jax.Array]) -> core.Primitive:
    """Make a primitive for ``dot_general`` of two matrices, or of a batch of both (layers at once), run by ``program``."""
    primitive = core.Primitive(name)

    def at_once(
        operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
    ) -> tuple[jax.Array, int]:
        if None in axes or operands[0].ndim > 3:
            # Where only one operand has a batch, this is an ordinary product again.
            product = functools.partial(lax.dot_general_p.bind, **params)
            return jax.vmap(product, in_axes=tuple(axes))(*operands), 0
        # A batch of layers stays a sum of outer products, with one axis for the batch in front.
        x, y = (jnp.moveaxis(x, cast(int, axis), 0) for x, axis in zip(operands, axes, strict=True))
        ((left,), (right,)), _ = params["dimension_numbers"]
        return _dot(primitive, x, y, left, right, **params), 0

    primitive.def_impl(program)
    primitive.def_abstract_eval(
        lambda x, y, **params: lax.dot_general_p.abstract_eval(x, y, **params)[0]
    )
    mlir.register_lowering(primitive, mlir.lower_fun(program, multiple_results=False))
    batching.primitive_batchers[primitive] = at_once
    return primitive


few_terms = _bilinear("few_terms", lax.dot_general_p.bind)  # (k, i), (i, j) -> (k, j)
outer_terms = _bilinear("outer_terms", _sum_of_outer_products)  # (k, i), (k, j) -> (i, j)


def _back(y: jax.Array, w: jax.Array, **params: object) -> jax.Array:
    """``(k, j), (i, j) -> (k, i)``."""
    return _dot(lax.dot_general_p, y, w, 1, 1, **params)


# for each operand, its cotangent from that of the product: `few_terms` of x and w, `outer_terms` of x and y
ad.defbilinear(
    few_terms,
    lambda y, x, w, **params: _back(y, w, **params),
    lambda y, x, w, **params: _dot(outer_terms, x, y, 0, 0, **params),
)
ad.defbilinear(
    outer_terms,
    lambda w, x, y, **params: _back(y, w, **params),
    lambda w, x, y, **params: _dot(few_terms, x, w, 1, 0, **params),
)
