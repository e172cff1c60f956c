"""Results of a run: its folder, a table, a summary, pictures."""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from lp_jax import train
from lp_jax._arrays._types import PyTree
from lp_jax.cli._errors import CommandError
from lp_jax.cli._experiment import Experiment, Run
from lp_jax.cli._info import version
from lp_jax.planning import with_effort
from lp_jax.planning._words import code, iteration_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "config.json"  # the options that a run was started with
LOCK = "run.lock"  # the process at work in the folder
ITERATIONS, MOST_ITERATIONS = 3, 8  # smallest and largest number of iterations that are drawn


def new_run(folder: Path) -> bool:
    """Make sure that a new run can write into the folder. Return whether the folder was made here."""
    if (folder / CONFIG).exists():
        raise CommandError(
            f"{folder} holds a run already; add --resume to go on with it, or choose another --out."
        )
    made = not folder.exists()
    make_writable(folder)
    if any(path.name != LOCK for path in folder.iterdir()):
        raise CommandError(f"{folder} is not empty and holds no run; choose another --out.")
    return made


def drop_if_not_begun(folder: Path, made: bool) -> None:
    """Empty the folder of a new run that failed before its first step, and remove it if this run made it."""
    log = folder / "metrics.jsonl"
    if not (log.exists() and log.stat().st_size):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if made:
            with contextlib.suppress(OSError):  # a network file system keeps the open lock
                folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs out of the folder. The lock of a process that ended is taken over, with a message."""
    path = folder / LOCK
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        owner = file.read().strip()
        try:
            fcntl.flock(
                file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # the system frees it when the process ends
        except OSError:
            raise CommandError(
                f"{folder} is in use by {owner}; wait for it to end, or choose another --out."
            ) from None
        if owner:
            say(f"{owner}, which used {folder}, is gone; its lock is taken over")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def stored_run(folder: Path, problem: str) -> dict[str, Any]:
    """Return the options that the run in the folder was started with."""
    config = folder / CONFIG
    if not config.exists():
        raise CommandError(f"{folder} holds no run to resume; leave out --resume to start one.")
    make_writable(folder)
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        run = {
            name: stored[name]
            for name in ("problem", "options", "fingerprint", "solver", "adjoint_solver")
        }
        if not isinstance(run["options"], dict) or not isinstance(run["fingerprint"]["model"], str):
            raise TypeError
    except (ValueError, TypeError, KeyError, OSError, RecursionError):
        raise CommandError(
            f"{config} is not the configuration of a run; it cannot be resumed."
        ) from None
    if run["problem"] != problem:
        raise CommandError(
            f"{folder} holds a run on {run['problem']}, not {problem}; choose another --out."
        )
    return run


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file for people to read; it is complete or not there."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def make_writable(folder: Path) -> None:
    """Make a folder, and make sure that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"cannot write to {folder}: {error.strerror}; choose another --out."
        ) from None


def plain_console(**options: Any) -> Console:
    """Return a console that prints text as it is."""
    return Console(markup=False, highlight=False, soft_wrap=True, **options)


def table(runs: Sequence[Run]) -> Table:
    result = Table(
        title="Test set; the network evaluated exactly", title_justify="left", title_style=""
    )
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    summaries = [run.summary() for run in runs]

    def row(title: str, key: str, text: str, missing: str = "", factor: float = 1) -> None:
        numbers = [s[key] for s in summaries]
        result.add_row(title, *(missing if n is None else text.format(factor * n) for n in numbers))

    if all("test_accuracy" in s for s in summaries):
        row("test accuracy", "test_accuracy", "{:.2%}")
    row("test loss", "test_loss", "{:.4f}", "not finite")
    result.add_row("gradient error at the end", *map(_gradient_error, summaries))
    if any(s["devices"] > 1 for s in summaries):
        row("devices", "devices", "{}")
    row("time per step, median", "time_per_step", "{:.2f} ms", factor=1e3)
    if any(s["seconds"] is not None for s in summaries):
        row("this call, with compiling and tests", "seconds", "{:.1f} s")
    row("steps", "steps", "{}")
    row("work: layers x examples evaluated", "work", "{:,.0f}")
    row("depth: layers one after the other", "depth", "{:,.0f}")
    return result


