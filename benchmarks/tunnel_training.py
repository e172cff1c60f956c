"""Trainings with emulated seconds: how much sooner several devices reach an accuracy.

Each row is a training of its own, by the program of its method on a mesh of so many host devices: a relay, `lp_jax.pipeline`, and
cycles over one interval for each device. Its numbers, its steps and its accuracies are real. A step's seconds are those that a
machine needs for it: the planner's for iterations, with the cycles that were really taken, and the formula of relay and pipeline.
So a training takes as long as this processor needs, not as long as it says. The networks are narrow; the machine's layers are as
wide as fill an accelerator, since narrow ones would rather share one. A training ends when the test set has the accuracy.

Relay and pipeline differ from exact training by rounding. Two cycles over one interval for each device, and one for the adjoint,
have an error that depends on the number of devices; with a controller (`lp_jax.train.Controller`) they take as many cycles as the
noise of a mini-batch asks for, or train by a relay where few do not do, and its probes are counted.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lp_jax
from benchmarks import emulation, report
from benchmarks.command import (
    Progress,
    add_only,
    common_parser,
    new_result,
    positive,
    results_folder,
    wanted,
)
from benchmarks.emulation import KINDS, MICROBATCHES, RELAY, SCAN, Place, pipelined
from lp_jax import MGRIT, Identity, Serial, data, nn, planning, train
from lp_jax.planning import Machine
from lp_jax.train._types import Batch, LossFn

ROOT = Path(__file__).resolve().parents[1]

FIELD = "TorchBraid, encoder of 128 blocks, 8 GPUs (arXiv 2601.09026)", 2.5
"""The published speedup that the table has beside its own."""

LATENCY, BANDWIDTH = 1e-5, 2e11  # of messages between accelerators: seconds, bytes per second
TIME = 4.0  # that the encoder's blocks span together


class Rows(nnx.Module):
    """An image as a sequence: a token for each of its rows, with its position."""

    def __init__(self, pixels: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.enter = nnx.Linear(pixels, width, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (pixels, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.enter(x.reshape(*x.shape[:3])) + self.position[...][None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A network that learns the digits, and the machine that it is emulated on."""

    name: str
    layers: int
    make: Callable[[int, lp_jax.Comm | None], nn.Classifier]
    problem: Callable[[int], lp_jax.Problem]  # shapes of layers that fill an accelerator
    target: float  # accuracy that is to be reached
    epochs: int
    batch: int
    rate: float

    def machine(self, device: str) -> Machine:
        """Times of a layer that fills the device: one at a time, as more would take as much longer."""
        filled = planning.estimate(self.problem(self.layers), device=device)
        times: dict[str, Any] = {kind: (getattr(filled, kind)[0],) for kind in KINDS}
        return dataclasses.replace(
            filled,
            at_once=(1,),
            newton=None,
            relaxation=1.0,
            latency=LATENCY,
            bandwidth=BANDWIDTH,
            name=device,
            **times,
        )


def encoder(layers: int, comm: lp_jax.Comm | None = None) -> nn.Classifier:
    width, heads, rngs = 16, 2, nnx.Rngs(0)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.EncoderLayer(width, heads, hidden=2 * width, rngs=rngs)

    trunk = nn.LayerParallel(make, layers, t1=TIME, comm=comm, rngs=rngs)
    closing = nnx.Sequential(lambda y: jnp.mean(y, axis=1), nnx.Linear(width, 10, rngs=rngs))
    return nn.Classifier(Rows(8, width, rngs=rngs), trunk, closing)


def dense(layers: int, comm: lp_jax.Comm | None = None) -> nn.Classifier:
    """The network of `lp-jax demo`."""
    width, rngs = 8, nnx.Rngs(0)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.DenseResidual(width, rngs=rngs)

    trunk = nn.LayerParallel(make, layers, comm=comm, rngs=rngs)
    opening = nn.DenseOpening((8, 8, 1), width, rngs=rngs)
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), 10, rngs=rngs))


