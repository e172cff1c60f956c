"""Prediction against measurement: what `lp_jax.planning` says of every committed row of the suites that measure time.

The layers of each row are calibrated here and now, in a process with as many threads as the row's; ratios to serial
propagation then follow from the schedule of each solver, and stand beside those that were measured by dense, resnet, single,
ranks and pipeline. With two workers all takes as much longer as the gradient of half of the layers on each of them, at the
same time, takes longer than on one alone; messages are measured between such workers. What a training step does beside its
layers is the difference of the baseline and serial propagation.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import dense, pipeline, report, resnet, settings, single
from benchmarks.command import Progress
from benchmarks.harness import Contender, Spread, Tell, measure, ratios
from benchmarks.manifest import device_slug, manifest
from benchmarks.propagation import Pair
from benchmarks.published import SERIAL
from benchmarks.ranks import Group, why_no_mpi
from lp_jax import planning

_CLOSE, _APART = 0.25, 0.15  # of a good prediction; of two times that are told apart


class Measured(NamedTuple):
    """A row of a result: what ran, and the ratios to the first contender.

    Attributes:
        suite: where it is from.
        sizes: network, width, layers, batch.
        threads: of the baseline.
        ratios: of contenders that can be predicted: name, what predicts its seconds, workers, ratio to serial propagation by the
            library, or to the baseline where that did not take part.
    """

    suite: str
    sizes: tuple[str, int, int, int]
    threads: int
    ratios: list[tuple[str, "Predict", int, float]]


Predict = Callable[[planning.Machine], float]
"""Seconds of a training step."""


def solved(pair: Pair, layers: int, workers: int = 1, **spread: int) -> Predict:
    """By solvers, with so many workers; ``spread`` is for `planning.predict`."""
    return lambda machine: planning.predict(*pair, layers, machine, workers=workers, **spread).seconds


def measured(folder: Path) -> Iterator[Measured]:
    """All rows of the results in a folder."""
    for suite in ("dense", "resnet", "single", "ranks_dense", "ranks_conv", "ranks_gru", "pipeline"):
        path = folder / f"{suite}.json"
        if not path.exists():
            continue
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            sizes = (
                row.get("network", "conv" if suite == "resnet" else "dense"),
                row.get("width", row.get("channels")),
                row["layers"],
                row.get("batch") or (50 if suite == "resnet" else dense.BATCH),
            )
            known = _known(suite, sizes)
            times = {c["name"]: c["ratio"]["median"] for c in row["contenders"]}
            serial = times.get("Serial", times.get("Serial, 1 thread", 1.0))
            found = []
            for c in row["contenders"][1:]:
                name, workers = _worker(c["name"])
                if name in known:
                    ratio = min(times[c["name"]], times.get(f"{c['name']}, unrolled", math.inf))  # of GPipe's
                    found.append((c["name"], known[name](workers), workers, ratio / serial))
            yield Measured(suite, sizes, row["contenders"][0]["threads"], found)


def _worker(name: str) -> tuple[str, int]:
    """The setting, and the workers, of a contender's name."""
    head, _, tail = name.rpartition(", ")
    if tail in ("2 devices", "2 ranks"):
        return head, int(tail.split()[0])
    return name, pipeline.WORKERS if name.startswith(("layer-parallel", "data parallel", "pipeline")) else 1


def _known(suite: str, sizes: tuple[str, int, int, int]) -> dict[str, Callable[[int], Predict]]:
    """From names to functions of the number of workers, of all whose effort does not depend on the problem."""
    layers = sizes[2]
    if suite.startswith(("ranks", "pipeline")):
        head = "layer-parallel, " if suite == "pipeline" else ""
        found: dict[str, Callable[[int], Predict]] = {
            f"{head}{name}": lambda workers, make=make: solved(make(layers, workers), layers, workers)  # type: ignore[misc]
            for name, make in settings.SETTINGS.items()
        }
        for m in pipeline.MICROBATCHES:
            found[f"pipeline, {m} microbatches"] = lambda workers, m=m: functools.partial(  # type: ignore[misc]
                planning.pipeline, layers, workers=workers, microbatches=m
            )
        return found | {"data parallel": lambda workers: solved(SERIAL, layers, data_workers=workers)}
    pairs = {"dense": dense.PAIRS, "resnet": resnet.PAIRS}.get(suite) or {
        name: pair for name, (_, pair) in single.known_solvers(*sizes[:1], sizes[2]).items()
    }
    return {
        name: lambda workers, pair=pair: solved(pair, layers, workers)  # type: ignore[misc]
        for name, pair in pairs.items()
        if not any(s.has_tolerance for s in pair)
    }


