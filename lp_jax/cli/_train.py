"""``lp-jax train``: from options to results."""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from lp_jax import Serial, planning, viz
from lp_jax._solver import Solver
from lp_jax.cli._catalog import resolved
from lp_jax.cli._experiment import Experiment, experiment, settings_and_task, settings_of
from lp_jax.cli._folder import prepare, write_config, write_json
from lp_jax.cli._launch import Launch, launch
from lp_jax.cli._plan import planned
from lp_jax.cli._report import gradient_errors, pictures, save, summary, table
from lp_jax.cli._run import Plan, Run, train_one
from lp_jax.cli._settings import Settings
from lp_jax.cli._sizes import mesh_sizes, set_cpu_devices
from lp_jax.cli._solver import FIELDS, build, default_solvers
from lp_jax.cli._tasks import Task
from lp_jax.cli._workers import workers
from lp_jax.planning import code
from lp_jax.train import Interrupted, confusion_matrix, predict
from lp_jax.train._checkpoint import first_difference

# How one call runs, not what is run: never taken from the folder.
_LAUNCH = ("mpi", "distributed", "coordinator", "process")
_MOST_CLASSES = 100  # of a picture that one can read
_OF_THIS_CALL = ("out", "resume", "no_compare", "no_pictures", "debug", *_LAUNCH)


def train_command(problem: str, options: dict[str, Any], explicit: set[str]) -> None:
    """Train, compare, report.

    Args:
        problem: "digits" or "mnist".
        options: of the command line, by name.
        explicit: those that were given there; on resuming, the folder says the others.
    """
    with launch(options) as processes:
        _train(problem, options, explicit, processes)


def _train(problem: str, options: dict[str, Any], explicit: set[str], processes: Launch) -> None:
    folder, console = options["out"], Console(stderr=True, quiet=not processes.chief)
    before = processes.once(lambda: prepare(folder, resume=options["resume"]))
    if before is not None:
        if before["problem"] != problem:
            raise click.ClickException(
                f"{folder} holds a run on {before['problem']}, not {problem}; choose another --out."
            )
        options = _as_before(options, explicit, before["options"])
    chosen = resolved(problem, options)
    solver, adjoint_solver = build(options, default_solvers(chosen["model"]))
    settings, learned = settings_and_task(problem, options)
    if before is not None:
        was = settings_of(problem, resolved(problem, {**options, **before["options"]}), learned).fingerprint()
        if difference := first_difference(was, settings.fingerprint()):
            raise click.ClickException(f"the run in {folder} is of another model: {difference}; choose another --out.")
    if options["solver"] == "auto":
        solver, adjoint_solver = _recommended(settings, learned, mesh_sizes(options), console, processes)
    _same_everywhere(settings, (solver, adjoint_solver), processes)
    place = workers(chosen, settings.layers, processes, (solver, adjoint_solver))
    made = experiment(settings, learned, place, (solver, adjoint_solver))
    of_this_call = _OF_THIS_CALL if processes.size == 1 else (*_OF_THIS_CALL, "devices", "mesh")
    stored = {name: _plain(value) for name, value in options.items() if name not in of_this_call}
    solvers = {"solver": repr(solver), "adjoint_solver": repr(adjoint_solver)}
    if before is not None and any(before[name] != text for name, text in solvers.items()):
        console.print(f"the solver changes, from {before['solver']}", markup=False, highlight=False)
    if processes.chief:
        write_config(folder, {"problem": problem, "options": stored, **solvers})
    for line in (
        settings.describe(made.place.size(made.params)),
        place.describe(),
        f"forward: {code(solver)}",
        f"adjoint: {code(adjoint_solver)}",
    ):
        if line is not None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    plan = Plan(options["probe_every"], options["checkpoint_every"], options["log_every"])
    pairs = [(solver, adjoint_solver, folder)]
    if not isinstance(solver, Serial) and not options["no_compare"]:
        pairs.append((Serial(), Serial(), folder / "serial"))
    runs: list[Run] = []
    try:
        for forward, adjoint, path in pairs:
            runs.append(train_one(settings, plan, made, forward, adjoint, path, console, processes))
    except Interrupted as interruption:
        again = f"lp-jax train {problem} --out {shlex.quote(str(folder))} --resume"
        if processes.chief:
            click.echo(f"lp-jax: {interruption}; go on with: {again}", err=True)
        raise SystemExit(128 + interruption.signal) from None
    _report(settings, made, runs, (solver, adjoint_solver), options, console, processes)


