"""Trainings with emulated seconds: how much sooner several devices reach an accuracy.

Each network is really trained, on this processor: its numbers, its steps and its accuracies are real. A step's seconds are those
that a machine needs for it: the planner's for iterations, with the cycles that were really taken, and the formula of relay and
pipeline. So a training takes as long as this processor needs, not as long as it says. The networks are narrow; the machine's
layers are as wide as fill an accelerator, since narrow ones would rather share one.

Relay and pipeline have the numbers of exact training, which is run once. Two cycles over one interval for each device, and one
for the adjoint, have an error that depends on the number of devices; with a controller (`lp_jax.train.Controller`) they take as
many cycles as the noise of a mini-batch asks for, or train by a relay where few do not do, and its probes are counted.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lp_jax
from benchmarks import emulation, report
from benchmarks.command import (
    Progress,
    add_numbers,
    add_only,
    common_parser,
    new_result,
    positive,
    results_folder,
    wanted,
)
from benchmarks.emulation import KINDS, MICROBATCHES, RELAY, SCAN, pipelined
from lp_jax import MGRIT, Identity, Serial, data, nn, planning, train
from lp_jax.planning import Machine
from lp_jax.train._types import Batch

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
    make: Callable[[int, nnx.Rngs], nn.Classifier]
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


def encoder(layers: int, rngs: nnx.Rngs) -> nn.Classifier:
    width, heads = 16, 2

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.EncoderLayer(width, heads, hidden=2 * width, rngs=rngs)

    trunk = nn.LayerParallel(make, layers, t1=TIME, solver=Serial(), rngs=rngs)
    closing = nnx.Sequential(lambda y: jnp.mean(y, axis=1), nnx.Linear(width, 10, rngs=rngs))
    return nn.Classifier(Rows(8, width, rngs=rngs), trunk, closing)


def dense(layers: int, rngs: nnx.Rngs) -> nn.Classifier:
    """The network of `lp-jax demo`."""
    width = 8

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.DenseResidual(width, rngs=rngs)

    trunk = nn.LayerParallel(make, layers, solver=Serial(), rngs=rngs)
    opening = nn.DenseOpening((8, 8, 1), width, rngs=rngs)
    return nn.Classifier(opening, trunk, nn.DenseClosing((width,), 10, rngs=rngs))


def wide_encoder(layers: int) -> lp_jax.Problem:
    """Shapes of blocks of 1,024 for 32 texts of 512 tokens."""
    width = 1024
    step, one = nn.stack(lambda rngs: nn.EncoderLayer(width, 16, rngs=rngs), 1, rngs=nnx.Rngs(0))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((layers, *x.shape[1:]), x.dtype), one)
    return lp_jax.Problem(step, stacked, jax.ShapeDtypeStruct((32, 512, width), "float32"))


TASKS = (
    Task(name="encoder", layers=128, make=encoder, problem=wide_encoder, target=0.9, epochs=6,
         batch=32, rate=5e-3),
    Task(name="dense", layers=4096, make=dense, problem=emulation.wide, target=0.9, epochs=6,
         batch=8, rate=3e-3),
)  # fmt: skip


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
        return planning.with_effort(self.pair[0], cycles), planning.with_effort(
            self.pair[1], adjoint
        )

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


def trained(
    task: Task,
    pair: tuple[lp_jax.Solver, lp_jax.Solver],
    *,
    controlled: bool = False,
    epochs: int | None = None,
    show: Callable[[dict[str, Any]], object] = lambda row: None,
) -> Training:
    """Train, and test four times an epoch by serial propagation."""
    model = task.make(task.layers, nnx.Rngs(0))
    loss_fn, params = train.classification(model)
    dataset = data.digits(seed=0)
    steps = len(dataset.train_y) // task.batch
    epochs = task.epochs if epochs is None else epochs
    optimizer = optax.adam(optax.cosine_decay_schedule(task.rate, steps * epochs))
    tests = [(dataset.test_x, dataset.test_y)]

    def batches(epoch: int) -> Iterator[Batch]:
        return data.batches(dataset, task.batch, seed=0, epoch=epoch)

    def test(state: train.TrainState, batch: Batch) -> dict[str, object]:
        return train.evaluate(loss_fn, state.params, tests)._asdict()

    controller = train.Controller(loss_fn) if controlled else None

    def adjoint(state: train.TrainState, batch: Batch) -> dict[str, object]:
        assert controller is not None
        now = controller.solvers(state.control, *pair)
        if now[0].exact:
            return {}
        solves = train.residuals(model, state.params, batch, *now)
        norms = solves.adjoint.residual_norms.tolist()
        return {f"adjoint_residual_{n}": norm for n, norm in enumerate(norms, 1) if not norm < 0}

    looks = [train.Every("adjoint", max(1, steps // 8), adjoint)] if controlled else []
    _, log = train.fit(
        train.make_train_step(loss_fn, optimizer, watch=False),
        train.init_state(params, optimizer),
        batches,
        steps_per_epoch=steps,
        epochs=epochs,
        solver=pair[0],
        adjoint_solver=pair[1],
        controller=controller,
        measures=[train.Every("test", max(1, steps // 4), test), *looks],
        log=train.Log(show),
    )
    return Training(log, pair)


# --- the table ------------------------------------------------------------------------------------------------------


def rows_of(
    task: Task,
    machine: Machine,
    devices: Sequence[int],
    run: Callable[[str, tuple[lp_jax.Solver, lp_jax.Solver], bool], Training],
    want: Callable[[str], bool],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task: every method on every number of devices. ``run`` trains."""
    layers = task.layers
    exact = run(EXACT, (Serial(), Serial()), False)
    one = _time(SCAN, layers, machine, 1)
    alone = row_of(task, SCAN, 1, exact, lambda *pair: one, one)
    yield alone
    for workers in (count for count in devices if count > 1):
        relay = _time(RELAY, layers, machine, workers)
        best = min(
            map(pipelined, MICROBATCHES),
            key=lambda name, workers=workers: _time(name, layers, machine, workers),  # type: ignore[misc]
        )
        for name in (RELAY, best):
            if want(name):
                step = _time(name, layers, machine, workers)
                made = row_of(task, name, workers, exact, lambda *pair, step=step: step, relay)
                yield compared(made, alone)

        @functools.cache
        def predicted(forward: Any, adjoint: Any, workers: int = workers) -> float:
            if forward.exact:  # propagation in turn, of a controller that iterates no more
                return _time(RELAY, layers, machine, workers)
            return planning.predict(forward, adjoint, layers, machine, workers=workers).seconds

        for name, controlled in ((FEW, False), (CONTROLLED, True)):
            if want(name):
                pair = intervals(layers, workers, controlled=controlled)
                training = run(f"{name}, {workers} devices", pair, controlled)
                yield compared(row_of(task, name, workers, training, predicted, relay), alone)