class Machines:
    """What the layers of a row take: alone, with the threads of the row's baseline, or with every worker at work.

    Args:
        row: what was measured.
        folder: of the machines' files, which are written, or read where they are there and ``kept``.
        kept: whether those will do.
        tell: progress.
    """

    def __init__(self, row: Measured, folder: Path, kept: bool, tell: Tell):
        self._row, self._folder, self._kept, self._tell = row, folder, kept, tell
        self._what = {
            "sizes": row.sizes,
            "updates": "dense" not in row.suite,
            "fewer": row.suite == "pipeline",
            "batched": row.suite == "dense",
        }
        self._found: dict[str, planning.Machine] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def alone(self) -> planning.Machine:
        """One worker."""
        return self._file("alone", self._alone)

    def of(self, workers: int, kind: str) -> planning.Machine:
        """For so many workers of a kind: as slow as layers get when each of them has its share, and the wires between them."""
        if workers == 1:
            return self.alone()
        return self._file(f"{workers} {kind}", functools.partial(self._together, workers, kind))

    def _file(self, name: str, make: Callable[[], planning.Machine]) -> planning.Machine:
        words = (self._row.suite, *self._row.sizes, *name.split())
        path = self._folder / f"{'_'.join(map(str, words))}.json"
        if name not in self._found:
            if not (self._kept and path.exists()):
                make().save(path)
            self._found[name] = planning.Machine.load(path)
        return self._found[name]

    def _alone(self) -> planning.Machine:
        self._tell("calibrating")
        with self._one() as group:
            return group.machine(**self._what)  # type: ignore[no-any-return]

    def _together(self, workers: int, kind: str) -> planning.Machine:
        devices = workers if kind == "devices" else 1
        network, width, layers, batch = self._row.sizes
        share = network, width, layers // workers, batch
        with self._one() as one, _group(kind, devices, workers, self._keep) as group:
            self._tell(f"a share of the layers on each of {workers} {kind}")
            one.gradients(_SHARE, share, 1)
            group.gradients(_SHARE, share, devices)
            contenders = [Contender(name=_SHARE, elsewhere=functools.partial(g.time, _SHARE)) for g in (one, group)]
            alone, together = measure(contenders, rounds=15, warmup=2, min_time=0.05, budget=10.0)
        self._tell(f"messages between {kind}")
        wires = _wires(kind, devices, workers, self._keep)
        return slowed(self.alone(), Spread.of(ratios(together, alone)).median, wires)

    def _one(self) -> Any:
        """The process of the baseline: that of the suite's other contenders, or one for itself."""
        if self._row.suite == "pipeline":
            return _group("devices", pipeline.WORKERS, pipeline.WORKERS, self._keep)
        return _group("jax", self._row.threads, 1, self._keep)

    @property
    def _keep(self) -> bool:
        return self._row.suite.startswith(("ranks", "pipeline"))  # as these suites do


def _group(kind: str, threads: int, workers: int, keep: bool) -> Any:
    return contextlib.closing(Group(kind, workers=workers, threads=threads, keep_memory=keep))


@functools.cache
def _wires(kind: str, threads: int, workers: int, keep: bool) -> planning.Interconnect:
    with _group(kind, threads, workers, keep) as group:
        return group.wires()  # type: ignore[no-any-return]


_SHARE = "a share of the layers"


def slowed(machine: planning.Machine, by: float, wires: planning.Interconnect) -> planning.Machine:
    """All that it computes takes so many times as long."""
    times = {*machine.kinds, "serial", "relaxation", "interval", "fixed", "adding", "update"}
    found = {name: getattr(machine, name) for name in times}
    scaled = {
        k: x if x is None else x * by if isinstance(x, float) else tuple(t * by for t in x) for k, x in found.items()
    }
    return dataclasses.replace(machine, **scaled, **wires._asdict())


def predicted(alone: planning.Machine, machine: planning.Machine, seconds: Predict, layers: int) -> float | None:
    """The ratio to serial propagation alone; None for what the cost model does not know."""
    try:
        return seconds(machine) / solved(SERIAL, layers)(alone)
    except NotImplementedError:
        return None


