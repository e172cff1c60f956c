"""Prediction against measurement: what `lp_jax.planning` says of every committed row of the suites that measure time.

The layers of each row are calibrated here and now, in a process with as many threads as the row's; ratios to serial
propagation then follow from the schedule of each solver, and stand beside those that were measured by dense, single and
ranks. With two workers all takes as much longer as the gradient of half of the layers on each of them, at the
same time, takes longer than on one alone; messages are measured between such workers.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import dense, report, single
from benchmarks.command import Progress, common_parser, new_result, results_folder
from benchmarks.group import Group, why_no_mpi
from benchmarks.harness import Contender, Tell, measure, ratios
from benchmarks.networks import SERIAL, SETTINGS, Pair
from lp_jax import planning

_CLOSE, _APART = 0.25, 0.15  # of a good prediction; of two times that are told apart

Predict = Callable[[planning.Machine], float]
"""Seconds of a training step."""


class Measured(NamedTuple):
    """A row of a result: what ran, and the ratios to the first contender."""

    suite: str  # where it is from
    sizes: tuple[str, int, int, int]  # network, width, layers, batch
    threads: int  # of the baseline
    # name, what predicts the seconds, workers, ratio to the library's serial propagation (or else to the baseline)
    ratios: list[tuple[str, Predict, int, float]]


def solved(pair: Pair, layers: int, workers: int = 1) -> Predict:
    """The time that solvers take with this number of workers."""
    return lambda machine: planning.predict(*pair, layers, machine, workers=workers).seconds


def measured(folder: Path) -> Iterator[Measured]:
    """All rows of the results in a folder."""
    for suite in ("dense", "single", "ranks"):
        for row in report.kept(folder, suite)["rows"]:
            network = row.get("network", "dense")
            batch = row.get("batch", dense.BATCH)
            sizes = network, row.get("width", row.get("channels")), row["layers"], batch
            times = {c["name"]: c["ratio"]["median"] for c in row["contenders"]}
            serial = times.get("Serial", times.get("Serial, 1 thread", 1.0))
            predictors = []
            for name in list(times)[1:]:
                setting, workers = _workers(name)
                seconds = _predictor(suite, sizes, setting, workers)
                if seconds is not None:
                    predictors.append((name, seconds, workers, times[name] / serial))
            yield Measured(suite, sizes, row["contenders"][0]["threads"], predictors)


def _workers(name: str) -> tuple[str, int]:
    """The setting, and the workers, of a contender's name."""
    match = re.fullmatch(r"(.*), (\d+) (devices|ranks)", name)
    return (match[1], int(match[2])) if match else (name, 1)


def _predictor(
    suite: str, sizes: tuple[str, int, int, int], setting: str, workers: int
) -> Predict | None:
    """What predicts the seconds; None for what is no setting of the suite, or takes an effort that depends on the problem."""
    network, _, layers, _ = sizes
    if suite == "ranks":
        return (
            solved(SETTINGS[setting](layers, workers), layers, workers)
            if setting in SETTINGS
            else None
        )
    pairs = dense.PAIRS if suite == "dense" else single.pairs(network, layers)
    pair = pairs.get(setting)
    return None if pair is None or any(s.has_tolerance for s in pair) else solved(pair, layers)


