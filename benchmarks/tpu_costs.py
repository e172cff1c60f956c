"""Cycles of programs that are compiled for a TPU that need not be there, and what the default predicts of them.

XLA's compiler for TPUs estimates the cycles of each kernel. Here they are added up, those of a loop times its turns: of a
plain ``lax.scan``, of the exact solver, of fixed numbers of sweeps and of iterations of Newton's method, and of the default when
it is told that it is that chip. A loop whose length is data turns as often as the default expects; where a tolerance is met, no
serial propagation follows, and none is counted. The numbers of TPUs in lp_jax/_choice/_processor.py are fitted to these tables.

It needs libtpu of the version that jax[tpu] names, and Linux. One process at a time may use it.
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lp_jax
from benchmarks import networks, report
from benchmarks.command import (
    Progress,
    add_numbers,
    add_only,
    common_parser,
    network_row,
    new_result,
    results_folder,
    wanted,
)
from benchmarks.networks import RECURRENT, Network, Pair
from lp_jax import planning
from lp_jax._choice._fastest import typical
from lp_jax._programs._traced import Tracing
from lp_jax.planning._hlo import COLLECTIVES, Instruction, Text

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
"""Cycles a second: a data sheet's products a second over those of all its matrix units in a cycle."""

ITERATIONS = {"full": (5, 1), "shared": (5, 5), "diagonal": (4, 2)}  # of Newton's method
ROWS = """dense,8,4096,32 dense,8,1024,8 dense,16,1024,32 dense,32,1024,32 dense,64,1024,32
    dense,64,4096,32 dense,64,256,256 dense,128,512,32 dense,128,128,256 dense,256,128,32
    dense,256,512,32 dense,512,64,64 dense,512,128,256 dense,1024,64,256 dense,1024,32,32
    block,64,128,32 block,128,64,64 block,256,64,256 block,512,24,256 block,1024,12,256
    mlp,64,64,32 mlp,128,64,64 mlp,256,64,256 mlp,512,16,256
    encoder,64,32,8 encoder,128,32,16 encoder,256,16,16 encoder,512,8,16
    conv,4,32,8 conv,8,32,32 conv,16,16,64 voxels,4,8,4
    gru,16,1024,64 gru,64,1024,16 gru,64,256,64 gru,128,512,32 gru,256,256,64
    paragru,64,1024,16 paragru,64,8192,16 paragru,256,1024,64 paralstm,64,1024,64"""
QUICK = "dense,8,64,8"