def _recommended(
    settings: Settings, learned: Task, sizes: Mapping[str, int], console: Console, processes: Launch
) -> tuple[Solver, Solver]:
    """What ``lp-jax plan`` recommends."""
    if processes.size > 1:
        raise click.UsageError(
            "--solver auto measures, and each process would find something else; ask lp-jax plan, and pass what it says."
        )
    if sizes:
        set_cpu_devices(math.prod(sizes.values()))
    found = planned(settings, learned, console, workers=min(sizes.get("layers", 1), settings.layers))
    console.print(f"auto: {planning.reason(found)}", markup=False, highlight=False, soft_wrap=True)
    return found.solver, found.adjoint_solver


def _same_everywhere(settings: Settings, solvers: tuple[Solver, Solver], processes: Launch) -> None:
    """Every process has options of its own."""
    mine = {**dataclasses.asdict(settings), "solver": repr(solvers[0]), "adjoint_solver": repr(solvers[1])}
    if difference := first_difference(processes.once(lambda: mine), mine):
        raise click.ClickException(f"this process was started otherwise than the first: {difference}.")


def _report(
    settings: Settings,
    made: Experiment,
    runs: Sequence[Run],
    solvers: tuple[Solver, Solver],
    options: Mapping[str, Any],
    console: Console,
    processes: Launch,
) -> None:
    """Table, summary and pictures; the chief's to show, everyone's to measure."""
    folder = options["out"]
    drawn: list[Path] = []
    errors, answers, samples = None, None, None
    params, task = runs[0].state.params, made.task
    if task.samples is not None:
        with console.status("a few answers, to read"):
            samples = task.samples(lambda x: np.array(predict(made.tested, params, x)))
    if not options["no_pictures"]:
        answers = confusion_matrix(made.tested, params, task.test_batches, classes=task.classes)
    if not options["no_pictures"] and not all(isinstance(s, Serial) for s in solvers):
        with console.status("for a picture, other solvers are compiled and their gradients measured"):
            errors = gradient_errors(made, runs[0].state.params, *solvers)
    if not processes.chief:
        return
    write_json(folder / "summary.json", summary(settings, runs, *solvers))
    if not options["no_pictures"]:
        figures = pictures(settings, runs, *solvers, errors)
        if answers is not None and len(answers) <= _MOST_CLASSES:
            figures["confusion.png"] = viz.confusion(answers, made.task.names)
        drawn = save(folder, figures)
    out = Console()
    out.print(table(runs))
    names = ["metrics.jsonl", "summary.json", "config.json", "checkpoints", *(path.name for path in drawn)]
    if samples is not None:
        out.print(f"\n{samples}\n", markup=False, highlight=False, soft_wrap=True)
        (folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
        names.append("samples.txt")
    out.print(f"In {folder}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)


def _as_before(options: Mapping[str, Any], explicit: set[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The options, those that were not given as the folder has them."""
    void: set[str] = set()  # another kind of solver makes the old one's settings so
    if explicit & {"serial", "solver"}:
        void |= {"serial", "solver", *FIELDS}
    if explicit & {"serial", "solver", "adjoint_solver"}:
        void |= {f"adjoint_{name}" for name in ("solver", *FIELDS)}
    if explicit & {"devices", "mesh", "mpi", "distributed"}:
        void |= {"devices", "mesh"}
    kept = {name: value for name, value in stored.items() if name in options and name not in explicit | void}
    return {**options, **kept}


def _plain(value: Any) -> Any:
    """For JSON. A folder's path is made absolute, for resuming elsewhere."""
    return str(value.resolve()) if isinstance(value, Path) else value
