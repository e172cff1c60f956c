"""The grid levels of a solver and its path through them: a title, a note and stops for each class of solvers."""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lp_jax import MGRIT, CoarseStep, Identity, Newton, Serial, Solver, Windowed
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._sweeps import Sweeps
from lp_jax.planning._schedule import Stop, count, path
from lp_jax.planning._words import code
from lp_jax.viz._schedule import COLOURS
from lp_jax.viz._style import (
    BLUE,
    GREY,
    INK,
    LABEL,
    RED,
    bracket,
    figure,
    legend_above,
    note,
    styled,
)

_MOST_POINTS = 36  # of the finest level that are drawn in a row
_MOST_ITERATIONS = 4  # that are drawn
_MOST_WORDS = 9  # stops that are labelled in words
_MOST_ALIKE = 4  # bars of all layers, where some are left out

_DOWN: dict[str, Any] = {"color": BLUE, "linewidth": 2.4}
_UP: dict[str, Any] = {"color": RED, "linewidth": 2.4, "linestyle": (0, (4, 1.5))}
_COARSE: dict[str, Any] = {"color": RED}
_FINE: dict[str, Any] = {"facecolor": "white", "edgecolor": BLUE, "linewidth": 1.4}
_COARSEST: dict[str, Any] = {"color": INK, "marker": "D"}


@styled
def hierarchy(
    solver: Solver, num_layers: int, *, t1: float = 1.0, adjoint_solver: Solver | None = None
) -> Figure:
    """Draw how a solver goes through a network.

    For a solver with levels, the picture shows the path of its cycles, and the C- and F-points of each level over [0, t1];
    otherwise, which layers are evaluated at the same time, and which wait. Iterations after the fourth, and points of later
    intervals, are left out.

    The solvers are those of `lp_jax.solve`; a line below describes the adjoint solve.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> solver = lp_jax.MGRIT(levels=3, coarsening=4, cycle="F")
        >>> viz.hierarchy(solver, 64).get_suptitle()
        '64 layers on 3 levels: only 4 coarse steps remain one after another'
    """
    same = adjoint_solver in (None, solver)
    adjoint = "the same" if same else code(adjoint_solver)
    solver = solver.resolve(num_layers)
    title, text, levels, stops = describe(solver, num_layers)
    if stops:
        fig = figure(title, width=12, height=3.2 + 1.6 * len(levels))
        route, grid = fig.subplots(2, 1, height_ratios=[1.6 + len(levels), 1.0 * len(levels)])
        _draw_path(route, stops, len(levels), solver)
        _draw_grid(grid, levels, t1 / num_layers)
    else:
        known = batches(solver, num_layers)
        fig = figure(title, width=12, height=min(6.5, 3.0 + 0.4 * len(known)))
        _draw_batches(fig.subplots(), known, num_layers, "at most " if solver.has_tolerance else "")
        text = f"{text[:1].upper()}{text[1:]}." if text else ""
    note(fig, text, f"Adjoint: {adjoint}, from right to left.")
    return fig


