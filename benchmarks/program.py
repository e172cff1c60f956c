"""Programs compiled for a GPU that need not be there: kernels, bytes, products, messages.

XLA compiles for a named device without it. Kernels, bytes, products, loops, CUDA graphs and messages are read off the
compiled program (benchmarks/hlo.py), beside those of the same network by ``lax.scan``, as it is and with eight layers to a turn,
which is how a scan is fast on a GPU. Times are by a model, stated below the table; nothing is run, and nothing autotuned.
On a machine that has the GPU, ``--run`` times every program as well, and takes the error of its gradient.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lp_jax
from benchmarks import report
from benchmarks.command import (
    Progress,
    Row,
    add_numbers,
    add_only,
    common_parser,
    network_row,
    new_result,
    results_folder,
    wanted,
)
from benchmarks.harness import Contender, Tell, measure, relative_error, spread
from benchmarks.hlo import Program, Target
from benchmarks.manifest import cores
from benchmarks.networks import NETWORKS, RECURRENT, Network, Pair
from benchmarks.single import TO_A_TOLERANCE, pairs
from benchmarks.training import LEARNING_RATE, MOMENTUM
from lp_jax import planning
from lp_jax._solvers._default import SWEEPS

_SPECS = Path(__file__).parent / "targets"
TARGETS = {
    "h200": Target(3.2e12, 200e12),
    "h100": Target(2.2e12, 200e12),
    "a100": Target(1.4e12, 80e12),
}
"""Bandwidth as it was measured on an H200, two thirds of the data sheet's, and as much of the others'; products of TF32 at some
two fifths of their peak, as small ones reach no more."""

_MODEL = (
    "Time by a model: a kernel takes its launch (1.4 us within a CUDA graph, 2.5 us alone), and its bytes at {bandwidth:.3g} "
    "TB/s, and its products at {flops:.3g} TFLOP/s, one after another. A loop of unknown length (marked +) counts as one turn; "
    "where a tolerance is met, no serial propagation follows, and none is counted."
)
ROWS = "dense,64,1024,64 dense,64,4096,64 mlp,256,64,256 mlp,256,256,256 gru,16,1024,64 paragru,64,1024,64 paralstm,64,1024,64"
DEFAULT = "the default"
TYPICAL = {
    "Serial": (0, 0),
    "Picard": (5, 3),
    "Newton": (5, 5),
    "MGRIT": (2, 2),
}  # iterations, forward and adjoint
WRITTEN_OUT = 64  # layers at most whose loop is written out whole, as a loop in Python is


def contenders(network: str, layers: int) -> dict[str, Pair | int]:
    """What is compiled: a scan of so many layers to a turn, or a pair of solvers."""
    two: dict[str, Any] = {"coarsening": 16, "coarse_step": lp_jax.Picard(sweeps=1)}
    more = {
        "Picard, 8 sweeps": lp_jax.Picard(sweeps=8),
        "Picard, 8 windows, 4 sweeps": lp_jax.Windowed(sweeps=4, windows=8),
        "MGRIT, m = 16": lp_jax.MGRIT(**two),
        "MGRIT, m = 16, all kept": lp_jax.MGRIT(**two, storage="all"),
    }
    if network in ("paragru", "paralstm"):
        more = {}
    if network == "gru":
        more["Newton, 5 after 16 relaxations"] = lp_jax.Newton(
            iterations=5, relaxations=16, batch_axes=1
        )
        more["Newton, shared, 5/5"] = lp_jax.Newton(jacobian="shared", iterations=5)
        more["Picard, secant, to 1e-3"] = lp_jax.Secant(sweeps=64, rtol=1e-3)
    loops = {"lax.scan": 1, "lax.scan, unroll=8": 8}
    if network == "mlp" and layers <= WRITTEN_OUT:
        loops["every layer written out"] = layers
    return {
        **loops,
        **{name: (solver, solver.for_adjoint()) for name, solver in more.items()},
        **pairs(network, layers),
        **({} if network in ("paragru", "paralstm") else {TO_A_TOLERANCE: _met(*SWEEPS)}),
    }


def _of_default(network: Network, target: str) -> tuple[Pair, str]:
    """The default's solvers, with as many iterations as networks near an ODE take, and their name with the predicted time."""
    with planning.assume(target):
        taken = planning.default(
            lp_jax.Problem(
                **network.problem(network.weights, network.x, (lp_jax.Serial(), lp_jax.Serial()))
            )
        )
    pair = taken.solver, taken.adjoint_solver
    name = f"{type(pair[0]).__name__}, {1e3 * taken.seconds:.3g} ms predicted"
    usual = TYPICAL[type(pair[0]).__name__]
    fixed = (
        planning.with_effort(s, min(n, s.iterations)) if s.has_tolerance else s
        for s, n in zip(pair, usual, strict=True)
    )
    return cast(Pair, tuple(fixed)), name


