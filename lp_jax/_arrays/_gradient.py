"""Identities that refuse one way of differentiation, with a message for the user."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lp_jax._arrays._types import PyTree


def without_gradient(tree: PyTree, message: str) -> PyTree:
    """Return ``tree``. Reverse mode through it raises ValueError(message), where ``lax.stop_gradient`` would give zeros."""
    return jax.tree.map(functools.partial(_untransposed.bind, message=message), tree)


def reverse_only(tree: PyTree, message: str) -> PyTree:
    """Return ``tree``. Forward mode through it raises TypeError(message), unless its tangents are only transposed."""
    return jax.tree.map(functools.partial(_marked.bind, message=message), tree)


def _identity(
    name: str,
    *,
    of_tangents: Primitive | None = None,
    evaluate: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] = lambda cotangent, x, message: [cotangent],
) -> Primitive:
    """Make the identity on an array, with another primitive for tangents, and some rules replaced."""
    primitive = Primitive(name)

    def jvp(
        primals: Sequence[jax.Array], tangents: Sequence[Any], **params: str
    ) -> tuple[jax.Array, Any]:
        (x,) = primals
        (t,) = tangents
        # differentiated once, it is unmarked
        out = primitive.bind(x, **params) if of_tangents is None else x
        return out, t if isinstance(t, ad.Zero) else (of_tangents or primitive).bind(t, **params)

    def batch(
        operands: Sequence[jax.Array], axes: Sequence[int], **params: str
    ) -> tuple[jax.Array, int]:
        return primitive.bind(*operands, **params), axes[0]

    primitive.def_impl(evaluate or (lambda x, message: x))
    primitive.def_abstract_eval(lambda x, message: x)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = evaluate or batch
    mlir.register_lowering(primitive, evaluate or (lambda context, x, message: [x]))
    return primitive


def _refuse_transpose(cotangent: jax.Array | ad.Zero, x: object, message: str) -> list[ad.Zero]:
    # A cotangent that is zero by its type means that nobody differentiates this output.
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    raise ValueError(message)


def _refuse_tangent(*operands: object, message: str) -> NoReturn:
    raise TypeError(message)


_untransposed = _identity("without_gradient", transpose=_refuse_transpose)
_marked = _identity(
    "reverse_only", of_tangents=_identity("reverse_only_tangent", evaluate=_refuse_tangent)
)
