"""``lp-jax demo``: train one network exactly, layer-parallel and depth by depth, and compare times to the same accuracy."""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from lp_jax import MeshComm, Picard, Solver, data, nn, planning, train
from lp_jax._arrays._types import PyTree
from lp_jax.cli._menu import Parser, positive
from lp_jax.cli._network import EXACT, WIDTH, network
from lp_jax.train._types import Batch, Loss, LossFn
from lp_jax.viz._style import GREY, figure, line_style, styled

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table
compares the times to the same accuracy, with the reason below, and a picture draws them. This takes
two minutes on two cores."""

EXPLAINED = """\
Times are those of training steps; compilation and evaluation are left out. The gradient error is
relative to the exact gradient, in the first step and after the last one. The sizes were chosen:
depth is what limits a network of many small layers and a small batch.
  exact           Serial(): one layer after another, on one device
  data parallel   the same, each device with its share of every batch
  nested          exact; a quarter of the layers first, then half, then all
  layer-parallel  Picard(sweeps=3), adjoint Picard(sweeps=2): every device evaluates all of its
                  layers at once; rough: 1 and 1
"""
BATCH = 8
_MOST_WORKERS = 8

SWEEPS = Picard(sweeps=3), Picard(sweeps=2)


class Way(NamedTuple):
    """A way to train."""

    solvers: tuple[Solver, Solver] = EXACT  # sweeps are spread over the devices
    nested: bool = False  # a quarter of the layers first, then half of them, then all
    copies: bool = False  # each device has all layers, and its share of every batch


WAYS = {
    "exact": Way(),
    "data parallel": Way(copies=True),
    "layer-parallel": Way(SWEEPS),
    "layer-parallel, rough": Way((Picard(sweeps=1), Picard(sweeps=1))),
    "nested": Way(nested=True),
    "nested, layer-parallel": Way(SWEEPS, nested=True),
}


class Task(NamedTuple):
    """The digits, and the size of each training."""

    dataset: data.Dataset
    layers: int
    epochs: int
    seed: int
    comm: MeshComm | None  # None for one device

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return len(self.dataset.train_y) // BATCH


class Run(NamedTuple):
    """A training as the table shows it."""

    curve: list[tuple[float, float]]  # seconds of training up to each test, and its accuracy
    errors: list[float]  # of the first and the last gradient; none for exact ones


def copied(model: nn.Classifier, comm: MeshComm) -> tuple[LossFn, PyTree]:
    """Return the loss as the mean over copies of the network, each with its share of the batch; and the parameters."""
    loss_fn, params = train.classification(model)
    axis, whole = comm.axis, PartitionSpec()

    @jax.shard_map(mesh=comm.mesh, in_specs=(whole, PartitionSpec(axis)), out_specs=whole)
    def mean(params: PyTree, batch: Batch) -> Loss:
        # The layers' gradients are summed once for each step, because the copies count as different.
        own = jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying"), params)
        loss, info = loss_fn(own, batch, *EXACT)
        # `pmax` has no derivative, and only the loss needs one.
        info = jax.lax.stop_gradient(info)
        return jax.lax.pmean(loss, axis), jax.tree.map(lambda x: jax.lax.pmax(x, axis), info)

    params = jax.device_put(params, NamedSharding(comm.mesh, whole))
    return lambda params, batch, *solvers: mean(params, batch), params


@functools.cache
def exact_loss(layers: int) -> LossFn:
    """Return the exact loss on one device, whose program the tests of all trainings share."""
    return train.classification(network(layers))[0]


def run_one(task: Task, way: Way) -> Run:
    """Train, test after each epoch, and measure the errors of the first and the last gradient."""
    layers = task.layers
    # Nested iteration shares the epochs of one training among its depths, as evenly as whole epochs allow.
    depths = (layers // 4, layers // 2, layers) if way.nested else (layers,)
    epochs = np.diff(task.epochs * np.arange(len(depths) + 1) // len(depths)).tolist()
    comm = None if way.solvers == EXACT else task.comm

    def batches(epoch: int) -> Iterator[Batch]:
        return data.batches(task.dataset, BATCH, seed=task.seed, epoch=epoch)

    def loss(model: nn.Classifier) -> tuple[LossFn, PyTree]:
        # Copies of the network are trained on several devices only, where the task has a comm.
        if way.copies and task.comm:
            return copied(model, task.comm)
        return train.classification(model)

    def tests(model: nn.Classifier) -> list[train.Every]:
        """Return the measurement of the test set's accuracy after each epoch, exactly and on one device."""
        assert isinstance(model.trunk, nn.LayerParallel)
        loss_fn = exact_loss(model.trunk.num_layers)
        test = task.dataset.test_x, task.dataset.test_y

        def measure(state: train.TrainState, batch: Batch) -> dict[str, object]:
            params = jax.device_put(state.params, jax.devices()[0])
            return train.evaluate(loss_fn, params, [test])._asdict()

        return [train.Every("test", task.steps, measure)]

    _, state, log = train.nested(
        network(depths[0], task.seed, way.solvers, comm),
        optax.adam(optax.cosine_decay_schedule(3e-3, task.steps * task.epochs)),
        batches,
        [train.Depth(*part, *way.solvers) for part in zip(depths, epochs, strict=True)],
        steps_per_epoch=task.steps,
        loss=loss,
        measures=tests,
    )
    if way.solvers == EXACT:
        return Run(curve(log), [])
    loss_fn, first = loss(network(layers, task.seed, way.solvers, comm))
    batch = next(batches(0))

    @jax.jit
    def gradient(params: PyTree, solvers: tuple[Solver, Solver]) -> PyTree:
        return jax.grad(loss_fn, has_aux=True)(params, batch, *solvers)[0]

    def error(params: PyTree) -> float:
        exact = gradient(params, EXACT)
        difference = optax.tree.sub(gradient(params, way.solvers), exact)
        return float(optax.tree.norm(difference) / optax.tree.norm(exact))

    return Run(curve(log), [error(first), error(state.params)])