def wide_encoder(layers: int) -> lp_jax.Problem:
    """Shapes of blocks of 1,024 for 32 texts of 512 tokens."""
    width = 1024
    step, one = nn.stack(lambda rngs: nn.EncoderLayer(width, 16, rngs=rngs), 1, rngs=nnx.Rngs(0))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((layers, *x.shape[1:]), x.dtype), one)
    return lp_jax.Problem(step, stacked, jax.ShapeDtypeStruct((32, 512, width), "float32"))


TASKS = (
    Task(name="encoder", layers=128, make=encoder, problem=wide_encoder, target=0.8, epochs=3,
         batch=32, rate=5e-3),
    Task(name="dense", layers=4096, make=dense, problem=emulation.wide, target=0.9, epochs=6,
         batch=8, rate=3e-3),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Method:
    """How a row is trained: solvers, on so many devices; by a pipeline if it has microbatches."""

    name: str
    workers: int
    pair: tuple[lp_jax.Solver, lp_jax.Solver] = (Serial(), Serial())
    microbatches: int = 0
    controlled: bool = False

    @property
    def place(self) -> Place:
        return Place("devices", self.workers)

    def model(self, task: Task) -> nn.Classifier:
        """The network; within a pipeline its layers are spread by that."""
        if self.microbatches:
            return task.make(task.layers, None)
        sequential = "relay" if self.pair[0].exact else "auto"
        return task.make(task.layers, self.place.comm(sequential=sequential))


def in_pipeline(loss_fn: LossFn, mesh: Mesh, microbatches: int) -> LossFn:
    """The loss of a batch by `lp_jax.pipeline`: the mean over its microbatches."""

    def one(params: Any, x: jax.Array, labels: jax.Array) -> Any:
        loss, info = loss_fn(params, (x, labels), None, None)
        return loss, info.total, info.correct, info.stats, info.result

    piped = lp_jax.pipeline(one, mesh, in_axes=(None, 0, 0))

    def whole(params: Any, batch: Batch, *solvers: lp_jax.Solver | None) -> Any:
        parts = (x.reshape(microbatches, -1, *x.shape[1:]) for x in batch)
        losses, totals, correct, stats, results = piped(params, *parts)
        first = jax.tree.map(lambda x: x[0], stats)
        info = train.Info(jnp.sum(totals), first, jnp.max(results), jnp.sum(correct))
        return jnp.mean(losses), info

    return whole


def spread(params: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The layers' parameters on the devices that hold them, all others on every device."""
    held, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("layers",), ()))
    return {
        name: jax.device_put(part, held if name == "trunk" else everywhere)
        for name, part in params.items()
    }


class Reached(Exception):
    """The test set has the accuracy, so that the training is over."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How it went: after which step the test set had which accuracy, and what every step and probe evaluated."""

    log: train.Log
    pair: tuple[lp_jax.Solver, lp_jax.Solver]

    def seconds(
        self, step_seconds: Callable[[lp_jax.Solver, lp_jax.Solver], float], probe: float
    ) -> Iterator[tuple[int, float, float]]:
        """Yield the tests: step, emulated seconds up to there, accuracy.

        ``step_seconds(solver, adjoint_solver)`` are those of a step, ``probe`` those of a gradient of a controller's probe.
        """
        clock, adjoint = 0.0, _adjoints(self.log)
        for row in self.log.rows:
            if row["kind"] == "train":
                clock += step_seconds(*self._taken(row, adjoint(row["step"])))
            elif row["kind"] == "control":
                clock += row["gradients"] * probe
            elif row["kind"] == "test":
                yield row["step"], clock, row["accuracy"]

    def _taken(self, row: Any, adjoint: int) -> tuple[lp_jax.Solver, lp_jax.Solver]:
        """Solvers with as many cycles as a step took; a controller's step without any was serial."""
        if not self.pair[0].has_tolerance:
            return self.pair
        cycles = _iterations("forward_residual", row)
        if not cycles:
            return Serial(), Serial()
        return self.pair[0].with_effort(cycles), self.pair[1].with_effort(adjoint)

    @property
    def cycles(self) -> float:
        """Of the forward solve, on average over the steps; those of a serial step count as none."""
        rows = self.log.of("train")
        if not self.pair[0].has_tolerance:
            return float(getattr(self.pair[0], "iterations", 0))
        return float(np.mean([_iterations("forward_residual", row) for row in rows]))


