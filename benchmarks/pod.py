"""Layers over a row of TPUs, up to a pod: compile time, cycles, messages and memory of a chip, as more chips take part.

Every program is compiled for chips that need not be here: loss and gradient of blocks of two dense layers, in bfloat16. Some
rows have four layers a chip, some 1,024 layers in all. Nothing is run. Cycles are the compiler's own estimates of each kernel,
times the turns of its loops; those of a relay are of all chips in a row, as one works at a time. What a message takes to arrive
is not in them.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

import lp_jax
from benchmarks import report
from benchmarks.command import (
    Progress,
    add_numbers,
    add_only,
    common_parser,
    new_result,
    positive,
    results_folder,
    wanted,
)
from lp_jax import planning

SHAPES = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
STRONG, LAYERS = 1024, 4
SCAN = "one chip, Serial()"
EXACT = ("relay", "pipeline", SCAN)
NAMES = (SCAN, "the default", "relay", "pipeline", "identity, 2/1", "sweeps, 3/2")


def step(y: jax.Array, layer: Any) -> jax.Array:
    """A block of two dense layers."""
    w, v = layer.params
    return y + (jax.nn.gelu(y @ w) @ v) * layer.dt.astype(y.dtype)


def losses(name: str, mesh: Mesh, layers: int) -> Callable[..., jax.Array]:
    """The loss by a method, of (weights, states): the mean square of the last state."""
    comm = None if mesh.size == 1 else lp_jax.MeshComm(mesh)
    whole = lp_jax.MGRIT(
        coarsening=layers // mesh.size, coarse_step=lp_jax.Identity(), storage="all"
    )
    pairs: dict[str, tuple[Any, Any]] = {
        SCAN: (lp_jax.Serial(), lp_jax.Serial()),
        "the default": (None, None),
        "relay": (lp_jax.Serial(), lp_jax.Serial()),
        "pipeline": (None, None),
        "identity, 2/1": tuple(dataclasses.replace(whole, iterations=n) for n in (2, 1)),
        "sweeps, 3/2": (lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)),
    }
    solver, adjoint = pairs[name]

    def loss(weights: Any, y: jax.Array, comm: Any = comm) -> jax.Array:
        y1 = lp_jax.solve(step, weights, y, solver=solver, adjoint_solver=adjoint, comm=comm).y1
        return jnp.mean(y1.astype(jnp.float32) ** 2)

    if name != "pipeline":
        return loss
    piped = lp_jax.pipeline(lambda weights, y: loss(weights, y, None), mesh, in_axes=(None, 0))
    parts = mesh.size
    return lambda weights, y: piped(weights, y.reshape(parts, -1, y.shape[-1])).mean()


def facts(name: str, mesh: Mesh, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compile one program, and read it."""
    if name == SCAN:
        mesh = Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)
    width, over = options.width, NamedSharding(mesh, PartitionSpec("layers"))

    def weights(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, *shape), jnp.bfloat16, sharding=over)

    given = (
        (weights(width, 4 * width), weights(4 * width, width)),
        jax.ShapeDtypeStruct((options.batch, width), jnp.bfloat16),
    )
    start = time.perf_counter()
    found = planning.compiled(jax.value_and_grad(losses(name, mesh, layers)), *given, on=mesh)
    traced = time.perf_counter() - start - found.seconds
    return {"name": name, "trace_seconds": traced, **dataclasses.asdict(found), "fits": found.fits}


def table(result: report.Result) -> str:
    """A table for each row."""
    parts = []
    for row in result["rows"]:
        alone = next((one["cycles"] for one in row["contenders"] if one["name"] == SCAN), 0)
        cells = []
        for one in row["contenders"]:
            mark = "+" if one["unknown_loops"] else ""
            kinds = ", ".join(f"{n} {kind}" for kind, (n, _) in one["messages"].items()) or "none"
            size = sum(size for _, size in one["messages"].values())
            memory = {k: report.number(size / 1e6, 3) for k, size in one["memory"].items()}
            cell = {
                "": one["name"],
                "million cycles": report.number(one["cycles"] / 1e6, 3) + mark,
                "of one chip's": report.number(one["cycles"] / alone, 2) + mark if alone else "–",
                "messages": kinds + mark,
                "MB in them": report.number(size / 1e6, 3) + mark,
                "arguments MB": memory.get("arguments", "–"),
                "outputs MB": memory.get("outputs", "–"),
                "temp MB": memory.get("temporaries", f"out of memory, {memory.get('all')} in all"),
                "trace s": report.number(one["trace_seconds"], 2),
                "compile s": report.number(one["seconds"], 2),
            }
            cells.append(cell if one["fits"] else {**cell, "million cycles": "–", "messages": "–"})
        parts += [
            f"## {row['title']}",
            report.pipes([[*cells[0]], *([*c.values()] for c in cells)]),
        ]
    about = " ".join((__doc__ or "").split("\n\n")[1].split())
    return report.page(result, *parts, f"{about} {_MARK}")


