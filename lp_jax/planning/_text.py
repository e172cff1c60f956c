"""Solvers and numbers as text, for people."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from lp_jax._solvers._solver import Solver
from lp_jax.planning._words import code


def pasted(solver: Solver, adjoint_solver: Solver) -> str:
    """Return both solvers as arguments of `lp_jax.solve`; classes of this library have the prefix ``lp_jax.``."""
    text = f"solver={code(solver)}, adjoint_solver={code(adjoint_solver)}"
    ours = {type(part).__name__ for part in _parts((solver, adjoint_solver)) if type(part).__module__[:7] == "lp_jax."}
    return re.sub(r"\b[A-Z]\w*(?=\()", lambda name: f"lp_jax.{name[0]}" if name[0] in ours else name[0], text)


def _parts(value: object) -> list[object]:
    if isinstance(value, tuple):
        return list(itertools.chain.from_iterable(map(_parts, value)))
    if not dataclasses.is_dataclass(value):
        return []
    return [value, *_parts(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))]


def pair(solver: Solver, adjoint_solver: Solver) -> str:
    """Return the forward solver, and the fields in which the adjoint solver differs."""
    if type(solver) is not type(adjoint_solver):
        return f"{code(solver)}, adjoint {code(adjoint_solver)}"
    names = [field.name for field in dataclasses.fields(solver)]  # type: ignore[arg-type]
    others = [f"{n}={value!r}" for n in names if (value := getattr(adjoint_solver, n)) != getattr(solver, n)]
    return code(solver) + (f", adjoint {', '.join(others)}" if others else "")


def milliseconds(seconds: float | None) -> str:
    """Return "1.23", or "-" for None."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def times(gain: float) -> str:
    """Return "1.2" or "12"."""
    return f"{gain:.0f}" if gain >= 10 else f"{gain:.2g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines. The last column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([*(x.rjust(w) for x, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows]
