"""Programs compiled for GPUs and TPUs that need not be there: kernels, bytes, products, messages, memory.

XLA compiles for a named device without it. Kernels, bytes, products, loops, CUDA graphs and messages are read off the compiled
program (benchmarks/hlo.py), next to those of the same network by ``lax.scan``, as it is and with eight layers to a turn, which
is how a scan is fast on a GPU. Times on a GPU are by a model, stated below the table; nothing is run, and nothing autotuned.
For a TPU the compiler says how many cycles it expects each kernel to take.
On a machine that has the GPU, ``--run`` times every program as well, and takes the error of its gradient.
"""

import argparse
import dataclasses
import functools
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
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
    positive,
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
from lp_jax._choice._fastest import SWEEPS
from lp_jax._choice._processor import processor
from lp_jax.planning._compiled import lower, read_program

TARGETS = {
    "h200": Target(3.2e12, 200e12),
    "h100": Target(2.2e12, 200e12),
    "a100": Target(1.4e12, 80e12),
}
"""Bandwidth as it was measured on an H200, two thirds of the data sheet's, and as much of the others'; products of TF32 at some
two fifths of their peak, as small ones reach no more."""

_CYCLES = (
    "Cycles are the compiler's own estimates of each kernel, times the turns of its loops. What a message takes to arrive is not "
    "in them. A loop of unknown length (marked +) counts as one turn; where a tolerance is met, no serial propagation follows. "
    "In a relay one chip works at a time, so that its cycles are those of all chips in a row."
)
_MODEL = (
    "Time by a model: a kernel takes its launch (1.4 us within a CUDA graph, 2.5 us alone), and its bytes at {bandwidth:.3g} "
    "TB/s, and its products at {flops:.3g} TFLOP/s, one after another. A loop of unknown length (marked +) counts as one turn; "
    "where a tolerance is met, no serial propagation follows, and none is counted."
)
ROWS = "dense,64,1024,64 dense,64,4096,64 mlp,256,64,256 mlp,256,256,256 gru,16,1024,64 paragru,64,1024,64 paralstm,64,1024,64"
ROWS_OF_A_TPU = "dense,64,1024,64 mlp,128,64,64 gru,64,256,16"
DEFAULT = "the default"
TYPICAL = {
    "Serial": (0, 0),
    "Picard": (5, 3),
    "Newton": (5, 5),
    "MGRIT": (2, 2),
}  # iterations, forward and adjoint
WRITTEN_OUT = 64  # layers at most whose loop is written out whole, as a loop in Python is


class Microbatches(NamedTuple):
    """A pipeline."""

    number: int


Way = Pair | int | Microbatches


def contenders(network: str, layers: int, devices: int = 1) -> dict[str, Way]:
    """The programs to compile, by name: scans of so many layers to a turn, pairs of solvers, pipelines over several devices."""
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
    over_devices: dict[str, Way] = {}
    if devices > 1 and network not in RECURRENT:
        whole = lp_jax.MGRIT(
            coarsening=-(-layers // devices), coarse_step=lp_jax.Identity(), storage="all"
        )
        over_devices = {
            f"pipeline, {devices} microbatches": Microbatches(devices),
            "identity, one interval each, 2/1": tuple(
                dataclasses.replace(whole, iterations=n) for n in (2, 1)
            ),
            "Picard, 3/2": (lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)),
        }
    return {
        **loops,
        **over_devices,
        **{name: (solver, solver.for_adjoint()) for name, solver in more.items()},
        **pairs(network, layers),
        **({} if network in ("paragru", "paralstm") else {TO_A_TOLERANCE: _met(*SWEEPS)}),
    }