_MARK = (
    "A loop of unknown length (marked +) counts as one turn: the default, where it sweeps to a tolerance, counts one sweep each "
    "way, and the relay that it falls back to."
)
PANELS = (
    ("Time, millions of cycles", lambda one: one["cycles"] / 1e6),
    ("Compile time, seconds", lambda one: one["seconds"]),
    ("Memory of a chip, MB", lambda one: (sum(one["memory"].values())) / 1e6),
    ("Messages of a chip", lambda one: sum(n for n, _ in one["messages"].values())),
)  # fmt: skip


def draw(result: report.Result) -> Figure:
    """Draw four quantities over the number of chips, weak scaling above strong; without the default, whose cycles have a mark."""
    fig = report.figure(result, width=18, height=9)
    panels = fig.subplots(2, len(PANELS), squeeze=False)
    colours = dict(zip(NAMES, report.COLOURS.values(), strict=False))
    for line, (kind, title) in zip(
        panels, (("weak", "4 layers a chip"), ("strong", "1,024 layers")), strict=True
    ):
        rows = [row for row in result["rows"] if kind in row["scalings"]]
        rows.sort(key=lambda row: row["chips"])
        for ax, (what, value) in zip(line, PANELS, strict=True):
            for number, name in enumerate(name for name in NAMES if name != "the default"):
                points = [
                    (row["chips"], value(one))
                    for row in rows
                    for one in row["contenders"]
                    if one["name"] == name and one["fits"]
                ]
                if points and any(y for _, y in points):
                    ax.plot(*zip(*points, strict=True), marker="os^DvP"[number], color=colours[name],
                            linewidth=2, label=name, alpha=0.85)  # fmt: skip
            chips = [row["chips"] for row in rows]
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set_xticks(chips, [str(n) for n in chips])
            ax.minorticks_off()
            report.dress(ax, title=f"{title}: {what}", x="chips", y="")
    lines, names = panels[0][0].get_legend_handles_labels()
    fig.legend(lines, names, fontsize=10, frameon=False, ncols=len(names), loc="upper right")
    return fig


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser(
        "pod",
        __doc__ or "",
        [("", "8, 64 and 256 chips of a v5e"), ("--chips 8 --only relay", "one program")],
    )
    parser.add_argument(
        "--kind", default="v5e", help="Kind of the chips, v5e or v6e (default: v5e)."
    )
    parser.add_argument(
        "--chips", type=positive, nargs="+", choices=SHAPES, default=[8, 64, 256],
        help="Numbers of chips (default: 8 64 256).",
    )  # fmt: skip
    add_numbers(parser, ("--width", 512, "Width of a block (default: 512)."))
    add_numbers(parser, ("--batch", 512, "Number of examples (default: 512)."))
    add_only(parser, "Compile only methods with one of these in their names.")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # else the process looks for the chips
    chips = sorted({8} if options.quick else set(options.chips))
    try:
        meshes = {n: planning.topology(f"{options.kind}:{SHAPES[n]}") for n in chips}
    except ValueError as error:
        parser.error(str(error))
    folder, progress = results_folder(parser, options, "tpu"), Progress()
    settings = {name: getattr(options, name) for name in ("kind", "width", "batch")}
    title = (
        f"Layers over a row of {options.kind} chips, {options.width} wide, {options.batch} examples"
    )
    result = new_result("pod", title, arguments, settings)
    sizes = {(n, LAYERS * n): ["weak"] for n in chips}
    for n in () if options.quick else chips:
        sizes.setdefault((n, STRONG), []).append("strong")
    found: dict[Any, dict[str, Any]] = {}
    for (n, layers), scalings in sizes.items():
        title = f"{n} chips, {layers} layers"
        row = {"title": title, "chips": n, "layers": layers, "scalings": scalings, "contenders": []}
        result["rows"].append(row)
        for name in NAMES:
            if wanted(name, options):
                progress(f"{title}: {name}")
                key = layers if name == SCAN else (n, layers, name)
                found[key] = found.get(key) or facts(name, meshes[n], layers, options)
                row["contenders"].append(found[key])
        report.save(result, folder, draw, table)
    progress.clear()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