def _gradient_error(summary: Mapping[str, Any]) -> str:
    if "gradient_error" not in summary:
        return "exact"
    step, error, cosine = (
        summary[name] for name in ("gradient_error_step", "gradient_error", "gradient_cosine")
    )
    when = "" if step == summary["steps"] else f" at step {step}"
    shown = "not finite" if error is None else f"{error:.1e}"  # None in a log
    return f"{shown}{when} (cosine {'not finite' if cosine is None else f'{cosine:.4f}'})"


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Yield remarks on the table: trainings that failed or were slower, and what to do."""
    for run in runs:
        losses = [row["loss"] for row in run.log.of("test")]
        if losses and losses[-1] is None:
            yield f"{run.name} has failed: its test loss is not finite. Look for very large inputs in the test set."
        tests = [loss for loss in losses if loss is not None]
        if tests and tests[-1] > tests[0]:
            yield (
                f"{run.name} has failed: its test loss ended at {tests[-1]:.3g}, above the {tests[0]:.3g} that it began with. "
                "Lower --learning_rate, or take a smaller --t1."
            )
    if [run.name for run in runs] == ["layer-parallel", "serial"]:
        own, exact = (run.summary()["time_per_step"] for run in runs)
        if own > 1.05 * exact:  # the rest is noise
            yield (
                f"A layer-parallel step took {own / exact:.1f} times as long as an exact one. Layers at once gain where layers "
                "are many and small, batches small, and processors several: lp-jax plan "
                f"{runs[0].made.settings.problem} predicts for which solver, lp-jax demo shows such a network."
            )


def gradient_errors(made: Experiment, params: PyTree) -> "Figure":
    """Draw gradient errors on the last batch, for several numbers of iterations and coarse steps."""
    from lp_jax import viz
    from lp_jax.viz._hierarchy import variants

    *_, batch = made.batches(made.settings.training.epochs - 1)
    solver, adjoint_solver = made.solvers
    setting = jax.config.read("jax_disable_most_optimizations")
    jax.config.update(
        "jax_disable_most_optimizations", True
    )  # compile quickly: each program here runs once
    try:
        solves = train.residuals(
            made.model, params, batch, solver, adjoint_solver, loss=made.task.measure
        )
        taken = int(solves.forward.iterations), int(solves.adjoint.iterations)
        adjoints = variants(adjoint_solver)
        pairs = {
            name: (variant, adjoints.get(name, adjoint_solver))
            for name, variant in variants(solver).items()
        }
        most = ITERATIONS if len(pairs) > 1 else min(max(*taken, ITERATIONS), MOST_ITERATIONS)
        choices = {
            name: [
                made.gradient_error(params, batch, *(with_effort(s, n) for s in pair))
                for n in range(1, most + 1)
            ]
            for name, pair in pairs.items()
        }
        own = made.gradient_error(params, batch, solver, adjoint_solver)
    finally:
        jax.config.update("jax_disable_most_optimizations", setting)
    return viz.gradient_errors(
        choices,
        run=(
            f"this run, {type(solver).__name__}:\n{taken[0]} forward, {taken[1]} adjoint",
            taken[0],
            own,
        ),
        iteration=iteration_name(solver),
        choice="coarse step" if len(choices) > 1 else "solver",
    )


def pictures(runs: Sequence[Run], errors: "Figure | None") -> "dict[str, Figure]":
    """Return the pictures by file name; a serial run has no pictures of residuals and gradient errors."""
    from lp_jax import viz

    first = runs[0]
    solver, adjoint = runs[0].made.solvers
    layers = first.made.settings.layers
    t1 = first.made.settings.t1
    figures = {
        "curves.png": viz.curves({run.name: run.log.rows for run in runs}),
        "costs.png": viz.costs({run.name: run.rows for run in runs}),
        "hierarchy.png": viz.hierarchy(solver, layers, t1=t1, adjoint_solver=adjoint),
    }
    if first.log.of("probe"):
        names = code(solver), code(adjoint)
        figures["residuals.png"] = viz.residuals(
            first.log.rows, iteration=iteration_name(solver), solvers=names
        )
    return figures if errors is None else figures | {"gradient_error.png": errors}


def show(runs: Sequence[Run], options: argparse.Namespace, console: Console, is_root: bool) -> None:
    """Show table, summary and pictures. All processes measure; the first one shows."""
    folder = options.out
    made = runs[0].made
    params = runs[0].state.params
    figures = {}
    samples = ""
    errors = None
    if made.task.samples is not None:
        with console.status("a few answers, to read"):
            samples = made.task.samples(lambda x: np.array(train.predict(made.tested, params, x)))
    if not options.no_pictures:
        figures = _answers(made, params)
        if not made.exact:
            with console.status(
                "for a picture, other solvers are compiled and their gradients measured"
            ):
                errors = gradient_errors(made, params)
    if not is_root:
        return
    summary = {
        "problem": made.settings.flat(),
        "solver": repr(made.solvers[0]),
        "adjoint_solver": repr(made.solvers[1]),
        "results": {run.name: run.summary() for run in runs},
        "versions": {name: version(name) for name in ("lp_jax", "jax", "flax", "optax")},
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
    }
    write_json(folder / "summary.json", summary)
    if not options.no_pictures:
        figures = pictures(runs, errors) | figures
    for name, figure in figures.items():
        figure.savefig(folder / name)
    names = ["metrics.jsonl", "summary.json", "config.json", "checkpoints", *figures]
    out = plain_console()
    out.print(table(runs), soft_wrap=False)
    for remark in remarks(runs):
        out.print(remark)
    if samples:
        (folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
        names.append("samples.txt")
        out.print(f"\n{samples}\n")
    out.print(f"In {folder}: {', '.join(names)}")


def _answers(made: Experiment, params: PyTree) -> "dict[str, Figure]":
    """Return the picture of the network's answers on the test set, by file name."""
    from sklearn import metrics  # here: it takes a second to import

    from lp_jax import viz

    task = made.task
    if task.unscaled is None and task.outputs > 100:  # too many to read
        return {}
    pairs = [(y, np.asarray(train.predict(made.tested, params, x))) for x, y in task.test_batches]
    if task.unscaled is None:  # the outputs of a batch go at once: those of a text are large
        pairs = [(y.ravel(), outputs.argmax(axis=-1).ravel()) for y, outputs in pairs]
    truth, answers = (np.concatenate(column) for column in zip(*pairs, strict=True))
    if task.unscaled is not None:
        return {"predictions.png": viz.predictions(task.unscaled(truth), task.unscaled(answers))}
    matrix = metrics.confusion_matrix(truth, answers, labels=np.arange(task.outputs))
    return {"confusion.png": viz.confusion(matrix, task.names)}
