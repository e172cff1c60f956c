"""Memory of loss and gradient against the number of layers, by the compiler's own account; nothing is run.

A dense ResNet, as in suite `dense`: a hand-written scan, its checkpointed form, and the solvers, with one state per interval or
all of them kept, intervals looped or batched. From two lengths the bytes per layer follow, parameters and their gradient
included, and from these the longest network that fits into a memory.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, add_numbers, common_parser, new_result, results_folder
from benchmarks.networks import Network, Pair, dense

LAYERS, QUICK = (256, 1024, 4096, 16384), (16, 64)


def contenders(layers: int) -> dict[str, Pair | None]:
    """Solvers by name; a scan has none."""
    checkpointed = lp_jax.Serial(checkpoint_every=math.isqrt(layers))
    pairs: dict[str, Pair | None] = {
        "lax.scan": None,
        "Serial, checkpoints": (checkpointed, checkpointed),
        "global Picard, 3/2": (lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)),
    }
    kinds: dict[str, Any] = {
        "Picard 1": lp_jax.Picard(sweeps=1),
        "injection": lp_jax.Rediscretize(),
    }
    stored = {"one state per interval": "c_points", "all states": "all"}
    mapped = {"looped": 1, "batched": math.inf}
    for kind, kept, how in itertools.product(kinds, stored, mapped):
        forward, adjoint = (
            lp_jax.MGRIT(
                coarsening=16,
                iterations=k,
                coarse_step=kinds[kind],
                storage=stored[kept],
                at_once=mapped[how],
            )
            for k in (2, 1)
        )
        pairs[f"{kind}, m = 16, {kept}, {how}"] = forward, adjoint
    return pairs


def bytes_of(network: Network, solvers: Pair | None) -> dict[str, int]:
    """What the compiled gradient of the layers keeps besides its arguments and results, and what these are."""
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (network.weights, network.x, network.target),
    )
    loss = network.loss(solvers)
    program = (
        jax.jit(jax.value_and_grad(lambda *given: loss(*given)[0])).lower(*arguments).compile()
    )
    analysis = program.memory_analysis()
    assert analysis is not None
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


def growth(rows: Sequence[dict[str, Any]]) -> float:
    """Bytes per layer, from the two longest networks."""
    before, after = rows[-2:]
    return float((after["total"] - before["total"]) / (after["layers"] - before["layers"]))


def longest(rows: Sequence[dict[str, Any]], capacity: float) -> float:
    """Number of layers that fit: a line through the two longest networks, where memory grows with depth."""
    return float(rows[-1]["layers"] + (capacity - rows[-1]["total"]) / growth(rows))


def table(result: dict[str, Any]) -> str:
    """Temporary memory as multiples of the scan's, bytes per layer and the longest network."""
    rows, settings = result["rows"], result["settings"]
    lengths = [f"{n} layers, MB" for n in sorted({row["layers"] for row in rows})]
    capacity = settings["capacity"]
    cells = [["", *lengths, "× lax.scan", "bytes per layer", f"layers in {capacity / 2**30:g} GiB"]]
    by_name = {
        row["name"]: [other for other in rows if other["name"] == row["name"]] for row in rows
    }
    base = by_name["lax.scan"][-1]["temporary_bytes"]
    for name, here in by_name.items():
        megabytes = [report.number(row["temporary_bytes"] / 1e6, 3) for row in here]
        multiple = report.number(here[-1]["temporary_bytes"] / base, 2)
        cells.append(
            [name, *megabytes, multiple, f"{growth(here):,.0f}", f"{longest(here, capacity):,.0f}"]
        )
    about = (
        f"Width {settings['width']}, batch {settings['batch']}, float32. Temporary memory of loss and gradient; bytes per layer "
        "and longest network with parameters and gradient, which the compiler counts as arguments and results."
    )
    return report.page(result, about, report.pipes(cells))


EXAMPLES = [
    ("", "the whole table"),
    ("--layers 64 128 --width 16", "two lengths of a narrow network"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("memory", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help=f"Numbers of layers, two or more (default: {LAYERS}).",
    )
    about = (
        ("--width", 64, "Width of the state (default: 64)."),
        ("--batch", 32, "Number of examples (default: 32)."),
    )
    add_numbers(parser, *about)
    parser.add_argument(
        "--capacity",
        type=float,
        metavar="GIB",
        help="Memory to fill, in GiB (default: the device's, 16 on a CPU).",
    )
    options = parser.parse_args(arguments)
    lengths = sorted(options.layers or (QUICK if options.quick else LAYERS))
    if len(lengths) < 2:
        parser.error(f"--layers needs two numbers or more, for the growth per layer; got {lengths}")
    folder = results_folder(parser, options)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    capacity = limit if options.capacity is None else options.capacity * 2**30
    progress = Progress()
    rows = []
    for layers in lengths:
        network = dense(options.width, layers, options.batch)
        for name, solvers in contenders(layers).items():
            progress(f"{layers} layers: compiling {name}")
            nbytes = bytes_of(network, solvers)
            rows.append({"name": name, "layers": layers, **nbytes, "total": sum(nbytes.values())})
    progress.clear()
    settings = {"width": options.width, "batch": options.batch, "capacity": capacity}
    result = new_result(
        "memory", "Memory of loss and gradient of a dense ResNet", arguments, settings
    )
    result["rows"] = rows
    report.save(result, folder, text=table)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
