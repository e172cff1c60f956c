"""Old public names, which work for one more release and say what they are called now."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that a public name has changed; ``stacklevel`` counts from the function that calls this one."""
    message = f"{old} is called {new} now. The old name works in this release and goes in the next."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


def old_methods(names: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return a ``__getattr__`` for a class: each old method is the function with the new full name, after a warning."""

    def __getattr__(self: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        home, _, new = names[name].rpartition(".")
        warn_renamed(f"{type(self).__name__}.{name}(...)", f"{names[name]}(solver, ...)")
        return functools.partial(getattr(importlib.import_module(home), new), self)

    return __getattr__


def register_old_methods(cls: Any, names: Mapping[str, str]) -> None:
    """Register each old method that a class defines with the function that took its place, after a warning."""
    for name in sorted(names.keys() & vars(cls).keys()):
        if inspect.isfunction(method := vars(cls)[name]):
            home, _, new = names[name].rpartition(".")
            warn_renamed(f"{cls.__name__}.{name}", f"a function, registered with {names[name]}.register,", stacklevel=5)
            getattr(importlib.import_module(home), new).register(cls, method)


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module: each old name in it is the object with the new full name, after a warning.

    Raises:
        AttributeError: for a name that is not among them.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home), new)

    return __getattr__
