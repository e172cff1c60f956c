"""Accuracy of training layer-parallel: every problem with its recommended solver, with a controller, with injection, and exactly.

Each run trains as ``lp-jax train`` does. Several seeds give the mean and the spread; a run that the table has already is not
repeated, so it grows over several calls, and takes hours from nothing. At the end the trained network is evaluated
layer-parallel too: training and inference are to use the same arithmetic.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, common_parser, results_folder
from benchmarks.manifest import manifest
from benchmarks.networks import SERIAL, Pair
from benchmarks.problems import Experiment, load, taken
from lp_jax.planning import training_step
from lp_jax.train import Controller, Every, Log, evaluate, fit, gradient_error, init_state, make_train_step

PROBES = 6  # of the gradient in a run
WATCHED = 20  # steps from one look at a controller's gradient to the next


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, what differs from its defaults, and solvers besides the usual ones; ``data`` is in the folder of all data."""

    problem: str
    model: str
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    solvers: Mapping[str, Pair] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.options.get('name', self.problem)}, {self.model}"


_FCF = lp_jax.MGRIT(levels=2, coarsening=4, iterations=2, relaxation="FCF")
_HALF = dataclasses.replace(_FCF, spatial=lp_jax.spatial(3))
_WORDS = {"width": 32, "epochs": 2}
_LETTERS = {"width": 32, "buffers": 2, "batch_size": 16, "epochs": 1}

CASES = [
    Case("digits", "dense"),
    Case("peaks", "dense"),
    Case("timeseries", "gru", "ucr", {"name": "BasicMotions"}),
    Case("timeseries", "gru", "ucr", {"name": "JapaneseVowels", "epochs": 20}),
    Case("mnist", "conv", "mnist10k", {"width": 8, "stride": 2, "epochs": 6}),
    Case("gum", "transformer", "gum", _WORDS),
    Case("text", "transformer", "gum/en_gum-ud-train.conllu.gz", _LETTERS),
    Case(
        "modelnet",
        "conv",
        "modelnet32",
        {"epochs": 2, "stride": 4},
        {"FCF 2/2": (_FCF, _FCF), "FCF 2/2, half the points": (_HALF, _HALF)},
    ),
]
QUICK = Case("digits", "dense", None, {"epochs": 1, "layers": 8, "width": 8})

CONTROLLED = "with a controller"

Key = tuple[str, int, str]
"""A case, a seed and a solver."""


def injection() -> Pair:
    """The field's setting: three levels, two cycles and one."""
    forward = lp_jax.MGRIT(levels=3, coarsening=4, iterations=2, coarse_step=lp_jax.Rediscretize())
    return forward, dataclasses.replace(forward, iterations=1)


def run(
    case: Case, seed: int, data: Path, only: Sequence[str] | None, known: Mapping[Key, Any], tell: Progress
) -> Iterator[dict[str, Any]]:
    """Train with each solver, or with those with one of ``only`` in their names; a row for each that is not ``known``."""
    made = load(case.problem, case.model, data / (case.data or ""), seed=seed, **case.options)
    pairs = {"serial": SERIAL, "recommended": made.solvers, "injection, 2/1": injection(), **case.solvers}
    if all(solver.has_tolerance for solver in made.solvers):  # which a controller sets
        pairs[CONTROLLED] = made.solvers
    for name, pair in pairs.items():
        if (only and not any(text in name for text in only)) or (case.title, seed, name) in known:
            continue
        tell(f"{case.title}, seed {seed}: training, {name}")
        controller = Controller(made.loss_fn) if name == CONTROLLED else None
        yield {"case": case.title, "seed": seed, "solver": name, **trained(made, pair, controller)}
        jax.clear_caches()