def curve(log: train.Log) -> list[tuple[float, float]]:
    """Return the seconds of training up to each test, and its accuracy.

    The first step of each depth compiles, so it counts as long as the second one.
    """
    times = [row["step_time"] for row in log.of("train")]
    for row in log.of("depth"):
        times[row["step"]] = times[row["step"] + 1]
    # Row n of `times` belongs to step n + 1, because the log has one row of kind "train" for each step.
    clock = np.cumsum(times).tolist()
    return [(clock[row["step"] - 1], row["accuracy"]) for row in log.of("test")]


def reached(runs: Mapping[str, Run]) -> tuple[float, dict[str, float]]:
    """Return the accuracy that all runs end with, and the seconds that each of them took to reach it."""
    target = min(run.curve[-1][1] for run in runs.values())
    return target, {
        name: next(clock for clock, accuracy in run.curve if accuracy >= target)
        for name, run in runs.items()
    }


def table(target: float, runs: Mapping[str, Run], seconds: Mapping[str, float]) -> Table:
    """Return the table; in brackets are the times relative to those of exact training."""
    result = Table("training", box=box.SIMPLE_HEAD)
    for title in (f"to {target:.1%}", "all epochs", "accuracy", "gradient error"):
        result.add_column(title, justify="right", no_wrap=True)
    whole_exact, _ = runs["exact"].curve[-1]
    for name, run in runs.items():
        whole, accuracy = run.curve[-1]
        result.add_row(
            name,
            f"{seconds[name]:5.2f} s ({seconds[name] / seconds['exact']:.2f})",
            f"{whole:5.2f} s ({whole / whole_exact:.2f})",
            f"{accuracy:.1%}",
            ", ".join(f"{error:.0e}" for error in run.errors) or "none",
        )
    return result


