"""The identity on values whose gradient is refused, not zero."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lp_jax._types import PyTree


def without_gradient(tree: PyTree, message: str) -> PyTree:
    """``tree``; a loss that depends on it raises ValueError(message) where its gradient is taken.

    ``lax.stop_gradient`` would make that gradient zero, in silence. Forward mode passes through.
    """
    return jax.tree.map(functools.partial(_identity.bind, message=message), tree)


def _refuse(cotangent: Any, x: Any, *, message: str) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    raise ValueError(message)


_identity = Primitive("without_gradient")
_identity.def_impl(lambda x, *, message: x)
_identity.def_abstract_eval(lambda x, *, message: x)
ad.primitive_jvps[_identity] = lambda primals, tangents, **message: (
    _identity.bind(*primals, **message),
    tangents[0] if isinstance(tangents[0], ad.Zero) else _identity.bind(*tangents, **message),
)
ad.primitive_transposes[_identity] = _refuse
batching.primitive_batchers[_identity] = lambda args, dims, **message: (_identity.bind(*args, **message), dims[0])
mlir.register_lowering(_identity, lambda context, x, *, message: [x])
