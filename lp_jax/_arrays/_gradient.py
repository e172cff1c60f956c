"""Identities that refuse one way of differentiation, with a message for the user."""

import functools
from collections.abc import Sequence
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


def _identity(name: str) -> Primitive:
    """Make the identity on an array, as yet without a derivative."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, message: x)
    primitive.def_abstract_eval(lambda x, message: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda context, x, message: [x])
    return primitive


def _refuse_transpose(cotangent: jax.Array, x: object, message: str) -> NoReturn:
    raise ValueError(message)


def _refuse_tangent(*operands: object, message: str) -> NoReturn:
    raise TypeError(message)


def _unmarked(primals: Sequence[Any], tangents: Sequence[Any], message: str) -> tuple[Any, Any]:
    """The derivative of what is marked. Differentiated once, it is unmarked."""
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, message=message)


_untransposed = _identity("without_gradient")
# JAX asks no rule for a cotangent that is zero by its type, with which nobody differentiates this output.
ad.deflinear2(_untransposed, _refuse_transpose)
_marked = _identity("reverse_only")
ad.primitive_jvps[_marked] = _unmarked
# the tangents of what is marked: nothing but transposes of them are evaluated
_tangent = Primitive("reverse_only_tangent")
_tangent.def_impl(_refuse_tangent)
_tangent.def_abstract_eval(lambda x, message: x)
ad.deflinear2(_tangent, lambda cotangent, x, message: [cotangent])
batching.primitive_batchers[_tangent] = _refuse_tangent
mlir.register_lowering(_tangent, _refuse_tangent)
