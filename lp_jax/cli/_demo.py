"""``lp-jax demo``: train one network exactly, layer-parallel and depth by depth, and compare times to the same accuracy."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from jsonargparse.typing import PositiveInt
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from lp_jax import MGRIT, MeshComm, Picard, Rediscretize, nn, planning, train, viz
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.cli._experiment import SERIAL, Experiment, Run, described, experiment
from lp_jax.cli._launch import set_cpu_devices
from lp_jax.cli._menu import MenuParser
from lp_jax.cli._methods import depth_by_depth
from lp_jax.cli._models import Pair
from lp_jax.cli._plan import make_plan
from lp_jax.cli._report import make_writable, plain_console, quick_compilation, save, write_json
from lp_jax.cli._settings import prepare
from lp_jax.cli._workers import ONE_DEVICE, Place, copies, devices, mesh_comm
from lp_jax.planning._words import code, times
from lp_jax.train._types import Batch, LossFn

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table compares the times to the same
accuracy, with the reasons below. Five pictures show the solver at work. This takes two minutes on two cores."""

SIZES = {"width": 8, "t1": 1.0, "batch_size": 8, "learning_rate": 3e-3}
"""Options of ``lp-jax train digits`` that differ from its defaults."""

SWEEPS: Pair = (Picard(sweeps=3), Picard(sweeps=2))
ROUGH: Pair = (Picard(sweeps=1), Picard(sweeps=1))
EXPLAINED = """\
Times are those of training steps; compilation and evaluation are left out. The gradient error is relative to the exact
gradient, in the first step and after the last one. The sizes were chosen: depth is what limits a network of many small layers
and a small batch.
  exact           Serial(): one layer after another, on one device
  data parallel   the same, each device with its share of every batch
  nested          exact; a quarter of the layers first, then half, then all
  layer-parallel  Picard(sweeps=3), adjoint Picard(sweeps=2): every device evaluates all of its layers at once; rough: 1 and 1
"""
_MOST_WORKERS = 8