def trained(made: Experiment, pair: Pair, controller: Controller | None) -> dict[str, Any]:
    """Train, evaluate serially and layer-parallel; the gradient's error and the solvers' effort are probed on the way."""
    settings, task = made.settings, made.task
    optimizer = optax.adam(settings.training.learning_rate)
    steps = task.steps_per_epoch * settings.training.epochs
    log = Log()
    work: list[float] = []
    over: list[float] = []

    def probe(state: Any, batch: Any) -> dict[str, Any]:
        now = pair if controller is None or state.control is None else controller.solvers(state.control, *pair)
        work.append(evaluations(taken(made, state.params, batch, now), settings.layers))
        error = float(gradient_error(made.loss_fn, state.params, batch, *now).relative)
        over.extend(error / row["allowed"] for row in log.of("control")[-1:])
        return {"gradient_error": error}

    every = max(1, steps // PROBES) if controller is None else WATCHED
    state, _ = fit(
        make_train_step(made.loss_fn, optimizer),
        init_state(made.params, optimizer),
        made.batches,
        steps_per_epoch=task.steps_per_epoch,
        epochs=settings.training.epochs,
        solver=pair[0],
        adjoint_solver=pair[1],
        controller=controller,
        measures=() if pair == SERIAL else (Every("probe", every, probe),),
        log=log,
        log_every=20,
    )
    serial = evaluate(made.test_fn, state.params, task.test_batches)
    parallel = evaluate(made.test_fn, state.params, task.test_batches, solver=pair[0])
    found = {
        "steps": steps,
        "test_accuracy": float(serial.accuracy),
        "test_loss": float(serial.loss),
        "time_per_step": float(np.median([row["step_time"] for row in log.of("train")])),
        "layer_parallel_accuracy": float(parallel.accuracy),
        "gradient_errors": [row["gradient_error"] for row in log.of("probe")],
        "evaluations": float(np.mean(work)) if work else 1.0,
    }
    if controller is None:
        return found
    controls = log.of("control")
    # of the four gradients of a probe two take the solvers, one is serial, and two are of half a batch
    probes = sum(row["gradients"] / 4 for row in controls) * (2 * found["evaluations"] + 2)
    return found | {
        "over_bound": over,
        "serial_probes": sum(row["serial"] for row in controls),
        "probe_share": probes / (steps * found["evaluations"]),
    }


def evaluations(pair: Pair, layers: int) -> float:
    """Evaluations of layers in a training step, as a multiple of serial propagation's."""
    return training_step(*pair, layers, at_once=1).work() / training_step(*SERIAL, layers).work()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each case and solver, over the seeds."""
    head = ["", "solver", "seeds", "test accuracy", "evaluated layer-parallel", "test loss"]
    cells = [[*head, "gradient error, first to last probe", "evaluations", "ms per step"]]
    for case, solver in dict.fromkeys((row["case"], row["solver"]) for row in rows):
        found = [row for row in rows if (row["case"], row["solver"]) == (case, solver)]
        accuracy = [100 * row["test_accuracy"] for row in found]
        apart = max(abs(100 * (row["test_accuracy"] - row["layer_parallel_accuracy"])) for row in found)
        errors = [row["gradient_errors"] for row in found]
        drift = f"{np.mean([e[0] for e in errors]):.0e} to {np.mean([e[-1] for e in errors]):.0e}" if errors[0] else "–"
        loss, work = (np.mean([row[name] for row in found]) for name in ("test_loss", "evaluations"))
        seconds = np.median([row["time_per_step"] for row in found])
        spread = f"{np.mean(accuracy):.2f} ± {np.std(accuracy):.2f} %"
        numbers = f"{loss:.3f}", drift, f"{work:.1f}", f"{1e3 * seconds:.0f}"
        cells.append([case, solver, str(len(found)), spread, f"within {apart:.2f} %", *numbers])
    return f"{report.pipes(cells)}\n\nEvaluations of layers are multiples of serial propagation's.\n{controlled(rows)}"


def controlled(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each case with a controller: what it saved, and how well it held its bound."""
    cells = [["", "seeds", "evaluations, parts of recommended", "error / bound: median, largest", "serial", "probes"]]
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["solver"] == CONTROLLED:
            by_case.setdefault(row["case"], []).append(row)
    for case, found in by_case.items():
        before = [row["evaluations"] for row in rows if (row["case"], row["solver"]) == (case, "recommended")]
        part = np.mean([row["evaluations"] for row in found]) / np.mean(before) if before else np.nan
        over = np.concatenate([row["over_bound"] for row in found])
        serial, share = sum(row["serial_probes"] for row in found), np.mean([row["probe_share"] for row in found])
        numbers = f"{part:.2f}", f"{np.median(over):.2f}, {np.max(over):.2f}", f"{serial}", f"{100 * share:.1f} %"
        cells.append([case, str(len(found)), *numbers])
    if len(cells) == 1:
        return ""
    return (
        f"\n{report.pipes(cells)}\n\nThe error of the gradient was looked at every {WATCHED} steps. Serial: probes after which "
        "training went on serially. Probes: their part of all evaluations.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("accuracy", __doc__ or "")
    parser.add_argument("--data", type=Path, help="folder with mnist10k/, gum/, ucr/ and modelnet32/; not for --quick")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="those with one of these in their titles")
    parser.add_argument("--solvers", nargs="+", metavar="TEXT", help="those with one of these in their names")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: 3; --quick: 1)")
    options = parser.parse_args(arguments)
    if options.data is None and not options.quick:
        parser.error("--data is missing: the folder with mnist10k/, gum/, ucr/ and modelnet32/.")
    out = results_folder(parser, options)
    rows = [] if options.quick else report.kept(out, "accuracy")
    results: dict[Key, dict[str, Any]] = {(row["case"], row["seed"], row["solver"]): row for row in rows}
    described = manifest("benchmarks.accuracy", sys.argv[1:] if arguments is None else arguments)
    titles = [case.title for case in CASES]
    progress = Progress()
    for case in [QUICK] if options.quick else CASES:
        if options.cases and not any(text in case.title for text in options.cases):
            continue
        for seed in range(options.seeds or (1 if options.quick else 3)):
            for row in run(case, seed, options.data or Path(), options.solvers, results, progress):
                results[case.title, seed, row["solver"]] = row
                rows = sorted(results.values(), key=lambda row: titles.index(row["case"]))
                result = {"suite": "accuracy", "title": "Accuracy of training", "manifest": described, "rows": rows}
                report.save(result, out, text=lambda result: f"# {result['title']}\n\n{table(result['rows'])}")
    progress.clear()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
