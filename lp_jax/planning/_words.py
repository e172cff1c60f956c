"""Solvers and numbers in words, for tables, titles and notes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lp_jax._arrays._check import numbered as numbered
from lp_jax._solvers._solver import Solver

_MAIN = ("levels", "coarsening", "iterations", "coarse_step", "sweeps", "params")


def code(solver: Any, *, prefix: str = "") -> str:
    """Return the solver as code: main fields and those not at their default, ``prefix`` before names of this library."""
    if isinstance(solver, tuple):
        return (
            f"({', '.join(code(part, prefix=prefix) for part in solver)}{',' * (len(solver) == 1)})"
        )
    if not dataclasses.is_dataclass(solver):
        return repr(solver)
    shown = [
        f"{field.name}={code(value, prefix=prefix)}"
        for field in dataclasses.fields(solver)
        if (value := getattr(solver, field.name)) != field.default or field.name in _MAIN
    ]
    # A solver of the user is not in this library, so its name gets no prefix.
    ours = type(solver).__module__.startswith("lp_jax.")
    return f"{prefix * ours}{type(solver).__name__}({', '.join(shown)})"


def pair(solver: Solver, adjoint_solver: Solver) -> str:
    """Return the forward solver, and the fields in which the adjoint solver differs."""
    if type(solver) is not type(adjoint_solver):
        return f"{code(solver)}, adjoint {code(adjoint_solver)}"
    theirs = vars(solver)
    others = [f"{name}={x!r}" for name, x in vars(adjoint_solver).items() if x != theirs[name]]
    return code(solver) + (f", adjoint {', '.join(others)}" if others else "")


def milliseconds(seconds: float | None) -> str:
    """Return "1.23", or "-" for None."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines. The last column is left-aligned, the others are right-aligned."""
    # The last column needs no width, because nothing stands to its right.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(x.rjust(w) for x, w in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]
