"""How a decoder drifts away from what a solver can follow as it trains, and what keeps it near.

A standard pre-norm decoder (h = 1) of 16 layers guesses the next character of a text. It is trained exactly, with injection,
with the default cycles, with sweeps to a tolerance, with buffers, with a controller, and with the depth penalty. At some steps
the sweeps that an unseen batch needs and the errors of gradients are measured; at the end, the test loss of the network,
exactly and by a few sweeps. A run that the table has already is not repeated.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import lp_jax
from benchmarks import report
from benchmarks.accuracy import evaluations
from benchmarks.command import Progress, common_parser, results_folder
from benchmarks.manifest import manifest
from benchmarks.networks import SERIAL, Pair
from lp_jax import data, nn, planning, train


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The network, its data and the number of training steps; ``marks`` are the steps at which it is measured."""

    layers: int = 16
    time: float | None = None  # at the last layer, where the first is at 0; None is h = 1
    width: int = 32
    heads: int = 4
    length: int = 32
    batch: int = 16
    rate: float = 2e-3
    marks: tuple[int, ...] = (0, 200, 400, 800, 1200)
    held_out: int = 512  # windows
    sweeps: int = 6  # that the penalty allows


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to train."""

    pair: Pair = SERIAL
    penalty: float = 0.0  # its weight
    bound: float | None = None  # of a controller
    buffers: int = 0  # serial layers before and behind those that are solved


_INJECTION = lp_jax.MGRIT(levels=2, coarsening=4, iterations=2, coarse_step=lp_jax.Rediscretize())
_SWEEPS = lp_jax.Picard(sweeps=32, rtol=1e-3)
INJECTION: Pair = _INJECTION, dataclasses.replace(_INJECTION, iterations=1)
SWEEPS: Pair = _SWEEPS, dataclasses.replace(_SWEEPS, rtol=1e-2)

RUNS = {
    "serial": Run(),
    "serial, penalty 0.01": Run(penalty=0.01),
    "serial, penalty 0.02": Run(penalty=0.02),
    "serial, penalty 0.05": Run(penalty=0.05),
    "injection, 2/1": Run(INJECTION),
    "injection, buffers": Run(INJECTION, buffers=2),
    "default cycles": Run((lp_jax.MGRIT(), lp_jax.MGRIT())),
    "sweeps to 1e-3": Run(SWEEPS),
    "sweeps to 1e-3, buffers": Run(SWEEPS, buffers=2),
    "sweeps, controller 0.3": Run(SWEEPS, bound=0.3),
    "sweeps, controller 0.1": Run(SWEEPS, bound=0.1),
    "sweeps, controller 0.03": Run(SWEEPS, bound=0.03),
    "sweeps to 1e-3, penalty 0.02": Run(SWEEPS, penalty=0.02),
    "sweeps, controller 0.03, penalty 0.02": Run(SWEEPS, penalty=0.02, bound=0.03),
}

DEEP = "serial", "injection, 2/1", "sweeps to 1e-3", "sweeps, controller 0.03"
"""The runs of the deeper network."""


class Decoder:
    """The network on its data, and all that is measured on it."""

    def __init__(self, path: Path, sizes: Sizes, seed: int, buffers: int = 0):
        text = data.characters(path, sizes.length)
        self.sizes, self.text, self.buffers, rngs = sizes, text, buffers, nnx.Rngs(seed)
        h = (sizes.time or sizes.layers) / sizes.layers

        def layer(rngs: nnx.Rngs) -> nnx.Module:
            return nn.EncoderLayer(sizes.width, sizes.heads, causal=True, depth=sizes.layers, rngs=rngs)

        def block(layers: int, solver: lp_jax.Solver) -> nn.LayerParallel:
            return nn.LayerParallel(layer, layers, t1=h * layers, solver=solver, rngs=rngs)

        opening = nn.TokenOpening(text.classes, sizes.width, max_length=sizes.length, rngs=rngs)
        trunk: Any = block(sizes.layers - 2 * buffers, lp_jax.MGRIT())
        if buffers:
            trunk = nn.Network(block(buffers, lp_jax.Serial()), trunk, block(buffers, lp_jax.Serial()))
        self.model = nn.Classifier(opening, trunk, nn.TokenClosing(sizes.width, text.classes, rngs=rngs))
        self.loss_fn, self.params = train.classification(self.model)
        order = np.random.default_rng(seed).permutation(len(text.train_x))
        self.unseen = self._batch(text.train_x[order], text.train_y[order], -1)
        self.order = order[: -sizes.batch]
        windows = range(64, sizes.held_out + 1, 64)
        self.test = [(text.test_x[end - 64 : end], text.test_y[end - 64 : end]) for end in windows]

    def _batch(self, x: np.ndarray, y: np.ndarray, number: int) -> Any:
        size = self.sizes.batch
        part = slice(number * size, (number + 1) * size or None)
        return x[part], y[part]

    def batches(self, epoch: int) -> Any:
        order = np.random.default_rng(epoch).permutation(self.order)
        x, y = self.text.train_x[order], self.text.train_y[order]
        return (self._batch(x, y, number) for number in range(self.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int:
        return min(len(self.order) // self.sizes.batch, self.sizes.marks[-1])

    def loss(self, params: Any, solver: lp_jax.Solver) -> float:
        return train.evaluate(self.loss_fn, params, self.test, solver=solver).loss

    def taken(self, params: Any, pair: Pair) -> list[int]:
        """Iterations that an unseen batch takes, forward and adjoint."""
        return [int(stats.iterations) for stats in train.residuals(self.model, params, self.unseen, *pair)[:2]]

    def work(self, pair: Pair) -> float:
        """Evaluations of layers in a training step, as a multiple of serial propagation's."""
        solved = self.sizes.layers - 2 * self.buffers
        return (2 * self.buffers + solved * evaluations(pair, solved)) / self.sizes.layers

    def measured(self, params: Any) -> dict[str, Any]:
        def error(pair: Pair) -> float:
            return float(train.gradient_error(self.loss_fn, params, self.unseen, *pair).relative)

        forward, adjoint = self.taken(params, (_SWEEPS, _SWEEPS))
        errors = {"injection_error": error(INJECTION), "sweeps_error": error(SWEEPS)}
        return {"sweeps": forward, "adjoint_sweeps": adjoint, **errors}


