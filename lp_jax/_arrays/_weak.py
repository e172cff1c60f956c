"""Functions in nested dataclasses, held by weak references."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from lp_jax._arrays._check import unchecked


def weakly(value: Any, gone: Callable[[Any], object]) -> Any:
    """Replace a function, or those in the fields of a dataclass, by weak references, which call ``gone`` in the end.

    They are equal where the functions are. What is compared by value stays: it is often made anew for each call, and would
    be gone before the next one.
    """
    return _replaced(value, lambda function: weakref.ref(function, gone))


def strong(value: Any) -> Any:
    """Undo `weakly`."""
    return _replaced(value, lambda it: it() if isinstance(it, weakref.ref) else it)


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    kind: Any = type(value)
    # What is hashed by identity, such as a function, lives as long as its owner; a weak reference tells when it is gone.
    function = callable(value) and kind.__hash__ is object.__hash__
    if function or isinstance(value, weakref.ref):
        return change(value)
    if not dataclasses.is_dataclass(value):
        return value
    fields = (field.name for field in dataclasses.fields(value))
    return unchecked(kind, ((name, _replaced(getattr(value, name), change)) for name in fields))