def _of_default(network: Network, mesh: Mesh) -> tuple[Pair, str]:
    """The default's solvers, with as many iterations as networks near an ODE take, and their name with the predicted time."""
    device, comm = mesh.devices.flat[0], lp_jax.MeshComm(mesh) if mesh.size > 1 else None
    problem = network.problem(network.weights, network.x, (lp_jax.Serial(), lp_jax.Serial()), comm)
    with planning.assume(processor(device.platform, device.device_kind)):
        taken = planning.default(lp_jax.Problem(**problem))
    pair = taken.solver, taken.adjoint_solver
    name = f"{type(pair[0]).__name__}, {1e3 * taken.seconds:.3g} ms predicted"
    usual = TYPICAL[type(pair[0]).__name__]
    fixed = (
        s.with_effort(min(n, s.iterations)) if s.has_tolerance else s
        for s, n in zip(pair, usual, strict=True)
    )
    return cast(Pair, tuple(fixed)), name


def _met(solver: lp_jax.Picard, adjoint_solver: lp_jax.Picard) -> Pair:
    """Solvers whose tolerance is met: they do not fall back to serial propagation, which would be counted."""
    return dataclasses.replace(solver, fallback=False), dataclasses.replace(
        adjoint_solver, fallback=False
    )


def lowered(network: Network, which: Way, mesh: Mesh, *, updates: bool) -> Any:
    """Loss and gradient, or a training step, lowered for the devices. Layers are spread over several; a scan is on the first."""
    if isinstance(which, int):
        mesh = Mesh(mesh.devices.flatten()[:1], ("layers",), axis_types=(AxisType.Auto,))
        network = dataclasses.replace(network, scan=functools.partial(network.scan, unroll=which))
    solvers = None if isinstance(which, int | Microbatches) else which
    loss = network.loss(solvers, lp_jax.MeshComm(mesh) if mesh.size > 1 else None)
    if isinstance(which, Microbatches):
        piped = lp_jax.pipeline(
            lambda *given: network.loss()(*given)[0], mesh, in_axes=(None, 0, 0)
        )

        number = math.gcd(which.number, len(network.x))

        def parts(x: jax.Array) -> jax.Array:
            return x.reshape(number, -1, *x.shape[1:])

        def loss(weights: Any, *batch: jax.Array) -> Any:
            return piped(weights, *map(parts, batch)).mean(), None

    gradient = jax.value_and_grad(lambda *given: loss(*given)[0])

    def step(weights: Any, momentum: Any, *batch: Any) -> Any:
        value, slope = gradient(weights, *batch)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, slope)
        return value, jax.tree.map(lambda p, m: p - LEARNING_RATE * m, weights, momentum), momentum

    spread = PartitionSpec("layers") if network.name not in RECURRENT else PartitionSpec()

    def shape(x: Any, spec: PartitionSpec = spread) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    weights = network.weights._replace(layers=jax.tree.map(shape, network.weights.layers))
    given = (weights, weights) if updates else (weights,)
    return lower(step if updates else gradient, (*given, network.x, network.target), mesh)


