"""``lp-jax demo``: train one network exactly, layer-parallel and depth by depth, and compare times to the same accuracy."""

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lp_jax import MeshComm, Picard, Serial, Solver, data, nn, planning, train
from lp_jax._arrays._types import PyTree
from lp_jax.cli._menu import Parser, positive
from lp_jax.train._log import Row
from lp_jax.train._types import Batch, Loss, LossFn
from lp_jax.viz._style import GREY, dress, figure, legend, line_style

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table
compares the times to the same accuracy, with the reason below, and a picture draws them. This takes
two minutes on two cores."""

SWEEPS = Picard(sweeps=3), Picard(sweeps=2)
EXPLAINED = """\
Times are those of training steps; compilation and evaluation are left out. The gradient error is
relative to the exact gradient, in the first step and after the last one. The sizes were chosen: depth
is what limits a network of many small layers and a small batch.
  exact           Serial(): one layer after another, on one device
  data parallel   the same, each device with its share of every batch
  nested          exact; a quarter of the layers first, then half, then all
  layer-parallel  Picard(sweeps=3), adjoint Picard(sweeps=2): every device evaluates all of its
                  layers at once; rough: 1 and 1
"""
WIDTH, BATCH = 8, 8
_MOST_WORKERS = 8

Numbers = Mapping[str, Mapping[str, float]]
"""Seconds, accuracy and gradient errors of each training, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train: successive numbers of layers, solvers, and the devices of the layers.

    With ``copies``, each of these devices has all layers, and its share of every batch.
    """

    depths: Sequence[int]
    solvers: tuple[Solver, Solver] = (Serial(), Serial())
    comm: MeshComm | None = None  # None is one device
    copies: bool = False

    def network(self, layers: int, seed: int) -> nn.Classifier:
        solver, adjoint_solver = self.solvers
        rngs = nnx.Rngs(seed)
        opening = nn.DenseOpening((8, 8, 1), WIDTH, rngs=rngs)
        trunk = nn.LayerParallel(
            lambda rngs: nn.DenseResidual(WIDTH, rngs=rngs),
            layers,
            rngs=rngs,
            solver=solver,
            adjoint_solver=adjoint_solver,
            comm=None if self.copies else self.comm,
        )
        return nn.Classifier(opening, trunk, nn.DenseClosing((WIDTH,), 10, rngs=rngs))

    def loss(self, model: nn.Classifier) -> tuple[LossFn, PyTree]:
        """Return the loss, and the model's parameters."""
        loss_fn, params = train.classification(model)
        if self.comm is None or not self.copies:
            return loss_fn, params
        axis, whole = self.comm.axis, PartitionSpec()

        @functools.partial(
            jax.shard_map,
            mesh=self.comm.mesh,
            in_specs=(whole, PartitionSpec(axis)),
            out_specs=whole,
        )
        def mean(params: PyTree, batch: Batch) -> Loss:
            # The layers' gradients are summed once for each step, because the copies count as different.
            own = jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying"), params)
            loss, info = loss_fn(own, batch, *self.solvers)
            info = jax.lax.stop_gradient(info)
            return jax.lax.pmean(loss, axis), jax.tree.map(lambda x: jax.lax.pmax(x, axis), info)

        params = jax.device_put(params, NamedSharding(self.comm.mesh, whole))
        return lambda params, batch, *solvers: mean(params, batch), params


