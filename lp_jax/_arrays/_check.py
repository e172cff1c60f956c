"""Refusals at trace time: the argument's name, what it got, what it wanted and what to do."""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])

_SAME = (
    {"sweeps", "iterations", "cycles", "iters", "max_iter", "maxiter", "max_iterations", "max_steps", "n_iterations"},
    {"rtol", "tol", "tolerance", "eps", "epsilon"},
    {"levels", "max_levels", "n_levels"},
    {"coarsening", "cf", "m", "cfactor", "coarsening_factor", "factor"},
    {"coarse_step", "coarse", "coarse_solver", "coarse_grid"},
    {"relaxation", "relax", "nrelax", "smoother"},
    {"solver", "method"},
    {"adjoint_solver", "backward_solver", "adjoint"},
    {"t1", "T", "tstop", "t_end", "tf"},
    {"t0", "tstart", "t_start"},
    {"comm", "mesh", "devices"},
    {"data", "inputs", "xs"},
)
"""Words of the field, and of other libraries, for one thing."""


def integer(name: str, value: Any, *, least: int) -> int:
    """``value`` as an int of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, at least {least}; got {value!r} ({type(value).__name__})."
        ) from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, at least {least}; got the boolean {value!r}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}.")
    return number


def one_of(name: str, value: Any, allowed: Iterable[str], *, otherwise: str = "") -> None:
    """``value`` is one of the allowed strings."""
    allowed = tuple(allowed)
    if isinstance(value, str) and value in allowed:
        return
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    wanted = " or ".join(repr(a) for a in allowed) + (f", {otherwise}" if otherwise else "")
    raise ValueError(f"{name} must be {wanted}; got {value!r}.{hint}")


def tolerance(rtol: Any, fallback: Any, *, has_tolerance: bool) -> None:
    """A relative tolerance that some residual norm can meet, and a fallback for one."""
    if isinstance(rtol, str | bool):
        raise TypeError(f"rtol must be a number, or None for a fixed number of iterations; got {rtol!r}.")
    if isinstance(rtol, int | float) and not rtol >= 0:
        raise ValueError(f"rtol must be at least 0, as a part of the first residual norm; got {rtol}.")
    if fallback and not has_tolerance:
        raise ValueError("fallback=True got no tolerance that could be missed. Set rtol, for example rtol=1e-3.")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``name`` is likely to stand for: another word for it, or nearly spelled so."""
    names = list(names)
    same = next((group for group in _SAME if name in group), set())
    other = [each for each in names if each in same]
    if not other:
        lower = {each.lower(): each for each in reversed(names)}
        other = [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=1)]
    return other[0] if other else None


def called_right(f: T) -> T:
    """``f``, a function or a class, which tells of arguments that it does not have which one may be meant."""
    target = f.__init__ if isinstance(f, type) else f  # type: ignore[misc]
    called = f.__name__
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name != "self"]
    names = [p.name for p in parameters]
    others = any(p.kind == p.VAR_KEYWORD for p in parameters)  # which go to somebody who checks them
    first = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    skip = int(isinstance(f, type))

    @functools.wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[skip:]
        if len(given) > len(first):
            wanted = f"takes {', '.join(first)} by position" if first else "takes its arguments by name"
            extra, rest = given[len(first)], names[len(first) :]
            name = "solver" if "solver" in rest and hasattr(extra, "for_adjoint") else rest[0] if not first else "..."
            raise TypeError(f"{called} {wanted}; got {_shown(extra)}, too. Name it: {name}={_shown(extra)}.")
        for name in kwargs:
            if not (others or name in names):
                near = nearest(name, names)
                hint = f"Did you mean {near}?" if near else f"It has {', '.join(names)}."
                raise TypeError(f"{called} has no argument {name!r}. {hint}")
        return target(*args, **kwargs)

    if isinstance(f, type):
        f.__init__ = checked  # type: ignore[misc]
        return f
    return cast(T, checked)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else type(value).__name__
