"""Old public names. They work for one more release and warn with the new name."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that a public name has changed; ``stacklevel`` counts from the function that calls this one."""
    message = f"{old} is called {new} now. The old name works in this release and goes in the next."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


def old_methods(names: Mapping[str, str]) -> Callable[[object, str], object]:
    """Return a ``__getattr__`` for a class: an old method warns, and is the function with the new full name."""

    def __getattr__(self: object, name: str) -> object:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        home, _, new = names[name].rpartition(".")
        warn_renamed(f"{type(self).__name__}.{name}(...)", f"{names[name]}(solver, ...)")
        return functools.partial(getattr(importlib.import_module(home), new), self)

    return __getattr__


def register_old_methods(cls: type, names: Mapping[str, str]) -> None:
    """Warn of each old method that a class defines, and register it with the function that replaces it."""
    for name in sorted(names.keys() & vars(cls).keys()):
        if inspect.isfunction(method := vars(cls)[name]):
            home, _, new = names[name].rpartition(".")
            warn_renamed(f"{cls.__name__}.{name}", f"a function, registered with {names[name]}.register,", stacklevel=5)
            getattr(importlib.import_module(home), new).register(cls, method)


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a module: an old name warns, and is the object with the new full name.

    Raises:
        AttributeError: for a name that is not among them.
    """

    def __getattr__(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home), new)

    return __getattr__
