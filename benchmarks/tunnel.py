"""A wind tunnel: what several devices give, measured without them.

Layers sleep for as long as an accelerator would compute: the forward evaluation, the cotangent of the state and the gradient of
the weights take the times of a machine. They run on host devices of one process and on MPI ranks. Programs, meshes, messages and
numbers are real, only the time of a layer is emulated, so that two cores stand for sixteen accelerators.

Speedups are over one device, on which a layer's three times follow each other for all layers. "Net" takes out what the same
program takes while nobody sleeps: callbacks and messages of this host. "Predicted" is the planner's, or the formula of what the
planner does not know; "ideal" is a relay's, a pipeline's and data parallelism's. Evaluations are counted in the callbacks.
"""

import argparse
import collections
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import lp_jax
from benchmarks import emulation, report
from benchmarks.command import (
    Progress,
    add_numbers,
    add_only,
    common_parser,
    new_result,
    positive,
    results_folder,
    wanted,
    warn_if_busy,
)
from benchmarks.emulation import DATA, DEFAULT, KINDS, SCAN, Place
from benchmarks.group import Group, why_no_mpi
from benchmarks.harness import Contender, Tell, measure, relative_error, summary
from lp_jax.planning import Machine

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One table: so many workers and layers, on such a machine."""

    place: Place
    layers: int
    machine: Machine

    @property
    def milliseconds(self) -> list[float]:
        return [1e3 * self.machine.seconds(kind, 1) for kind in KINDS]

    @property
    def alone(self) -> float:
        """Seconds of one device: all layers, three times each, one after the other."""
        return self.layers * sum(self.milliseconds) / 1e3

    @property
    def row(self) -> dict[str, Any]:
        mean = sum(self.milliseconds) / len(KINDS)
        kind, workers = self.place.kind, self.place.workers
        where = "one device" if workers == 1 else f"{workers} {kind}"
        return {
            "title": f"{where}, {self.layers} layers of {mean:g} ms",
            "where": kind,
            "workers": workers,
            "layers": self.layers,
            "milliseconds": mean,
            "costs": self.milliseconds,
            "alone": self.alone,
        }


def contenders(
    setting: Setting, options: argparse.Namespace, group: Group | None, tell: Tell
) -> tuple[list[Contender], list[tuple[str, str]]]:
    """Every method twice, asleep and awake; and who takes no part, as (name, reason)."""
    place, layers, machine = setting.place, setting.layers, setting.machine
    exact = emulation.build(SCAN, Place("devices", 1), layers, machine).gradient
    found, left_out = [], []
    for name in emulation.methods(layers, place.workers, place.kind):
        if not wanted(name, options) and name != SCAN:
            continue
        tell(f"building {name}")
        try:
            program = emulation.build(name, place, layers, machine) if group is None else None
            if group is not None:
                gradient, facts = group.emulate(name, layers, machine)
            else:
                gradient, facts = program.gradient, program.facts  # type: ignore[union-attr]
        except (NotImplementedError, ValueError, TypeError) as error:
            left_out.append((name, f"{type(error).__name__}: {error}"))
            continue
        facts = {**facts, "gradient_error": relative_error(gradient, exact)}
        calls = (program, program and program.awake)
        for own, call in zip((name, emulation.awake(name)), calls, strict=True):
            timer = None if group is None else _timer(group, own)
            found.append(
                Contender(name=own, call=call or (lambda: None), elsewhere=timer, facts=facts)
            )
    return found, left_out


def _timer(group: Group, name: str) -> Any:
    return lambda calls: group.time(name, calls)


def measured(
    setting: Setting, options: argparse.Namespace, tell: Tell
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A row of the result."""
    place = setting.place
    group = Group("ranks", workers=place.workers, threads=1) if place.kind == "ranks" else None
    try:
        entries, left_out = contenders(setting, options, group, tell)
        timings = measure(entries, rounds=options.rounds, tell=tell)
    finally:
        if group is not None:
            group.close()
    told = summary(entries, timings)
    lines = []
    for asleep, awake in zip(told[::2], told[1::2], strict=True):
        asleep["evaluations"] = {
            kind: number / setting.layers for kind, number in asleep["evaluations"].items()
        }
        lines.append(judged(asleep, awake["seconds"]["median"], setting.alone))
    return {**setting.row, "contenders": lines}, left_out


