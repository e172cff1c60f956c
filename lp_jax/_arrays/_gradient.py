"""Identities that refuse one way of differentiation, with a message for the user."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lp_jax._arrays._types import PyTree


def without_gradient(tree: PyTree, message: str) -> PyTree:
    """Return ``tree``. Reverse mode through it raises ValueError(message).

    ``lax.stop_gradient`` would silently make that gradient zero.
    """
    return jax.tree.map(functools.partial(_untransposed.bind, message=message), tree)


def reverse_only(tree: PyTree, message: str) -> PyTree:
    """Return ``tree``. Forward mode through it raises TypeError(message), unless its tangents are only transposed."""
    return jax.tree.map(functools.partial(_marked.bind, message=message), tree)


Tangents = Sequence[jax.Array | ad.Zero]


def _identity(name: str, **rules: Callable[..., Any]) -> Primitive:
    """Make the identity on an array, with some rules replaced."""
    primitive = Primitive(name)

    def jvp(primals: Sequence[jax.Array], tangents: Tangents, **params: str) -> tuple[jax.Array, jax.Array | ad.Zero]:
        (x,), (t,) = primals, tangents
        return primitive.bind(x, **params), t if isinstance(t, ad.Zero) else primitive.bind(t, **params)

    primitive.def_impl(rules.get("impl", lambda x, message: x))
    primitive.def_abstract_eval(lambda x, message: x)
    ad.primitive_jvps[primitive] = rules.get("jvp", jvp)
    ad.primitive_transposes[primitive] = rules.get("transpose", lambda cotangent, x, message: [cotangent])
    batching.primitive_batchers[primitive] = rules.get(
        "batch", lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])
    )
    mlir.register_lowering(primitive, rules.get("lower", lambda context, x, message: [x]))
    return primitive


def _refuse_transpose(cotangent: jax.Array | ad.Zero, x: object, message: str) -> list[ad.Zero]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    raise ValueError(message)


def _refuse_tangent(*operands: object, message: str) -> NoReturn:
    raise TypeError(message)


def _mark(primals: Sequence[jax.Array], tangents: Tangents, message: str) -> tuple[jax.Array, jax.Array | ad.Zero]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, message=message)


_untransposed = _identity("without_gradient", transpose=_refuse_transpose)
_tangent = _identity("reverse_only_tangent", impl=_refuse_tangent, lower=_refuse_tangent, batch=_refuse_tangent)
_marked = _identity("reverse_only", jvp=_mark)
