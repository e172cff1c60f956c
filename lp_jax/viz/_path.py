"""The path of a solve through the levels, as `lp_jax._cycle` walks it."""

from typing import NamedTuple

from lp_jax._cycle import VISITS
from lp_jax._mgrit import MGRIT


class Stop(NamedTuple):
    """One stop on the path.

    Attributes:
        level: 0 is the finest.
        label: what is done there.
        iteration: number of the iteration that begins here, None within one.
    """

    level: int
    label: str
    iteration: int | None = None


def path(mgrit: MGRIT, levels: int, iterations: int) -> list[Stop]:
    """The stops of so many iterations and the final sweep; successive ones on a level are one."""
    stops: list[Stop] = []
    for iteration in range(1, iterations + 1):
        if iteration == 1 and mgrit.skip_downcycle:
            cascade = [Stop(levels - 1, "solve"), *(Stop(level, "F") for level in reversed(range(levels - 1)))]
            _extend(stops, [cascade[0]._replace(iteration=1), *cascade[1:]])
        else:
            cycle = _cycle(mgrit, levels, mgrit.cycle, 0)
            _extend(stops, [cycle[0]._replace(iteration=iteration), *cycle[1:]])
    _extend(stops, [Stop(0, "FC")])
    return stops


def relaxation(mgrit: MGRIT, level: int) -> str:
    """The pre-relaxation on a level, as "FCF"."""
    return "F" + "CF" * mgrit.c_relaxations(level)


def _cycle(mgrit: MGRIT, levels: int, kind: str, level: int) -> list[Stop]:
    stops = [Stop(level, relaxation(mgrit, level))]
    if level + 2 == levels:
        _extend(stops, [Stop(level + 1, "solve")])
    else:
        for visit in VISITS[kind]:
            _extend(stops, _cycle(mgrit, levels, visit, level + 1))
    return [*stops, Stop(level, "F")]


def _extend(stops: list[Stop], more: list[Stop]) -> None:
    """Append; where the path stays on a level, the later relaxation takes in the F-relaxation before it."""
    if stops and stops[-1].level == more[0].level:
        before = stops.pop()
        more = [more[0]._replace(iteration=more[0].iteration or before.iteration), *more[1:]]
    stops.extend(more)
