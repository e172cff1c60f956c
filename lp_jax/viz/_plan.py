"""A plan as a picture."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lp_jax.planning import Plan
from lp_jax.planning._words import code, numbered
from lp_jax.viz._style import BLUE, GREEN, GREY, RED, figure, line_style, logarithmic, styled

_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2}  # of a legend
_DIVIDED = {"data": "examples", "both": "layers and examples"}  # other fields name themselves


@styled
def plan(found: Plan) -> Figure:
    """Draw an `lp_jax.plan`: error against predicted time of each solver, and the speedup on more devices.

    A plan without measured gradients has the speedup only.

    Example:
        >>> from lp_jax import planning, viz
        >>> flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> found = planning.choose(64, planning.Machine(at_once=(1, 1024), **flat))
        >>> [ax.get_xlabel() for ax in viz.plan(found).axes]  # no gradient was taken
        ['devices']
    """
    title = f"{found.layers} layers"
    looked_at = [
        (1e3 * c.cost.seconds, c.error) for c in found.choices if c.error and math.isfinite(c.error)
    ]
    if looked_at:
        title += f" on {numbered(found.workers, 'worker')}: {code(found.solver)}"
        title += f"\n{found.reason[:1].upper()}{found.reason[1:]}"
    fig = figure(title)
    *first, ax = fig.subplots(1, 2 if looked_at else 1, squeeze=False)[0]
    if first:
        _draw_errors(first[0], found, looked_at)
    rows = found.scaling()
    for i, field in enumerate(("layers", "data", "both", "pipeline")):
        points = [
            (row.devices, found.serial_seconds / seconds)
            for row in rows
            if (seconds := getattr(row, field)) is not None
        ]
        if points:
            name = _DIVIDED.get(field, field)
            ax.plot(*zip(*points, strict=True), label=name, **line_style(i))
    # The line at 1 is serial propagation on one device.
    ax.axhline(1.0, color=GREY, linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.xaxis.set(major_formatter="{x:g}", minor_locator=NullLocator())
    logarithmic(ax, "y")
    ax.legend(**_BELOW)
    ax.set(xlabel="devices", ylabel="times as fast as one device", title="Speedup on more devices")
    return fig


def _draw_errors(ax: Axes, result: Plan, looked_at: Sequence[tuple[float, float]]) -> None:
    """Draw a point for each solver whose gradient was measured; ``looked_at`` are their milliseconds and errors."""
    for name, good, marker, colour in (
        ("exact enough", True, "o", BLUE),
        ("not exact enough", False, "x", GREY),
    ):
        points = [(ms, error) for ms, error in looked_at if (error <= result.error) is good]
        if points:
            ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=8, label=name)
    best = result.best
    # Serial propagation has no measured error, and a logarithmic axis has no place for zero.
    if best.error:
        at = 1e3 * best.cost.seconds, best.error
        ax.plot(*at, "o", color=BLUE, markersize=15, mfc="none", label="best")
    ax.axvline(1e3 * result.serial.cost.seconds, color=RED, linewidth=1.8, label="serial")
    asked = f"asked for: {result.error:.0e}"
    ax.axhline(result.error, color=GREEN, linewidth=1.4, linestyle="--", label=asked)
    logarithmic(ax, "x", "y")
    ax.legend(**_BELOW)
    ax.set(
        xlabel="ms per training step, predicted",
        ylabel="error of the gradient",
        title="Solvers: cost and error",
    )