class Machines:
    """What the layers of a row take: alone, with the threads of the row's baseline, or with every worker at work."""

    def __init__(self, row: Measured, path: Path, kept: bool, quick: bool, tell: Tell):
        self._row, self._path, self._quick, self._tell = row, path, quick, tell
        self._machines = read(path) if kept else {}

    def alone(self) -> planning.Machine:
        return self._known("alone", self._alone)

    def of(self, workers: int, kind: str) -> planning.Machine:
        """For so many workers of a kind: as slow as layers get when each of them has its share, and the wires between them."""
        if workers == 1:
            return self.alone()
        return self._known(f"{workers} {kind}", functools.partial(self._together, workers, kind))

    def _known(self, name: str, make: Callable[[], planning.Machine]) -> planning.Machine:
        key = ", ".join(map(str, (self._row.suite, *self._row.sizes, name)))
        if key not in self._machines:
            self._machines[key] = make()
            write(self._path, read(self._path) | self._machines)
        return self._machines[key]

    def _alone(self) -> planning.Machine:
        self._tell("calibrating")
        with self._one() as group:
            return group.machine(sizes=self._row.sizes)

    def _together(self, workers: int, kind: str) -> planning.Machine:
        devices = workers if kind == "devices" else 1
        network, width, layers, batch = self._row.sizes
        share = network, width, layers // workers, batch
        with self._one() as one, _group(kind, devices, workers) as group:
            self._tell(f"a share of the layers on each of {workers} {kind}")
            one.gradients(_SHARE, share, 1)
            group.gradients(_SHARE, share, devices)
            contenders = [
                Contender(name=_SHARE, elsewhere=functools.partial(g.time, _SHARE))
                for g in (one, group)
            ]
            alone, together = measure(contenders, rounds=15, warmup=2, min_time=0.05, budget=10.0)
            if (kind, workers) not in _WIRES:
                self._tell(f"messages between {kind}")
                _WIRES[kind, workers] = group.wires(
                    **({"sizes": (1 << 8, 1 << 16)} if self._quick else {})
                )
        wires = _WIRES[kind, workers]
        return slowed(self.alone(), float(np.median(ratios(together, alone))), wires)

    def _one(self) -> Any:
        """A process like that of the baseline."""
        return _group("jax", self._row.threads, 1)


def read(path: Path) -> dict[str, planning.Machine]:
    """The machines of a file, by name; none where there is no file."""
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        name: planning.Machine(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        )
        for name, fields in stored.items()
    }