def compiled(
    program: Any, mesh: Mesh, options: Mapping[str, Any]
) -> tuple[Any, Program, dict[str, Any]]:
    """Compile a program: returns it, its text as read, and its memory, messages and compile time."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        on_gpu = mesh.devices.flat[0].platform != "tpu"
        start = time.perf_counter()
        executable = program.compile(compiler_options={**(dump if on_gpu else {}), **options})
        seconds = time.perf_counter() - start
        texts = (
            [_dumped(Path(folder), name) for name in ("_after_optimizations.txt", "thunk_sequence")]
            if on_gpu
            else [executable.as_text()]
        )
    costs = read_program(executable, mesh, seconds)
    return (
        executable,
        Program(*texts),
        {
            "compile_seconds": seconds,
            "temporary_bytes": costs.memory["temporaries"],
            "argument_bytes": costs.memory["arguments"],
            "output_bytes": costs.memory["outputs"],
            "message_bytes": {kind: size for kind, (_, size) in costs.messages.items()},
        },
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


def facts(program: Program, target: Target | None) -> dict[str, Any]:
    """The record of a program in the result."""
    launches = program.launches
    return {
        "kernels": program.launched,
        "alone": launches.alone if launches else None,
        "graphs": launches.graphs if launches else None,
        "in_graphs": launches.in_graphs if launches else None,
        # kernels of a TPU hold kernels, and its products are convolutions: neither is read
        "bytes": program.nbytes if target else None,
        "flops": program.flops if target else None,
        "kinds": program.kinds(),
        "products": [[*shape, times] for shape, times in program.products().items()],
        "loops": [loop._asdict() for loop in program.loops],
        "unknown": program.unknown,
        "scatters": program.scatters(),
        "collectives": program.collectives(),
        "overlaps": program.overlaps,
        "cycles": program.cycles,
        "model_seconds": program.seconds(target) if target else None,
        "dearest": [kernel._asdict() for kernel in program.dearest(target, 5)],
    }


def table(result: dict[str, Any]) -> str:
    """A table for every row: launches, bytes, products, memory, and the model's time or the compiler's cycles."""
    settings = result["settings"]
    target = TARGETS.get(settings["target"])
    kind = "model_seconds" if target else "cycles"
    what = "training step" if settings["updates"] else "loss and gradient"
    lines = []
    for row in result["rows"]:
        number, name = settings["devices"], settings["target"]
        where = f"{number} x {name.upper()}" if target else f"{number} of the chips of {name}"
        lines.append(f"## {row['title']}, {what}, {where}")
        baseline = next(
            (one for one in row["contenders"] if one["name"].endswith("lax.scan, unroll=8")), None
        )
        cells: list[dict[str, str]] = []
        for one in row["contenders"]:
            mark = "+" if one["unknown"] else ""
            cell = {"": one["name"], "kernels": str(one["kernels"]) + mark}
            if target:
                cell |= {"alone": str(one["alone"]) + mark, "graphs": str(one["graphs"]) + mark}
            cell |= {
                "loops: kernels x turns": _loops(one["loops"]),
            }
            if target:
                cell |= {
                    "GB": report.number(one["bytes"] / 1e9, 3) + mark,
                    "GFLOP": report.number(one["flops"] / 1e9, 3) + mark,
                }
            else:
                cell |= {
                    "messages": str(sum(one["collectives"].values())) + mark,
                    "MB in them": report.number(sum(one["message_bytes"].values()) / 1e6, 3) + mark,
                    "arguments MB": report.number(one["argument_bytes"] / 1e6, 3),
                }
            cell |= {
                "temp MB": report.number(one["temporary_bytes"] / 1e6, 3),
                "trace s": report.number(one["trace_seconds"], 2),
                "compile s": report.number(one["compile_seconds"], 2),
                "ms, model" if target else "million cycles": report.number(
                    one[kind] * (1e3 if target else 1e-6), 3
                )
                + mark,
                "of unroll=8": report.number(one[kind] / baseline[kind], 2) + mark
                if baseline
                else "–",
            }
            cells.append(cell)
        measured = [_measured(one, baseline) for one in row["contenders"]]
        head = [*cells[0], *(_MEASURED if settings["run"] else [])]
        rest = [[*cell.values(), *more] for cell, more in zip(cells, measured, strict=True)]
        lines.append(report.pipes([head, *rest]))
        lines += [
            f"Messages of {one['name']}: {_messages(one)}."
            for one in row["contenders"]
            if one["collectives"]
        ]
    model = (
        _MODEL.format(bandwidth=target.bandwidth / 1e12, flops=target.flops / 1e12)
        if target
        else _CYCLES
    )
    return report.page(result, *lines, model)


_MEASURED = ["ms, measured", "IQR", "of unroll=8", "error"]


def _loops(loops: Sequence[dict[str, Any]]) -> str:
    """Loops that are alike, and how many of them."""
    alike = Counter(f"{loop['kernels']} x {loop['trips'] or '?'}" for loop in loops)
    return ", ".join(one if n == 1 else f"{n} of {one}" for one, n in alike.items()) or "none"


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
    about = f"Sizes, without a space (default: {ROWS}; for a TPU {ROWS_OF_A_TPU})."
    add("--rows", nargs="+", type=network_row(NETWORKS), metavar=row, help=about)
    add_only(parser, "Compile only the scans and contenders with one of these in their names.")
    add("--target", default="h200", help=_TARGET)
    add(
        "--devices",
        type=positive,
        metavar="N",
        help="How many of the target's devices hold the layers (default: all).",
    )
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


_TARGET = (
    f"Devices to compile for: {', '.join(TARGETS)}, or several, as h200:4; or a TPU's kind and shape, as v5e:2x4 or v4:2x2x1 "
    "(default: h200)."
)
_EXAMPLES = [
    ("", "all rows for an H200"),
    ("--rows dense,64,1024,64 --only Picard", "a few programs"),
    ("--target h100:4", "layers over four GPUs"),
    ("--target v5e:2x4", "layers over eight chips of a TPU"),
    ("--target v5e:2x4 --devices 1", "one of these chips"),
]


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Options of XLA, numbers and truth values as such."""
    known: dict[str, Any] = {"true": True, "false": False}
    pairs = (text.partition("=")[::2] for text in given)
    return {
        name: known.get(value, int(value) if value.lstrip("-").isdigit() else value)
        for name, value in pairs
    }


