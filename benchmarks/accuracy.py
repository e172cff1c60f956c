"""Accuracy of training layer-parallel: every problem with its recommended solver, with injection, and exactly.

Each run is one of ``lp-jax train`` without pictures. Several seeds give the mean and the spread; a run that the table
has already is not repeated, so it grows over several calls, and takes hours from nothing. At the end the trained network is
evaluated layer-parallel too: training and inference are to use the same arithmetic.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import lp_jax
from benchmarks.manifest import device_slug, manifest
from benchmarks.problems import prepared
from lp_jax._solver import Solver
from lp_jax.cli._experiment import experiment
from lp_jax.cli._launch import SingleProcess
from lp_jax.cli._run import train_one
from lp_jax.planning import training_step
from lp_jax.train import evaluate, read_rows, unflat

INJECTION = tuple(
    lp_jax.MGRIT(levels=3, coarsening=4, iterations=cycles, coarse_step=lp_jax.Rediscretize()) for cycles in (2, 1)
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, what differs from its defaults, and solvers beside the usual ones; ``data`` is in the folder of all data."""

    problem: str
    model: str
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    solvers: Mapping[str, Solver] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.options.get('name', self.problem)}, {self.model}"


_FCF = lp_jax.MGRIT(levels=2, coarsening=4, iterations=2, relaxation="FCF")

CASES = [
    Case("digits", "dense"),
    Case("peaks", "dense"),
    Case("timeseries", "gru", "ucr", {"name": "BasicMotions"}),
    Case("timeseries", "gru", "ucr", {"name": "JapaneseVowels", "epochs": 20}),
    Case("mnist", "conv", "mnist10k", {"width": 8, "stride": 2, "epochs": 6}),
    Case("gum", "transformer", "gum", {"width": 32, "epochs": 2}),
    Case(
        "text",
        "transformer",
        "gum/en_gum-ud-train.conllu.gz",
        {"width": 32, "buffers": 2, "batch_size": 16, "epochs": 1},
    ),
    Case(
        "modelnet",
        "conv",
        "modelnet32",
        {"epochs": 2, "stride": 4},
        {"FCF 2/2": _FCF, "FCF 2/2, half the points": dataclasses.replace(_FCF, spatial=lp_jax.spatial(3))},
    ),
]


Key = tuple[str, int, str]
"""A case, a seed and a solver."""


def run(
    case: Case, seed: int, folder: Path, data: Path, only: Sequence[str] | None, known: Mapping[Key, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Train with each solver, or with those with one of ``only`` in their names; a row for each that is not ``known``."""
    path = data / (case.data or "")
    settings, learned = prepared(case.problem, case.model, path, seed=seed, **case.options)
    best = settings.model.solvers
    pairs: dict[str, tuple[Solver, Solver]] = {
        "serial": (lp_jax.Serial(), lp_jax.Serial()),
        "recommended": best,
        "injection, 2/1": (INJECTION[0], INJECTION[1]),
        **{name: (solver, solver) for name, solver in case.solvers.items()},
    }
    for name, (forward, adjoint) in pairs.items():
        if (only and not any(text in name for text in only)) or (case.title, seed, name) in known:
            continue
        place = folder / case.title.replace(", ", "_") / f"{seed}_{re.sub('[^A-Za-z0-9]+', '-', name)}"
        done = place / "result.json"
        if not done.exists():
            made = experiment(settings, learned, solvers=(forward, adjoint))
            plan = {"probe_every": None, "checkpoint_every": 10**9, "log_every": 20}
            console = Console(stderr=True)
            alone = SingleProcess({"debug": False})
            finished = train_one(made, made.solvers, plan, place, console, alone)
            params, test = finished.state.params, learned.test_batches
            parallel = evaluate(made.test_fn, params, test, solver=forward)
            probes = [row["gradient_error"] for row in finished.log.of("probe")]
            result = finished.summary() | {
                "case": case.title,
                "seed": seed,
                "solver": name,
                "layer_parallel_accuracy": parallel.accuracy,
                "gradient_errors": probes,
            }
            done.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            jax.clear_caches()
        result = json.loads(done.read_text(encoding="utf-8"))
        yield result | {"evaluations": evaluations(place / "metrics.jsonl", forward, adjoint, settings.layers)}


def evaluations(log: Path, forward: Solver, adjoint: Solver, layers: int) -> float:
    """Evaluations of layers in a training step, as a multiple of serial propagation's; with a tolerance, in the mean."""
    probes = [row for row in read_rows(log) if row["kind"] == "probe"]

    def taken(solver: Solver, solve: str) -> Solver:
        if not solver.has_tolerance:
            return solver
        counts = [np.isfinite(np.array(unflat(f"{solve}_residual", row), float)).sum() for row in probes]
        return solver.with_effort(round(np.mean(counts)))

    exact = training_step(lp_jax.Serial(), lp_jax.Serial(), layers)
    return (
        training_step(taken(forward, "forward"), taken(adjoint, "adjoint"), layers, looped=True).work() / exact.work()
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each case and solver, over the seeds. Evaluations of layers are multiples of serial propagation's."""
    lines = [
        "| | solver | seeds | test accuracy | evaluated layer-parallel | test loss | gradient error, first to last probe "
        "| evaluations | ms per step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((result["case"], result["solver"]) for result in results)
    for case, solver in keys:
        found = [r for r in results if (r["case"], r["solver"]) == (case, solver)]
        accuracy = [100 * r["test_accuracy"] for r in found]
        apart = max(abs(100 * (r["test_accuracy"] - r["layer_parallel_accuracy"])) for r in found)
        errors = [r["gradient_errors"] for r in found]
        drift = f"{np.mean([e[0] for e in errors]):.0e} to {np.mean([e[-1] for e in errors]):.0e}" if errors[0] else "–"
        spread = f"{np.mean(accuracy):.2f} ± {np.std(accuracy):.2f} %"
        loss = np.mean([r["test_loss"] for r in found])
        work = np.mean([r["evaluations"] for r in found])
        seconds = np.median([r["time_per_step"] for r in found])
        lines.append(
            f"| {case} | {solver} | {len(found)} | {spread} | within {apart:.2f} % | {loss:.3f} | {drift} "
            f"| {work:.1f} | {1e3 * seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist10k/, gum/, ucr/ and modelnet32/")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="those with one of these in their titles")
    parser.add_argument("--solvers", nargs="+", metavar="TEXT", help="those with one of these in their names")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds (default: 3)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/accuracy"), help="where runs are (default: runs/accuracy)"
    )
    parser.add_argument("--out", type=Path, help="where the table is and goes (default: benchmarks/results/DEVICE)")
    options = parser.parse_args(arguments)
    out = options.out or Path(__file__).parent / "results" / device_slug()
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "accuracy.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.exists() else []
    results: dict[Key, dict[str, Any]] = {(row["case"], row["seed"], row["solver"]): row for row in rows}
    described = manifest("benchmarks.accuracy", sys.argv[1:] if arguments is None else arguments)
    titles = [case.title for case in CASES]

    def save() -> str:
        rows = sorted(results.values(), key=lambda row: titles.index(row["case"]))
        document = {"suite": "accuracy", "manifest": described, "rows": rows}
        kept.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (out / "accuracy.md").write_text("# Accuracy of training\n\n" + table(rows), encoding="utf-8")
        return table(rows)

    for case in CASES:
        if options.cases and not any(text in case.title for text in options.cases):
            continue
        for seed in range(options.seeds):
            for row in run(case, seed, options.runs, options.data, options.solvers, results):
                results[case.title, seed, row["solver"]] = row
                save()
    print(save())


if __name__ == "__main__":
    main()