def _draw_grid(ax: Axes, levels: Sequence[tuple[int, int]], dt: float) -> None:
    """Draw the points of each level, in a row: all of them, or those of the first intervals."""
    layers = levels[0][0]
    factors = [factor for _, factor in levels[:-1]]
    spans = list(itertools.accumulate(factors, operator.mul, initial=1))
    # whole intervals of the coarsest level are drawn, so that the last point shown is on all levels
    unit = spans[-1] if spans[-1] <= _MOST_POINTS else 1
    end = min(layers, _MOST_POINTS // unit * unit)
    # The area of a marker falls with the number of points in a row, so that they do not touch.
    size = float(np.clip(11000 / (end + 1) ** 1.15, 30, 130))
    for level, ((steps, factor), span) in enumerate(zip(levels, spans, strict=True)):
        ax.axhline(-level, color="#BBBBBB", linewidth=1.2, zorder=1)
        numbers = np.arange(steps + 1)
        # The last interval of a level may be cut short by the end of the network.
        x = np.minimum(numbers * span, layers)
        shown = x <= end
        coarse = (numbers % factor == 0) | (numbers == steps)
        points = [(shown & coarse, _COARSE, 1.0), (shown & ~coarse, _FINE, 0.55)]
        last = level + 1 == len(levels)
        for part, look, area in [(shown, _COARSEST, 0.8)] if last else points:
            ax.scatter(x[part], np.full(part.sum(), -level), s=area * size, zorder=3, **look)
        if not last:
            ax.vlines(
                x[shown & coarse],
                -level - 1,
                -level,
                color=RED,
                linewidth=0.8,
                alpha=0.45,
                zorder=2,
            )
        dt_of = f"dt {'≤' if layers % span else '='} {dt * span:.4g}"
        _name_level(ax, level, f"level {level}\n{steps} steps, {dt_of}")
        if end < layers:
            ax.text(1.02 * end, -level, "···", ha="left", va="center", fontsize=18, color=GREY)
    right = (1.05 if end < layers else 1) * end + 0.6
    ax.set(xlim=(-0.6, right), ylim=(0.7 - len(levels), 0.3))
    ax.set_axis_off()
    # Empty scatters give the legend its entries, with markers of one size whatever the picture has.
    kinds = {
        "C-point: also on the next level": _COARSE,
        "F-point": _FINE,
        "coarsest level": _COARSEST,
    }
    for label, look in kinds.items():
        ax.scatter([], [], s=80, label=label, **look)
    legend_above(ax, ncols=3)


def _name_level(ax: Axes, level: int, text: str) -> None:
    """Write the name of a level on the left of its line."""
    ax.text(-0.02, -level, text, ha="right", va="center", transform=ax.get_yaxis_transform())


def _draw_path(ax: Axes, stops: Sequence[Stop], levels: int, solver: Solver) -> None:
    """Draw the stops from left to right, level below level, and name the iterations above them."""
    for i, (before, after) in enumerate(itertools.pairwise(stops)):
        look = _DOWN if after.level > before.level else _UP
        ax.plot([i, i + 1], [-before.level, -after.level], zorder=1, **look)
    for i, stop in enumerate(stops):
        look = _COARSEST if stop.label == "solve" else {"color": BLUE, "marker": "o"}
        ax.scatter(i, -stop.level, s=200, zorder=3, **look)
        right, up = _label_place(stops, i)
        ax.annotate(
            _label(stops, i),
            (i, -stop.level),
            (right, up),
            textcoords="offset points",
            fontsize=LABEL,
            ha="left" if right else "center",
            va="bottom" if up > 0 else "top",
        )
    # A stop that begins an iteration carries its number; the others carry None.
    starts = [i for i, stop in enumerate(stops) if stop.iteration is not None]
    for i, end in zip(starts, [*starts[1:], len(stops) - 1], strict=True):
        bracket(ax, i, end, 0.65, f"{stops[i].iteration}: {stops[i].title}")
    for level in range(levels):
        ax.axhline(-level, color="#E5E5E5", linewidth=1, zorder=0)
        _name_level(ax, level, f"level {level}")
    more = len(starts) < solver.iterations
    if more:
        rest = f"···  {solver.iterations}\niterations"
        ax.text(len(stops) - 0.6, -(levels - 1) / 2, rest, va="center", color=GREY)
    ax.set(xlim=(-0.7, max(len(stops), 4) - 0.3 + more), ylim=(-levels + 0.45, 1.05))
    ax.set_axis_off()
    ax.plot([], [], label="down: states and residuals are restricted", **_DOWN)
    ax.plot([], [], label="up: states are corrected", **_UP)
    legend_above(ax, ncols=2)


def _label(stops: Sequence[Stop], i: int) -> str:
    """Return the label of a stop, in words if there are few of them."""
    label = stops[i].label
    if len(stops) > _MOST_WORDS:
        return label
    if i + 1 == len(stops):
        return "final sweep"
    if label == "solve":
        return "coarse solve"
    return f"{label}-relaxation" if set(label) <= {"F", "C"} else label


def _label_place(stops: Sequence[Stop], i: int) -> tuple[int, int]:
    """Return where a label stands, in points to the right and up: above a peak, below a valley, and otherwise on the right."""
    level = stops[i].level
    around = [stop.level for stop in (*stops[max(i - 1, 0) : i], *stops[i + 1 : i + 2])]
    if max(around) <= level:
        return 0, -15
    if min(around) >= level:
        return 0, 14
    return (11, 6) if stops[i + 1].level > level else (11, -6)


def batches(solver: Solver, layers: int) -> list[tuple[int, int, str]]:
    """Return the batches of a solve on one device, one after the other: first layer, number of layers, phase."""
    drawn = []
    for event in count(solver, layers, kept=solver.keeps_states).events:
        # An event in turn runs over all layers in batches of `event.layers`; any other is a single batch from layer 0.
        starts = range(0, layers if event.in_turn else 1, event.layers)
        for first in starts:
            drawn += [(first, min(event.layers, layers - first), event.phase)] * (
                event.times // len(starts)
            )
    return drawn


def _draw_batches(ax: Axes, every: Sequence[tuple[int, int, str]], layers: int, most: str) -> None:
    """Draw a bar for each batch, the first at the top; many that are alike are drawn in part."""
    # Many bars of all layers would look the same, so the first ones and the last one stand for them.
    alike = len(every) > 2 * _MOST_ALIKE and all(batch[:2] == (0, layers) for batch in every)
    shown = [*every[: _MOST_ALIKE - 1], every[-1]] if alike else every
    end = len(shown) + alike  # with room for the ones left out, before the last
    gap = 0.06 if len(shown) <= 32 else 0.0
    for now, (first, number, phase) in enumerate(shown):
        top = end - 1 if now + 1 == len(shown) else now
        place = (top + gap, 1 - 2 * gap)
        ax.broken_barh([(first, number)], place, facecolor=COLOURS[phase], linewidth=0, zorder=2)
    ylabel = "time, in evaluations\nthat wait for each other"
    ax.set(xlim=(0, layers), ylim=(end, 0), xlabel="layer", ylabel=ylabel)
    ax.locator_params(integer=True)
    if alike:
        rest = f"···  {most}{len(every) - len(shown)} more, like these"
        ax.text(layers / 2, end - 1.5, rest, ha="center", va="center", fontsize=LABEL, color=GREY)
        ax.set_yticks([])
    plain = {"propagation": "a layer", "sweep": "a sweep: these layers at the same time"}
    phases = dict.fromkeys(phase for *_, phase in shown)
    handles = [Patch(color=COLOURS[phase], label=plain.get(phase, phase)) for phase in phases]
    legend_above(ax, handles=handles, ncols=len(handles))


class Described(NamedTuple):
    """The title of a picture of a solve, and the note below it. ``grid`` and ``stops`` are empty for a single level.

    ``grid`` holds (number of steps, coarsening factor) of every level, finest first, and ``stops`` the path of the first
    iterations through the levels.
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
    return Described(f"{layers} layers, {solver.summary}: no coarse level")


@describe.register
def _(solver: MGRIT, layers: int) -> Described:
    grid = solver.grid(layers)
    rest = f"only {grid[-1][0]} coarse steps remain one after another"
    if solver.coarse_step == Identity():
        rest = "the coarse solve is a prefix sum"
    note = "F, C: relaxation of the F- and C-points; FC at the end: final sweep."
    stops = path(solver, layers, min(solver.iterations, _MOST_ITERATIONS))
    title = f"{layers} layers on {len(grid)} levels: {rest}"
    step = cast(CoarseStep, solver.coarse_step)
    return Described(title, f"{note} Coarse step: {step.summary}.", grid, stops)


@describe.register
def _(solver: Sweeps, layers: int) -> Described:
    most = f"{solver.effort} at most" if solver.has_tolerance else solver.effort
    note = "each sweep evaluates every layer at once and adds the increments up"
    return Described(f"{layers} layers at once, {most}: no coarse level", note)


@describe.register
def _(solver: Windowed, layers: int) -> Described:
    note = (
        "sweeps go over one window after the other, the last one over all layers; each adds "
        "increments up"
    )
    return Described(f"{layers} layers in {solver.windows} windows, {solver.effort}", note)


@describe.register
def _(solver: Newton, layers: int) -> Described:
    note = (
        "each iteration linearises every layer at once and solves the linear chain by a scan of "
        "logarithmic depth"
    )
    return Described(f"{layers} layers at once, {solver.summary}: no coarse level", note)


@describe.register
def _(solver: Serial | Elementwise, layers: int) -> Described:
    return Described(
        f"{layers} layers one after another: serial propagation", "exact, and the baseline"
    )