def ways(layers: int, comm: MeshComm | None) -> Iterator[tuple[str, Sequence[int], Pair, Place]]:
    """Yield the ways to train: name, successive numbers of layers, solvers and place. ``comm`` is None on one device."""
    once, depths, spread = (layers,), (layers // 4, layers // 2, layers), ONE_DEVICE if comm is None else devices(comm)
    yield "exact", once, SERIAL, ONE_DEVICE
    if comm is not None:
        yield "data parallel", once, SERIAL, copies(comm)
    yield "layer-parallel", once, SWEEPS, spread
    yield "layer-parallel, rough", once, ROUGH, spread
    yield "nested", depths, SERIAL, ONE_DEVICE
    yield "nested, layer-parallel", depths, SWEEPS, spread


def trained(
    name: str, depths: Sequence[int], made: Experiment, exact_loss: Callable[[int], LossFn], console: Console
) -> Run:
    """Train, and test after each epoch by ``exact_loss(layers)``, by serial propagation on one device.

    Rows of kind "probe" have the gradient's error at the first and at the last parameters, unless it is exact.
    """
    training, steps = made.settings.training, made.task.steps_per_epoch
    optimizer = optax.adam(optax.cosine_decay_schedule(training.learning_rate, steps * training.epochs))

    def test(model: nn.Classifier) -> list[train.Every]:
        exact = exact_loss(_trunk(model).num_layers)

        def measure(state: train.TrainState, batch: Batch) -> dict[str, object]:
            return train.evaluate(exact, _on_one_device(state.params), made.task.test_batches)._asdict()

        return [train.Every("test", steps, measure)]

    _, state, log = depth_by_depth(made, depths, optimizer, measures=test, meter=train.Bar(name, console))
    without_compilation(log)
    if not made.exact:
        for step, params in ((0, made.params), (int(state.step), state.params)):
            error = made.gradient_error(params, next(made.batches(0)), *made.solvers)
            log.write(kind="probe", step=step, gradient_error=error)
    return Run(name, made, state._replace(params=_on_one_device(state.params)), log, training.batch_size)


def _trunk(model: nn.Classifier) -> nn.LayerParallel:
    assert isinstance(model.trunk, nn.LayerParallel)
    return model.trunk


def _on_one_device(params: PyTree) -> PyTree:
    return jax.device_put(params, jax.devices()[0])


def without_compilation(log: train.Log) -> None:
    """Give the first step of each depth the time of the second, and write the difference as a row."""
    steps = log.of("train")
    for begun in (row["step"] for row in log.of("depth")):
        first, second = steps[begun], steps[begun + 1]
        log.write(kind="compilation", step=first["step"], seconds=first["step_time"] - second["step_time"])
        first["step_time"] = second["step_time"]


def seconds(run: Run, accuracy: float = math.inf) -> float:
    """Return the seconds of training until the test set first reached this accuracy, or of the whole training."""
    clock = 0.0
    for row in run.log.rows:
        clock += row["step_time"] if row["kind"] == "train" else 0.0
        if row["kind"] == "test" and row["accuracy"] >= accuracy:
            break
    return clock


def numbers_of(runs: Sequence[Run]) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the accuracy that all runs end with, and the numbers of each run by name; the first run is the exact one."""
    last = {run.name: run.log.of("test")[-1]["accuracy"] for run in runs}
    target, exact = min(last.values()), runs[0]
    numbers = {}
    for run in runs:
        probed = [row["gradient_error"] for row in run.log.of("probe")]  # a log has None for what is not finite
        first_error, last_error = [math.nan if error is None else error for error in probed] or (0.0, 0.0)
        numbers[run.name] = {
            "seconds": seconds(run, target),
            "of_exact": seconds(run, target) / seconds(exact, target),
            "all_seconds": seconds(run),
            "all_of_exact": seconds(run) / seconds(exact),
            "accuracy": last[run.name],
            "first_error": first_error,
            "last_error": last_error,
            "compilation": sum(row["seconds"] for row in run.log.of("compilation")),
        }
    return target, numbers


def table(target: float, numbers: Mapping[str, Mapping[str, float]]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("training", no_wrap=True)
    for name in (f"to {target:.1%}", "all epochs", "accuracy", "gradient error"):
        result.add_column(name, justify="right", no_wrap=True)
    for name, row in numbers.items():
        result.add_row(
            name,
            f"{row['seconds']:5.2f} s ({row['of_exact']:.2f})",
            f"{row['all_seconds']:5.2f} s ({row['all_of_exact']:.2f})",
            f"{row['accuracy']:.1%}",
            f"{row['first_error']:.0e}, {row['last_error']:.0e}" if row["last_error"] else "none",
        )
    return result


def reason(plan: planning.Plan, workers: int, measured: float) -> str:
    """Return an explanation of the time of the layer-parallel row; ``plan`` has the times of the layers on this machine."""
    serial = planning.training_step(*SERIAL, plan.layers).depth()
    counted = planning.training_step(*SWEEPS, plan.layers, workers=workers)
    sent = f", with {counted.states + counted.reductions} messages" if workers > 1 else ""
    predicted = planning.predict(*SWEEPS, plan.layers, plan.machine, workers=workers).seconds / plan.serial_seconds
    return (
        f"Why: an exact step is {serial} evaluations of one layer, one after another. A layer-parallel step is "
        f"{counted.depth()} evaluations of {max(layers for _, layers in counted.batches)} layers at once: 4 forward, "
        f"2 adjoint and the gradient{sent}. From the times of layers on this machine the planner predicts "
        f"{predicted:.2f} of the exact step's time. Measured: {measured:.2f}.\n"
    )


def predictions(made: Experiment, params: PyTree) -> Iterator[str]:
    """Yield the planner's predictions for the same network on one H200 and on eight."""
    yield "Predicted for the same network on other machines:"
    x, *_ = batch = next(made.batches(0))
    gpu = planning.estimate(_trunk(made.model).problem(made.model.opening(x)), device="H200")
    gpu = dataclasses.replace(gpu, latency=1e-5, bandwidth=2e11)
    there = train.plan(made.model, params, batch, machine=gpu, error=1e-2, seconds=2.0)
    for on in there.scaling((1, 8)):
        how = "" if on.devices == 1 else " ({} along the layers x {} along the examples)".format(*on.split)
        if on.both is not None:
            gain = times(there.serial_seconds / on.both)
            yield f"{on.devices} H200{how}: {1e3 * on.both:.2g} ms a step, {gain} times as fast as layer after layer on one"
    yield ""


_SHOWN: Mapping[str, Solver] = {
    "sweeps, as in the table": Picard(),
    "two levels, injection": MGRIT(coarsening=16, coarse_step=Rediscretize()),
    "two levels, Picard 1": MGRIT(coarsening=16),
}
"""Solvers of the picture of errors: that of the table, and cycles to compare."""

_SIX = Picard(sweeps=6)
"""Solver of the picture of residual norms: six sweeps (the table has three) show how fast norms fall."""


def pictures(made: Experiment, workers: int, runs: Sequence[Run], target: float) -> dict[str, Figure]:
    """Return the five pictures, by file name."""
    params, layers, batch = runs[0].state.params, made.settings.layers, next(made.batches(0))
    last, exact = int(runs[0].state.step), planning.training_step(*SERIAL, layers).work()
    choices = {name: [planning.with_effort(s, n) for n in (1, 2, 3, 4)] for name, s in _SHOWN.items()}
    work = {name: [planning.training_step(s, s, layers).work() / exact for s in one] for name, one in choices.items()}
    with quick_compilation():
        errors = {name: [made.gradient_error(params, batch, s) for s in one] for name, one in choices.items()}
        history = [
            {"kind": "probe", "step": step, **made.residuals(at, batch, _SIX, _SIX)}
            for step, at in ((0, made.params), (last, params))
        ]
    solver, adjoint_solver = SWEEPS
    return {
        "race.png": viz.race({run.name: run.log.rows for run in runs}, target=target),
        "residuals.png": viz.residuals(history, iteration="sweep", solvers=(code(_SIX),) * 2),
        "gradient_error.png": viz.gradient_errors(errors, work=work, iteration="iteration", choice="solver"),
        "sweeps.png": viz.hierarchy(solver, layers, t1=made.settings.t1, adjoint_solver=adjoint_solver),
        "schedule.png": viz.schedule(
            solver, layers, workers=max(workers, 2), adjoint_solver=adjoint_solver, at_once=math.inf
        ),
    }


def run(args: Sequence[str]) -> None:
    parser = MenuParser(prog="lp-jax demo", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    folder = Path("runs", "demo")
    add("--out", type=Path, default=folder, metavar="FOLDER", help="Folder for the table and the pictures.")
    add("--layers", type=PositiveInt, default=4096, metavar="N", help="Number of layers, a multiple of 64.")
    add("--seed", type=int, default=0, metavar="N", help="Seed of the split, the first parameters and the batches.")
    add("--epochs", type=PositiveInt, default=6, metavar="N", help="Number of epochs of each training.")
    add("--no-pictures", action="store_true", help="Draw no pictures.")
    options = parser.parse_args(args)
    if options.layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {options.layers}.")
    make_writable(options.out)
    chosen = {"layers": options.layers, "epochs": options.epochs, "seed": options.seed}
    try:
        settings, task = prepare("digits", {**SIZES, **chosen})
    except ValueError as error:
        parser.error(f"--{error}")
    described(settings, task)
    set_cpu_devices(len(os.sched_getaffinity(0)))
    workers = 2 ** int(np.log2(min(jax.device_count(), _MOST_WORKERS)))
    console, out = Console(stderr=True), plain_console(width=max(100, Console().width))
    comm = mesh_comm({"layers": workers}) if workers > 1 else None
    examples = task.steps_per_epoch * settings.training.batch_size
    out.print(
        f"{settings.layers} layers of {settings.model.width} units on {examples:,} digits an epoch, {options.epochs} epochs."
    )
    there = f"{workers} devices ({jax.devices()[0].device_kind}): each holds {settings.layers // workers} layers."
    out.print(there if workers > 1 else f"One device ({jax.devices()[0].device_kind}): all layers at once.")

    @functools.cache  # one program for the tests of all runs
    def exact_loss(layers: int) -> LossFn:
        return task.loss(experiment(settings, task, solvers=SERIAL, layers=layers).model)[0]

    runs = [
        trained(name, depths, experiment(settings, task, place, pair), exact_loss, console)
        for name, depths, pair, place in ways(settings.layers, comm)
    ]
    target, numbers = numbers_of(runs)
    out.print(table(target, numbers))
    out.print(EXPLAINED)
    plan = make_plan(settings, task, console, workers=workers, seconds=2.0)
    out.print(reason(plan, workers, numbers["layer-parallel"]["all_of_exact"]))
    made = experiment(settings, task)
    with console.status("predicting times on other machines"):
        out.print("\n".join(predictions(made, runs[0].state.params)))
    names: list[str] = []
    with console.status("pictures: other solvers are compiled and their gradients measured"):
        if not options.no_pictures:
            names = save(options.out, pictures(made, workers, runs, target))
    write_json(options.out / "summary.json", {"seed": options.seed, "workers": workers, "runs": numbers})
    out.print(f"In {options.out}: {', '.join([*names, 'summary.json'])}")
