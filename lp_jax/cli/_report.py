"""Results of a run: its folder, a table, a summary, pictures."""

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
from rich.console import Console
from rich.table import Table

from lp_jax._arrays._types import PyTree
from lp_jax.cli._errors import CommandError
from lp_jax.cli._experiment import Experiment, Run
from lp_jax.cli._info import version
from lp_jax.planning import with_effort
from lp_jax.planning._words import code, iteration_name
from lp_jax.train import residuals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "config.json"  # the options that a run was started with
LOCK = "run.lock"  # the process at work in the folder


def new_run(folder: Path) -> None:
    """Make sure that a new run can write into the folder."""
    if (folder / CONFIG).exists():
        raise CommandError(f"{folder} holds a run already; add --resume to go on with it, or choose another --out.")
    make_writable(folder)
    if any(path.name != LOCK for path in folder.iterdir()):
        raise CommandError(f"{folder} is not empty and holds no run; choose another --out.")


def drop_if_not_begun(folder: Path) -> None:
    """Remove the folder of a new run that failed before its first step, so that the next try can use it."""
    log = folder / "metrics.jsonl"
    if not (log.exists() and log.stat().st_size):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with contextlib.suppress(OSError):  # the folder may be a mount point
            folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs out of the folder. The lock of a process that ended is taken over, with a message."""
    path = folder / LOCK
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        owner = file.read().strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when the process ends
        except OSError:
            raise CommandError(f"{folder} is in use by {owner}; wait for it to end, or choose another --out.") from None
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
        run = {name: stored[name] for name in ("problem", "options", "fingerprint", "solver", "adjoint_solver")}
        if not isinstance(run["options"], dict) or not isinstance(run["fingerprint"]["model"], str):
            raise TypeError
    except (ValueError, TypeError, KeyError, OSError, RecursionError):
        raise CommandError(f"{config} is not the configuration of a run; it cannot be resumed.") from None
    if run["problem"] != problem:
        raise CommandError(f"{folder} holds a run on {run['problem']}, not {problem}; choose another --out.")
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
        raise CommandError(f"cannot write to {folder}: {error.strerror}; choose another --out.") from None


ITERATIONS, MOST_ITERATIONS = 3, 8  # smallest and largest number of iterations that are drawn


def plain_console(**options: Any) -> Console:
    """Return a console that prints text as it is."""
    return Console(markup=False, highlight=False, soft_wrap=True, **options)


def table(runs: Sequence[Run]) -> Table:
    result = Table(title="Test set; the network evaluated exactly", title_justify="left", title_style="")
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    summaries = [run.summary() for run in runs]
    if all("test_accuracy" in s for s in summaries):
        result.add_row("test accuracy", *(f"{s['test_accuracy']:.2%}" for s in summaries))
    result.add_row("test loss", *(_shown("{:.4f}", s["test_loss"], _NOT_FINITE) for s in summaries))
    result.add_row("gradient error at the end", *map(_gradient_error, summaries))
    if any(s["devices"] > 1 for s in summaries):
        result.add_row("devices", *(str(s["devices"]) for s in summaries))
    result.add_row("time per step, median", *(f"{1e3 * s['time_per_step']:.2f} ms" for s in summaries))
    if any(s["seconds"] is not None for s in summaries):
        result.add_row("this call, with compiling and tests", *(_shown("{:.1f} s", s["seconds"]) for s in summaries))
    result.add_row("steps", *(str(s["steps"]) for s in summaries))
    result.add_row("work: layers x examples evaluated", *(_shown("{:,.0f}", s["work"]) for s in summaries))
    result.add_row("depth: layers one after the other", *(_shown("{:,.0f}", s["depth"]) for s in summaries))
    return result


_NOT_FINITE = "not finite"  # None in a log


def _shown(text: str, number: float | None, otherwise: str = "") -> str:
    return otherwise if number is None else text.format(number)


def _gradient_error(summary: Mapping[str, Any]) -> str:
    if "gradient_error" not in summary:
        return "exact"
    early = summary["gradient_error_step"] != summary["steps"]
    when = f" at step {summary['gradient_error_step']}" if early else ""
    error, cosine = summary["gradient_error"], summary["gradient_cosine"]
    return f"{_shown('{:.1e}', error, _NOT_FINITE)}{when} (cosine {_shown('{:.4f}', cosine, _NOT_FINITE)})"


_NOISE = 1.05  # ratios of times below this do not count as slower


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Yield remarks on the table: trainings that failed or were slower, and what to do."""
    for run in runs:
        losses = [row["loss"] for row in run.log.of("test")]
        if losses and losses[-1] is None:
            yield f"{run.name} has failed: its test loss is not finite. Look for very large inputs in the test set."
        tests = [loss for loss in losses if loss is not None]
        if len(tests) > 1 and tests[-1] > tests[0]:
            yield (
                f"{run.name} has failed: its test loss ended at {tests[-1]:.3g}, above the {tests[0]:.3g} that it began with. "
                "Lower --learning_rate, or take a smaller --t1."
            )
    if [run.name for run in runs] == ["layer-parallel", "serial"]:
        own, exact = (run.summary()["time_per_step"] for run in runs)
        if own > _NOISE * exact:
            yield (
                f"A layer-parallel step took {own / exact:.1f} times as long as an exact one. Layers at once gain where layers "
                "are many and small, batches small, and processors several: lp-jax plan "
                f"{runs[0].made.settings.problem} predicts for which solver, lp-jax demo shows such a network."
            )