def ways(layers: int, comm: MeshComm | None) -> dict[str, Way]:
    """Return the ways to train, by name. ``comm`` is None on one device."""
    once = (layers,)
    depths = (layers // 4, layers // 2, layers)
    copies = {"data parallel": Way(depths=once, comm=comm, copies=True)}
    return {
        "exact": Way(depths=once),
        **({} if comm is None else copies),
        "layer-parallel": Way(depths=once, solvers=SWEEPS, comm=comm),
        "layer-parallel, rough": Way(depths=once, solvers=(Picard(sweeps=1),) * 2, comm=comm),
        "nested": Way(depths=depths),
        "nested, layer-parallel": Way(depths=depths, solvers=SWEEPS, comm=comm),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The digits, and the length of each training."""

    dataset: data.Dataset
    layers: int
    epochs: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return len(self.dataset.train_y) // BATCH

    def batches(self, epoch: int) -> Any:
        return data.batches(self.dataset, BATCH, seed=self.seed, epoch=epoch)

    def tests(self, model: nn.Classifier) -> list[train.Every]:
        """Return the measurement of the test set's accuracy after each epoch, exactly and on one device."""
        assert isinstance(model.trunk, nn.LayerParallel)
        loss_fn = exact_loss(model.trunk.num_layers)
        test = self.dataset.test_x, self.dataset.test_y

        def measure(state: train.TrainState, batch: Batch) -> dict[str, object]:
            params = jax.device_put(state.params, jax.devices()[0])
            return train.evaluate(loss_fn, params, [test])._asdict()

        return [train.Every("test", self.steps, measure)]

    def train(self, way: Way, show: Callable[[Row], object]) -> train.Log:
        """Train, test after each epoch, and probe the first and the last gradient."""
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, self.steps * self.epochs))
        count = len(way.depths)
        ends = [self.epochs * i // count for i in range(count + 1)]
        parts = [
            train.Depth(layers, end - begin, *way.solvers)
            for layers, (begin, end) in zip(way.depths, itertools.pairwise(ends), strict=True)
        ]
        log = train.Log(show=show)
        _, state, _ = train.nested(
            way.network(way.depths[0], self.seed),
            optimizer,
            self.batches,
            parts,
            steps_per_epoch=self.steps,
            loss=way.loss,
            measures=self.tests,
            log=log,
        )
        without_compilation(log)
        if not way.solvers[0].exact:
            loss_fn, first = way.loss(way.network(self.layers, self.seed))
            for params in (first, state.params):
                batch = next(self.batches(0))
                error = gradient_error(loss_fn, params, batch, way.solvers)
                log.write(kind="probe", step=int(state.step), gradient_error=error)
        return log


@functools.cache
def exact_loss(layers: int) -> LossFn:
    """Return the exact loss on one device, whose program the tests of all trainings share."""
    way = Way(depths=())
    return way.loss(way.network(layers, seed=0))[0]


@functools.partial(jax.jit, static_argnums=0)
def _gradient(loss_fn: LossFn, *args: Any) -> PyTree:
    return jax.grad(loss_fn, has_aux=True)(*args)[0]


def gradient_error(
    loss_fn: LossFn, params: PyTree, batch: Batch, solvers: tuple[Solver, Solver]
) -> jax.Array:
    """Return the relative error of the gradient with these solvers."""
    found = _gradient(loss_fn, params, batch, *solvers)
    exact = _gradient(loss_fn, params, batch, Serial(), Serial())
    return optax.tree.norm(optax.tree.sub(found, exact)) / optax.tree.norm(exact)


def without_compilation(log: train.Log) -> None:
    """Give the first step of each depth the time of the second."""
    steps = log.of("train")
    for row in log.of("depth"):
        steps[row["step"]]["step_time"] = steps[row["step"] + 1]["step_time"]


def curve(log: train.Log) -> list[tuple[float, float]]:
    """Return the seconds of training up to each test, and its accuracy."""
    clock = 0.0
    points = []
    for row in log.rows:
        clock += row["step_time"] if row["kind"] == "train" else 0.0
        if row["kind"] == "test":
            points.append((clock, row["accuracy"]))
    return points


def numbers_of(logs: Mapping[str, train.Log]) -> tuple[float, Numbers]:
    """Return the accuracy that all runs end with, and the numbers of each run by name."""
    curves = {name: curve(log) for name, log in logs.items()}
    target = min(points[-1][1] for points in curves.values())
    numbers = {}
    for name, points in curves.items():
        errors = [row["gradient_error"] for row in logs[name].of("probe")] or [0.0]
        numbers[name] = {
            "seconds": next(clock for clock, accuracy in points if accuracy >= target),
            "all_seconds": points[-1][0],
            "accuracy": points[-1][1],
            "first_error": errors[0],
            "last_error": errors[-1],
        }
    return target, numbers


def table(target: float, numbers: Numbers) -> Table:
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


def race(
    target: float, numbers: Numbers, curves: Mapping[str, list[tuple[float, float]]]
) -> Figure:
    """Draw the accuracy against the seconds of each training, with a marker where it reached the target."""
    fastest = min(numbers, key=lambda name: numbers[name]["seconds"])
    first = next(iter(numbers))
    seconds = {name: f"{row['seconds']:.3g} s" for name, row in numbers.items()}
    title = f"{fastest.capitalize()} training reaches {target:.1%} in {seconds[fastest]}"
    if fastest != first:
        title += f", {first} training in {seconds[first]}"
    fig = figure(title)
    ax = fig.subplots()
    for i, (name, points) in enumerate(curves.items()):
        look = line_style(i)
        ax.plot(*zip(*points, strict=True), label=name, **look)
        reached = numbers[name]["seconds"]
        ax.plot([reached], [target], "os^DvP"[i], color=look["color"], mec="white", ms=12, zorder=5)
    ax.axhline(target, color=GREY, linestyle=":", zorder=1)
    # The first tests of a training would flatten the rest.
    accuracies = sorted(accuracy for points in curves.values() for _, accuracy in points)
    low = min(accuracies[len(accuracies) // 2], target)
    space = max(accuracies[-1] - low, 0.01) / 2
    ax.set(xlim=(0, None), ylim=(max(0, low - space), min(1, accuracies[-1] + space)))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    where = f"Markers: where {target:.1%} is reached"
    dress(ax, x="seconds of training", y="test accuracy", title=where)
    legend(ax, "lower right")
    return fig


def run(args: Sequence[str]) -> None:
    parser = Parser("lp-jax demo", ABOUT, [("lp-jax demo --seed 1", "what the README shows")])
    add = parser.add_argument
    about = "Folder for the numbers and the picture."
    add("--out", type=Path, default=Path("runs", "demo"), metavar="FOLDER", help=about)
    about = "Number of layers, a multiple of 64."
    add("--layers", type=positive, default=4096, metavar="N", help=about)
    about = "Seed of the split, the first parameters and the batches."
    add("--seed", type=int, default=0, metavar="N", help=about)
    about = "Number of epochs of each training."
    add("--epochs", type=positive, default=6, metavar="N", help=about)
    add("--no-pictures", action="store_true", help="Draw no picture.")
    options = parser.parse_args(args)
    layers = options.layers
    if layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {layers}.")
    options.out.mkdir(parents=True, exist_ok=True)
    summary = options.out / "summary.json"
    summary.touch()  # A folder that cannot be written to fails now rather than after the trainings.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    workers = 2 ** (min(jax.device_count(), _MOST_WORKERS).bit_length() - 1)
    mesh = jax.make_mesh((workers,), ("layers",), (AxisType.Auto,), devices=jax.devices()[:workers])
    task = Task(
        dataset=data.digits(options.seed), layers=layers, epochs=options.epochs, seed=options.seed
    )
    out = Console(width=max(100, Console().width), markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"{layers} layers of {WIDTH} units on {task.steps * BATCH:,} digits an epoch, "
        f"{task.epochs} epochs."
    )
    kind = jax.devices()[0].device_kind
    out.print(f"Devices: {workers} ({kind}), each with {layers // workers} layers.")
    logs = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name, way in ways(layers, MeshComm(mesh) if workers > 1 else None).items():
            bar = progress.add_task(name, total=task.steps * task.epochs)

            def show(row: Row, bar: Any = bar) -> None:
                progress.update(bar, completed=row["step"])

            logs[name] = task.train(way, show)
    target, numbers = numbers_of(logs)
    out.print(table(target, numbers))
    out.print(EXPLAINED)
    serial = planning.training_step(Serial(), Serial(), layers)
    sweeps = planning.training_step(*SWEEPS, layers, workers=workers)
    out.print(
        f"Why: an exact step is {serial.depth()} evaluations of one layer, one after another. A "
        f"layer-parallel step is {sweeps.depth()} evaluations of {layers // workers} layers at once: "
        "4 forward, 2 adjoint and the gradient.\n"
    )
    found = {"seed": options.seed, "workers": workers, "runs": numbers}
    summary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not options.no_pictures:
        curves = {name: curve(log) for name, log in logs.items()}
        race(target, numbers, curves).savefig(options.out / "race.png")
    out.print(f"In {options.out}: {'' if options.no_pictures else 'race.png, '}summary.json")