def _met(solver: lp_jax.Picard, adjoint_solver: lp_jax.Picard) -> Pair:
    """Solvers whose tolerance is met: they do not fall back to serial propagation, which would be counted."""
    return dataclasses.replace(solver, fallback=False), dataclasses.replace(
        adjoint_solver, fallback=False
    )


def lowered(network: Network, which: Pair | int, devices: Sequence[Any], *, updates: bool) -> Any:
    """Loss and gradient, or a training step, lowered for the devices; layers are spread over several of them."""
    mesh = Mesh(np.array(devices), ("layers",), axis_types=(AxisType.Auto,))
    comm = lp_jax.MeshComm(mesh) if len(devices) > 1 else None
    if isinstance(which, int):
        network = dataclasses.replace(network, scan=functools.partial(network.scan, unroll=which))
    loss = network.loss(None if isinstance(which, int) else which, comm)
    gradient = jax.value_and_grad(lambda *given: loss(*given)[0])

    def step(weights: Any, momentum: Any, *batch: Any) -> Any:
        value, slope = gradient(weights, *batch)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, slope)
        return value, jax.tree.map(lambda p, m: p - LEARNING_RATE * m, weights, momentum), momentum

    everywhere, spread = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("layers",)))
    by_layer = network.name not in RECURRENT

    def shape(place: NamedSharding) -> Callable[[Any], jax.ShapeDtypeStruct]:
        return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    weights = jax.tree.map(shape(everywhere), network.weights)
    weights = weights._replace(
        layers=jax.tree.map(shape(spread if by_layer else everywhere), network.weights.layers)
    )
    batch = jax.tree.map(shape(everywhere), (network.x, network.target))
    with jax.default_device("gpu"):  # the library writes programs for it, though it is not here
        traced = (
            jax.jit(step).trace(weights, weights, *batch)
            if updates
            else jax.jit(gradient).trace(weights, *batch)
        )
    return traced.lower()