def block(width: int, layers: int, batch: int) -> Network:
    """Pre-norm blocks of two dense layers, four times as wide between them."""

    def step(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
        inward, outward = layer.params
        return y + jax.nn.gelu(jax.nn.standardize(y) @ inward) @ outward

    rng = np.random.default_rng(0)
    weights = (
        networks._normal(rng, layers, width, 4 * width) / np.float32(width**0.5),
        networks._normal(rng, layers, 4 * width, width) / np.float32((4 * width) ** 0.5),
    )
    x, target = (networks._normal(rng, batch, width) for _ in range(2))
    weights = networks.Weights(None, weights, None)
    return networks._residual("block", step, weights, x, target, networks.half_mean_square)


def gru(width: int, steps: int, batch: int) -> Network:
    """A recurrent unit with three gates; the inputs are mapped for all times at once."""

    def cell(h: jax.Array, gates: jax.Array, kernel: jax.Array) -> jax.Array:
        of_input, of_state = jnp.split(gates, 3, -1), jnp.split(h @ kernel, 3, -1)
        z, r = (jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
        return (1 - z) * h + z * jnp.tanh(of_input[2] + r * of_state[2])

    def problem(
        weights: networks.Weights, x: jax.Array, solvers: Pair, comm: Any = None
    ) -> dict[str, Any]:
        inward, kernel = weights.layers
        step = lambda h, layer: cell(h, layer.data, layer.shared)  # noqa: E731
        start = jnp.zeros((batch, width), x.dtype)
        return {"step": step, "params": None, "y0": start, "shared": kernel, "data": x @ inward}

    def scan(weights: networks.Weights, x: jax.Array, unroll: int = 1) -> jax.Array:
        inward, kernel = weights.layers
        body = lambda h, gates: (cell(h, gates, kernel), None)  # noqa: E731
        start = jnp.zeros((batch, width), x.dtype)
        return jax.lax.scan(body, start, x @ inward, unroll=unroll)[0]

    rng = np.random.default_rng(0)
    kernels = tuple(networks._normal(rng, n, 3 * width) / np.float32(n**0.5) for n in (9, width))
    x, target = networks._normal(rng, steps, batch, 9), networks._normal(rng, batch, width)
    return Network(
        name="gru",
        weights=networks.Weights(None, kernels, None),
        x=x,
        target=target,
        problem=problem,
        scan=scan,
        measure=networks.half_mean_square,
    )


NETWORKS: Mapping[str, Callable[..., Network]] = {**networks.NETWORKS, "block": block, "gru": gru}


class Counted(NamedTuple):
    """Counts of a compiled program."""

    cycles: int
    kernels: int
    messages: dict[str, int]
    unknown: int  # loops whose length is data


def counted(text: str, layers: int, iterations: tuple[int, int]) -> Counted:
    """Add up the cycles of a compiled program; loops of unknown length make ``iterations``, forward and adjoint.

    Such a loop with a long loop inside is serial propagation after a tolerance that was not met, and makes none. Without a
    tolerance it is a part of a relay, in which one chip after the other makes a turn.
    """
    program = Text(text)

    def turns(loop: Instruction) -> int:
        inside = program.executed(loop.attribute("body"))
        loops = [program.trips(one) or 1 for _, one, _ in inside if one.operation == "while"]
        falls_back = max(loops, default=0) >= max(8, layers / 128) and max(iterations) > 1
        return 0 if falls_back else iterations["_backward" in loop.rest]

    cycles = kernels = unknown = 0
    messages = collections.Counter[str]()
    for _, one, times in program.executed(turns=turns):
        cycles += times * one.cycles
        kernels += times * (one.cycles > 0)
        unknown += one.operation == "while" and program.trips(one) is None
        kind = one.operation.removesuffix("-start")
        messages[kind] += times * (kind in COLLECTIVES)
    return Counted(cycles, kernels, dict(+messages), unknown)


class Scan(NamedTuple):
    """A `lax.scan` of so many layers a turn, on one chip; or on all, with the weights where the layers' are."""

    unroll: int = 1
    spread: bool = False


Way = Scan | Pair | None


def contenders(name: str, width: int, chips: int) -> dict[str, Way]:
    """Scans and pairs of solvers; None is the default."""
    sweeps = (lp_jax.Picard(sweeps=5), lp_jax.Picard(sweeps=3))
    several: dict[str, Way] = {"scan": Scan(), "Serial": networks.SERIAL}
    if chips > 1:
        if name not in RECURRENT:
            several |= {"scan, weights spread": Scan(spread=True), "sweeps 5/3": sweeps}
        return {**several, "default": None}
    if width <= 128:
        several["scan, unroll=8"] = Scan(unroll=8)
    if name == "gru":
        several |= {
            f"Newton, {kind}": tuple(
                lp_jax.Newton(jacobian=kind, iterations=count, batch_axes=1)
                for count in ITERATIONS[kind]
            )
            for kind in ("shared", "full")
        }
    elif name in RECURRENT:
        several["Newton, diagonal"] = tuple(
            lp_jax.Newton(jacobian="diagonal", iterations=count, batch_axes=1)
            for count in ITERATIONS["diagonal"]
        )
    else:
        several["sweeps 5/3"] = sweeps
    return {**several, "default": None}


def lowered(network: Network, which: Way, devices: Sequence[Any]) -> Any:
    """Loss and gradient, lowered for the devices; layers are spread over several of them, of most scans over the first."""
    comm, solvers = None, which or (None, None)
    if isinstance(which, Scan):
        devices, solvers = devices if which.spread else devices[:1], None
        scan = functools.partial(network.scan, unroll=which.unroll)
        network = dataclasses.replace(network, scan=scan)
    mesh = Mesh(np.array(devices), ("layers",), axis_types=(AxisType.Auto,))
    if len(devices) > 1 and solvers:
        comm = lp_jax.MeshComm(mesh)
    loss = network.loss(solvers, comm)
    everywhere, spread = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("layers",)))

    def shape(place: NamedSharding) -> Callable[[Any], jax.ShapeDtypeStruct]:
        return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    by_layer = network.name not in RECURRENT
    weights = jax.tree.map(shape(everywhere), network.weights)
    layers = jax.tree.map(shape(spread if by_layer else everywhere), network.weights.layers)
    batch = jax.tree.map(shape(everywhere), (network.x, network.target))
    gradient = jax.value_and_grad(lambda *given: loss(*given)[0])
    return jax.jit(gradient).trace(weights._replace(layers=layers), *batch).lower()


class Choice(NamedTuple):
    """The solvers that the default chooses, and the seconds that it predicts."""

    pair: Pair
    seconds: float
    scan_seconds: float
    footprint: Any


def chosen(network: Network, comm: Any = None) -> Choice:
    found = []

    def look(weights: Any, x: Any) -> None:
        given = network.problem(weights, x, (None, None), comm)
        names = ("step", "params", "y0", "shared", "data", "t0", "t1", "comm", "has_aux")
        problem = lp_jax.Problem(**{name: given[name] for name in names if name in given})
        tracing = Tracing(problem, (lp_jax.Fastest(), lp_jax.Fastest()))
        pair, seconds = tracing.chosen
        serial = sum(tracing.workers.processor.serial(tracing.footprint, problem.layers))
        found.append(Choice(pair, seconds, serial, tracing.footprint))

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (network.weights, network.x)
    )
    jax.eval_shape(look, *shapes)
    return found[0]


def iterations_of(pair: Pair) -> tuple[int, int]:
    """How often the default expects its loops to turn."""
    jacobian = getattr(pair[0], "jacobian", None)
    if jacobian is not None:
        return ITERATIONS[jacobian]
    return tuple(typical(each.rtol) if each.has_tolerance else 1 for each in pair)