def compared(row: Measured, machines: Machines) -> list[dict[str, Any]]:
    """Both ratios of each contender."""
    found = []
    for name, seconds, workers, ratio in row.ratios:
        machine = machines.of(workers, "ranks" if name.endswith("ranks") else "devices")
        said = predicted(machines.alone(), machine, seconds, row.sizes[2])
        if said is not None:
            found.append({"name": name, "workers": workers, "measured": ratio, "predicted": said})
    return found


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
    lines = [
        "| suite | row | solver | workers | measured | predicted | predicted / measured |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    pairs = [c for row in rows for c in row["contenders"]]
    for row in rows:
        for c in row["contenders"]:
            off = c["predicted"] / c["measured"]
            title = ", ".join(map(str, row["sizes"]))
            lines.append(
                f"| {row['suite']} | {title} | {c['name']} | {c['workers']} | {c['measured']:.2f} | {c['predicted']:.2f} "
                f"| {off:.2f} |"
            )
    close = sum(1 / (1 + _CLOSE) <= c["predicted"] / c["measured"] <= 1 + _CLOSE for c in pairs)
    right, total = (sum(x) for x in zip(*(winners(row["contenders"]) for row in rows), strict=True))
    lines.append(
        f"\nRatios to serial propagation. {close} of {len(pairs)} predictions are within {_CLOSE:.0%}; of {total} pairs of "
        f"solvers in a row that differ by more than {_APART:.0%}, {right} are in the right order."
    )
    return "\n".join(lines) + "\n"


def draw(result: report.Result) -> Figure:
    """Predicted against measured, a colour per network."""
    fig = report.figure(result, width=8.5, height=8.0)
    ax = fig.subplots()
    colours = dict(zip(("dense", "conv", "gru", "encoder", "voxels"), list(report.COLOURS.values())[2:], strict=False))
    colours["voxels"] = report.COLOURS["other scan"]
    for network, colour in colours.items():
        for many, marker in ((False, "o"), (True, "^")):
            points = [
                (c["measured"], c["predicted"])
                for row in result["rows"]
                for c in row["contenders"]
                if row["sizes"][0] == network and (c["workers"] > 1) is many
            ]
            if points:
                label = f"{network}, {'two workers' if many else 'one'}"
                ax.plot(*zip(*points, strict=True), marker, color=colour, alpha=0.75, markersize=8, label=label)
    values = [c[key] for row in result["rows"] for c in row["contenders"] for key in ("measured", "predicted")]
    ends = np.array([min(values) / 1.2, max(values) * 1.2])
    ax.plot(ends, ends, color=report.INK, linewidth=1)
    ax.fill_between(
        ends, ends / (1 + _CLOSE), ends * (1 + _CLOSE), color=report.FAINT, zorder=0, label=f"within {_CLOSE:.0%}"
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    ax.legend(fontsize=11, frameon=False, loc="upper left")
    report.dress(ax, x="measured: times serial propagation", y="predicted", title="Every solver of every committed row")
    return fig


def _save(folder: Path, rows: list[dict[str, Any]], described: dict[str, Any]) -> None:
    result: report.Result = {"suite": "model", "title": "Predicted and measured", "manifest": described, "rows": rows}
    report.save(result, folder, draw, lambda r: f"# {r['title']}\n\n{report.origin(r)}\n\n{table(r['rows'])}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, compare."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suites", nargs="+", metavar="NAME", help="results of these only")
    parser.add_argument(
        "--results", type=Path, help="folder with the measured results (default: benchmarks/results/DEVICE)"
    )
    parser.add_argument(
        "--kept", action="store_true", help="use the machines' files that are there, and calibrate the others"
    )
    parser.add_argument("--out", type=Path, help="where the files go (default: the folder of the results)")
    options = parser.parse_args(arguments)
    folder = options.results or Path(__file__).parent / "results" / device_slug()
    out = options.out or folder
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "model.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.exists() else []
    wanted = list(measured(folder))
    if reason := why_no_mpi():
        print(f"Left out: ranks ({reason}).")
        wanted = [row._replace(ratios=[r for r in row.ratios if not r[0].endswith("ranks")]) for row in wanted]
    wanted = [row for row in wanted if row.ratios]
    wanted = [row for row in wanted if not options.suites or row.suite in options.suites]
    if not wanted:
        parser.error(f"no result in {folder} has a row that can be predicted.")
    progress, described = Progress(), manifest("benchmarks.model", arguments)
    for row in wanted:
        title = f"{row.suite}, {', '.join(map(str, row.sizes))}"
        machines = Machines(row, out / "machines", options.kept, lambda text, title=title: progress(f"{title}: {text}"))
        new = {
            "suite": row.suite,
            "sizes": list(row.sizes),
            "threads": row.threads,
            "contenders": compared(row, machines),
        }
        rows = [r for r in rows if (r["suite"], r["sizes"]) != (new["suite"], new["sizes"])] + [new]
        _save(out, rows, described)
    progress.clear()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
