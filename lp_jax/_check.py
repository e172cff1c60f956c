"""Refusals at trace time: the argument's name, what it got, what it wanted and what to do."""

import difflib
import operator
from collections.abc import Iterable
from typing import Any


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
    if isinstance(rtol, str):
        raise TypeError(f"rtol must be a number, or None for a fixed number of iterations; got the string {rtol!r}.")
    if isinstance(rtol, int | float) and not rtol >= 0:
        raise ValueError(f"rtol must be at least 0, as a part of the first residual norm; got {rtol}.")
    if fallback and not has_tolerance:
        raise ValueError("fallback=True got no tolerance that could be missed. Set rtol, for example rtol=1e-3.")
