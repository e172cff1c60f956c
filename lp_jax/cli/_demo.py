"""``lp-jax demo``: train one network exactly, layer-parallel and depth by depth, and compare times to the same accuracy."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import lp_jax
from lp_jax import MGRIT, MeshComm, Picard, Rediscretize, Serial, nn, planning, train, viz
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.cli._experiment import Experiment, built, depth_by_depth, experiment
from lp_jax.cli._launch import set_cpu_devices
from lp_jax.cli._menu import MenuParser, positive_int
from lp_jax.cli._models import Pair
from lp_jax.cli._problem import Settings
from lp_jax.cli._reason import why
from lp_jax.cli._report import make_writable, quick_compilation, save, write_json
from lp_jax.cli._settings import prepare
from lp_jax.cli._task import Task
from lp_jax.cli._workers import Copies, Devices, OneDevice, Place, mesh_comm
from lp_jax.train._log import Row, measured
from lp_jax.train._types import Batch

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table compares the times to the same
accuracy, with the reasons below. Five pictures show the solver at work. This takes two minutes on two cores."""

SIZES = {"width": 8, "t1": 1.0, "batch_size": 8, "learning_rate": 3e-3}
"""Options of ``lp-jax train digits`` that differ from its defaults."""

SWEEPS, ROUGH = (3, 2), (1, 1)
EXPLAINED = """\
Times are those of training steps; compilation and evaluation are left out. The gradient error is relative to the exact
gradient, in the first step and after the last one. The sizes were chosen: depth is what limits a network of many small layers
and a small batch.
  exact           one layer after another, on one device
  data parallel   the same, each device with its share of every batch
  nested          exact; a quarter of the layers first, then half, then all
  layer-parallel  every device evaluates all of its layers at once, in {} sweeps forward and {} backward; rough: {} and {}
"""
_MOST_WORKERS = 8


class Way(NamedTuple):
    """A way to train the network: successive numbers of layers, the solvers, and the place."""

    depths: Sequence[int]
    solvers: Pair
    place: Place


def sweeps(number: tuple[int, int]) -> tuple[Picard, Picard]:
    """Return solvers by sweeps over all layers, forward and adjoint."""
    forward, adjoint = number
    return Picard(sweeps=forward), Picard(sweeps=adjoint)


