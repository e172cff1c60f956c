"""``lp-jax demo``: train one network exactly, layer-parallel and depth by depth, and compare times to the same accuracy."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from jsonargparse.typing import PositiveInt
from rich import box
from rich.console import Console
from rich.table import Table

from lp_jax import MeshComm, Picard, nn, planning, train, viz
from lp_jax.cli._experiment import SERIAL, Experiment, described, experiment
from lp_jax.cli._launch import set_cpu_devices
from lp_jax.cli._menu import MenuParser
from lp_jax.cli._models import Pair
from lp_jax.cli._problems import prepare
from lp_jax.cli._report import make_writable, plain_console, write_json
from lp_jax.cli._train import depth_by_depth
from lp_jax.cli._workers import ONE_DEVICE, Place, copies, devices, mesh_comm
from lp_jax.train._types import Batch, LossFn

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table compares the times to the same
accuracy, with the reason below, and a picture draws them. This takes two minutes on two cores."""

SWEEPS: Pair = (Picard(sweeps=3), Picard(sweeps=2))
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
    once = (layers,)
    depths = (layers // 4, layers // 2, layers)
    spread = ONE_DEVICE if comm is None else devices(comm)
    yield "exact", once, SERIAL, ONE_DEVICE
    if comm is not None:
        yield "data parallel", once, SERIAL, copies(comm)
    yield "layer-parallel", once, SWEEPS, spread
    yield "layer-parallel, rough", once, (Picard(sweeps=1), Picard(sweeps=1)), spread
    yield "nested", depths, SERIAL, ONE_DEVICE
    yield "nested, layer-parallel", depths, SWEEPS, spread


def trained(
    name: str,
    depths: Sequence[int],
    made: Experiment,
    exact_loss: Callable[[int], LossFn],
    console: Console,
) -> train.Log:
    """Train, test after each epoch by ``exact_loss(layers)`` on one device, and probe the first and the last gradient."""
    training = made.settings.training
    steps = made.task.steps_per_epoch
    optimizer = optax.adam(
        optax.cosine_decay_schedule(training.learning_rate, steps * training.epochs)
    )

    def test(model: nn.Classifier) -> list[train.Every]:
        assert isinstance(model.trunk, nn.LayerParallel)
        exact = exact_loss(model.trunk.num_layers)

        def measure(state: train.TrainState, batch: Batch) -> dict[str, object]:
            params = jax.device_put(state.params, jax.devices()[0])
            return train.evaluate(exact, params, made.task.test_batches)._asdict()

        return [train.Every("test", steps, measure)]

    _, state, log = depth_by_depth(
        made, depths, optimizer, measures=test, meter=train.Bar(name, console)
    )
    without_compilation(log)
    if not made.exact:
        for step, params in ((0, made.params), (int(state.step), state.params)):
            error = made.gradient_error(params, next(made.batches(0)), *made.solvers)
            log.write(kind="probe", step=step, gradient_error=error)
    return log


def without_compilation(log: train.Log) -> None:
    """Give the first step of each depth the time of the second."""
    steps = log.of("train")
    for row in log.of("depth"):
        steps[row["step"]]["step_time"] = steps[row["step"] + 1]["step_time"]


def seconds(log: train.Log, accuracy: float = math.inf) -> float:
    """Return the seconds of training until the test set first reached this accuracy, or of the whole training."""
    clock = 0.0
    for row in log.rows:
        clock += row["step_time"] if row["kind"] == "train" else 0.0
        if row["kind"] == "test" and row["accuracy"] >= accuracy:
            break
    return clock


def numbers_of(logs: Mapping[str, train.Log]) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the accuracy that all runs end with, and the numbers of each run by name."""
    last = {name: log.of("test")[-1]["accuracy"] for name, log in logs.items()}
    target = min(last.values())
    numbers = {}
    for name, log in logs.items():
        probed = [
            row["gradient_error"] for row in log.of("probe")
        ]  # a log has None for what is not finite
        errors = [math.nan if error is None else error for error in probed] or (0.0, 0.0)
        numbers[name] = {
            "seconds": seconds(log, target),
            "all_seconds": seconds(log),
            "accuracy": last[name],
            "first_error": errors[0],
            "last_error": errors[-1],
        }
    return target, numbers


def table(target: float, numbers: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table; in brackets are parts of the times of the first run, the exact one."""
    result = Table(box=box.SIMPLE_HEAD)
    exact = next(iter(numbers.values()))
    result.add_column("training", no_wrap=True)
    for name in (f"to {target:.1%}", "all epochs", "accuracy", "gradient error"):
        result.add_column(name, justify="right", no_wrap=True)
    for name, row in numbers.items():
        result.add_row(
            name,
            *(
                f"{row[time]:5.2f} s ({row[time] / exact[time]:.2f})"
                for time in ("seconds", "all_seconds")
            ),
            f"{row['accuracy']:.1%}",
            f"{row['first_error']:.0e}, {row['last_error']:.0e}" if row["last_error"] else "none",
        )
    return result


def run(args: Sequence[str]) -> None:
    parser = MenuParser(prog="lp-jax demo", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    folder = Path("runs", "demo")
    add(
        "--out",
        type=Path,
        default=folder,
        metavar="FOLDER",
        help="Folder for the numbers and the picture.",
    )
    add(
        "--layers",
        type=PositiveInt,
        default=4096,
        metavar="N",
        help="Number of layers, a multiple of 64.",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed of the split, the first parameters and the batches.",
    )
    add(
        "--epochs",
        type=PositiveInt,
        default=6,
        metavar="N",
        help="Number of epochs of each training.",
    )
    add("--no-pictures", action="store_true", help="Draw no picture.")
    options = parser.parse_args(args)
    layers = options.layers
    epochs = options.epochs
    seed = options.seed
    if layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {layers}.")
    make_writable(options.out)
    sizes = {"width": 8, "t1": 1.0, "batch_size": 8, "learning_rate": 3e-3}
    settings, task = prepare("digits", {**sizes, "layers": layers, "epochs": epochs, "seed": seed})
    described(settings, task)
    set_cpu_devices(len(os.sched_getaffinity(0)))
    workers = 2 ** int(np.log2(min(jax.device_count(), _MOST_WORKERS)))
    console = Console(stderr=True)
    out = plain_console(width=max(100, Console().width))
    comm = mesh_comm({"layers": workers}) if workers > 1 else None
    examples = task.steps_per_epoch * settings.training.batch_size
    kind = jax.devices()[0].device_kind
    out.print(
        f"{layers} layers of {settings.model.width} units on {examples:,} digits an epoch, {epochs} epochs."
    )
    out.print(f"Devices: {workers} ({kind}), each with {layers // workers} layers.")

    @functools.cache  # one program for the tests of all runs
    def exact_loss(layers: int) -> LossFn:
        return task.loss(experiment(settings, task, solvers=SERIAL, layers=layers).model)[0]

    logs = {
        name: trained(name, depths, experiment(settings, task, place, pair), exact_loss, console)
        for name, depths, pair, place in ways(layers, comm)
    }
    target, numbers = numbers_of(logs)
    out.print(table(target, numbers))
    out.print(EXPLAINED)
    serial = planning.training_step(*SERIAL, layers)
    sweeps = planning.training_step(*SWEEPS, layers, workers=workers)
    out.print(
        f"Why: an exact step is {serial.depth()} evaluations of one layer, one after another. A layer-parallel step is "
        f"{sweeps.depth()} evaluations of {layers // workers} layers at once: 4 forward, 2 adjoint and the gradient.\n"
    )
    write_json(options.out / "summary.json", {"seed": seed, "workers": workers, "runs": numbers})
    if not options.no_pictures:
        viz.race({name: log.rows for name, log in logs.items()}, target=target).savefig(
            options.out / "race.png"
        )
    out.print(f"In {options.out}: {'' if options.no_pictures else 'race.png, '}summary.json")
