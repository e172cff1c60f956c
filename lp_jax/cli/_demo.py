"""``lp-jax demo``: one network trained exactly, layer-parallel and depth by depth; how long each takes to the same accuracy."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jsonargparse.typing import PositiveInt
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import lp_jax
from lp_jax import MGRIT, Picard, Rediscretize, Serial, data, nn, planning, train, viz
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.cli._commands import MenuParser
from lp_jax.cli._launch import set_cpu_devices
from lp_jax.cli._reason import why
from lp_jax.cli._report import make_writable, quick_compilation, save, write_json
from lp_jax.cli._workers import data_parallel, mesh_comm

ABOUT = """\
Train a deep network on handwritten digits exactly, layer-parallel and depth by depth. A table tells how long each takes to the
same accuracy, and below it stands why. Five pictures show what the solver does. Takes two minutes on two cores."""

WIDTH, T1 = 8, 1.0
BATCH, RATE = 8, 3e-3
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
    """A way to train the network: numbers of layers, one after another, and the solver of each."""

    depths: Sequence[int]
    solver: Solver
    adjoint_solver: Solver | None = None
    shared: bool = False  # each device has its share of the examples


def sweeps(number: tuple[int, int]) -> tuple[Picard, Picard]:
    """Sweeps over all layers, forward and adjoint."""
    forward, adjoint = number
    return Picard(sweeps=forward), Picard(sweeps=adjoint)


class Run(NamedTuple):
    """A training, as it went.

    Attributes:
        rows: those of its log, without the time of compilation.
        compilation: seconds.
        errors: relative error of the gradient at the first parameters, and at the last ones.
        params: the trained parameters, on one device.
    """

    rows: list[dict[str, Any]]
    compilation: float
    errors: tuple[float, float]
    params: PyTree

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of the test set, evaluated exactly, at the end of each epoch."""
        return [row["accuracy"] for row in self.rows if row["kind"] == "test"]

    def seconds(self, accuracy: float | None = None) -> float:
        """Return the time of training until the test set was first answered that well; of all of it for None."""
        clock = 0.0
        for row in self.rows:
            clock += row["step_time"] if row["kind"] == "train" else 0.0
            if row["kind"] == "test" and accuracy is not None and row["accuracy"] >= accuracy:
                break
        return clock


def layers_of(model: nn.Classifier) -> Any:
    """Return the layers that are solved for: a `lp_jax.nn.LayerParallel`."""
    return model.trunk


