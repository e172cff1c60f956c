"""The path of a multigrid solve through its levels, as `lp_jax._solvers._cycle` walks it."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from lp_jax._solvers._cycle import VISITS
from lp_jax._solvers._mgrit import MGRIT


class Stop(NamedTuple):
    """One stop on the path."""

    level: int  # 0 is the finest
    label: str  # "solve", or the relaxation, like "FCF"
    iteration: int | None = None  # number of the iteration that begins here; None within one
    title: str = ""  # name of that iteration


def relaxations(solver: MGRIT, levels: int) -> tuple[str, ...]:
    """Return the label of the relaxation on every level: "FCF", or the name of a function."""
    rules = solver.relaxation if isinstance(solver.relaxation, tuple) else (solver.relaxation,)
    each = (rules[min(level, len(rules) - 1)] for level in range(levels))
    return tuple(getattr(relaxation, "__name__", str(relaxation)) for relaxation in each)


def path(solver: MGRIT, steps: int, iterations: int) -> list[Stop]:
    """Return the stops of ``iterations`` cycles and the final sweep; successive stops on one level are merged."""
    stops: list[Stop] = []
    labels = relaxations(solver, len(solver.grid(steps)))
    for iteration in range(1, iterations + 1):
        first = solver.start == "cascade" and iteration == 1
        kind, name = solver.cycle, f"{solver.cycle}-cycle"
        if callable(kind):  # drawn as if it went down and up once
            kind, name = "V", getattr(solver.cycle, "__name__", "a cycle of its own")
        begin, *rest = (cascade_stops if first else cycle_stops)(labels, kind)
        title = "coarse to fine" if first else name
        _extend(stops, [begin._replace(iteration=iteration, title=title), *rest])
    _extend(stops, [Stop(0, "FC")])
    return stops


@functools.cache
def cycle_stops(relaxations: tuple[str, ...], kind: str, level: int = 0) -> tuple[Stop, ...]:
    """Return the stops of one cycle from ``level`` down and up again."""
    stops = [Stop(level, relaxations[level])]
    if level + 2 == len(relaxations):
        stops.append(Stop(level + 1, "solve"))
    else:
        for visit in VISITS[kind]:
            _extend(stops, cycle_stops(relaxations, visit, level + 1))
    return (*stops, Stop(level, "F"))


@functools.cache
def cascade_stops(relaxations: tuple[str, ...], kind: str, level: int = 0) -> tuple[Stop, ...]:
    """Return the stops of the coarse-to-fine cascade; it stands for the first visit of a cycle of its kind."""
    if level + 2 == len(relaxations):
        return (Stop(level + 1, "solve"), Stop(level, "F"))
    stops = list(cascade_stops(relaxations, kind, level + 1))
    for visit in VISITS[kind][1:]:
        _extend(stops, cycle_stops(relaxations, visit, level + 1))
    return (*stops, Stop(level, "F"))


def _extend(stops: list[Stop], more: Sequence[Stop]) -> None:
    """Append stops; where the path stays on a level, the later relaxation includes the earlier F-relaxation."""
    if stops and stops[-1].level == more[0].level:
        earlier = stops.pop()
        if more[0].iteration is None:
            more = [more[0]._replace(iteration=earlier.iteration, title=earlier.title), *more[1:]]
    stops.extend(more)