class Run(NamedTuple):
    """A finished training.

    Attributes:
        rows: rows of its log, without the time of compilation.
        compilation: seconds of compilation.
        errors: relative error of the gradient at the first parameters, and at the last ones.
        params: the trained parameters, on one device.
    """

    rows: list[Row]
    compilation: float
    errors: tuple[float, float]
    params: PyTree

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of the test set, evaluated exactly, at the end of each epoch."""
        return [row["accuracy"] for row in self.rows if row["kind"] == "test"]

    def seconds(self, accuracy: float | None = None) -> float:
        """Return the seconds of training until the test set first reached this accuracy; None means the whole training."""
        clock = 0.0
        for row in self.rows:
            clock += row["step_time"] if row["kind"] == "train" else 0.0
            if row["kind"] == "test" and accuracy is not None and row["accuracy"] >= accuracy:
                break
        return clock


EXACT: Pair = (Serial(), Serial())


def ways(layers: int, comm: MeshComm | None) -> dict[str, Way]:
    """Return the ways to train this many layers, by name; ``comm`` is None on one device."""
    single, depths = OneDevice(), (layers // 4, layers // 2, layers)
    spread = single if comm is None else Devices(comm)
    exact = {"exact": Way((layers,), EXACT, single)}
    if comm is not None:
        exact["data parallel"] = Way((layers,), EXACT, Copies(comm))
    return exact | {
        "layer-parallel": Way((layers,), sweeps(SWEEPS), spread),
        "layer-parallel, rough": Way((layers,), sweeps(ROUGH), spread),
        "nested": Way(depths, EXACT, single),
        "nested, layer-parallel": Way(depths, sweeps(SWEEPS), spread),
    }


def optimizer_of(made: Experiment) -> optax.GradientTransformation:
    training = made.settings.training
    return optax.adam(optax.cosine_decay_schedule(training.learning_rate, made.task.steps_per_epoch * training.epochs))


def trained(name: str, way: Way, settings: Settings, task: Task, console: Console) -> Run:
    """Train, and test after each epoch by serial propagation on one device."""
    made = experiment(settings, task, way.place, way.solvers)

    def test(model: nn.Classifier) -> list[train.Every]:
        exact, _ = task.loss(built(settings, task, OneDevice(), EXACT, trunk_of(model).num_layers))

        def measure(state: train.TrainState, batch: Batch) -> dict[str, object]:
            return train.evaluate(exact, _on_one_device(state.params), task.test_batches)._asdict()

        return [train.Every("test", task.steps_per_epoch, measure)]

    model, state, log = depth_by_depth(
        made, way.depths, way.solvers, optimizer_of(made), measures=test, meter=train.Bar(name, console)
    )
    errors = (0.0, 0.0)
    if way.solvers != EXACT:
        errors = _error(made), _error(made.of(model))
    return _run(log, errors, _on_one_device(state.params))


def trunk_of(model: nn.Classifier) -> nn.LayerParallel:
    """Return the layers that are solved for."""
    assert isinstance(model.trunk, nn.LayerParallel)
    return model.trunk


def layers_problem(made: Experiment) -> lp_jax.Problem:
    """Return the problem of the layers for the first batch."""
    x, *_ = next(made.batches(0))
    return trunk_of(made.model).problem(made.model.opening(x))


def _on_one_device(params: PyTree) -> PyTree:
    return jax.device_put(params, jax.devices()[0])


def _error(made: Experiment) -> float:
    """Return the relative error of the gradient of the first batch."""
    return float(train.gradient_error(made.loss_fn, made.params, next(made.batches(0)), *made.solvers).relative)


def _run(log: train.Log, errors: tuple[float, float], params: PyTree) -> Run:
    """Return a run from its log. The first step of each depth compiles, so it gets the time of the second."""
    rows, compilation = [dict(row) for row in log.rows], 0.0
    steps = [row for row in rows if row["kind"] == "train"]
    for begun in (row["step"] for row in rows if row["kind"] == "depth"):
        first, second = steps[begun], steps[begun + 1]
        compilation += first["step_time"] - second["step_time"]
        first["step_time"] = second["step_time"]
    return Run(rows, compilation, errors, params)


def target_of(runs: Mapping[str, Run]) -> float:
    """Return the accuracy that all runs reach at the end."""
    return min(run.accuracies[-1] for run in runs.values())


def numbers_of(runs: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    target = target_of(runs)
    exact = next(iter(runs.values()))
    return {
        name: {
            "seconds": run.seconds(target),
            "of_exact": run.seconds(target) / exact.seconds(target),
            "all_seconds": run.seconds(),
            "all_of_exact": run.seconds() / exact.seconds(),
            "accuracy": run.accuracies[-1],
            "first_error": run.errors[0],
            "last_error": run.errors[1],
            "compilation": run.compilation,
        }
        for name, run in runs.items()
    }


def table(runs: Mapping[str, Run]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("training", no_wrap=True)
    for name in (f"to {target_of(runs):.1%}", "all epochs", "accuracy", "gradient error"):
        result.add_column(name, justify="right", no_wrap=True)
    for name, row in numbers_of(runs).items():
        result.add_row(
            name,
            f"{row['seconds']:5.2f} s ({row['of_exact']:.2f})",
            f"{row['all_seconds']:5.2f} s ({row['all_of_exact']:.2f})",
            f"{row['accuracy']:.1%}",
            f"{row['first_error']:.0e}, {row['last_error']:.0e}" if row["last_error"] else "none",
        )
    return result


def reason(made: Experiment, comm: MeshComm | None, runs: Mapping[str, Run]) -> str:
    """Return an explanation of the time of the layer-parallel row."""
    return why(
        layers_problem(made),
        sweeps(SWEEPS),
        comm,
        optimizer=optimizer_of(made),
        params=made.params,
        measured=runs["layer-parallel"].seconds() / runs["exact"].seconds(),
    )


def predictions(made: Experiment, params: PyTree) -> Iterator[str]:
    """Yield the planner's predictions for the same network on one H200 and on eight."""
    gpu = planning.estimate(layers_problem(made), device="H200")
    gpu = dataclasses.replace(gpu, latency=1e-5, bandwidth=2e11)
    plan = train.plan(made.model, params, next(made.batches(0)), machine=gpu, error=1e-2, seconds=2.0)
    for devices in plan.scaling((1, 8)):
        layers, copies = devices.split
        how = "" if devices.devices == 1 else f" ({layers} along the layers x {copies} along the examples)"
        if devices.both is not None:
            yield (
                f"{devices.devices} H200{how}: {1e3 * devices.both:.2g} ms a step, {plan.alone / devices.both:.2g} times as "
                f"fast as layer after layer on one"
            )


