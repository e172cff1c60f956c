"""The grid levels of a solver and the way it goes through them."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lp_jax._mgrit import MGRIT
from lp_jax._newton import Newton
from lp_jax._picard import Picard
from lp_jax._rediscretize import Rediscretize
from lp_jax._serial import Serial
from lp_jax._solver import Solver
from lp_jax.viz._path import Stop, path
from lp_jax.viz._style import BLUE, GREY, INK, LABEL, NOTE, RED, figure

_MOST_POINTS = 72  # of the finest level that are drawn in a row
_MOST_ITERATIONS = 4


def hierarchy(
    solver: Solver, num_layers: int, *, t0: float = 0.0, t1: float = 1.0, adjoint_solver: Solver | None = None
) -> Figure:
    """Draw the levels with their C- and F-points, and the path of the cycles through them.

    Args:
        solver: what is drawn.
        num_layers: number of layers N.
        t0: time at which layer 0 starts.
        t1: time at which the last layer ends.
        adjoint_solver: told in a line below; None means the settings of ``solver``.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> solver = lp_jax.MGRIT(levels=3, coarsening=4, cycle="F")
        >>> viz.hierarchy(solver, 64).get_suptitle()
        '64 layers on 3 levels: only 4 coarse steps remain one after another'
    """
    adjoint_solver = solver.for_adjoint() if adjoint_solver is None else adjoint_solver
    resolved = solver.resolve(num_layers)
    if not isinstance(resolved, MGRIT):
        return _single_level(resolved, num_layers, t0, t1)
    plan = resolved.grid(num_layers)
    fig = figure(_title(resolved, plan), width=12, height=2.9 + 1.45 * len(plan))
    grid, route = fig.subplots(2, 1, height_ratios=[1, 1.5])
    _draw_grid(grid, _rows(plan), t0, t1)
    _draw_path(route, resolved, len(plan))
    fig.supxlabel(_notes(resolved, adjoint_solver), fontsize=NOTE, color=GREY, x=0.02, ha="left")
    return fig


class _Row(NamedTuple):
    steps: int
    factor: int  # to the next coarser level; 1 on the coarsest
    span: int  # layers per step


def _rows(plan: Sequence[tuple[int, int]]) -> list[_Row]:
    rows, span = [], 1
    for steps, factor in plan:
        rows.append(_Row(steps, factor, span))
        span *= factor
    return rows


def _draw_grid(ax: Axes, rows: Sequence[_Row], t0: float, t1: float) -> None:
    layers, last = rows[0].steps, len(rows) - 1
    place = _Excerpt(layers, rows[-1].span)
    kinds: dict[str, dict[str, Any]] = {
        "C-point: also on the next level": {"color": RED, "s": place.size},
        "F-point": {"facecolor": "white", "edgecolor": BLUE, "linewidth": 1.4, "s": place.size * 0.55},
        "coarsest level": {"color": INK, "s": place.size * (0.8 if last else 0.35), "marker": "D"},
    }
    for level, row in enumerate(rows):
        ax.axhline(-level, color="#BBBBBB", linewidth=1.2, zorder=1)
        numbers = np.arange(row.steps + 1)
        points = np.minimum(numbers * row.span, layers)
        coarse = (numbers % row.factor == 0) | (numbers == row.steps)
        for point, is_coarse in zip(points.tolist(), coarse.tolist(), strict=True):
            if not place.shows(point):
                continue
            kind = "coarsest level" if level == last else "C-point: also on the next level" if is_coarse else "F-point"
            ax.scatter([place.x(point)], [-level], zorder=3, **kinds[kind])
            if is_coarse and level < last:
                ax.plot([place.x(point)] * 2, [-level, -level - 1], color=RED, linewidth=0.8, alpha=0.45, zorder=2)
        short = layers % row.span != 0
        text = f"level {level}\n{row.steps} steps, dt {'≤' if short else '='} {(t1 - t0) / layers * row.span:.4g}"
        _row_label(ax, level, text)
    if place.gap is not None:
        for level in range(len(rows)):
            box = {"boxstyle": "square,pad=0.6", "color": "white"}
            ax.text(place.gap, -level, "···", ha="center", va="center", fontsize=18, color=GREY, zorder=5, bbox=box)
    ax.set_xlim(-0.6, place.width + 0.6)
    ax.set_ylim(-last - 0.3, 0.3)
    ax.axis("off")
    if last > 0:
        handles = [ax.scatter([], [], label=kind, **style | {"s": 80}) for kind, style in kinds.items()]
        ax.legend(
            handles=handles,
            ncols=3,
            fontsize=NOTE,
            frameon=False,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderaxespad=0.2,
        )


def _row_label(ax: Axes, level: int, text: str) -> None:
    transform = ax.get_yaxis_transform()
    ax.text(-0.02, -level, text, ha="right", va="center", fontsize=NOTE, color=INK, transform=transform)


class _Excerpt:
    """Where the points of the finest level are drawn: all of them, or the first and last intervals of the coarsest."""

    def __init__(self, layers: int, span: int):
        self.layers = layers
        self.head, self.tail, self.gap, self.width = layers, layers, None, float(layers)
        if layers > _MOST_POINTS:
            unit = span if 3 * span <= _MOST_POINTS else 1
            self.head = _MOST_POINTS * 2 // 3 // unit * unit
            self.tail = max((layers - _MOST_POINTS // 4) // unit * unit, self.head + 1)
            space = _MOST_POINTS / 8
            self.gap = self.head + space / 2
            self.width = self.head + space + layers - self.tail
        self.size = float(np.clip(11000 / (self.width + 1) ** 1.15, 30, 130))

    def shows(self, point: int) -> bool:
        return point <= self.head or point >= self.tail

    def x(self, point: int) -> float:
        return float(point) if point <= self.head else self.width - (self.layers - point)


def _draw_path(ax: Axes, mgrit: MGRIT, levels: int) -> None:
    iterations = min(mgrit.iterations, _MOST_ITERATIONS)
    stops = path(mgrit, levels, iterations)
    ax.plot(range(len(stops)), [-stop.level for stop in stops], color="#888888", linewidth=2, zorder=1)
    for i, stop in enumerate(stops):
        solved = stop.label == "solve"
        ax.scatter([i], [-stop.level], s=200, color=INK if solved else BLUE, marker="D" if solved else "o", zorder=3)
        dx, dy, ha, va = _label_place(stops, i)
        ax.annotate(
            stop.label,
            (i, -stop.level),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=ha,
            va=va,
            fontsize=LABEL,
            color=INK,
        )
    starts = [(i, stop.iteration) for i, stop in enumerate(stops) if stop.iteration is not None]
    for (i, number), (end, _) in zip(starts, [*starts[1:], (len(stops) - 1, None)], strict=True):
        skipped = number == 1 and mgrit.skip_downcycle
        text = f"{number}: coarse to fine" if skipped else f"{number}: {mgrit.cycle}-cycle"
        ax.annotate("", (i, 0.65), (end, 0.65), arrowprops={"arrowstyle": "|-|", "color": GREY, "mutation_scale": 4})
        ax.text((i + end) / 2, 0.72, text, ha="center", va="bottom", fontsize=NOTE, color=INK)
    for level in range(levels):
        ax.axhline(-level, color="#E5E5E5", linewidth=1, zorder=0)
        _row_label(ax, level, f"level {level}")
    if iterations < mgrit.iterations:
        note = f"···  {mgrit.iterations}\niterations"
        ax.text(len(stops) - 0.6, -(levels - 1) / 2, note, va="center", fontsize=NOTE, color=GREY)
    ax.set_xlim(-0.7, max(len(stops), 4) - 0.3 + (iterations < mgrit.iterations))
    ax.set_ylim(-levels + 0.45, 1.05)
    ax.axis("off")


def _label_place(stops: Sequence[Stop], i: int) -> tuple[float, float, str, str]:
    """Beside the path: above on the finest level, below on the coarsest, in the open corner between."""
    level = stops[i].level
    before = stops[i - 1].level if i else level
    after = stops[i + 1].level if i + 1 < len(stops) else level
    if max(before, after) <= level:  # a valley
        return 0, -15, "center", "top"
    if min(before, after) >= level:  # a peak
        return 0, 14, "center", "bottom"
    return (11, 6, "left", "bottom") if after > level else (-11, 6, "right", "bottom")


def _single_level(solver: Solver, layers: int, t0: float, t1: float) -> Figure:
    if isinstance(solver, Picard):
        count = _count(solver.sweeps, "Picard sweep")
        if solver.has_tolerance:
            count = f"{count} at most"
        title = f"{layers} layers at once, {count}: no coarse level"
        note = "each sweep evaluates every layer at once and adds the increments up"
        if solver.windows > 1:
            title = f"{layers} layers in {solver.windows} windows, {_count(solver.sweeps, 'Picard sweep')}"
            note = "sweeps go over one window after the other, the last one over all layers; each adds increments up"
    elif isinstance(solver, Newton):
        title = f"{layers} layers at once, {_words(solver)}: no coarse level"
        note = (
            "each iteration linearises every layer at once and solves the linear chain by a scan of logarithmic depth"
        )
    else:
        title = f"{layers} layers one after another: serial propagation"
        note = "exact, and the baseline"
    fig = figure(title, width=12, height=2.1)
    ax = fig.subplots()
    _draw_grid(ax, [_Row(layers, 1, 1)], t0, t1)
    fig.supxlabel(note, fontsize=NOTE, color=GREY, x=0.02, ha="left")
    return fig


def _title(mgrit: MGRIT, plan: Sequence[tuple[int, int]]) -> str:
    layers, coarsest = plan[0][0], plan[-1][0]
    rest = "a prefix sum" if isinstance(mgrit.coarse_step, Picard) and mgrit.coarse_step.sweeps == 0 else None
    tail = f"the coarse solve is {rest}" if rest else f"only {coarsest} coarse steps remain one after another"
    return f"{layers} layers on {len(plan)} levels: {tail}"


def _notes(mgrit: MGRIT, adjoint: Solver) -> str:
    coarse = _words(mgrit.coarse_step)
    forward = f"F, C: relaxation of the F- and C-points; FC at the end: final sweep. Coarse step: {coarse}."
    if not isinstance(adjoint, MGRIT):
        backward = f"Adjoint: {_words(adjoint)}."
    else:
        others = [
            f"{field.name} = {_words(getattr(adjoint, field.name))}"
            for field in dataclasses.fields(MGRIT)
            if field.name != "iterations" and repr(getattr(adjoint, field.name)) != repr(getattr(mgrit, field.name))
        ]
        same = f"but {', '.join(others)}, and with" if others else "with"
        backward = f"Adjoint: the same from right to left, {same} {_count(adjoint.iterations, 'iteration')}."
    return "\n".join(textwrap.fill(line, 125) for line in (forward, backward))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _words(value: Any) -> str:
    """A setting in words."""
    if isinstance(value, Picard):
        return f"{_count(value.sweeps, 'Picard sweep')} over the layers"
    if isinstance(value, Newton):
        kind = "" if value.jacobian == "full" else f" with {value.jacobian} Jacobians"
        before = f" after {_count(value.relaxations, 'relaxation')}" if value.relaxations else ""
        return f"{_count(value.iterations, 'Newton iteration')}{before}{kind}"
    if isinstance(value, Rediscretize):
        rule = value.params if isinstance(value.params, str) else "a function"
        return f"the layer with the interval's dt, parameters by {rule}"
    if isinstance(value, Serial):
        return "serial"
    return ", ".join(map(_words, value)) if isinstance(value, tuple) else str(value)
