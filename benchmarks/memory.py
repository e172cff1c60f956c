"""Memory of loss and gradient against the number of layers, by the compiler's own account; nothing is run.

A dense ResNet, as in suite `dense`: a hand-written scan, its checkpointed form, and the solvers, with one state per interval or
all of them kept, intervals looped or batched. From two lengths the bytes per layer follow, parameters and their gradient
included, and from these the longest network that fits into a memory.

With ``--pipeline``: a device's temporary memory by `lp_jax.pipeline` beside a relay and a scan, against the numbers of layers,
devices and microbatches, and the formula. A device of a pipeline holds, for every microbatch, what its layers keep for the
gradient and the cotangents of their states; with checkpoints, the state that enters it, and once what its layers keep.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, add_numbers, common_parser, new_result, results_folder
from benchmarks.emulation import Place, set_devices
from benchmarks.networks import SERIAL, Network, Pair, dense

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


# --- pipelines ------------------------------------------------------------------------------------------------------

PIPED_LAYERS, DEVICES, MICROBATCHES = (32, 64), (1, 2, 4, 8), (1, 4, 8)
WAYS = ("lax.scan", "relay", "pipeline", "pipeline, checkpoint")
KEPT = 4
"""Arrays of a state's size that a layer keeps: the state that enters it, two of the tanh, and the cotangent of its product."""


def temporaries(network: Network, way: str, microbatches: int, workers: int) -> int:
    """Bytes of temporary arrays on one device, of the layers' gradient for so many times the network's examples."""
    mesh, piped = Place("devices", workers).mesh, way.startswith("pipeline")
    spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("layers",), ()))
    relay = lp_jax.MeshComm(mesh, sequential="relay") if way == "relay" else None
    loss = network.loss(SERIAL if relay else None, relay)

    def one(weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return loss(weights, x, target)[0]

    def mean(weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        axes, checkpoint = (None, 0, 0), way.endswith("checkpoint")
        mapped = lp_jax.pipeline(one, mesh, in_axes=axes, checkpoint=checkpoint)
        return jnp.mean(mapped(weights, x, target))

    def given(x: Any) -> jax.ShapeDtypeStruct:
        examples = (microbatches, len(x)) if piped else (microbatches * len(x),)
        return jax.ShapeDtypeStruct((*examples, *x.shape[1:]), x.dtype, sharding=everywhere)

    weights = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=spread), network.weights
    )
    gradient = jax.jit(jax.grad(mean if piped else one), out_shardings=spread)
    program = gradient.lower(weights, given(network.x), given(network.target)).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def formula(way: str, layers: int, microbatches: int, workers: int) -> int:
    """States that a device holds."""
    mine = math.ceil(layers / workers)
    if way.endswith("checkpoint"):
        return microbatches + KEPT * mine
    return microbatches * KEPT * mine


def piped_table(result: dict[str, Any]) -> str:
    """Megabytes on a device, and those of the pipelines by the formula in brackets."""
    state = 4e-6 * result["settings"]["width"] * result["settings"]["batch"]
    cells = [["layers", "devices", "microbatches", *(f"{way}, MB" for way in WAYS)]]
    for row in result["rows"]:
        sizes = row["layers"], row["microbatches"], row["workers"]
        line = [str(row[key]) for key in ("layers", "workers", "microbatches")]
        for way in WAYS:
            words = report.number(row["bytes"][way] / 1e6, 3) if way in row["bytes"] else ""
            if way.startswith("pipeline"):
                words += f" ({report.number(state * formula(way, *sizes), 3)})"
            line.append(words)
        cells.append(line)
    about = (
        f"Dense layers of width {result['settings']['width']}, {result['settings']['batch']} examples a microbatch, float32: "
        f"{report.number(state)} MB a state. Temporary memory of the gradient on one device; in brackets: by the formula, "
        f"{KEPT} states of each of its layers for every microbatch, and with checkpoints one entering state for every "
        f"microbatch and {KEPT} states of each of its layers. Programs of several host devices hold one state more for every "
        "layer and microbatch, also with checkpoints: the states of a solution, which the compiler does not take out of their "
        "loops."
    )
    return report.page(result, about, report.pipes(cells))


def piped(options: Any, arguments: Sequence[str] | None, folder: Any) -> None:
    lengths = sorted(options.layers or ((8,) if options.quick else PIPED_LAYERS))
    devices, counts = (DEVICES[:2], MICROBATCHES[:2]) if options.quick else (DEVICES, MICROBATCHES)
    settings = {"width": options.width, "batch": options.batch}
    title = "Memory of a pipeline's gradient on one device"
    result = new_result("memory", title, arguments, settings) | {"suite": "memory_pipeline"}
    progress = Progress()
    for layers, workers, microbatches in itertools.product(lengths, devices, counts):
        network, found = dense(options.width, layers, options.batch), {}
        for way in WAYS[workers > 1 :]:  # a scan is on one device
            progress(f"{layers} layers, {workers} devices, {microbatches} microbatches: {way}")
            found[way] = temporaries(network, way, microbatches, workers)
        sizes = {"layers": layers, "workers": workers, "microbatches": microbatches}
        result["rows"].append({**sizes, "bytes": found})
    progress.clear()
    report.save(result, folder, text=piped_table)
    print(piped_table(result))


EXAMPLES = [
    ("", "the whole table"),
    ("--layers 64 128 --width 16", "two lengths of a narrow network"),
    (
        "--pipeline --batch 256",
        "a pipeline beside a relay and a scan, on 1 to 8 devices; --batch of a microbatch",
    ),
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
    parser.add_argument(
        "--pipeline", action="store_true", help="Compile pipelines, a relay and a scan instead."
    )
    options = parser.parse_args(arguments)
    if options.pipeline:
        set_devices(max(DEVICES))
        piped(options, arguments, results_folder(parser, options))
        return 0
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