def pictures(made: Experiment, workers: int, runs: Mapping[str, Run]) -> dict[str, Figure]:
    """Return the five pictures, by file name."""
    rows = {name: run.rows for name, run in runs.items()}
    params = next(iter(runs.values())).params
    layers = made.settings.layers
    solver, adjoint_solver = sweeps(SWEEPS)
    with quick_compilation():
        errors = gradient_errors(made, params)
        steps = made.task.steps_per_epoch * made.settings.training.epochs
        history = [residual_row(made, step, at) for step, at in ((0, made.params), (steps, params))]
    exact = planning.training_step(Serial(), Serial(), layers).work()
    work = {
        name: [
            planning.training_step(planning.with_effort(s, n), planning.with_effort(s, n), layers).work() / exact
            for n in _EFFORTS
        ]
        for name, s in _SHOWN.items()
    }
    return {
        "race.png": viz.race(rows, target=target_of(runs)),
        "residuals.png": viz.residuals(history, iteration="sweep", solvers=(planning.code(_SIX),) * 2),
        "gradient_error.png": viz.gradient_errors(errors, work=work, iteration="iteration", choice="solver"),
        "sweeps.png": viz.hierarchy(solver, layers, t1=made.settings.t1, adjoint_solver=adjoint_solver),
        "schedule.png": viz.schedule(
            solver, layers, workers=max(workers, 2), adjoint_solver=adjoint_solver, at_once=math.inf
        ),
    }


_SHOWN: Mapping[str, Solver] = {
    "sweeps, as in the table": Picard(),
    "two levels, injection": MGRIT(coarsening=16, coarse_step=Rediscretize()),
    "two levels, Picard 1": MGRIT(coarsening=16),
}
"""Solvers of the picture of errors: that of the table, and cycles to compare."""

_EFFORTS = (1, 2, 3, 4)


def gradient_errors(made: Experiment, params: PyTree) -> dict[str, list[float]]:
    """Return errors of the trained network's gradient after 1, 2, ... sweeps or cycles."""
    batch = next(made.batches(0))
    return {
        name: [
            float(train.gradient_error(made.loss_fn, params, batch, planning.with_effort(s, n)).relative)
            for n in _EFFORTS
        ]
        for name, s in _SHOWN.items()
    }


_SIX = Picard(sweeps=6)
"""Solver of the picture of residual norms: six sweeps (the table has three) show how fast norms fall."""


def residual_row(made: Experiment, step: int, params: PyTree) -> Row:
    """Return the residual norms of six sweeps at some parameters."""
    solves = train.residuals(made.model, params, next(made.batches(0)), _SIX, _SIX)
    return {
        "kind": "probe",
        "step": step,
        **measured("forward_residual", solves.forward.residual_norms.tolist()),
        "forward_scale": float(solves.forward_scale),
        **measured("adjoint_residual", solves.adjoint.residual_norms.tolist()),
        "adjoint_scale": float(solves.adjoint_scale),
    }


def run(args: Sequence[str]) -> None:
    parser = MenuParser(prog="lp-jax demo", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("runs", "demo"),
        metavar="FOLDER",
        help="Folder for the table and the pictures.",
    )
    add("--layers", type=int, default=4096, metavar="N", help="Number of layers, a multiple of 64.")
    add("--seed", type=int, default=0, metavar="N", help="Seed of the split, the first parameters and the batches.")
    add("--epochs", type=positive_int, default=6, metavar="N", help="Number of epochs of each training.")
    add("--no-pictures", action="store_true", help="Draw no pictures.")
    options = parser.parse_args(args)
    if options.layers < 64 or options.layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {options.layers}.")
    make_writable(options.out)
    set_cpu_devices(len(os.sched_getaffinity(0)))
    workers = 2 ** int(np.log2(min(jax.device_count(), _MOST_WORKERS)))
    console, out = Console(stderr=True), Console(highlight=False, soft_wrap=True, width=max(100, Console().width))
    settings, task = prepare(
        "digits", {**SIZES, "layers": options.layers, "epochs": options.epochs, "seed": options.seed}
    )
    comm = mesh_comm({"layers": workers}) if workers > 1 else None
    examples = task.steps_per_epoch * settings.training.batch_size
    out.print(
        f"{settings.layers} layers of {settings.model.width} units on {examples:,} digits an epoch, {options.epochs} epochs."
    )
    there = f"{workers} devices ({jax.devices()[0].device_kind}): each holds {settings.layers // workers} layers."
    out.print(there if workers > 1 else f"One device ({jax.devices()[0].device_kind}): all layers at once.")
    runs = {name: trained(name, way, settings, task, console) for name, way in ways(settings.layers, comm).items()}
    out.print(table(runs))
    out.print(EXPLAINED.format(*SWEEPS, *ROUGH))
    made = experiment(settings, task)
    with console.status("measuring each part of a step on this machine"):
        text = reason(made, comm, runs)
    out.print(f"{text}\n")
    with console.status("predicting times on other machines"):
        lines = list(predictions(made, next(iter(runs.values())).params))
    out.print("\n".join(["Predicted for the same network on other machines:", *lines, ""]))
    names: list[str] = []
    with console.status("pictures: other solvers are compiled and their gradients measured"):
        if not options.no_pictures:
            names = save(options.out, pictures(made, workers, runs))
    write_json(options.out / "summary.json", {"seed": options.seed, "workers": workers, "runs": numbers_of(runs)})
    out.print(f"In {options.out}: {', '.join([*names, 'summary.json'])}")
