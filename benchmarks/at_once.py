"""Layers at once on one device: how many are fastest, and whether "auto" finds it.

Loss and gradient by sweeps over all layers (Newton's method for recurrent cells), with 1, 4, 16, 64 and all layers at once
and with "auto", beside a hand-written scan, the same with eight layers written out, and `Serial`. Where the best of them is
below 1, all layers at once are faster than one after another, on the same device.
"""

import argparse
import dataclasses
import functools
import math
import sys
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import lp_jax
from benchmarks import one_device
from benchmarks.command import Field, Row, Suite, network_row, run
from benchmarks.harness import Tell
from benchmarks.networks import NETWORKS, RECURRENT, SERIAL, Pair
from benchmarks.one_device import Entry

AT_ONCE = (1, 4, 16, 64, math.inf, "auto")


def name_of(at_once: Any) -> str:
    return {math.inf: "all at once", "auto": "auto"}.get(at_once, f"{at_once} at once")


def pair(network: str, at_once: Any) -> Pair:
    """Sweeps that have an error of 1e-5 or so on untrained layers; Newton's method where states move far in a step."""
    if network not in RECURRENT:
        return lp_jax.Picard(sweeps=3, at_once=at_once), lp_jax.Picard(sweeps=2, at_once=at_once)
    jacobian = "full" if network == "gru" else "diagonal"
    solver = lp_jax.Newton(jacobian=jacobian, iterations=4, batch_axes=1, at_once=at_once)
    return solver, dataclasses.replace(solver, iterations=1)


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    name, width, layers, batch = row
    details = {"size": 8} if name == "conv" and batch <= 20 and width == 8 else {}
    network = NETWORKS[name](width, layers, batch, **details)
    unrolled = dataclasses.replace(network, scan=functools.partial(network.scan, unroll=8))
    entries = [Entry("lax.scan", network), Entry("lax.scan, 8 written out", unrolled)]
    entries.append(Entry("Serial", network, SERIAL))
    numbers = [number for number in AT_ONCE if not isinstance(number, int) or number < layers]
    entries += [Entry(name_of(number), network, pair(name, number)) for number in numbers]
    return one_device.field(entries, options, tell, updates=False)


def draw(result: dict[str, Any]) -> Figure:
    """Draw the ratios to the scan, a line for each row of the grid: left of 1 the solver is faster."""
    rows = []
    for row in result["rows"]:
        ratios = {c["name"]: c["ratio"]["median"] for c in row["contenders"]}
        rows.append((f"{row['network']} {row['width']}, {row['layers']}, {row['batch']}", ratios))
    rows.sort(key=lambda row: -row[1]["auto"])
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.24 * len(rows)), layout="constrained")
    for name, (marker, colour) in _SHOWN.items():
        known = [(ratios[name], place) for place, (_, ratios) in enumerate(rows) if name in ratios]
        axes.scatter(*zip(*known, strict=True), marker=marker, color=colour, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xscale("log")
    ticks = (0.2, 0.5, 1, 2, 5, 10)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(
        "Layers at once beat lax.scan where they are many and small", loc="left", fontweight="bold"
    )
    axes.set_xlabel(
        "time of loss and gradient, divided by that of lax.scan (rows: width, layers, batch)"
    )
    axes.legend(loc="upper right")
    return figure


_SHOWN = {
    "1 at once": ("x", "tab:red"),
    "all at once": ("s", "tab:orange"),
    "auto": ("o", "tab:blue"),
}

SUITE = Suite(
    name="at_once",
    title="Layers at once on one device",
    about=__doc__ or "",
    examples=[
        ("", "the whole grid, a quarter of an hour"),
        ("--quick", "tiny rows, to see that all works"),
        ("--rows dense,16,4096,4 conv,8,64,50", "two rows"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows="dense,4,64,1 dense,4,16384,1 dense,8,1024,4 dense,8,4096,4 dense,16,64,32 dense,16,4096,1 dense,16,4096,8 "
    "dense,16,16384,32 dense,32,1024,1 dense,32,1024,16 dense,64,64,64 dense,64,1024,1 dense,64,1024,16 dense,64,1024,32 "
    "dense,64,4096,64 dense,128,256,64 dense,256,64,64 dense,256,256,1 dense,256,256,8 mlp,64,64,32 conv,8,64,20 conv,4,32,20 "
    "encoder,32,64,4 encoder,64,64,8 gru,16,256,16 paragru,64,1024,16",
    quick_rows="dense,4,32,4",
    field=field,
    row=network_row(NETWORKS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
