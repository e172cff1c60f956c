"""Refusals at trace time: the argument's name, what it got, what it wanted and what to do."""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import jax
from jax.tree_util import GetAttrKey

T = TypeVar("T", bound=Callable[..., object])
C = TypeVar("C")

# synonyms, of this field and of other libraries, a line for each group
_SAME = [
    line.split()
    for line in """
    sweeps iterations cycles iters max_iter maxiter max_iterations max_steps n_iterations
    rtol tol tolerance eps epsilon
    levels max_levels n_levels
    coarsening cf m cfactor coarsening_factor factor
    coarse_step coarse coarse_solver coarse_grid
    relaxation relax nrelax smoother
    solver method
    adjoint_solver backward_solver adjoint
    t1 T tstop t_end tf
    t0 tstart t_start
    comm mesh devices
    data inputs xs
    """.splitlines()
]


def numbered(number: int, what: str) -> str:
    """Return "1 sweep", "2 sweeps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def integer(name: str, value: object, *, least: int) -> int:
    """Return ``value`` as an int; refuse it below ``least``."""
    wanted = f"{name} must be an integer, at least {least}; got"
    try:
        # `operator.index` takes NumPy's integers, and refuses floats.
        number = operator.index(value)  # type: ignore[arg-type]  # it refuses all others
    except TypeError:
        raise TypeError(f"{wanted} {value!r} ({type(value).__name__}).") from None
    # A boolean is an int for Python.
    if isinstance(value, bool):
        raise TypeError(f"{wanted} the boolean {value!r}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}.")
    return number


def one_of(name: str, value: object, allowed: Iterable[str], *, otherwise: str = "") -> None:
    """Refuse a value that is not one of the allowed strings."""
    allowed = tuple(allowed)
    if isinstance(value, str) and value in allowed:
        return
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    wanted = " or ".join(repr(a) for a in allowed) + (f", {otherwise}" if otherwise else "")
    raise ValueError(f"{name} must be {wanted}; got {value!r}.{hint}")


def at_once(value: object) -> None:
    """Refuse an ``at_once`` that is not a number of layers."""
    if isinstance(value, str):
        one_of("at_once", value, ("auto",), otherwise="or a number of layers")
    elif not (isinstance(value, float) and value == math.inf):
        integer("at_once", value, least=1)


def tolerance(rtol: object, fallback: object, *, has_tolerance: bool) -> None:
    """Refuse a relative tolerance that no residual norm can meet, and a fallback without a tolerance."""
    if isinstance(rtol, str | bool):
        raise TypeError(
            f"rtol must be a number, or None for a fixed number of iterations; got {rtol!r}."
        )
    if isinstance(rtol, float) and math.isnan(rtol):
        raise ValueError(
            "rtol must be a number; got nan. A negative tolerance asks for all iterations."
        )
    if fallback and not has_tolerance:
        raise ValueError(
            "fallback=True got no tolerance that could be missed. Set rtol, for example rtol=1e-3."
        )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that ``name`` likely means: a synonym, or a similar spelling."""
    names = list(names)
    # A synonym is a better guess than a similar spelling.
    same = next((group for group in _SAME if name in group), [])
    other = [each for each in names if each in same]
    if not other:
        lower = {each.lower(): each for each in reversed(names)}
        other = [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=1)]
    return other[0] if other else None


def check_arguments(f: T) -> T:
    """Decorate a function or a class: for an unknown argument, its error suggests the one that may be meant."""
    target = f.__init__ if isinstance(f, type) else f  # type: ignore[misc]
    title = f.__name__
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name != "self"]
    names = [p.name for p in parameters]
    # Other keyword arguments are passed on to a function that checks them.
    others = any(p.kind == p.VAR_KEYWORD for p in parameters)
    first = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    skip = int(isinstance(f, type))

    @functools.wraps(target)
    def checked(*args: object, **kwargs: object) -> object:
        positional = args[skip:]
        if len(positional) > len(first):
            wanted = (
                f"takes {', '.join(first)} by position" if first else "takes its arguments by name"
            )
            extra = positional[len(first)]
            rest = names[len(first) :]
            name = (
                "solver"
                if "solver" in rest and hasattr(extra, "for_adjoint")
                else rest[0]
                if not first
                else "..."
            )
            raise TypeError(
                f"{title} {wanted}; got {_short_repr(extra)}, too. Name it: "
                f"{name}={_short_repr(extra)}."
            )
        for name in kwargs:
            if not (others or name in names):
                near = nearest(name, names)
                hint = f"Did you mean {near}?" if near else f"It has {', '.join(names)}."
                raise TypeError(f"{title} has no argument {name!r}. {hint}")
        return target(*args, **kwargs)

    if isinstance(f, type):
        # A class stays the same class, so that its instances and subclasses do not change.
        f.__init__ = checked  # type: ignore[misc]
        return f
    return cast(T, checked)


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else type(value).__name__


def unchecked(cls: type[C], fields: Iterable[tuple[str, object]]) -> C:
    """Make an instance of a dataclass from its fields, without a call of ``__init__``."""
    made = object.__new__(cls)
    for name, value in fields:
        object.__setattr__(made, name, value)
    return made


def register(*data: str) -> Callable[[type[C]], type[C]]:
    """Register a dataclass as a pytree: the fields ``data``, which may change without recompiling, are its leaves.

    A tree is put together without the checks of ``__init__``, because JAX and other libraries also put None, masks, labels,
    tangents and cotangents in the places of leaves.
    """

    def decorate(cls: type[C]) -> type[C]:
        static = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.name not in data
        ]
        # trees by `register_dataclass` are equal for classes of equal fields, so that jit may run one's program for another
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda x: (
                [(GetAttrKey(name), getattr(x, name)) for name in data],
                tuple(getattr(x, f) for f in static),
            ),
            lambda fixed, leaves: unchecked(
                cls, zip((*static, *data), (*fixed, *leaves), strict=True)
            ),
        )
        return check_arguments(cls)

    return decorate