def trained(decoder: Decoder, run: Run) -> dict[str, Any]:
    """Train to the last mark, and measure at each."""
    sizes, work = decoder.sizes, []
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(sizes.rate))

    def penalty(problem: lp_jax.Problem) -> jax.Array:
        return run.penalty * train.depth_penalty(problem, sweeps=sizes.sweeps, rtol=5e-4)

    loss_fn, _ = train.classification(decoder.model, penalty=penalty if run.penalty else None)
    controller = None if run.bound is None else train.Controller(loss_fn, bound=run.bound, probe_every=200)
    state = train.init_state(decoder.params, optimizer)
    step_fn, log, found = train.make_train_step(loss_fn, optimizer), train.Log(), []

    def solvers(state: Any) -> Pair:
        return run.pair if controller is None or state.control is None else controller.solvers(state.control, *run.pair)

    for mark in sizes.marks:
        if mark > int(state.step):
            # one epoch is all that is trained on, so a run goes on within it
            state = _to(decoder, run, state, step_fn, controller, log, mark)
        forward, adjoint = pair = solvers(state)
        if any(solver.has_tolerance for solver in pair):
            counts = decoder.taken(state.params, pair)
            forward, adjoint = (planning.with_effort(s, n) for s, n in zip(pair, counts, strict=True))
        work.append(decoder.work((forward, adjoint)))
        found.append({"step": mark, **decoder.measured(state.params)})
    losses = [row["loss"] for row in log.of("train")]
    return {
        "marks": found,
        "loss": float(np.mean(losses[-10:])),
        "test_loss": decoder.loss(state.params, lp_jax.Serial()),
        "by_sweeps": [decoder.loss(state.params, lp_jax.Picard(sweeps=s)) for s in range(1, 9)],
        "work": float(np.mean(work)),
        "serial_steps": sum(row["serial"] for row in log.of("control")),
        "control": [{k: row[k] for k in ("step", "error", "allowed", "serial")} for row in log.of("control")],
    }


