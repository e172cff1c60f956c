"""Solvers as pictures show them: a title, a note, and the path through the levels, registered by their classes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_jax._solvers._coarse_step import CoarseStep, Identity, Rediscretize
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard, Sweeps, Windowed
from lp_jax.planning._path import Stop, path
from lp_jax.planning._words import iterations, summary

MOST_ITERATIONS = 4  # that are drawn


class Described(NamedTuple):
    """Words and path of a picture of a solve.

    Attributes:
        title: title of the picture.
        note: note below the picture.
        grid: (number of steps, coarsening factor) of every level, finest first; empty for a single level.
        stops: the path of the first iterations through the levels; empty for a single level.
    """

    title: str
    note: str = ""
    grid: Sequence[tuple[int, int]] = ()
    stops: Sequence[Stop] = ()


@functools.singledispatch
def describe(solver: Solver, layers: int) -> Described:
    """Return the title, note and path for a picture of a solve.

    Register a function for a class of solvers with ``@viz.describe.register``.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> viz.describe(lp_jax.Serial(), 64).title
        '64 layers one after another: serial propagation'
    """
    return Described(f"{layers} layers, {summary(solver)}: no coarse level")


@describe.register
def _(solver: MGRIT, layers: int) -> Described:
    grid = solver.grid(layers)
    rest = f"only {grid[-1][0]} coarse steps remain one after another"
    if solver.coarse_step == Identity():
        rest = "the coarse solve is a prefix sum"
    note = "F, C: relaxation of the F- and C-points; FC at the end: final sweep."
    stops = path(solver, layers, min(solver.iterations, MOST_ITERATIONS))
    title = f"{layers} layers on {len(grid)} levels: {rest}"
    return Described(title, f"{note} Coarse step: {summary(solver.coarse_step)}.", grid, stops)


@describe.register
def _(solver: Sweeps, layers: int) -> Described:
    most = f"{iterations(solver)} at most" if solver.has_tolerance else iterations(solver)
    note = "each sweep evaluates every layer at once and adds the increments up"
    return Described(f"{layers} layers at once, {most}: no coarse level", note)


@describe.register
def _(solver: Windowed, layers: int) -> Described:
    note = "sweeps go over one window after the other, the last one over all layers; each adds increments up"
    return Described(f"{layers} layers in {solver.windows} windows, {iterations(solver)}", note)


@describe.register
def _(solver: Newton, layers: int) -> Described:
    note = "each iteration linearises every layer at once and solves the linear chain by a scan of logarithmic depth"
    return Described(f"{layers} layers at once, {summary(solver)}: no coarse level", note)


@describe.register
def _(solver: Serial | Elementwise, layers: int) -> Described:
    return Described(f"{layers} layers one after another: serial propagation", "exact, and the baseline")


def variants(solver: Any) -> dict[str, Solver]:
    """Return the solvers, by name, that a picture of the gradient's error compares: of one with a coarse step, others."""
    own: CoarseStep | None = getattr(solver, "coarse_step", None)
    if own is None:
        return {type(solver).__name__: solver}
    others: dict[str, CoarseStep] = {
        "injection": Rediscretize(params="inject"),
        "mean of parameters": Rediscretize(params="mean"),
        "1 Picard sweep": Picard(sweeps=1),
        "2 Picard sweeps": Picard(sweeps=2),
    }
    if own not in others.values():
        others["this run's coarse step"] = own
    return {name: dataclasses.replace(solver, coarse_step=step) for name, step in others.items()}