def _iterations(prefix: str, row: dict[str, Any]) -> int:
    """Number of the last iteration of which a row has a residual norm."""
    return max((int(name.rpartition("_")[2]) for name in row if name.startswith(prefix)), default=0)


def _adjoints(log: train.Log) -> Callable[[int], int]:
    """Cycles of the adjoint solve at a step: those of the last time that they were looked at, or the first."""
    looks = [(row["step"], _iterations("adjoint_residual", row)) for row in log.of("adjoint")]

    def of(step: int) -> int:
        before = [cycles for at, cycles in looks if at <= step and cycles]
        return before[-1] if before else next((cycles for _, cycles in looks if cycles), 1)

    return of


def intervals(layers: int, workers: int, *, controlled: bool) -> tuple[MGRIT, MGRIT]:
    """One interval for each worker: two cycles and one, or as many as a controller's tolerances ask for."""
    each = functools.partial(
        MGRIT, coarsening=layers // workers, coarse_step=Identity(), storage="all", start="guess"
    )
    if not controlled:
        return each(iterations=2), each(iterations=1)
    most = workers // 2 + 1  # twice as many are exact, and no faster than a relay
    return each(iterations=most, rtol=1e-1), each(iterations=most, rtol=1e-1)


@functools.cache
def _exact(task: Task) -> LossFn:
    """The loss by serial propagation on one device, whose programs serve the tests of all rows."""
    return train.classification(task.make(task.layers, None))[0]


