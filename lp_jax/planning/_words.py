"""Solvers and numbers in words, for tables, titles and notes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from lp_jax._solvers._coarse_step import Identity, PerInterval, Rediscretize
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Sweeps


def numbered(number: int, what: str) -> str:
    """Return "1 sweep", "2 sweeps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


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


@functools.singledispatch
def iteration_name(solver: Solver) -> str:
    """Return the name of one iteration."""
    return "iteration"


iteration_name.register(MGRIT, lambda solver: "cycle")
iteration_name.register(Sweeps, lambda solver: "sweep")


def iterations(solver: Solver) -> str:
    """Return the number of iterations, with their name."""
    return numbered(solver.iterations, f"{type(solver).__name__} {iteration_name(solver)}")


@functools.singledispatch
def summary(part: object) -> str:
    """Return a few words on a solver or a coarse step, for titles and notes."""
    return type(part).__name__


summary.register(Solver, iterations)
summary.register(Sweeps, lambda part: f"{iterations(part)} over the layers")
summary.register(Serial, lambda part: "serial")
summary.register(Elementwise, lambda part: "serial, in one kernel")
summary.register(Identity, lambda part: "the identity")
summary.register(
    PerInterval, lambda part: f"the function {getattr(part.function, '__name__', part.function)}"
)


@summary.register
def _(part: Newton) -> str:
    kind = "" if part.jacobian == "full" else f" with {part.jacobian} Jacobians"
    start = f" after {numbered(part.relaxations, 'relaxation')}" if part.relaxations else ""
    return f"{iterations(part)}{start}{kind}"


@summary.register
def _(part: Rediscretize) -> str:
    rule = part.params if isinstance(part.params, str) else "a function"
    return f"the layer with the interval's dt, parameters by {rule}"


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