def summary(runs: Sequence[Run]) -> dict[str, object]:
    """Return the numbers of the table, the solvers, versions and device."""
    made = runs[0].made
    return {
        "problem": made.settings.flat(),
        "solver": repr(made.solvers[0]),
        "adjoint_solver": repr(made.solvers[1]),
        "results": {run.name: run.summary() for run in runs},
        "versions": {name: version(name) for name in ("lp_jax", "jax", "flax", "optax")},
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
    }


def gradient_errors(made: Experiment, params: PyTree) -> "Figure":
    """Draw gradient errors on the last batch, for several numbers of iterations and coarse steps."""
    from lp_jax import viz
    from lp_jax.viz._describe import variants

    (*_, batch), (solver, adjoint_solver) = made.batches(made.settings.training.epochs - 1), made.solvers

    with quick_compilation():
        solves = residuals(made.model, params, batch, solver, adjoint_solver, loss=made.task.measure)
        taken = int(solves.forward.iterations), int(solves.adjoint.iterations)
        adjoints = variants(adjoint_solver)
        pairs = {name: (variant, adjoints.get(name, adjoint_solver)) for name, variant in variants(solver).items()}
        most = ITERATIONS if len(pairs) > 1 else min(max(*taken, ITERATIONS), MOST_ITERATIONS)
        choices = {
            name: [made.gradient_error(params, batch, *(with_effort(s, n) for s in pair)) for n in range(1, most + 1)]
            for name, pair in pairs.items()
        }
        own = made.gradient_error(params, batch, solver, adjoint_solver)
    return viz.gradient_errors(
        choices,
        run=(f"this run, {type(solver).__name__}:\n{taken[0]} forward, {taken[1]} adjoint", taken[0], own),
        iteration=iteration_name(solver),
        choice="coarse step" if len(choices) > 1 else "solver",
    )


def pictures(runs: Sequence[Run], errors: "Figure | None") -> "dict[str, Figure]":
    """Return the pictures by file name; a serial run has no pictures of residuals and gradient errors."""
    from lp_jax import viz

    first, settings, (solver, adjoint_solver) = runs[0], runs[0].made.settings, runs[0].made.solvers
    figures = {
        "curves.png": viz.curves({run.name: run.log.rows for run in runs}),
        "hierarchy.png": viz.hierarchy(solver, settings.layers, t1=settings.t1, adjoint_solver=adjoint_solver),
    }
    costs = {run.name: run.rows for run in runs}
    if all(rows[-1]["work"] is not None for rows in costs.values()):
        figures["costs.png"] = viz.costs(costs)
    if first.log.of("probe"):
        names = code(solver), code(adjoint_solver)
        figures["residuals.png"] = viz.residuals(first.log.rows, iteration=iteration_name(solver), solvers=names)
    if errors is not None:
        figures["gradient_error.png"] = errors
    return figures


def save(folder: Path, figures: "Mapping[str, Figure]") -> list[str]:
    for name, figure in figures.items():
        figure.savefig(folder / name)
    return list(figures)


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile quickly: each program here runs once."""
    setting = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", setting)