def write(path: Path, machines: dict[str, planning.Machine]) -> None:
    lines = []
    for name, machine in machines.items():
        fields = {
            k: v for k, v in dataclasses.asdict(machine).items() if v is not None and v != math.inf
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(fields)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _group(kind: str, threads: int, workers: int) -> Any:
    return contextlib.closing(Group(kind, workers=workers, threads=threads))


_SHARE = "a share of the layers"
_WIRES: dict[
    tuple[str, int], dict[str, float]
] = {}  # between so many workers of a kind, measured once


def slowed(machine: planning.Machine, by: float, wires: dict[str, float]) -> planning.Machine:
    """All that it computes takes so many times as long."""
    scaled: dict[str, Any] = {
        name: tuple(x * by for x in getattr(machine, name)) for name in machine.kinds
    }
    return dataclasses.replace(machine, **scaled | wires)


def predicted(
    alone: planning.Machine, machine: planning.Machine, seconds: Predict, layers: int
) -> float | None:
    """The ratio to serial propagation alone; None for what the cost model does not know."""
    try:
        return seconds(machine) / solved(SERIAL, layers)(alone)
    except NotImplementedError:
        return None


def compared(row: Measured, machines: Machines) -> list[dict[str, Any]]:
    predictions = []
    for name, seconds, workers, ratio in row.ratios:
        machine = machines.of(workers, "ranks" if name.endswith("ranks") else "devices")
        said = predicted(machines.alone(), machine, seconds, row.sizes[2])
        if said is not None:
            predictions.append(
                {"name": name, "workers": workers, "measured": ratio, "predicted": said}
            )
    return predictions


def winners(contenders: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Of pairs whose measured times are apart: how many were told rightly, and how many there are."""
    right = total = 0
    for a, b in itertools.combinations(contenders, 2):
        apart = math.log(a["measured"] / b["measured"])
        if abs(apart) > math.log(1 + _APART):
            total += 1
            right += (a["predicted"] > b["predicted"]) == (apart > 0)
    return right, total


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each contender; at the end what share is close, and what pairs are in the right order."""
    cells = [["suite", "row", "solver", "workers", "measured", "predicted", "predicted / measured"]]
    pairs = [c for row in rows for c in row["contenders"]]
    for row in rows:
        title = ", ".join(map(str, row["sizes"]))
        for c in row["contenders"]:
            said, took = c["predicted"], c["measured"]
            ratios = f"{took:.2f}", f"{said:.2f}", f"{said / took:.2f}"
            cells.append([row["suite"], title, c["name"], str(c["workers"]), *ratios])
    close = sum(1 / (1 + _CLOSE) <= c["predicted"] / c["measured"] <= 1 + _CLOSE for c in pairs)
    right, total = (sum(x) for x in zip(*(winners(row["contenders"]) for row in rows), strict=True))
    return (
        f"{report.pipes(cells)}\n\nRatios to serial propagation. {close} of {len(pairs)} predictions are within "
        f"{_CLOSE:.0%}; of {total} pairs of solvers in a row that differ by more than {_APART:.0%}, {right} are in the "
        "right order."
    )


def draw(result: report.Result) -> Figure:
    fig = report.figure(result, width=8.5, height=8.0)
    ax = fig.subplots()
    points = [(row["sizes"][0], c) for row in result["rows"] for c in row["contenders"]]
    for number, network in enumerate(dict.fromkeys(network for network, _ in points)):
        for many, marker in ((False, "o"), (True, "^")):
            here = [c for name, c in points if name == network and (c["workers"] > 1) is many]
            label = f"{network}, {'two workers' if many else 'one'}" if here else None
            x, y = ([c[key] for c in here] for key in ("measured", "predicted"))
            ax.plot(x, y, marker, color=f"C{number}", alpha=0.75, markersize=8, label=label)
    ends = np.array(
        [0.8 * min(c["measured"] for _, c in points), 1.2 * max(c["measured"] for _, c in points)]
    )
    ax.plot(ends, ends, color=report.INK, linewidth=1)
    band: dict[str, Any] = {"color": report.FAINT, "zorder": 0, "label": f"within {_CLOSE:.0%}"}
    ax.fill_between(ends, ends / (1 + _CLOSE), ends * (1 + _CLOSE), **band)
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    ax.legend(fontsize=11, frameon=False, loc="upper left")
    report.dress(
        ax,
        x="measured: times serial propagation",
        y="predicted",
        title="Every solver of every committed row",
    )
    return fig


def text(result: report.Result) -> str:
    return report.page(result, table(result["rows"]))


EXAMPLES = [
    ("--results benchmarks/results/cpu", "all rows that are kept; half an hour"),
    (
        "--results benchmarks/results/cpu --suites dense --kept",
        "one suite, from the machines that are kept",
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("model", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--suites",
        nargs="+",
        metavar="NAME",
        help="Suites whose results are predicted (default: all).",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="Folder with the measured results (default: that of --out).",
    )
    parser.add_argument(
        "--kept",
        action="store_true",
        help="Use the machines in the folder, and calibrate only the others.",
    )
    options = parser.parse_args(arguments)
    out = results_folder(parser, options)
    folder = options.results or out
    wanted = list(measured(folder))
    if reason := why_no_mpi():
        print(f"Left out: ranks ({reason}).")
        wanted = [
            row._replace(ratios=[r for r in row.ratios if not r[0].endswith("ranks")])
            for row in wanted
        ]
    wanted = [row for row in wanted if row.ratios]
    wanted = [row for row in wanted if not options.suites or row.suite in options.suites]
    wanted = wanted[:1] if options.quick else wanted
    if not wanted:
        parser.error(
            f"no result in {folder} has a row that can be predicted. Run another suite first."
        )
    progress, result = Progress(), new_result("model", "Predicted and measured", arguments)
    result["rows"] = report.kept(out, "model")["rows"]
    for row in wanted:
        title = f"{row.suite}, {', '.join(map(str, row.sizes))}"
        tell = lambda text, of=title: progress(f"{of}: {text}")  # noqa: E731
        machines = Machines(row, out / "machines.json", options.kept, options.quick, tell)
        predictions = compared(row, machines)
        new = {
            "suite": row.suite,
            "sizes": list(row.sizes),
            "threads": row.threads,
            "contenders": predictions,
        }
        others = [
            r for r in result["rows"] if (r["suite"], r["sizes"]) != (new["suite"], new["sizes"])
        ]
        result["rows"] = [*others, new]
        report.save(result, out, draw, text)
    progress.clear()
    print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