def _to(decoder: Decoder, run: Run, state: Any, step_fn: Any, controller: Any, log: train.Log, mark: int) -> Any:
    """Train to a step."""

    def batches(epoch: int) -> Any:
        whole = itertools.chain.from_iterable(map(decoder.batches, itertools.count()))
        return itertools.islice(whole, mark)

    forward, adjoint = run.pair
    options = {"solver": forward, "adjoint_solver": adjoint, "controller": controller, "log": log}
    state, _ = train.fit(step_fn, state, batches, steps_per_epoch=mark, epochs=1, **options)
    return state


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run."""
    steps = [mark["step"] for mark in rows[0]["marks"]]
    head = ["", "test loss", "evaluations", f"sweeps to 1e-3 at {', '.join(map(str, steps))}"]
    cells = [[*head, "error of injection", "error of sweeps"]]
    for row in rows:
        marks = row["marks"]
        ends = [f"{marks[0][name]:.0e} to {marks[-1][name]:.0e}" for name in ("injection_error", "sweeps_error")]
        sweeps = ", ".join(str(mark["sweeps"]) for mark in marks)
        cells.append([row["run"], f"{row['test_loss']:.4f}", f"{row['work']:.1f}", sweeps, *ends])
    by_sweeps = [["test loss by sweeps", *map(str, range(1, 9)), "exact"]]
    by_sweeps += [[row["run"], *(f"{x:.3f}" for x in row["by_sweeps"]), f"{row['test_loss']:.3f}"] for row in rows]
    return f"{report.pipes(cells)}\n\n{report.pipes(by_sweeps)}\n\n{_LEGEND}\n"


_LEGEND = (
    "Evaluations of layers in a training step are multiples of serial propagation's. Sweeps are those of an unseen batch. "
    "Errors are relative 2-norm errors of its gradient, with injection (2/1) and with sweeps to 1e-3 and 1e-2, at the first and "
    "the last step."
)


_ALIKE = ("serial, penalty 0.01", "serial, penalty 0.05", "sweeps to 1e-3, penalty 0.02")
_ALIKE += (
    "sweeps to 1e-3",
    "sweeps to 1e-3, buffers",
    "sweeps, controller 0.1",
    "sweeps, controller 0.03",
)  # their lines lie on others


def draw(result: report.Result) -> Figure:
    """Sweeps and gradient errors against steps, and the loss that a few sweeps give."""
    fig = report.figure(result, width=17, height=5.2)
    needed, errors, quality = fig.subplots(1, 3)
    for number, row in enumerate(row for row in result["rows"] if row["run"] not in _ALIKE):
        steps = [mark["step"] for mark in row["marks"]]
        look = {"color": f"C{number}", "marker": "os^DvP*X"[number % 8], "label": row["run"]}
        needed.plot(steps, [mark["sweeps"] for mark in row["marks"]], **look)
        errors.plot(steps, [mark["injection_error"] for mark in row["marks"]], **look)
        quality.plot(range(1, 9), [abs(x - row["test_loss"]) for x in row["by_sweeps"]], **look)
    errors.set_yscale("log")
    quality.set(yscale="log", ylim=(1e-5, 1e6))  # room for the legend
    report.dress(needed, title="Sweeps to 1e-3", x="training step", y="sweeps")
    report.dress(errors, title="Gradient error of injection, 2/1", x="training step", y="relative error")
    report.dress(
        quality, title="A trained network, used by a few sweeps", x="sweeps", y="distance from the exact test loss"
    )
    quality.legend(fontsize=11, frameon=False, loc="upper right")
    return fig


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("drift", __doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="a text file, or a treebank (.conllu)")
    parser.add_argument("--runs", nargs="+", metavar="TEXT", help="those with one of these in their names")
    parser.add_argument("--deep", action="store_true", help="64 layers with h = 1/64; results apart")
    parser.add_argument("--rate", type=float, metavar="X", help="learning rate of Adam")
    options = parser.parse_args(arguments)
    sizes = Sizes(layers=8, width=8, length=16, batch=4, marks=(0, 3, 6), held_out=64) if options.quick else Sizes()
    sizes = dataclasses.replace(sizes, layers=64, time=1.0) if options.deep else sizes
    sizes = sizes if options.rate is None else dataclasses.replace(sizes, rate=options.rate)
    suite, title = (
        ("drift_deep", "A decoder of 64 layers, h = 1/64") if options.deep else ("drift", "The drift of a decoder")
    )
    out = results_folder(parser, options)
    rows = [] if options.quick else report.kept(out, suite)
    described = manifest("benchmarks.drift", sys.argv[1:] if arguments is None else arguments)
    progress = Progress()
    for name, run in ((name, RUNS[name]) for name in (DEEP if options.deep else RUNS)):
        if any(row["run"] == name for row in rows) or not (
            not options.runs or any(text in name for text in options.runs)
        ):
            continue
        progress(name)
        rows.append({"run": name, **trained(Decoder(options.data, sizes, 0, run.buffers), run)})
        rows.sort(key=lambda row: list(RUNS).index(row["run"]))
        result = {"suite": suite, "title": title, "manifest": described, "rows": rows}
        result["settings"] = dataclasses.asdict(sizes)
        report.save(
            result, out, draw, lambda result: f"# {result['title']}\n\n{report.origin(result)}\n\n{table(rows)}"
        )
        jax.clear_caches()
    progress.clear()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
