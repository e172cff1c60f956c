"""Solver settings as pytrees: numbers that may change without recompiling are leaves, all else is structure."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

from lp_jax._arrays import _check

T = TypeVar("T")


def register(*data: str) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as a pytree with the fields ``data`` as its leaves."""

    def decorate(cls: type[T]) -> type[T]:
        cls = _check.check_arguments(cls)
        fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return jax.tree_util.register_dataclass(cls, list(data), [name for name in fields if name not in data])

    return decorate
