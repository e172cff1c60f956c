"""Identities that refuse to be differentiated in one way, with words for the user, where JAX's own fall short."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lp_jax._arrays._types import PyTree


def without_gradient(tree: PyTree, message: str) -> PyTree:
    """``tree``; where a loss that depends on it is differentiated in reverse mode, ValueError(message).

    ``lax.stop_gradient`` would make that gradient zero, in silence.
    """
    return jax.tree.map(functools.partial(_untransposed.bind, message=message), tree)


def reverse_only(tree: PyTree, message: str) -> PyTree:
    """``tree``; where its tangents are computed with, not only transposed, TypeError(message)."""
    return jax.tree.map(functools.partial(_marked.bind, message=message), tree)


def _identity(name: str, **rules: Callable[..., Any]) -> Primitive:
    """The identity on an array, with rules of its own."""
    primitive = Primitive(name)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
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


def _not_transposed(cotangent: Any, x: Any, message: str) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    raise ValueError(message)


def _not_computed(*operands: Any, message: str) -> Any:
    raise TypeError(message)


def _mark(primals: Any, tangents: Any, message: str) -> Any:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _tangent.bind(t, message=message)


_untransposed = _identity("without_gradient", transpose=_not_transposed)
_tangent = _identity("reverse_only_tangent", impl=_not_computed, lower=_not_computed, batch=_not_computed)
_marked = _identity("reverse_only", jvp=_mark)
