"""One look for all pictures: large type, colours that the colour-blind can distinguish, no chart junk."""

import io
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# Okabe and Ito, "Color universal design", 2008
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
RED = "#D55E00"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
INK = "#222222"
GREY = "#666666"
FAINT = "#DDDDDD"

TITLE = 17
LABEL = 14
TICK = 12
NOTE = 12


class Picture(Figure):
    """A figure that a notebook shows where it is the last expression of a cell, without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The image, and the size at which a notebook shows it: more pixels than that, for sharp screens."""
        image = io.BytesIO()
        self.savefig(image, format="png")
        width, height = self.get_size_inches()
        return image.getvalue(), {"width": round(72 * width), "height": round(72 * height)}


def figure(title: str, *, width: float = 11.0, height: float = 6.0) -> Figure:
    """Return an empty figure with a left-aligned title, whose parts do not overlap."""
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.06)
    fig = Picture(figsize=(width, height), dpi=150, layout=layout, facecolor="white")
    title = "\n".join(textwrap.fill(line, round(7.4 * width)) for line in title.splitlines())
    fig.suptitle(title, x=0.02, ha="left", fontsize=TITLE, fontweight="bold", color=INK)
    return fig


def dress(ax: Axes, *, x: str, y: str, title: str = "") -> None:
    """Set axis labels and a quiet frame."""
    ax.set_xlabel(x, fontsize=LABEL, color=INK)
    ax.set_ylabel(y, fontsize=LABEL, color=INK)
    ax.set_title(title, fontsize=LABEL, color=INK, loc="left")
    ax.tick_params(labelsize=TICK, colors=GREY, which="both")
    ax.grid(True, which="major", color=FAINT, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)


def line_style(number: int) -> dict[str, Any]:
    """Return the colour, width and dashes of a line among others."""
    dashes = ("-", "--", ":", "-.")[number % 4]
    return {"color": COLOURS[number % len(COLOURS)], "linewidth": 2.3, "linestyle": dashes}


def logarithmic(ax: Axes, *names: str) -> None:
    """Make the axes "x" or "y" logarithmic, with ticks closer on a short axis."""
    for name in names:
        ax.set(**{f"{name}scale": "log"})
        axis: Axis = getattr(ax, f"{name}axis")
        low, high = axis.get_view_interval()
        between = (
            (1,) if high > 1e3 * low else (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
        )
        axis.set(
            major_locator=LogLocator(subs=between),
            major_formatter="{x:g}",
            minor_locator=NullLocator(),
        )


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(integer=True))


_PLACES: dict[str, dict[str, Any]] = {
    "above": {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0)},
    "below": {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2},
}


def legend(ax: Axes, place: str, **options: Any) -> None:
    """Add a legend without a box around it: in a corner, above or below."""
    ax.legend(
        fontsize=TICK,
        framealpha=0.9,
        edgecolor="none",
        **_PLACES.get(place, {"loc": place}),
        **options,
    )


def bracket(ax: Axes, start: float, end: float, y: float, text: str) -> None:
    """Name a part of the x-axis, at height ``y``."""
    ax.annotate(
        "",
        (start, y),
        (end, y),
        arrowprops={"arrowstyle": "|-|", "color": GREY, "mutation_scale": 4},
    )
    ax.annotate(
        text,
        ((start + end) / 2, y),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=NOTE,
        color=INK,
    )


def note(fig: Figure, *paragraphs: str) -> None:
    """Write a few lines below a picture."""
    text = "\n".join(
        textwrap.fill(paragraph, round(10 * fig.get_figwidth()))
        for paragraph in paragraphs
        if paragraph
    )
    fig.supxlabel(text, fontsize=NOTE, color=GREY, x=0.02, ha="left")