def table(result: dict[str, Any]) -> str:
    """A line for each row: cycles of the scan, of all others relative to it, and the prediction."""
    found = dict.fromkeys(c["name"] for row in result["rows"] for c in row["contenders"])
    names = sorted(found, key=lambda name: (name != "scan", name == "default"))
    lines = [["", "scan, Mcycles", *names[1:], "predicted / cycles"]]
    for row in result["rows"]:
        cycles = {c["name"]: c["cycles"] for c in row["contenders"]}
        ratios = [
            report.number(cycles[n] / cycles["scan"], 3) if n in cycles else "–" for n in names[1:]
        ]
        predicted = row["predicted_cycles"]
        lines.append([
            f"{row['title']}: {row['takes']}", report.number(cycles["scan"] / 1e6, 3), *ratios,
            report.number(predicted / cycles["default"]) if "default" in cycles else "–",
        ])  # fmt: skip
    return report.page(result, report.pipes(lines), __doc__ or "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser(
        "tpu_costs", __doc__ or "", [("", "all rows"), ("--target v5p:2x2x1", "another chip")]
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    row = "network,width,layers,batch"
    about = "Sizes, without a space."
    parser.add_argument("--rows", nargs="+", type=network_row(NETWORKS), metavar=row, help=about)
    add_only(parser, "Compile only the scan and contenders with one of these in their names.")
    parser.add_argument("--target", default="v5e:2x4", help="Topology (default: v5e:2x4).")
    add_numbers(parser, ("--chips", 1, "Number of chips that hold the layers (default: 1)."))
    parser.add_argument("--add", action="store_true", help="Keep earlier rows and programs.")
    parser.add_argument("--dump", help="Folder for the compiled programs.")
    options = parser.parse_args(arguments)
    name = options.target.split(":")[0]
    folder = results_folder(parser, options, f"tpu/{name}x{options.chips}")
    jax.config.update("jax_platforms", "cpu")  # else the process looks for them
    devices = planning.topology(options.target, layers=options.chips).devices
    kind = devices[0].device_kind
    progress = Progress()
    settings = {"target": options.target, "kind": kind, "chips": options.chips}
    result = new_result("tpu_costs", f"Cycles of programs for a {kind}", arguments, settings)
    if options.add and (folder / "tpu_costs.json").exists():
        result["rows"] = report.kept(folder, "tpu_costs")["rows"]
    known = {c["program"]: c for r in result["rows"] for c in r["contenders"]}
    for sizes in options.rows or map(
        network_row(NETWORKS), (QUICK if options.quick else ROWS).split()
    ):
        name, width, layers, batch = sizes
        more = {"formulation": "xla"} if name == "conv" else {}
        network = NETWORKS[name](width, layers, batch, **more)
        mesh = Mesh(np.array(devices), ("layers",), axis_types=(AxisType.Auto,))
        with planning.assume(kind):
            choice = chosen(network, lp_jax.MeshComm(mesh) if options.chips > 1 else None)
        title = f"{name}, {width} wide, {layers} layers, {batch} examples"
        old = next((r for r in result["rows"] if r["title"] == title), {"contenders": []})
        made = {c["name"]: c for c in old["contenders"]}
        clock = CLOCKS[options.target.split(":")[0]]
        for each, which in contenders(name, width, options.chips).items():
            if each != "scan" and not wanted(each, options):
                continue
            if each == "scan" and each in made:
                continue
            progress(f"{title}: {each}")
            start = time.perf_counter()
            try:
                with planning.assume(kind):
                    program = lowered(network, which, devices)
                text = program.as_text()
                key = hashlib.sha256(text.encode()).hexdigest()[:16]
                one = {"name": each, "program": key}
                turns = iterations_of(choice.pair) if which is None else (1, 1)
                if key in known and known[key].get("turns") == [*turns]:
                    one = {**known[key], **one}
                else:
                    executable = program.compile()
                    read = counted(executable.as_text(), layers, turns)
                    if options.dump:
                        with open(
                            f"{options.dump}/{name}-{width}-{layers}-{each.replace('/', '-')}.txt",
                            "w",
                        ) as f:
                            f.write(executable.as_text())
                    one |= {
                        **read._asdict(), "turns": [*turns],
                        "temporary_bytes": executable.memory_analysis().temp_size_in_bytes,
                        "seconds": time.perf_counter() - start,
                    }  # fmt: skip
            except Exception as error:
                print(f"{title}: {each} raises {type(error).__name__}: {str(error)[:300]}")
                continue
            known[key] = made[each] = one
            print(f"{title}: {each} {one['cycles'] / 1e6:.3f} M, unknown {one['unknown']}, "
                  f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
        entry = {
            "title": title, "sizes": [*sizes], "takes": str(choice.pair[0]).partition("(")[0],
            "pair": str(choice.pair), "footprint": choice.footprint._asdict(),
            "predicted_cycles": choice.seconds * clock, "serial_cycles": choice.scan_seconds * clock,
            "contenders": [*made.values()],
        }  # fmt: skip
        result["rows"] = [*(r for r in result["rows"] if r["title"] != title), entry]
        report.save(result, folder, text=table)
    progress.clear()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