def compiled(program: Any, options: Mapping[str, Any]) -> tuple[Any, Program, dict[str, Any]]:
    """Compile a program: returns it, its text as read, and its memory and compile time."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        executable = program.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options}
        )
        seconds = time.perf_counter() - start
        text, launches = (
            _dumped(Path(folder), name) for name in ("_after_optimizations.txt", "thunk_sequence")
        )
    temporary = executable.memory_analysis().temp_size_in_bytes
    return (
        executable,
        Program(text, launches),
        {"compile_seconds": seconds, "temporary_bytes": temporary},
    )


def _dumped(folder: Path, name: str) -> str:
    """The longest of the files of this name: that of the program itself, after the last pass."""
    paths = [path for path in folder.iterdir() if name in path.name and "buffer" not in path.name]
    last = [path for path in paths if "after_thunk_passes" in path.name] or paths
    return max(last, key=lambda path: path.stat().st_size).read_text()


def timed(
    network: Network, programs: Mapping[str, Any], rounds: int, tell: Tell
) -> dict[str, dict[str, Any]]:
    """Seconds of each program on the device that is here, side by side, and the error of its gradient.

    A sample is of calls that are dispatched in a row and waited for together, as the steps of a training loop are. The error is
    that of the layers' gradient, relative to a scan whose products are float32's in full.
    """
    weights, *batch = jax.tree.map(jnp.asarray, (network.weights, network.x, network.target))

    def call(program: Any) -> Callable[[], Any]:
        return lambda: [program(weights, *batch) for _ in range(IN_A_ROW)][-1]

    gradients = {
        name: jax.tree.map(np.asarray, program(weights, *batch)[1].layers)
        for name, program in programs.items()
    }
    entries = [
        Contender(name=name, call=call(program))
        for name, program in programs.items()
        if name != EXACT
    ]
    timings = measure(entries, rounds=rounds, min_time=0.02, budget=2.0, tell=tell)
    return {
        entry.name: {
            "seconds": spread([s / IN_A_ROW for s in timing.seconds]),
            "rounds": len(timing.rounds),
            "gradient_error": relative_error(gradients[entry.name], gradients[EXACT]),
        }
        for entry, timing in zip(entries, timings, strict=True)
    }


IN_A_ROW = 8
EXACT = "lax.scan, all of float32"


def facts(program: Program, target: Target) -> dict[str, Any]:
    """What is kept of a program."""
    launches = program.launches
    return {
        "kernels": program.launched,
        "alone": launches.alone if launches else None,
        "graphs": launches.graphs if launches else None,
        "in_graphs": launches.in_graphs if launches else None,
        "bytes": program.nbytes,
        "flops": program.flops,
        "kinds": program.kinds(),
        "products": [[*shape, times] for shape, times in program.products().items()],
        "loops": [loop._asdict() for loop in program.loops],
        "unknown": program.unknown,
        "scatters": program.scatters(),
        "collectives": program.collectives(),
        "overlaps": program.overlaps,
        "model_seconds": program.seconds(target),
        "dearest": [kernel._asdict() for kernel in program.dearest(target, 5)],
    }


def table(result: dict[str, Any]) -> str:
    """A table for every row: launches, bytes, products, memory and the model's time."""
    settings = result["settings"]
    target = TARGETS[settings["target"]]
    what = "training step" if settings["updates"] else "loss and gradient"
    lines = []
    head = [
        "",
        "kernels",
        "alone",
        "graphs",
        "loops: kernels x turns",
        "GB",
        "GFLOP",
        "temp MB",
        "trace s",
        "compile s",
    ]
    head += ["ms, model", "of unroll=8"]
    head += ["ms, measured", "IQR", "of unroll=8", "error"] if settings["run"] else []
    for row in result["rows"]:
        lines.append(
            f"## {row['title']}, {what}, {settings['devices']} x {settings['target'].upper()}"
        )
        baseline = next(
            (one for one in row["contenders"] if one["name"] == "lax.scan, unroll=8"), None
        )
        best = baseline and baseline["model_seconds"]
        cells = [head]
        for one in row["contenders"]:
            loops = (
                ", ".join(f"{loop['kernels']} x {loop['trips'] or '?'}" for loop in one["loops"])
                or "none"
            )
            mark = "+" if one["unknown"] else ""
            ratio = report.number(one["model_seconds"] / best, 2) + mark if best else "–"
            cells.append([
                one["name"], str(one["kernels"]) + mark, str(one["alone"]) + mark, str(one["graphs"]) + mark, loops,
                report.number(one["bytes"] / 1e9, 3) + mark, report.number(one["flops"] / 1e9, 3) + mark,
                report.number(one["temporary_bytes"] / 1e6, 3),
                report.number(one["trace_seconds"], 2), report.number(one["compile_seconds"], 2),
                report.number(1e3 * one["model_seconds"], 3) + mark, ratio, *_measured(one, baseline),
            ])  # fmt: skip
        lines.append(report.pipes(cells))
        lines += [
            f"Messages of {one['name']}: {_messages(one)}."
            for one in row["contenders"]
            if one["collectives"]
        ]
    model = _MODEL.format(bandwidth=target.bandwidth / 1e12, flops=target.flops / 1e12)
    return report.page(result, *lines, model)


def _measured(one: dict[str, Any], baseline: dict[str, Any] | None) -> list[str]:
    """The cells of a program that was run."""
    if "seconds" not in one or baseline is None:
        return []
    seconds = one["seconds"]
    return [
        report.number(1e3 * seconds["median"], 3),
        report.number(1e3 * (seconds["q3"] - seconds["q1"])),
        report.number(seconds["median"] / baseline["seconds"]["median"], 2),
        report.scientific(one["gradient_error"]),
    ]


def _messages(one: dict[str, Any]) -> str:
    kinds = ", ".join(f"{times} {kind}" for kind, times in one["collectives"].items())
    beside = sum(kernels > 0 for _, kernels in one["overlaps"])
    return f"{kinds}; {beside} of {len(one['overlaps'])} in the text have kernels between start and end"


def _parser() -> argparse.ArgumentParser:
    parser = common_parser("program", __doc__ or "", _EXAMPLES)
    add = parser.add_argument
    row = "network,width,layers,batch"
    about = f"Sizes, without a space (default: {ROWS})."
    add("--rows", nargs="+", type=network_row(NETWORKS), metavar=row, help=about)
    add_only(parser, "Compile only the scans and contenders with one of these in their names.")
    add("--target", choices=TARGETS, default="h200", help="Device to compile for (default: h200).")
    add_numbers(parser, ("--devices", 1, "Number of devices that hold the layers (default: 1)."))
    add(
        "--updates",
        action="store_true",
        help="Compile training steps, SGD with momentum (default: loss and gradient).",
    )
    add(
        "--run",
        action="store_true",
        help="Time the programs, too, on the GPU of this machine; one device.",
    )
    add_numbers(parser, ("--rounds", 10, "Number of rounds of timing, with --run (default: 10)."))
    about = "Options of XLA, such as xla_gpu_graph_min_graph_size=1."
    add("--xla", nargs="+", default=[], metavar="NAME=VALUE", help=about)
    return parser


