"""One look for all pictures: large type, colours that the colour-blind can distinguish, no chart junk."""

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Okabe and Ito, "Color universal design", 2008
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY, FAINT = "#222222", "#666666", "#DDDDDD"

TITLE, LABEL, TICK, NOTE = 17, 14, 12, 12


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
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GREY)


def logarithmic(ax: Axes) -> None:
    """Make the y-axis logarithmic, if any line has a positive value."""
    heights: list[Any] = [line.get_ydata() for line in ax.lines]
    if any(np.nanmax(y, initial=0) > 0 for y in heights):
        ax.set_yscale("log")


def legend(ax: Axes, **place: Any) -> None:
    """Add a legend without a box around it."""
    ax.legend(fontsize=TICK, frameon=True, framealpha=0.9, edgecolor="none", **place)
