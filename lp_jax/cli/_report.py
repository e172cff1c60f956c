"""What a run leaves: a table, a summary, pictures."""

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure
from rich.table import Table

from lp_jax import MGRIT, Picard, Rediscretize, viz
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.cli._experiment import Experiment
from lp_jax.cli._info import version
from lp_jax.cli._run import Run
from lp_jax.cli._settings import Settings
from lp_jax.cli._solver import with_effort
from lp_jax.train import gradient_error, residuals

COARSE_STEPS: Mapping[str, Rediscretize | Solver] = {
    "injection": Rediscretize(params="inject"),
    "mean of parameters": Rediscretize(params="mean"),
    "1 Picard sweep": Picard(sweeps=1),
    "2 Picard sweeps": Picard(sweeps=2),
}
ITERATIONS, MOST_ITERATIONS = 3, 8
"""How many are drawn at least, and at most."""


def table(runs: Sequence[Run]) -> Table:
    """The runs side by side."""
    result = Table(title="Test set; the network evaluated exactly", title_justify="left", title_style="")
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    summaries = [run.summary() for run in runs]
    result.add_row("test accuracy", *(f"{s['test_accuracy']:.2%}" for s in summaries))
    result.add_row("test loss", *(f"{s['test_loss']:.4f}" for s in summaries))
    result.add_row("gradient error at the end", *map(_gradient_error, summaries))
    result.add_row("time per step, median", *(f"{1e3 * s['time_per_step']:.2f} ms" for s in summaries))
    result.add_row("steps", *(str(s["steps"]) for s in summaries))
    return result


def _gradient_error(summary: Mapping[str, Any]) -> str:
    if "gradient_error" not in summary:
        return "exact"
    return f"{summary['gradient_error']:.1e} (cosine {summary['gradient_cosine']:.4f})"


def summary(settings: Settings, runs: Sequence[Run], solver: Solver, adjoint_solver: Solver) -> dict[str, Any]:
    """All that the table says, and what it was measured with."""
    return {
        "problem": dataclasses.asdict(settings),
        "solver": repr(solver),
        "adjoint_solver": repr(adjoint_solver),
        "results": {run.name: run.summary() for run in runs},
        "versions": {name: version(name) for name in ("lp_jax", "jax", "flax", "optax")},
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
    }


class GradientErrors(NamedTuple):
    """Errors of a trained network's gradient.

    Attributes:
        choices: by name and number of iterations, 1, 2, ..., forward and adjoint alike.
        own: the run's.
        iterations: the run's, forward and adjoint.
    """

    choices: dict[str, list[float]]
    own: float
    iterations: tuple[int, int]


def gradient_errors(made: Experiment, params: PyTree, solver: Solver, adjoint_solver: Solver) -> GradientErrors:
    """Measure the gradient on the first batch with few iterations and more, and with other coarse steps."""
    batch = next(iter(made.batches(0)))

    def error(solver: Solver, adjoint_solver: Solver) -> float:
        measured = gradient_error(made.loss_fn, params, batch, solver, adjoint_solver, global_sums=made.place.whole)
        return float(measured.relative)

    with _quick_compilation():
        solves = residuals(made.model, params, batch, solver, adjoint_solver)
        taken = int(solves.forward.iterations), int(solves.adjoint.iterations)
        most = ITERATIONS if isinstance(solver, MGRIT) else min(max(*taken, ITERATIONS), MOST_ITERATIONS)
        choices = {
            name: [
                error(*(with_effort(s, count, coarse_step) for s in (solver, adjoint_solver)))
                for count in range(1, most + 1)
            ]
            for name, coarse_step in _choices(solver).items()
        }
        return GradientErrors(choices, error(solver, adjoint_solver), taken)


def pictures(
    settings: Settings,
    runs: Sequence[Run],
    solver: Solver,
    adjoint_solver: Solver,
    errors: GradientErrors | None,
) -> dict[str, Figure]:
    """What there is to draw, by the name of its file: of a serial run, neither residuals nor gradient errors."""
    first = runs[0]
    figures = {
        "curves.png": viz.curves({run.name: run.log.rows for run in runs}),
        "hierarchy.png": viz.hierarchy(
            solver, settings.layers // settings.blocks, t1=settings.t1, adjoint_solver=adjoint_solver
        ),
    }
    if first.log.of("probe"):
        figures["residuals.png"] = viz.residuals(first.log.rows, iteration=_iteration(solver))
    if errors is not None:
        forward, adjoint = errors.iterations
        figures["gradient_error.png"] = viz.gradient_errors(
            errors.choices,
            run=(f"this run: {forward} forward,\n{adjoint} adjoint", forward, errors.own),
            iteration=_iteration(solver),
            choice="coarse step" if isinstance(solver, MGRIT) else "solver",
        )
    return figures


def save(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Write pictures into a folder; their paths."""
    paths = [folder / name for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths


def _iteration(solver: Solver) -> str:
    return {"Picard": "sweep", "Newton": "iteration"}.get(type(solver).__name__, "cycle")


@contextlib.contextmanager
def _quick_compilation() -> Iterator[None]:
    """Each program here runs once, so the time goes into compiling it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _choices(solver: Solver) -> dict[str, Any]:
    """Coarse steps to compare, the solver's own included; one nameless choice for a solver that has none."""
    if not isinstance(solver, MGRIT):
        return {type(solver).__name__: None}
    own = {} if solver.coarse_step in COARSE_STEPS.values() else {"this run's coarse step": solver.coarse_step}
    return {**COARSE_STEPS, **own}
