"""The grid levels of a solver and the way it goes through them."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lp_jax._path import Stop
from lp_jax._solver import Solver, counted
from lp_jax.viz._style import BLUE, GREY, INK, LABEL, NOTE, RED, figure

_MOST_POINTS = 72  # of the finest level that are drawn in a row
_MOST_ITERATIONS = 4


def hierarchy(
    solver: Solver, num_layers: int, *, t0: float = 0.0, t1: float = 1.0, adjoint_solver: Solver | None = None
) -> Figure:
    """Draw the levels over [t0, t1] with their C- and F-points, and the path of the cycles through them.

    ``adjoint_solver`` is told in a line below; None means the settings of ``solver``.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> solver = lp_jax.MGRIT(levels=3, coarsening=4, cycle="F")
        >>> viz.hierarchy(solver, 64).get_suptitle()
        '64 layers on 3 levels: only 4 coarse steps remain one after another'
    """
    adjoint_solver = solver.for_adjoint() if adjoint_solver is None else adjoint_solver
    solver = solver.resolve(num_layers)
    rows, stops = _rows(solver.grid(num_layers)), solver.stops(num_layers, min(solver.iterations, _MOST_ITERATIONS))
    title, note = solver.describe(num_layers)
    if not stops:
        fig = figure(title, width=12, height=0.65 + 1.45 * len(rows))
        _draw_grid(fig.subplots(), rows, t0, t1)
    else:
        fig = figure(title, width=12, height=2.9 + 1.45 * len(rows))
        grid, route = fig.subplots(2, 1, height_ratios=[1, 1.5])
        _draw_grid(grid, rows, t0, t1)
        _draw_path(route, stops, len(rows), solver)
        lines = (note, _adjoint_note(solver, adjoint_solver))
        note = "\n".join(textwrap.fill(line, 125) for line in lines)
    fig.supxlabel(note, fontsize=NOTE, color=GREY, x=0.02, ha="left")
    return fig


class _Row(NamedTuple):
    steps: int
    factor: int  # to the next coarser level; 1 on the coarsest
    span: int  # layers per step


def _rows(grid: Sequence[tuple[int, int]]) -> list[_Row]:
    rows, span = [], 1
    for steps, factor in grid:
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
            kind = (
                "coarsest level" if row.factor == 1 else "C-point: also on the next level" if is_coarse else "F-point"
            )
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


def _draw_path(ax: Axes, stops: Sequence[Stop], levels: int, solver: Solver) -> None:
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
    starts = [i for i, stop in enumerate(stops) if stop.iteration is not None]
    for i, end in zip(starts, [*starts[1:], len(stops) - 1], strict=True):
        text = f"{stops[i].iteration}: {stops[i].title}"
        ax.annotate("", (i, 0.65), (end, 0.65), arrowprops={"arrowstyle": "|-|", "color": GREY, "mutation_scale": 4})
        ax.text((i + end) / 2, 0.72, text, ha="center", va="bottom", fontsize=NOTE, color=INK)
    for level in range(levels):
        ax.axhline(-level, color="#E5E5E5", linewidth=1, zorder=0)
        _row_label(ax, level, f"level {level}")
    more = len(starts) < solver.iterations
    if more:
        note = f"···  {solver.iterations}\niterations"
        ax.text(len(stops) - 0.6, -(levels - 1) / 2, note, va="center", fontsize=NOTE, color=GREY)
    ax.set_xlim(-0.7, max(len(stops), 4) - 0.3 + more)
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


def _adjoint_note(solver: Solver, adjoint: Solver) -> str:
    if type(adjoint) is not type(solver):
        return f"Adjoint: {adjoint.summary()}."
    others = [
        f"{field.name} = {_words(getattr(adjoint, field.name))}"
        for field in dataclasses.fields(cast(Any, solver))
        if field.name != "iterations" and repr(getattr(adjoint, field.name)) != repr(getattr(solver, field.name))
    ]
    same = f"but {', '.join(others)}, and with" if others else "with"
    return f"Adjoint: the same from right to left, {same} {counted(adjoint.iterations, 'iteration')}."


def _words(value: Any) -> str:
    if hasattr(value, "summary"):
        return str(value.summary())
    return ", ".join(map(_words, value)) if isinstance(value, tuple) else str(value)