def trained(
    task: Task,
    method: Method,
    *,
    epochs: int | None = None,
    show: Callable[[dict[str, Any]], object] = lambda row: None,
) -> Training:
    """Train to the accuracy or to the last epoch; test four times an epoch by serial propagation on one device."""
    model, pair = method.model(task), method.pair
    loss_fn, params = train.classification(model)
    if method.workers > 1:
        params = spread(params, method.place.mesh)
    if method.microbatches:
        loss_fn = in_pipeline(loss_fn, method.place.mesh, method.microbatches)
    dataset = data.digits(seed=0)
    steps = len(dataset.train_y) // task.batch
    epochs = task.epochs if epochs is None else epochs
    optimizer = optax.adam(optax.cosine_decay_schedule(task.rate, steps * epochs))
    tests, log = [(dataset.test_x, dataset.test_y)], train.Log(show=show)

    def batches(epoch: int) -> Iterator[Batch]:
        return data.batches(dataset, task.batch, seed=0, epoch=epoch)

    def test(state: train.TrainState, batch: Batch) -> dict[str, object]:
        here = jax.device_put(state.params, jax.devices()[0])
        found = train.evaluate(_exact(task), here, tests)._asdict()
        if found["accuracy"] >= task.target:
            log.write(kind="test", step=int(state.step), **found)
            raise Reached
        return found

    controller = train.Controller(loss_fn) if method.controlled else None

    def adjoint(state: train.TrainState, batch: Batch) -> dict[str, object]:
        assert controller is not None
        now = controller.solvers(state.control, *pair)
        if now[0].exact:
            return {}
        solves = train.residuals(model, state.params, batch, *now)
        norms = solves.adjoint.residual_norms.tolist()
        return {f"adjoint_residual_{n}": norm for n, norm in enumerate(norms, 1) if not norm < 0}

    looks = [train.Every("adjoint", max(1, steps // 8), adjoint)] if controller else []
    with contextlib.suppress(Reached):
        train.fit(
            train.make_train_step(loss_fn, optimizer, watch=False),
            train.init_state(params, optimizer),
            batches,
            steps_per_epoch=steps,
            epochs=epochs,
            solver=pair[0],
            adjoint_solver=pair[1],
            controller=controller,
            measures=[*looks, train.Every("test", max(1, steps // 4), test)],
            log=log,
        )
    return Training(log, pair)


# --- the table ------------------------------------------------------------------------------------------------------


def rows_of(
    task: Task,
    machine: Machine,
    devices: Sequence[int],
    run: Callable[[Method], Training],
    want: Callable[[str], bool],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task: every method on every number of devices. ``run`` trains."""
    layers = task.layers
    alone = Method(SCAN, 1)
    exact = run(alone)
    one = _time(SCAN, layers, machine, 1)
    first = row_of(task, alone, exact, lambda *pair: one, one)
    yield first
    for workers in (count for count in devices if count > 1):
        relay = _time(RELAY, layers, machine, workers)
        times = {m: _time(pipelined(m), layers, machine, workers) for m in MICROBATCHES}
        best = min(times, key=times.__getitem__)

        @functools.cache
        def seconds(
            forward: Any, adjoint: Any, workers: int = workers, relay: float = relay
        ) -> float:
            if forward.exact:  # propagation in turn, also of a controller that iterates no more
                return relay
            return planning.predict(forward, adjoint, layers, machine, workers=workers).seconds

        jax.clear_caches()
        for method, step in (
            (Method(RELAY, workers), seconds),
            (
                Method(pipelined(best), workers, microbatches=best),
                lambda *pair, step=times[best]: step,
            ),
            (Method(FEW, workers, intervals(layers, workers, controlled=False)), seconds),
            (
                Method(
                    CONTROLLED,
                    workers,
                    intervals(layers, workers, controlled=True),
                    controlled=True,
                ),
                seconds,
            ),
        ):
            if want(method.name):
                training = run(method)
                row = row_of(task, method, training, step, relay)
                yield compared(row, first) | {"difference": difference(training, exact)}


FEW, CONTROLLED = "identity, 2/1", "identity, with a controller"
FIRST = 10


def difference(training: Training, exact: Training) -> float:
    """Largest relative difference from the losses of exact training, over the first steps."""
    losses, wanted = (
        np.array([row["loss"] for row in each.log.of("train")[:FIRST]])
        for each in (training, exact)
    )
    return float(np.max(np.abs(losses - wanted) / wanted))


def _time(name: str, layers: int, machine: Machine, workers: int) -> float:
    seconds = emulation.ideal(name, layers, machine, workers)
    assert seconds is not None
    return seconds


def row_of(
    task: Task,
    method: Method,
    training: Training,
    step_seconds: Callable[..., float],
    probe: float,
) -> dict[str, Any]:
    """Record of a training; seconds and steps are None where it did not reach the accuracy."""
    tests = list(training.seconds(step_seconds, probe))
    reached = next((test for test in tests if test[2] >= task.target), (None, None, None))
    return {
        "network": task.name,
        "layers": task.layers,
        "method": method.name,
        "workers": method.workers,
        "target": task.target,
        "steps": reached[0],
        "seconds": reached[1],
        "accuracy": tests[-1][2],
        "cycles": training.cycles,
        "tests": [list(test) for test in tests],
    }


def compared(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """With the speedup over one device; None where the accuracy was not reached."""
    reached = row["seconds"] and alone["seconds"]
    return row | {"speedup": alone["seconds"] / row["seconds"] if reached else None}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each training, and the published figure."""
    head = ["", "devices", "s to the accuracy", "times as fast", "steps", "accuracy"]
    lines = [[*head, "cycles", "first losses"]]
    for row in rows:
        numbers = [row["seconds"], row.get("speedup", 1.0)]
        lines.append(
            [
                f"{row['network']}: {row['method']}",
                str(row["workers"]),
                *(report.number(x, 3) for x in numbers),
                str(row["steps"] or "–"),
                f"{row['accuracy']:.1%}",
                report.number(row["cycles"]) if row["cycles"] else "–",
                report.scientific(row.get("difference", 0.0)),
            ]
        )
    lines.append([FIELD[0], "8", "", report.number(FIELD[1]), "", "", "", ""])
    return report.pipes(lines)


LEGEND = (
    "s to the accuracy: emulated seconds until the test set first had it, where the training ends; steps: those until then. "
    "times as fast: as one device. accuracy: of the last test. cycles: of the forward solve, the mean over the steps. first "
    f"losses: largest relative difference from those of exact training in the first {FIRST} steps. A pipeline has the number "
    "of microbatches that is fastest by its formula."
)


def short(result: report.Result) -> str:
    """The table of docs/benchmarks.md: times as fast as one device, and the published figure."""
    rows = [row for row in result["rows"] if row["workers"] > 1]
    counts = sorted({row["workers"] for row in rows})
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        words = (
            report.number(row["speedup"]) if row["speedup"] else f"ends at {row['accuracy']:.0%}"
        )
        method = re.sub(r", \d+ microbatches", "", row["method"])  # as many as are fastest
        name = f"{row['network']} to {row['target']:.0%}: {method}"
        lines.setdefault(name, {})[row["workers"]] = words
    lines[FIELD[0]] = {8: report.number(FIELD[1])}
    head = ["times as fast as one device", *(f"{count} devices" for count in counts)]
    cells = [[name, *(line.get(count, "") for count in counts)] for name, line in lines.items()]
    return report.pipes([head, *cells])


def text(result: report.Result) -> str:
    targets = {row["network"]: f"{row['target']:.0%}" for row in result["rows"]}
    about = f"Accuracies to reach: {', '.join(f'{n} {t}' for n, t in targets.items())}."
    times = [
        f"A layer of the machine, {name}: "
        + ", ".join(f"{report.number(1e3 * t, 3)} ms" for t in own)
        for name, own in result["settings"]["times"].items()
    ]
    earlier = {report.origin(row): None for row in result["rows"] if "manifest" in row}
    return report.page(
        result, *earlier, about, table(result["rows"]), LEGEND, ". ".join(times) + "."
    )


def headline(result: report.Result) -> str:
    """One sentence: the encoder on eight devices, or the most that were emulated, beside the published figure."""
    rows = [row for row in result["rows"] if row["network"] == TASKS[0].name]
    counts = {row["workers"] for row in rows}
    workers = 8 if 8 in counts else max(counts)
    there = [row for row in rows if row["workers"] == workers and workers > 1]
    words = [
        f"{row['method']}: {report.number(row['speedup'])}"
        if row["speedup"]
        else f"{row['method']}: never, it ends at {row['accuracy']:.0%}"
        for row in there
    ]
    return (
        f"Trainings of an encoder of {rows[0]['layers']} blocks to {rows[0]['target']:.0%}, times as fast on {workers} emulated "
        f"devices as on one: {'; '.join(words)}. {FIELD[0]}: {report.number(FIELD[1])}."
    )


def texts(result: report.Result) -> dict[str, list[str]]:
    """Sentences and tables of the pages, from a result."""
    return {"docs/benchmarks.md": [report.sentences(headline(result)), short(result)]}


EXAMPLES = [
    ("", "both networks on 1 to 16 devices, an hour"),
    ("--quick", "few layers and one epoch, to see that all works"),
    ("--only encoder --devices 1 8", "what compares with the published figure, ten minutes"),
    ("--methods relay pipeline", "exact ones only"),
    (
        "--pages benchmarks/results/cpu",
        "train nothing: write sentence and table of docs/benchmarks.md",
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("tunnel_training", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--devices", nargs="+", type=positive, metavar="P", default=[1, 2, 4, 8, 16],
        help="Numbers of emulated devices, which divide the layers (default: 1 2 4 8 16).",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="H200", metavar="KIND",
        help="Accelerator whose data sheet gives the times of a layer (default: H200).",
    )  # fmt: skip
    parser.add_argument(
        "--methods", nargs="+", metavar="TEXT", help="Only methods with one of these in their names."
    )  # fmt: skip
    parser.add_argument(
        "--epochs", type=positive, metavar="N",
        help="Number of epochs of each training (default: 3 of the encoder, 6 of the dense network).",
    )  # fmt: skip
    add_only(parser, "Only networks with one of these in their names: encoder, dense.")
    parser.add_argument(
        "--add", action="store_true", help="Keep the rows of other networks of an earlier result."
    )  # fmt: skip
    parser.add_argument(
        "--pages", type=Path, metavar="FOLDER",
        help="Train nothing. Write sentence and table of docs/benchmarks.md from the result in this folder.",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.pages:
        kept = report.kept(options.pages, "tunnel_training")
        if not kept["rows"]:
            parser.error(f"{options.pages} holds no tunnel_training.json: train first, with --out.")
        print("Wrote " + ", ".join(map(str, report.write_pages(texts(kept), ROOT))))
        return 0
    tasks = [task for task in TASKS if wanted(task.name, options)]
    if not tasks:
        parser.error(f"--only names no network; there are {', '.join(t.name for t in TASKS)}.")
    if options.quick:
        tasks = [dataclasses.replace(task, layers=16, target=0.2) for task in tasks]
        options.epochs = 1
        options.devices = [count for count in options.devices if count <= 2]
    emulation.set_devices(max(options.devices))
    for task in tasks:
        if wrong := [count for count in options.devices if task.layers % count]:
            parser.error(
                f"--devices must divide the {task.layers} layers of {task.name}; got {wrong}."
            )
    folder = results_folder(parser, options)
    emulated = {task.name: task.machine(options.device) for task in tasks}
    settings = {
        "device": options.device,
        "epochs": {task.name: options.epochs or task.epochs for task in tasks},
        "times": {
            name: [machine.seconds(kind, 1) for kind in KINDS] for name, machine in emulated.items()
        },
    }
    result = new_result("tunnel_training", TITLE, arguments, settings)
    if options.add:
        earlier = report.kept(folder, "tunnel_training")
        names = {task.name for task in tasks}
        result["rows"] = [
            {"manifest": earlier["manifest"], **row}
            for row in earlier["rows"]
            if row["network"] not in names
        ]
        for part in ("epochs", "times"):
            result["settings"][part] = earlier["settings"][part] | settings[part]
    progress = Progress()

    def want(name: str) -> bool:
        return options.methods is None or any(part in name for part in options.methods)

    paths = []
    for task in tasks:

        def run(method: Method, task: Task = task) -> Training:
            title = f"{task.name}, {method.name}, {method.workers} devices"

            def show(shown: dict[str, Any]) -> None:
                progress(f"{title}: step {shown['step']}")

            show({"step": 0})  # which is compiled
            return trained(task, method, epochs=options.epochs, show=show)

        for row in rows_of(task, emulated[task.name], options.devices, run, want):
            result["rows"] = sorted([*result["rows"], report.rounded(row)], key=_order)
            paths = report.save(report.rounded(result), folder, None, text)
    progress.clear()
    print(f"{table(result['rows'])}\n\n{LEGEND}\n\nWrote {', '.join(map(str, paths))}")
    return 0


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return [task.name for task in TASKS].index(row["network"]), row["workers"]


TITLE = "Trainings on several devices, in emulated time"

if __name__ == "__main__":
    sys.exit(main())