EXACT, FEW, CONTROLLED = "exact", "identity, 2/1", "identity, with a controller"


def _time(name: str, layers: int, machine: Machine, workers: int) -> float:
    seconds = emulation.ideal(name, layers, machine, workers)
    assert seconds is not None
    return seconds


def row_of(
    task: Task,
    name: str,
    workers: int,
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
        "method": name,
        "workers": workers,
        "target": task.target,
        "steps": reached[0],
        "seconds": reached[1],
        "all_seconds": tests[-1][1],
        "accuracy": tests[-1][2],
        "cycles": training.cycles,
        "tests": [list(test) for test in tests],
    }


def compared(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """With speedups over one device: to the accuracy, and of all steps."""
    reached = row["seconds"] and alone["seconds"]
    return row | {
        "speedup": alone["seconds"] / row["seconds"] if reached else None,
        "speedup_of_all": alone["all_seconds"] / row["all_seconds"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each training, and the published figure."""
    head = ["", "devices", "s to the accuracy", "times as fast", "steps", "all steps", "accuracy"]
    lines = [[*head, "cycles"]]
    for row in rows:
        numbers = [row["seconds"], row.get("speedup", 1.0)]
        lines.append(
            [
                f"{row['network']}: {row['method']}",
                str(row["workers"]),
                *(report.number(x, 3) for x in numbers),
                str(row["steps"] or "–"),
                report.number(row.get("speedup_of_all", 1.0), 3),
                f"{row['accuracy']:.1%}",
                report.number(row["cycles"]) if row["cycles"] else "–",
            ]
        )
    lines.append([FIELD[0], "8", "", report.number(FIELD[1]), "", "", "", ""])
    return report.pipes(lines)


LEGEND = (
    "s to the accuracy: emulated seconds until the test set first had it; steps: those until then. times as fast: as one "
    "device; all steps: the same for the whole training. accuracy: of the test set at the end. cycles: of the forward solve, "
    "the mean over the steps. Relay and pipeline have the numbers of exact training; a pipeline has the number of "
    "microbatches that is fastest."
)


def text(result: report.Result) -> str:
    targets = {row["network"]: f"{row['target']:.0%}" for row in result["rows"]}
    about = f"Accuracies to reach: {', '.join(f'{n} {t}' for n, t in targets.items())}."
    times = [
        f"A layer of the machine, {name}: "
        + ", ".join(f"{report.number(1e3 * t, 3)} ms" for t in own)
        for name, own in result["settings"]["times"].items()
    ]
    return report.page(result, about, table(result["rows"]), LEGEND, ". ".join(times) + ".")


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
    return {"docs/benchmarks.md": [report.sentences(headline(result))]}


EXAMPLES = [
    ("", "both networks on 1 to 16 devices, an hour"),
    ("--quick", "few layers and one epoch, to see that all works"),
    ("--only encoder --devices 1 8", "what compares with the published figure, ten minutes"),
    ("--methods relay pipeline", "what needs one training only"),
    ("--pages benchmarks/results/cpu", "train nothing: write the sentence of docs/benchmarks.md"),
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
    add_numbers(parser, ("--epochs", 6, "Number of epochs of each training (default: 6)."))
    add_only(parser, "Only networks with one of these in their names: encoder, dense.")
    parser.add_argument(
        "--pages", type=Path, metavar="FOLDER",
        help="Train nothing. Write the sentence of docs/benchmarks.md from the result in this folder.",
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
    for task in tasks:
        if wrong := [count for count in options.devices if task.layers % count]:
            parser.error(
                f"--devices must divide the {task.layers} layers of {task.name}; got {wrong}."
            )
    folder = results_folder(parser, options)
    emulated = {task.name: task.machine(options.device) for task in tasks}
    settings = {
        "device": options.device,
        "epochs": options.epochs,
        "times": {
            name: [machine.seconds(kind, 1) for kind in KINDS] for name, machine in emulated.items()
        },
    }
    result = new_result("tunnel_training", TITLE, arguments, settings)
    progress = Progress()

    def want(name: str) -> bool:
        return options.methods is None or any(part in name for part in options.methods)

    paths = []
    for task in tasks:

        def run(name: str, pair: Any, controlled: bool, task: Task = task) -> Training:
            def show(shown: dict[str, Any]) -> None:
                progress(f"{task.name}, {name}: step {shown['step']}")

            show({"step": 0})  # which is compiled
            return trained(task, pair, controlled=controlled, epochs=options.epochs, show=show)

        for row in rows_of(task, emulated[task.name], options.devices, run, want):
            result["rows"].append(report.rounded(row))
            paths = report.save(report.rounded(result), folder, None, text)
        jax.clear_caches()
    progress.clear()
    print(f"{table(result['rows'])}\n\n{LEGEND}\n\nWrote {', '.join(map(str, paths))}")
    return 0


TITLE = "Trainings on several devices, in emulated time"

if __name__ == "__main__":
    sys.exit(main())
