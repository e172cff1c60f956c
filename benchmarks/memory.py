"""Suite 5: memory of loss and gradient against the number of layers, by the compiler's own account; nothing is run.

A dense ResNet, as in suite 2: a hand-written scan, its checkpointed form, and the solvers, with one state per interval or
all of them kept, intervals looped or batched. From two lengths the bytes per layer follow, parameters and their gradient
included, and from these the longest network that fits into a memory.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

import lp_jax
from benchmarks import dense, report
from benchmarks.command import Progress
from benchmarks.manifest import device_slug, manifest
from benchmarks.propagation import Propagate, scan, solved

LAYERS = (256, 1024, 4096, 16384)


def contenders(layers: int) -> dict[str, Propagate]:
    """Ways to the gradient, by name."""
    picard, injection = lp_jax.Picard(sweeps=1), lp_jax.Rediscretize()
    found: dict[str, Propagate] = {
        "lax.scan": scan,
        "Serial, checkpoints": solved(lp_jax.Serial(checkpoint_every=math.isqrt(layers))),
        "global Picard, 3/2": solved(lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)),
    }
    for kind, coarse_step in (("Picard 1", picard), ("injection", injection)):
        for storage, interval_map in (("c_points", "loop"), ("c_points", "vmap"), ("all", "loop"), ("all", "vmap")):
            kept = "one state per interval" if storage == "c_points" else "all states"
            forward, adjoint = (
                lp_jax.MGRIT(
                    coarsening=16, iterations=k, coarse_step=coarse_step, storage=storage, interval_map=interval_map
                )
                for k in (2, 1)
            )
            how = "looped" if interval_map == "loop" else "batched"
            found[f"{kind}, m = 16, {kept}, {how}"] = solved(forward, adjoint)
    return found


def bytes_of(propagate: Propagate, layers: int, width: int, batch: int) -> dict[str, int]:
    """What the compiled gradient keeps beside its arguments and results, and what these are."""
    problem = jax.eval_shape(lambda: dense.random_problem(layers, width, batch))

    def loss(weights: Any, y: jax.Array, target: jax.Array) -> Any:
        y, _ = propagate(dense.residual_layer, weights, y)
        return 0.5 * ((y - target) ** 2).sum()

    program = jax.jit(jax.value_and_grad(loss)).lower(*problem).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


def longest(rows: Sequence[dict[str, Any]], capacity: float) -> float:
    """Number of layers that fit: a line through the two longest networks, where memory grows with depth."""
    (n1, b1), (n2, b2) = ((row["layers"], row["total"]) for row in rows[-2:])
    slope = (b2 - b1) / (n2 - n1)
    return n2 + (capacity - b2) / slope


def table(result: dict[str, Any]) -> str:
    """Temporary memory as multiples of the scan's, bytes per layer and the longest network."""
    rows, settings = result["rows"], result["settings"]
    lengths = sorted({row["layers"] for row in rows})
    capacity = settings["capacity"]
    head = [
        "",
        *(f"{n} layers, MB" for n in lengths),
        "× lax.scan",
        "bytes per layer",
        f"layers in {capacity / 2**30:g} GiB",
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    base = [row for row in rows if row["name"] == "lax.scan"][-1]["temporary_bytes"]
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        (n1, b1), (n2, b2) = ((row["layers"], row["total"]) for row in here[-2:])
        lines.append(
            [
                name,
                *(report.number(row["temporary_bytes"] / 1e6, 3) for row in here),
                report.number(here[-1]["temporary_bytes"] / base, 2),
                f"{(b2 - b1) / (n2 - n1):,.0f}",
                f"{longest(here, capacity):,.0f}",
            ]
        )
    about = (
        f"Width {settings['width']}, batch {settings['batch']}, float32. Temporary memory of loss and gradient; bytes per layer "
        "and longest network with parameters and gradient, which the compiler counts as arguments and results."
    )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"# {result['title']}\n\n{report.origin(result)}\n\n{about}\n\n{text}\n"


def draw(result: dict[str, Any]) -> Figure:
    """Temporary memory over the number of layers."""
    fig = report.figure(result, width=11, height=6)
    ax = fig.subplots()
    rows = result["rows"]
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        here = [row for row in rows if row["name"] == name]
        colour = report.INK if number == 0 else f"C{number % 10}"
        style = "-" if number < 3 else ("--" if "batched" in name else "-.")
        ax.plot(
            [row["layers"] for row in here],
            [row["temporary_bytes"] / 1e6 for row in here],
            style,
            color=colour,
            marker="o",
            label=name,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    report.dress(ax, x="layers", y="temporary memory, MB")
    ax.legend(fontsize=10, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return fig


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile everything, and write numbers, table and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", nargs="+", type=int, default=LAYERS, metavar="N", help="numbers of layers, two or more"
    )
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the state (default: 64)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="examples (default: 32)")
    parser.add_argument(
        "--capacity", type=float, metavar="GIB", help="memory to fill (default: the device's, 16 on a CPU)"
    )
    parser.add_argument("--out", type=Path, help="where the files go (default: benchmarks/results/DEVICE)")
    options = parser.parse_args(arguments)
    if len(options.layers) < 2:
        parser.error(f"--layers needs two numbers or more, for the growth per layer; got {options.layers}")
    folder = options.out or Path(__file__).parent / "results" / device_slug()
    folder.mkdir(parents=True, exist_ok=True)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    capacity = limit if options.capacity is None else options.capacity * 2**30
    progress = Progress()
    rows = []
    for layers in sorted(options.layers):
        for name, propagate in contenders(layers).items():
            progress(f"{layers} layers: compiling {name}")
            found = bytes_of(propagate, layers, options.width, options.batch)
            rows.append({"name": name, "layers": layers, **found, "total": sum(found.values())})
    progress.clear()
    result = {
        "suite": "memory",
        "title": "Memory of loss and gradient of a dense ResNet",
        "manifest": manifest("benchmarks.memory", sys.argv[1:] if arguments is None else arguments),
        "settings": {"width": options.width, "batch": options.batch, "capacity": capacity},
        "rows": rows,
    }
    report.save(result, folder, draw, table)
    print(table(result))


if __name__ == "__main__":
    main()