_EXAMPLES = [
    ("", "all rows for an H200"),
    ("--rows dense,64,1024,64 --only Picard", "a few programs"),
    ("--devices 4 --target h100", "layers over four devices"),
]


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Options of XLA, numbers and truth values as such."""
    known: dict[str, Any] = {"true": True, "false": False}
    pairs = (text.partition("=")[::2] for text in given)
    return {
        name: known.get(value, int(value) if value.lstrip("-").isdigit() else value)
        for name, value in pairs
    }


def _absent(target: str, count: int) -> Any:
    """Devices that need not be here."""
    jax.config.update("jax_platforms", "cpu")  # else the plugin asks for a driver
    spec = (_SPECS / f"{target}.txtpb").read_text()
    shape = f"1x1x{count}"
    return topologies.get_topology_desc("", "cuda", target_config=spec, topology=shape).devices


def _wanted(row: Row, options: argparse.Namespace) -> dict[str, Pair | int]:
    """The contenders of a row that were asked for."""
    name, _, layers, _ = row
    return {
        title: which
        for title, which in contenders(name, layers).items()
        if (options.devices == 1 if isinstance(which, int) else wanted(title, options))
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run and (options.devices > 1 or options.updates):
        parser.error(
            "--run times loss and gradient on one device. Leave --devices and --updates out."
        )
    several = f"x{options.devices}" if options.devices > 1 else ""
    folder = results_folder(parser, options, options.target + several)
    try:
        devices = jax.devices() if options.run else _absent(options.target, options.devices)
    except Exception as error:  # of the runtime, which has no class of its own
        what = "There is no GPU here" if options.run else "XLA cannot compile for a GPU here"
        remedy = "leave --run out" if options.run else "pip install -e '.[gpu-program]'"
        parser.error(f"{what} ({error}); {remedy}.")
    rows = options.rows or map(network_row(NETWORKS), (QUICK if options.quick else ROWS).split())
    target, progress = TARGETS[options.target], Progress()
    settings = {
        name: getattr(options, name) for name in ("target", "devices", "updates", "run", "xla")
    }
    result = new_result(
        "program", f"Programs {'on' if options.run else 'for'} a GPU", arguments, settings
    )
    result["suite"] += "_run" * options.run
    with ThreadPoolExecutor(cores() if options.run else 1) as pool:

        def begin(
            row: Row,
        ) -> tuple[str, Network, dict[str, dict[str, Any]], dict[str, Future[Any]]]:
            """Trace a row's programs, and have them compiled."""
            name, width, layers, batch = row
            network = NETWORKS[name](
                width, layers, batch, **({"formulation": "xla"} if name == "conv" else {})
            )
            title, facts_of, programs = (
                f"{name}, {width} wide, {layers} layers, {batch} examples",
                {},
                {},
            )
            several = _wanted(row, options)
            if options.devices == 1 and wanted(DEFAULT, options):
                which, about = _of_default(network, options.target)
                several[f"{DEFAULT}: {about}"] = which
            for each, which in several.items():
                progress(f"{title}: tracing {each}")
                start = time.perf_counter()
                program = lowered(
                    network, which, devices[: options.devices], updates=options.updates
                )
                facts_of[each] = {"name": each, "trace_seconds": time.perf_counter() - start}
                programs[each] = pool.submit(compiled, program, _options(options.xla))
            if options.run:
                with jax.default_matmul_precision("highest"):
                    program = lowered(network, 8, devices[:1], updates=False)
                programs[EXACT] = pool.submit(compiled, program, {})
            return title, network, facts_of, programs

        begun = map(begin, rows)
        if options.run:  # nothing is compiled while programs are timed
            begun = iter(list(begun))
            progress("compiling")
            pool.shutdown()
        for title, network, facts_of, programs in begun:
            for each, one in facts_of.items():
                progress(f"{title}: compiling {each}")
                _, read, costs = programs[each].result()
                one |= costs | facts(read, target)
            if options.run:
                ready = {each: future.result()[0] for each, future in programs.items()}
                times = timed(
                    network,
                    ready,
                    options.rounds,
                    lambda text, title=title: progress(f"{title}: {text}"),
                )
                facts_of = {each: one | times[each] for each, one in facts_of.items()}
            result["rows"].append({"title": title, "contenders": list(facts_of.values())})
            report.save(result, folder, text=table)
    progress.clear()
    print(table(result))
    return 0


QUICK = "dense,4,64,4"

if __name__ == "__main__":
    sys.exit(main())