class Digits:
    """Scikit-learn's 1,797 handwritten digits, a fifth of them held out, and the network that learns them."""

    def __init__(self, layers: int, seed: int, epochs: int, workers: int) -> None:
        self.layers, self.seed, self.epochs, self.workers = layers, seed, epochs, workers
        self.digits = data.digits(seed=seed)
        self.steps = len(self.digits.train_y) // BATCH
        self.optimizer = optax.adam(optax.cosine_decay_schedule(RATE, self.steps * epochs))
        self.comm = mesh_comm({"layers": workers}) if workers > 1 else None

    def network(self, layers: int, comm: lp_jax.MeshComm | None = None) -> nn.Classifier:
        rngs = nnx.Rngs(self.seed)
        return nn.Classifier(
            nn.DenseOpening((8, 8, 1), WIDTH, rngs=rngs),
            nn.LayerParallel(lambda rngs: nn.DenseResidual(WIDTH, rngs=rngs), layers, t1=T1, comm=comm, rngs=rngs),
            nn.DenseClosing((WIDTH,), self.digits.classes, rngs=rngs),
        )

    def batches(self, epoch: int) -> Iterator[Any]:
        return data.batches(self.digits, BATCH, seed=self.seed, epoch=epoch)

    def loss(self, model: nn.Classifier, *, shared: bool = False) -> tuple[train.LossFn, PyTree]:
        """The loss, and the parameters where they are used; each device has its share of the examples, if ``shared``."""
        loss_fn, params = train.classification(model)
        comm = self.comm if shared else layers_of(model).comm
        if comm is None:
            return loss_fn, params
        everywhere = NamedSharding(comm.mesh, PartitionSpec())
        params = jax.tree.map(lambda x: x if len(x.sharding.device_set) > 1 else jax.device_put(x, everywhere), params)
        return data_parallel(loss_fn, comm) if shared else loss_fn, params

    def test(self, model: nn.Classifier) -> list[train.Every]:
        """The accuracy of the test set after each epoch, by serial propagation on one device."""
        loss_fn, _ = train.classification(self.network(layers_of(model).num_layers))
        test = [(self.digits.test_x, self.digits.test_y)]

        def measure(state: train.TrainState, batch: Any) -> dict[str, Any]:
            return train.evaluate(loss_fn, jax.device_put(state.params, jax.devices()[0]), test)._asdict()

        return [train.Every("test", self.steps, measure)]

    def train(self, name: str, way: Way, console: Console) -> Run:
        ends = [self.epochs * (i + 1) // len(way.depths) for i in range(len(way.depths))]
        depths = [
            train.Depth(layers, end - begin, way.solver, way.adjoint_solver)
            for layers, begin, end in zip(way.depths, [0, *ends], ends, strict=False)
        ]
        exact = way.solver.exact
        model, state, log = train.nested(
            self.network(depths[0].layers, None if exact else self.comm),
            self.optimizer,
            self.batches,
            depths,
            steps_per_epoch=self.steps,
            loss=functools.partial(self.loss, shared=way.shared),
            measures=self.test,
            meter=train.Bar(name, console),
        )
        errors = (0.0, 0.0)
        if not exact:
            errors = (
                self.error(self.network(self.layers, self.comm), way),
                self.error(model, way),
            )
        return _run(log, errors, jax.device_put(state.params, jax.devices()[0]))

    def error(self, model: nn.Classifier, way: Way) -> float:
        """The relative error of the gradient of the first batch."""
        loss_fn, params = self.loss(model)
        batch = next(self.batches(0))
        return float(train.gradient_error(loss_fn, params, batch, way.solver, way.adjoint_solver).relative)


def _run(log: train.Log, errors: tuple[float, float], params: PyTree) -> Run:
    """Return what a log says. The first step of each depth compiles; it counts like the one after it."""
    rows, compilation = [dict(row) for row in log.rows], 0.0
    steps = [row for row in rows if row["kind"] == "train"]
    for begun in (row["step"] for row in rows if row["kind"] == "depth"):
        first, second = steps[begun], steps[begun + 1]
        compilation += first["step_time"] - second["step_time"]
        first["step_time"] = second["step_time"]
    return Run(rows, compilation, errors, params)


def ways(layers: int, workers: int) -> dict[str, Way]:
    """Return the ways to train this many layers on so many workers, by name."""
    depths = (layers // 4, layers // 2, layers)
    found = {"exact": Way((layers,), Serial())}
    if workers > 1:
        found["data parallel"] = Way((layers,), Serial(), shared=True)
    return found | {
        "layer-parallel": Way((layers,), *sweeps(SWEEPS)),
        "layer-parallel, rough": Way((layers,), *sweeps(ROUGH)),
        "nested": Way(depths, Serial()),
        "nested, layer-parallel": Way(depths, *sweeps(SWEEPS)),
    }


def target_of(runs: Mapping[str, Run]) -> float:
    """The accuracy that all of them have at the end."""
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
    found = Table(box=box.SIMPLE_HEAD)
    found.add_column("training", no_wrap=True)
    for name in (f"to {target_of(runs):.1%}", "all epochs", "accuracy", "gradient error"):
        found.add_column(name, justify="right", no_wrap=True)
    for name, row in numbers_of(runs).items():
        found.add_row(
            name,
            f"{row['seconds']:5.2f} s ({row['of_exact']:.2f})",
            f"{row['all_seconds']:5.2f} s ({row['all_of_exact']:.2f})",
            f"{row['accuracy']:.1%}",
            f"{row['first_error']:.0e}, {row['last_error']:.0e}" if row["last_error"] else "none",
        )
    return found


def reason(problem: Digits, runs: Mapping[str, Run]) -> str:
    """Return why the layer-parallel row takes the time that it takes."""
    model, batch = problem.network(problem.layers), next(problem.batches(0))
    return why(
        layers_of(model).problem(model.opening(batch[0])),
        sweeps(SWEEPS),
        problem.comm,
        optimizer=problem.optimizer,
        params=train.classification(model)[1],
        measured=runs["layer-parallel"].seconds() / runs["exact"].seconds(),
    )


def predictions(problem: Digits, params: PyTree) -> Iterator[str]:
    """Yield a line for one H200 and one for eight: what the planner says of the same network there."""
    model, batch = problem.network(problem.layers), next(problem.batches(0))
    gpu = planning.estimate(layers_of(model).problem(model.opening(batch[0])), device="H200")
    gpu = dataclasses.replace(gpu, latency=1e-5, bandwidth=2e11)
    plan = train.plan(model, params, batch, machine=gpu, error=1e-2, seconds=2.0)
    for devices in plan.scaling((1, 8)):
        layers, copies = devices.split
        how = "" if devices.devices == 1 else f" ({layers} along the layers x {copies} along the examples)"
        if devices.both is not None:
            yield (
                f"{devices.devices} H200{how}: {1e3 * devices.both:.2g} ms a step, {plan.alone / devices.both:.2g} times as "
                f"fast as layer after layer on one"
            )


def pictures(problem: Digits, runs: Mapping[str, Run]) -> dict[str, Figure]:
    """Return the five pictures, by file name."""
    rows = {name: run.rows for name, run in runs.items()}
    params = next(iter(runs.values())).params
    workers = max(problem.workers, 2)
    solver, adjoint_solver = sweeps(SWEEPS)
    with quick_compilation():
        errors = gradient_errors(problem, params)
        history = [
            residual_row(problem, step, at) for step, at in ((0, None), (problem.steps * problem.epochs, params))
        ]
    alone = planning.training_step(Serial(), Serial(), problem.layers).work()
    work = {
        name: [
            planning.training_step(planning.with_effort(s, n), planning.with_effort(s, n), problem.layers).work()
            / alone
            for n in _EFFORTS
        ]
        for name, s in _SHOWN.items()
    }
    return {
        "race.png": viz.race(rows, target=target_of(runs)),
        "residuals.png": viz.residuals(history, iteration="sweep", solvers=(planning.code(_SIX),) * 2),
        "gradient_error.png": viz.gradient_errors(errors, work=work, iteration="iteration", choice="solver"),
        "sweeps.png": viz.hierarchy(solver, problem.layers, t1=T1, adjoint_solver=adjoint_solver),
        "schedule.png": viz.schedule(
            solver, problem.layers, workers=workers, adjoint_solver=adjoint_solver, at_once=math.inf
        ),
    }


_SHOWN: Mapping[str, Solver] = {
    "sweeps, as in the table": Picard(),
    "two levels, injection": MGRIT(coarsening=16, coarse_step=Rediscretize()),
    "two levels, Picard 1": MGRIT(coarsening=16),
}
"""Solvers of the picture of errors: that of the table, and cycles beside it."""

_EFFORTS = (1, 2, 3, 4)


def gradient_errors(problem: Digits, params: PyTree) -> dict[str, list[float]]:
    """Return errors of the trained network's gradient after 1, 2, ... sweeps or cycles."""
    loss_fn, _ = train.classification(problem.network(problem.layers))
    batch = next(problem.batches(0))
    return {
        name: [
            float(train.gradient_error(loss_fn, params, batch, planning.with_effort(s, n)).relative) for n in _EFFORTS
        ]
        for name, s in _SHOWN.items()
    }


_SIX = Picard(sweeps=6)
"""The solver of the picture of residual norms: six sweeps, where the table's row has three, show how fast norms fall."""


def residual_row(problem: Digits, step: int, params: PyTree | None) -> dict[str, Any]:
    """Return the residual norms of six sweeps at some parameters, None being the first ones."""
    model = problem.network(problem.layers)
    params = train.classification(model)[1] if params is None else params
    found = train.residuals(model, params, next(problem.batches(0)), _SIX, _SIX)
    return {
        "kind": "probe",
        "step": step,
        **train.measured("forward_residual", found.forward.residual_norms.tolist()),
        "forward_scale": float(found.forward_scale),
        **train.measured("adjoint_residual", found.adjoint.residual_norms.tolist()),
        "adjoint_scale": float(found.adjoint_scale),
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
    add("--epochs", type=PositiveInt, default=6, metavar="N", help="Number of epochs of each training.")
    add("--no-pictures", action="store_true", help="No pictures.")
    options = parser.parse_args(args)
    if options.layers < 64 or options.layers % 64:
        parser.error(f"--layers must be a multiple of 64; got {options.layers}.")
    make_writable(options.out)
    set_cpu_devices(len(os.sched_getaffinity(0)))
    workers = 2 ** int(np.log2(min(jax.device_count(), _MOST_WORKERS)))
    console, out = Console(stderr=True), Console(highlight=False, soft_wrap=True, width=max(100, Console().width))
    problem = Digits(options.layers, options.seed, options.epochs, workers)
    out.print(
        f"{problem.layers} layers of {WIDTH} units on {len(problem.digits.train_y):,} digits, {options.epochs} epochs."
    )
    there = f"{workers} devices ({jax.devices()[0].device_kind}): each holds {problem.layers // workers} layers."
    out.print(there if workers > 1 else f"One device ({jax.devices()[0].device_kind}): all layers at once.")
    runs = {name: problem.train(name, way, console) for name, way in ways(problem.layers, workers).items()}
    out.print(table(runs))
    out.print(EXPLAINED.format(*SWEEPS, *ROUGH))
    with console.status("what each part of a step takes on this machine"):
        text = reason(problem, runs)
    out.print(f"{text}\n")
    first = next(iter(runs.values())).params
    with console.status("what the planner says of other machines"):
        lines = list(predictions(problem, first))
    out.print("\n".join(["Predicted for the same network on other machines:", *lines, ""]))
    names: list[str] = []
    with console.status("pictures: other solvers are compiled and their gradients measured"):
        if not options.no_pictures:
            names = save(options.out, pictures(problem, runs))
    write_json(options.out / "summary.json", {"seed": options.seed, "workers": workers, "runs": numbers_of(runs)})
    out.print(f"In {options.out}: {', '.join([*names, 'summary.json'])}")
