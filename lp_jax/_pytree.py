"""Solver settings as pytrees: numbers that may change without recompiling are leaves, the rest is structure."""

import dataclasses

import jax


def settings(*, data: tuple[str, ...] = ()):
    """Decorate a class as a frozen, keyword-only dataclass and pytree with the fields in ``data`` as its leaves."""

    def decorate(cls):
        cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        meta = [f.name for f in dataclasses.fields(cls) if f.name not in data]
        return jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=meta)

    return decorate