@styled
def race(target: float, runs: Mapping[str, Run], seconds: Mapping[str, float]) -> Figure:
    """Draw the accuracy against the seconds of each training, with a marker where it reached the target."""
    fastest = min(seconds, key=seconds.__getitem__)
    title = f"{fastest.capitalize()} training reaches {target:.1%} in {seconds[fastest]:.3g} s"
    if fastest != "exact":
        title += f", exact training in {seconds['exact']:.3g} s"
    fig = figure(title)
    ax = fig.subplots()
    for i, (name, run) in enumerate(runs.items()):
        look = line_style(i)
        ax.plot(*zip(*run.curve, strict=True), label=name, **look)
        colour, marker = look["color"], "os^DvP"[i]
        ax.plot(seconds[name], target, marker, color=colour, mec="white", ms=12, zorder=5)
    ax.axhline(target, color=GREY, linestyle=":", zorder=1)
    # The axis begins near the median, because the first tests of a training would flatten the rest.
    accuracies = [accuracy for run in runs.values() for _, accuracy in run.curve]
    low, high = min(np.median(accuracies), target), max(accuracies)
    space = max(high - low, 0.01) / 2
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(
        xlim=(0, None),
        ylim=(max(0, low - space), min(1, high + space)),
        xlabel="seconds of training",
        ylabel="test accuracy",
        title=f"Markers: where {target:.1%} is reached",
    )
    ax.legend(loc="lower right")
    return fig


def run(args: Sequence[str]) -> None:
    """Train in all ways, and print and draw how they compare."""
    parser = Parser("lp-jax demo", ABOUT, [("lp-jax demo --seed 1", "what the README shows")])
    about = "Folder for the numbers and the picture."
    parser.add("out", Path, Path("runs", "demo"), about, metavar="FOLDER")
    parser.add("layers", positive, 4096, "Number of layers, a multiple of 64.")
    parser.add("seed", int, 0, "Seed of the split, the first parameters and the batches.")
    parser.add("epochs", positive, 6, "Number of epochs of each training.")
    parser.add_argument("--no-pictures", action="store_true", help="Draw no picture.")
    options = parser.parse_args(args)
    layers = options.layers
    if layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {layers}.")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "summary.json"
    path.touch()  # A folder that cannot be written to fails now rather than after the trainings.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # JAX takes the number of its CPU devices only before it starts them, and XLA_FLAGS may have set it already.
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    # The largest power of two divides the layers, a multiple of 64, also at a quarter of the depth.
    workers = 2 ** (min(jax.device_count(), _MOST_WORKERS).bit_length() - 1)
    devices = jax.devices()[:workers]
    mesh = jax.make_mesh((workers,), ("layers",), (AxisType.Auto,), devices=devices)
    comm = MeshComm(mesh) if workers > 1 else None
    task = Task(data.digits(options.seed), layers, options.epochs, options.seed, comm)
    print(
        f"{layers} layers of {WIDTH} units on {task.steps * BATCH:,} digits an epoch, "
        f"{task.epochs} epochs.\n"
        f"Devices: {workers} ({devices[0].device_kind}), each with {layers // workers} layers."
    )
    runs = {}
    with Console(stderr=True).status("") as status:
        for name, way in WAYS.items():
            if comm is not None or not way.copies:
                status.update(f"training: {name}")
                runs[name] = run_one(task, way)
    target, seconds = reached(runs)
    out = Console(width=max(100, Console().width), highlight=False)
    out.print(table(target, runs, seconds))
    serial = planning.training_step(*EXACT, layers)
    sweeps = planning.training_step(*SWEEPS, layers, workers=workers)
    print(
        f"{EXPLAINED}\n"
        f"Why: an exact step is {serial.depth()} evaluations of one layer, one after another. A "
        f"layer-parallel step is {sweeps.depth()} evaluations of {layers // workers} layers at "
        f"once: "
        "4 forward, 2 adjoint and the gradient.\n"
    )
    found = {name: {"seconds": seconds[name], **run._asdict()} for name, run in runs.items()}
    summary = {"seed": options.seed, "workers": workers, "runs": found}
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if not options.no_pictures:
        race(target, runs, seconds).savefig(options.out / "race.png")
    print(f"In {options.out}: {'' if options.no_pictures else 'race.png, '}summary.json")