def judged(contender: dict[str, Any], awake: float, alone: float) -> dict[str, Any]:
    """A method with its speedups, measured, net, predicted and ideal, from seconds asleep and awake."""
    seconds = contender["seconds"]["median"]
    net = seconds - awake
    predicted, best = contender["predicted_seconds"], contender["ideal_seconds"]
    kept = {k: v for k, v in contender.items() if k not in ("ratio", "cores", "calls_per_sample")}
    return {
        **kept,
        "awake_seconds": awake,
        "speedup": alone / seconds,
        "net_speedup": alone / net if net > 0 else None,
        "predicted_speedup": alone / predicted if predicted else None,
        "ideal_speedup": alone / best if best else None,
        "measured_over_predicted": seconds / predicted if predicted else None,
        "net_over_predicted": net / predicted if predicted else None,
    }


HEAD = ["", "s", "speedup", "net", "predicted", "ideal", "s / predicted", "net / predicted"]
HEAD += ["error", "forward", "state", "weights"]
LEGEND = (
    "s: median of the rounds. speedup: over one device, whose layers take their three times one after the other. net: "
    "without what the program takes while nobody sleeps. predicted: by the planner, or by the formula of what it does not "
    "know. ideal: without messages, of relay, pipeline and data parallelism. error: relative 2-norm error of the gradient, "
    "against the scan's. forward, state, weights: evaluations of a layer, of the transpose for the state and of that for the "
    "weights, by all workers together, divided by the number of layers."
)


def table(row: dict[str, Any]) -> str:
    lines = []
    for c in row["contenders"]:
        name = c["name"] + (f": {c['takes']}" if c["takes"] else "")
        speedups = ("speedup", "net_speedup", "predicted_speedup", "ideal_speedup")
        ratios = ("measured_over_predicted", "net_over_predicted")
        counts = [report.number(c["evaluations"][kind], 3) for kind in KINDS]
        numbers = [report.number(c[key], 3) for key in (*speedups, *ratios)]
        seconds = report.number(c["seconds"]["median"], 3)
        lines.append([name, seconds, *numbers, report.scientific(c["gradient_error"]), *counts])
    return report.pipes([HEAD, *lines])


def text(result: report.Result) -> str:
    parts = []
    for row in result["rows"]:
        parts += [f"## {row['title']}", table(row)]
        if "manifest" in row:
            parts.append(report.origin(row))
    left_out = [f"Left out: {left['name']} ({left['reason']})." for left in result["left_out"]]
    return report.page(result, *parts, LEGEND, *left_out)


# --- picture and pages ----------------------------------------------------------------------------------------------


def longest(result: report.Result) -> list[dict[str, Any]]:
    """The rows of the layers that were measured in most places; of these the longest, which callbacks disturb least."""
    counts = collections.Counter(row["milliseconds"] for row in result["rows"])
    most = max(counts, key=lambda milliseconds: (counts[milliseconds], milliseconds))
    return [row for row in result["rows"] if row["milliseconds"] == most]