def _absent(target: str, devices: int | None) -> Mesh:
    """Devices that need not be here."""
    jax.config.update("jax_platforms", "cpu")  # else the process looks for them
    return planning.topology(target, **({} if devices is None else {"layers": devices}))


def _wanted(row: Row, devices: int, options: argparse.Namespace) -> dict[str, Way]:
    """The contenders of a row that were asked for. Scans are on one device."""
    name, _, layers, _ = row
    one = "one device, " if devices > 1 else ""
    return {
        one * isinstance(which, int) + title: which
        for title, which in contenders(name, layers, devices).items()
        if isinstance(which, int) or wanted(title, options)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    kind, _, shape = options.target.lower().partition(":")
    if options.run and (shape or options.devices or options.updates):
        parser.error(
            "--run times loss and gradient on one GPU. Leave --devices, --updates and the number in --target out."
        )
    try:
        if options.run:
            mesh = Mesh(np.array(jax.devices("gpu")[:1]), ("layers",), axis_types=(AxisType.Auto,))
        else:
            mesh = _absent(options.target, options.devices)
    except RuntimeError as error:
        parser.error(f"There is no GPU here ({error}); leave --run out.")
    except ValueError as error:
        parser.error(str(error))
    several = f"x{mesh.size}" if mesh.size > 1 else ""
    folder = results_folder(parser, options, kind + several if kind in TARGETS else "tpu")
    target, progress = TARGETS.get(kind), Progress()
    sizes = QUICK if options.quick else ROWS if target else ROWS_OF_A_TPU
    rows = options.rows or map(network_row(NETWORKS), sizes.split())
    settings = {name: getattr(options, name) for name in ("updates", "run", "xla")}
    settings = {"target": kind if target else options.target, "devices": mesh.size, **settings}
    of = "a GPU" if target else "a TPU"
    result = new_result(
        "program", f"Programs {'on' if options.run else 'for'} {of}", arguments, settings
    )
    result["suite"] += "_run" * options.run
    if not target:
        result["suite"] += f"_{kind}" + several
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
            ways = _wanted(row, mesh.size, options)
            if wanted(DEFAULT, options):
                which, about = _of_default(network, mesh)
                ways[f"{DEFAULT}: {about}"] = which
            for each, which in ways.items():
                progress(f"{title}: tracing {each}")
                start = time.perf_counter()
                program = lowered(network, which, mesh, updates=options.updates)
                facts_of[each] = {"name": each, "trace_seconds": time.perf_counter() - start}
                programs[each] = pool.submit(compiled, program, mesh, _options(options.xla))
            if options.run:
                with jax.default_matmul_precision("highest"):
                    program = lowered(network, 8, mesh, updates=False)
                programs[EXACT] = pool.submit(compiled, program, mesh, {})
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
