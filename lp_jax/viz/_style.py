"""One look for all pictures: large type, colours that the colour-blind can distinguish, no chart junk."""

import io
import textwrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullLocator

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

LABEL = 14  # size of labels; notes and numbers have 12

styled = matplotlib.rc_context(
    {
        "figure.dpi": 150,
        "figure.titlesize": 17,
        "figure.titleweight": "bold",
        "font.size": 12,
        "text.color": INK,
        "axes.labelsize": LABEL,
        "axes.labelcolor": INK,
        "axes.titlesize": LABEL,
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
        "xtick.color": GREY,
        "ytick.color": GREY,
        "legend.fontsize": 12,
        "legend.framealpha": 0.9,
        "legend.edgecolor": "none",
    }
)
"""Decorates a function that draws. While it runs, artists are made in this look; the user's own settings come back after it."""


class Picture(Figure):
    """A figure that a notebook shows where it is the last expression of a cell, without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the image, and the size at which a notebook shows it. The image has more pixels than that, for sharp screens."""
        # A figure that is made without pyplot has no manager that would show it, but a notebook calls this method.
        image = io.BytesIO()
        self.savefig(image, format="png")
        width, height = self.get_size_inches()
        return image.getvalue(), {"width": round(72 * width), "height": round(72 * height)}


def figure(title: str, *, width: float = 11.0, height: float = 6.0) -> Figure:
    """Return an empty figure with a left-aligned title, whose parts do not overlap."""
    # The constrained layout makes room for titles, legends and the note below, but it does not wrap text.
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.06)
    fig = Picture(figsize=(width, height), layout=layout, facecolor="white")
    # Matplotlib cannot wrap a figure's title, so the number of characters in a line is estimated from the width in inches.
    title = "\n".join(textwrap.fill(line, round(7.4 * width)) for line in title.splitlines())
    fig.suptitle(title, x=0.02, ha="left")
    return fig


def line_style(number: int) -> dict[str, Any]:
    """Return the colour, width and dashes of a line among others."""
    dashes = ("-", "--", ":", "-.")[number % 4]
    return {"color": COLOURS[number % len(COLOURS)], "linewidth": 2.3, "linestyle": dashes}


def logarithmic(ax: Axes, *names: str) -> None:
    """Make the axes "x" or "y" logarithmic, with ticks closer on a short axis; there must be data in them."""
    for name in names:
        ax.set(**{f"{name}scale": "log"})
        axis: Axis = getattr(ax, f"{name}axis")
        # A locator for powers of ten leaves a short axis with one tick or none, so ticks between them are added.
        low, high = axis.get_view_interval()
        if high > 1e3 * low:
            between = [1.0]
        else:
            between = [1, 2, 5] if high > 10 * low else [1, 1.5, 2, 3, 5, 7]
        axis.set_major_locator(LogLocator(subs=between))
        axis.set(major_formatter="{x:g}", minor_locator=NullLocator())


def legend_above(ax: Axes, **options: Any) -> None:
    """Add a legend between the axes and the title."""
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), **options)


def bracket(ax: Axes, start: float, end: float, y: float, text: str) -> None:
    """Name a part of the x-axis, at height ``y``."""
    # An annotation without text is an arrow only; this style is a line with a bar at both ends.
    bar = {"arrowstyle": "|-|", "color": GREY, "mutation_scale": 4}
    ax.annotate("", (start, y), (end, y), arrowprops=bar)
    middle = ((start + end) / 2, y)
    ax.annotate(text, middle, (0, 2), textcoords="offset points", ha="center", va="bottom")


def note(fig: Figure, *paragraphs: str) -> None:
    """Write a few lines below a picture."""
    width = round(10 * fig.get_figwidth())
    text = "\n".join(textwrap.fill(paragraph, width) for paragraph in paragraphs if paragraph)
    # The label of all x-axes takes part in the constrained layout, and free text on a figure does not.
    fig.supxlabel(text, fontsize=12, fontweight="normal", color=GREY, x=0.02, ha="left")
