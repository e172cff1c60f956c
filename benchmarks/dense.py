"""Suite 2: loss and gradient of a dense ResNet, and what compiling them takes in time and memory.

N layers ``y + h tanh(y W + b)`` with h = 1/N, batch 32, random weights as at initialisation, loss 0.5 |y - target|^2.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

import lp_jax
from benchmarks import report
from benchmarks.command import Field, Row, Suite, run, wanted
from benchmarks.harness import Contender, Tell, compile_program, relative_error
from benchmarks.manifest import jax_threads
from benchmarks.propagation import Pair, Propagate, scan, solved, two_one

BATCH = 32

Weights = tuple[Any, Any]
"""(N, width, width) and (N, width)."""
Problem = tuple[Weights, jax.Array, jax.Array]
"""Weights, the state that enters, and the target, in float32."""


def residual_layer(y: jax.Array, weights: Weights, h: Any) -> jax.Array:
    w, b = weights
    return y + h * jnp.tanh(y @ w + b[None])


_SETTINGS: dict[str, dict[str, Any]] = {
    "2 levels, m = 4, Picard 1": {"levels": 2, "coarsening": 4, "coarse_step": lp_jax.Picard(sweeps=1)},
    "2 levels, m = 16, Picard 1": {"levels": 2, "coarsening": 16, "coarse_step": lp_jax.Picard(sweeps=1)},
    "3 levels, m = 4, injection": {"levels": 3, "coarsening": 4, "coarse_step": lp_jax.Rediscretize()},
}

PAIRS: dict[str, Pair] = {
    "Serial": (lp_jax.Serial(), lp_jax.Serial()),
    "MGRIT 1 level": (lp_jax.MGRIT(levels=1), lp_jax.MGRIT(levels=1)),
    **{
        f"{name}, {interval_map}": two_one(**settings, interval_map=interval_map)
        for name, settings in _SETTINGS.items()
        for interval_map in ("loop", "vmap")
    },
}
EXACT = ("Serial", "MGRIT 1 level")

CONTENDERS: dict[str, tuple[str, Propagate]] = {
    "lax.scan": ("scan", scan),
    **{name: ("exact" if name in EXACT else "iterated", solved(*pair)) for name, pair in PAIRS.items()},
}


def random_problem(layers: int, width: int, batch: int = BATCH) -> Problem:
    """As at initialisation."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.normal(size=shape).astype(np.float32))

    weights = normal(layers, width, width) / math.sqrt(width), 0.1 * normal(layers, width)
    return weights, normal(batch, width), normal(batch, width)


class Gradient:
    """Loss and gradient, one per call.

    Args:
        propagate: through the layers.
        problem: weights, state and target.

    Attributes:
        gradient: of the weights.
        facts: for the result.
    """

    def __init__(self, propagate: Propagate, problem: Problem, *, ahead: bool = True):
        def loss(weights: Weights, y: jax.Array, target: jax.Array) -> Any:
            y, residual = propagate(residual_layer, weights, y)
            return 0.5 * jnp.sum((y - target) ** 2), residual

        program = compile_program(jax.value_and_grad(loss, has_aux=True), *problem, ahead=ahead)
        self._call, self._problem = program.call, problem
        (_, residual), self.gradient = self()
        self.facts = program.facts | {"residual_norm": float(residual)}

    def __call__(self) -> Any:
        return self._call(*self._problem)


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    """The baseline first: a scan."""
    problem = random_problem(*row)
    contenders: list[Contender] = []
    exact = None
    for name, (family, propagate) in CONTENDERS.items():
        if exact is not None and not wanted(name, options):
            continue
        tell(f"compiling {name}")
        call = Gradient(propagate, problem)
        exact = call.gradient if exact is None else exact
        error = relative_error(call.gradient, exact)
        facts = {"family": family, "threads": jax_threads(), "gradient_error": error}
        contenders.append(Contender(name=name, call=call, facts=facts | call.facts))
    return Field(contenders, [])


_STYLES: dict[str, dict[str, Any]] = {
    "lax.scan": {"color": report.COLOURS["scan"], "linestyle": "-"},
    "Serial": {"color": report.COLOURS["exact"], "linestyle": "-", "marker": "s"},
    "MGRIT 1 level": {"color": report.COLOURS["exact"], "linestyle": "--", "marker": "D"},
    **{
        f"{setting}, {interval_map}": {"color": colour, "linestyle": line, "marker": marker}
        for setting, colour in zip(_SETTINGS, ("#D55E00", "#009E73", "#CC79A7"), strict=True)
        for interval_map, line, marker in (("loop", "-", "o"), ("vmap", "--", "^"))
    },
}

_PANELS: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], float]]] = [
    ("time, × lax.scan", lambda c, base: c["ratio"]["median"]),
    ("error of the gradient", lambda c, base: c["gradient_error"] or math.nan),
    ("temporary memory, × lax.scan", lambda c, base: c["temporary_bytes"] / base["temporary_bytes"]),
    ("trace and compile, s", lambda c, base: c["trace_seconds"] + c["compile_seconds"]),
]


def draw(result: report.Result) -> Figure:
    """Time, error, memory and compilation over the number of layers; one line of panels per width."""
    widths = sorted({row["width"] for row in result["rows"]})
    fig = report.figure(result, width=16, height=2.2 + 3.3 * len(widths))
    panels, below = fig.subfigures(2, 1, squeeze=False, height_ratios=[1, 0.11 / len(widths) ** 0.5])[:, 0]
    grid = panels.subplots(len(widths), len(_PANELS), squeeze=False, sharex=True, sharey="col")
    for line, (axes, width) in enumerate(zip(grid, widths, strict=True)):
        first, last = line == 0, line == len(widths) - 1
        rows = sorted((row for row in result["rows"] if row["width"] == width), key=lambda row: row["layers"])
        for ax, (title, value) in zip(axes, _PANELS, strict=True):
            _draw_panel(ax, rows, value)
            report.dress(ax, title=title * first, x="layers" * last)
        axes[0].set_ylabel(f"width {width}", fontsize=14, color=report.INK)
    lines, names = grid[0][0].get_legend_handles_labels()
    below.legend(lines, names, loc="center", ncols=5, fontsize=12, frameon=False)
    return fig


def _draw_panel(
    ax: Axes, rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any], dict[str, Any]], float]
) -> None:
    layers = [row["layers"] for row in rows]
    for name, style in _STYLES.items():
        values = []
        for row in rows:
            found = [c for c in row["contenders"] if c["name"] == name]
            values.append(value(found[0], row["contenders"][0]) if found else math.nan)
        if np.isfinite(values).any():
            ax.plot(layers, values, label=name, markersize=6, linewidth=1.8, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(layers, [str(n) for n in layers])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    if high / low < 50:  # too few powers of ten to be read
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))


SUITE = Suite(
    name="dense",
    title="Loss and gradient of a dense ResNet, batch 32",
    about=__doc__ or "",
    examples=[
        ("", "all eight rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows 1024,64 4096,64 --rounds 30", "two rows, with more rounds"),
        ("--only Serial '1 level'", "what the library costs over a scan"),
    ],
    sizes=("layers", "width"),
    rows=[(n, width) for width in (16, 64) for n in (64, 256, 1024, 4096)],
    quick_rows=[(32, 4)],
    field=field,
    draw=draw,
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