def lines_of(result: report.Result, where: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Of the longest layers: methods by name, and in each what was found, by the number of workers."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in longest(result):
        if row["where"] == where and row["workers"] > 1:
            for contender in row["contenders"]:
                found.setdefault(contender["name"], {})[row["workers"]] = contender
    return found


EXACT = 1e-5  # error of the gradient below which it is rounding, in float32


def draw(result: report.Result) -> Figure:
    """Draw speedups over the number of workers: measured as markers, predicted or ideal as thin lines."""
    devices, ranks = lines_of(result, "devices"), lines_of(result, "ranks")
    counts = sorted({workers for line in devices.values() for workers in line})
    fig = report.figure(result, width=15, height=6.5)
    panels = fig.subplots(1, 2, sharey=True)
    ticks = [2.0**power for power in range(-1, 6)]
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for ax, exact in zip(panels, (True, False), strict=True):
        names = [name for name, line in devices.items() if _is_exact(name, line) == exact]
        for number, name in enumerate(names):
            line, colour = devices[name], colours[number % len(colours)]
            marker = "os^DvP*X<>"[number % 10]
            workers = list(line)
            ax.plot(workers, [line[w]["speedup"] for w in workers], marker=marker, color=colour,
                    linewidth=2, label=name)  # fmt: skip
            best = [line[w]["ideal_speedup"] or line[w]["predicted_speedup"] for w in workers]
            ax.plot(workers, [b or math.nan for b in best], color=colour, linewidth=0.8)
            if name in ranks:
                own = ranks[name]
                ax.plot(list(own), [c["speedup"] for c in own.values()], marker=marker, color=colour,
                        markerfacecolor="white", linewidth=0, markersize=9)  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(counts, [str(count) for count in counts])
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.axhline(1, color=report.INK, linewidth=1)
        title = "Exact gradients" if exact else "Gradients with an error"
        report.dress(ax, title=title, x="devices (hollow: MPI ranks)", y="speedup over one device")
        ax.legend(fontsize=10, frameon=False, loc="upper left")
    return fig


def _is_exact(name: str, line: dict[int, dict[str, Any]]) -> bool:
    """By the most workers, as cycles over few intervals are exact."""
    return bool(line[max(line)]["gradient_error"] < EXACT)


def short(result: report.Result) -> str:
    """The table of docs/workers.md: speedups of the longest layers, what was predicted in brackets."""
    devices, ranks = lines_of(result, "devices"), lines_of(result, "ranks")
    counts = sorted({workers for line in devices.values() for workers in line})
    of_ranks = sorted({workers for line in ranks.values() for workers in line})
    heads = [f"{n} devices" for n in counts] + [f"{n} ranks" for n in of_ranks]
    cells = [["speedup over one", *heads, "error", "evaluations"]]
    for name, line in devices.items():
        measured = [_with_prediction(line.get(n)) for n in counts]
        measured += [_with_prediction(ranks.get(name, {}).get(n)) for n in of_ranks]
        last = line[max(line)]
        error = last["gradient_error"]
        counted = "/".join(report.number(last["evaluations"][kind]) for kind in KINDS)
        words = "rounding" if error < EXACT else f"{error:.0e}".replace("e-0", "e-")
        cells.append([name, *measured, words, re.sub(r"\.0\b", "", counted)])
    return report.pipes(cells)


def _with_prediction(contender: dict[str, Any] | None) -> str:
    if contender is None:
        return ""
    best = contender["ideal_speedup"] or contender["predicted_speedup"]
    return f"{contender['speedup']:.2f} (" + ("–)" if best is None else f"{best:.2f})")


def headlines(result: report.Result) -> tuple[str, str]:
    """The fastest exact method that spreads the layers, on eight devices or the most: a sentence for the README.

    And one with the default beside it.
    """
    devices = lines_of(result, "devices")
    counts = sorted({workers for line in devices.values() for workers in line})
    workers = 8 if 8 in counts else counts[-1]
    there = {name: line[workers] for name, line in devices.items() if workers in line}
    exact = [name for name, c in there.items() if name != DATA and c["gradient_error"] < EXACT]
    best = max(exact, key=lambda name: there[name]["speedup"])
    anchor = "workers.md#what-several-devices-give"
    times = {name: report.number(c["speedup"]) for name, c in there.items()}
    opening = f"Exact on {workers} emulated devices: {times[best]} times"
    second = f"; {DEFAULT} {times[DEFAULT]} times" if DEFAULT in times and best != DEFAULT else ""
    return (
        report.sentences(f"{opening} as fast as on one ([{best}](docs/{anchor}))."),
        report.sentences(f"{opening} as fast as on one ({best}){second} ([table]({anchor}))."),
    )


def texts(result: report.Result) -> dict[str, list[str]]:
    """Sentences and tables of the pages, from a result."""
    readme, listed = headlines(result)
    return {
        "README.md": [readme],
        "docs/benchmarks.md": [listed],
        "docs/workers.md": [short(result)],
    }


# --- the command ----------------------------------------------------------------------------------------------------


def costs(text: str) -> tuple[float, ...]:
    """Milliseconds from the command line: of a kind on average, or of each of the three."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if len(found) not in (1, 3) or not all(0 < x < math.inf for x in found):
        raise argparse.ArgumentTypeError(
            "milliseconds of a layer are one number above 0, such as 20, or three, for the forward evaluation, the cotangent of "
            f"the state and the gradient of the weights, such as 20,20,25; got {text!r}"
        )
    return found


EXAMPLES = [
    ("", "the whole record, half an hour on two cores that nothing else uses"),
    ("--quick", "two devices, 1 ms, to see that all works"),
    ("--devices 4 --ranks 4 --tau 20", "four workers only"),
    ("--only relay pipeline", "some methods"),
    ("--tau 10,10,20 --layers 64", "weights' gradients that take twice as long as the rest"),
    ("--pages benchmarks/results/cpu", "measure nothing: write table and sentences of the documentation"),
]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = common_parser("tunnel", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--devices", nargs="*", type=positive, metavar="P", default=None,
        help="Numbers of host devices; they divide the layers and the 16 examples (default: 1 2 4 8 16).",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", nargs="*", type=positive, metavar="P", default=None,
        help="Numbers of MPI ranks, 2 or more, of the extra mpi; none if empty (default: 2 4 8).",
    )  # fmt: skip
    parser.add_argument(
        "--tau", nargs="+", type=costs, metavar="MS", default=None,
        help="Milliseconds that each of a layer's three costs takes on average, in the machine's ratio; or three numbers with "
        "commas, which no machine changes (default: 20 40).",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="H200", metavar="KIND",
        help="Machine whose data sheet gives the ratio of the three costs (default: H200).",
    )  # fmt: skip
    numbers = (
        ("--layers", 32, "Number of layers (default: 32)."),
        ("--rounds", 3, "Rounds that the medians are of, after a warm-up (default: 3)."),
    )
    add_numbers(parser, *numbers)
    add_only(parser, "Run only methods with one of these in their names.")
    parser.add_argument(
        "--add", action="store_true", help="Keep the rows of an earlier result that are not measured now."
    )  # fmt: skip
    parser.add_argument(
        "--pages", type=Path, metavar="FOLDER",
        help="Measure nothing. Write the table of docs/workers.md, and the sentences of README.md and docs/benchmarks.md, from "
        "the result in this folder; `python docs/images.py` draws the picture.",
    )  # fmt: skip
    return parser


def places(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Place]:
    """Where it is measured, in order."""
    devices, ranks = options.devices, options.ranks
    if devices is None:
        devices = [1, 2] if options.quick else [1, 2, 4, 8, 16]
    if ranks is None:
        ranks = [] if options.quick else [2, 4, 8]
    for count in [*devices, *ranks]:
        if options.layers % count or emulation.EXAMPLES % count:
            parser.error(
                f"{count} workers do not divide {options.layers} layers and {emulation.EXAMPLES} examples; take powers "
                "of two."
            )
    found = [Place("devices", n) for n in devices] + [Place("ranks", n) for n in ranks if n > 1]
    if not found:
        parser.error("--devices and --ranks are both empty; give one of them a number.")
    return found


def machines(options: argparse.Namespace) -> list[Machine]:
    """Machines to emulate, in order."""
    taus = options.tau or ([(1.0,)] if options.quick else [(20.0,), (40.0,)])
    return [
        emulation.accelerator(options.device, 1e-3 * tau[0])
        if len(tau) == 1
        else emulation.machine([1e-3 * each for each in tau])
        for tau in taus
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.pages:
        kept = report.kept(options.pages, "tunnel")
        if not kept["rows"]:
            parser.error(f"{options.pages} holds no tunnel.json: measure first, with --out.")
        print("Wrote " + ", ".join(map(str, report.write_pages(texts(kept), ROOT))))
        return 0
    if options.quick:
        options.layers = min(options.layers, 8)
    where = places(parser, options)
    emulation.set_devices(max(place.workers for place in where))
    chosen = [
        Setting(place, options.layers, machine) for machine in machines(options) for place in where
    ]
    folder = results_folder(parser, options)
    warn_if_busy()
    result = new_result("tunnel", TITLE, arguments, {"device": options.device})
    if options.add:
        earlier = report.kept(folder, "tunnel")
        result["rows"] = [{"manifest": earlier["manifest"], **row} for row in earlier["rows"]]
    reasons = []
    if not hasattr(lp_jax, "pipeline"):
        reasons.append(("pipeline", "this lp_jax has no lp_jax.pipeline"))
    if reason := why_no_mpi():
        reasons.append(("MPI ranks", reason))
        chosen = [setting for setting in chosen if setting.place.kind != "ranks"]
    progress, paths = Progress(), []
    try:
        for setting in chosen:
            title = setting.row["title"]
            row, left_out = measured(setting, options, lambda t, at=title: progress(f"{at}: {t}"))
            progress.clear()
            row = report.rounded(row)
            print(f"\n{title}\n\n{table(row)}", flush=True)
            rows = [*(r for r in result["rows"] if r["title"] != title), row]
            result["rows"] = sorted(rows, key=_order)
            reasons += [(f"{name}, {title}", reason) for name, reason in left_out]
            result["left_out"] = [{"name": name, "reason": reason} for name, reason in reasons]
            drawable = any(lines_of(result, "devices").values())
            paths = report.save(report.rounded(result), folder, draw if drawable else None, text)
    except KeyboardInterrupt:
        progress.clear()
        print(f"Stopped; {len(result['rows'])} tables are in {folder}.", file=sys.stderr)
        return 130
    print(f"\n{LEGEND}\n")
    for left in result["left_out"]:
        print(f"Left out: {left['name']} ({left['reason']}).")
    print("Wrote " + ", ".join(map(str, paths)))
    return 0


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["milliseconds"], row["layers"], row["where"], row["workers"]


TITLE = "Layers on several devices, in emulated time"

if __name__ == "__main__":
    sys.exit(main())
