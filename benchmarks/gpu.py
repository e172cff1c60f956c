"""Whole trainings and gradients on one GPU: seconds to an accuracy, by the fastest exact program and by the default.

The tasks run in the order of their worth, within so many seconds; each row is written when it is measured, and a second run
goes on where the first one stopped. --quick runs tiny ones on any machine, to see that all works.
The baselines are a scan of eight layers to a turn, all layers written out, and for a GRU cuDNN's, by PyTorch, if it is installed.
"""

import dataclasses
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, add_numbers, add_only, common_parser, new_result, results_folder, wanted
from benchmarks.gpu_models import (
    MODELS,
    RECURRENT,
    Data,
    Model,
    Scan,
    blocks,
    dense,
    diagonal,
    digits,
    encoder,
    gru,
    in_time,
    tagging,
)
from benchmarks.harness import Contender, measure, relative_error, spread
from benchmarks.manifest import cores
from lp_jax import Newton, Picard, nn, planning

SECONDS, EXACT = 600, "float32 in full"
OF_CUDNN = 8192  # steps; it refuses 65,536 of 16 examples
IN_A_ROW, LONG = 4, 0.02  # calls that are waited for together, unless one takes so many seconds
UNROLLED = functools.partial(lax.scan, unroll=8)


class Limits(NamedTuple):
    """How far a training goes."""

    rate: float  # of Adam
    batch: int
    every: int  # updates between two evaluations, which do not count
    updates: int  # at most
    seconds: float  # at most
    accuracy: float  # on held-out examples, which ends it


@dataclasses.dataclass(frozen=True)
class Context:
    """What the tasks share."""

    quick: bool
    data: Path | None
    pool: ThreadPoolExecutor
    tell: Callable[[str], object]

    def size(self, whole: int, toy: int) -> int:
        return toy if self.quick else whole


Rows = Iterator[dict[str, Any]]
Task = Callable[[Context], Rows]


def scans(name: str, layers: int) -> dict[str, Scan]:
    """The scans that a network is computed by."""
    found: dict[str, Scan] = {"lax.scan, unroll=8": UNROLLED, "default": lp_jax.scan}
    if name == "blocks" and layers <= 64:
        found["written out"] = functools.partial(lax.scan, unroll=True)
    if name == "gru":
        found["Newton, shared"] = functools.partial(lp_jax.scan, solver=Newton(jacobian="shared", rtol=1e-3))
        found["sweeps, secant"] = functools.partial(lp_jax.scan, solver=Picard(sweeps=64, rtol=1e-3, secant=True))
    return found


def taken(model: Model, x: Any) -> dict[str, Any]:
    """What the default takes, and the seconds that it predicts for value and gradient."""
    body, init, xs = model.parts(jax.tree.map(jnp.asarray, model.weights), jnp.asarray(x))
    default = planning.default(lp_jax.scanned(body, init, xs))
    return {"took": planning.summary(default.solver), "predicted": default.seconds}


def gradients(name: str, width: int, layers: int, batch: int, context: Context, dtype: Any = jnp.float32) -> Rows:
    """Time loss and gradient by every scan, side by side; errors are relative to a scan in full float32."""
    model = MODELS[name](width, layers).astype(dtype)
    rng = np.random.default_rng(1)
    shape = (batch, layers, 1) if name in RECURRENT else (batch, 64)
    x, labels = jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.integers(0, 10, batch))
    weights, title = jax.tree.map(jnp.asarray, model.weights), f"{name} {width}, {layers}, {batch} examples"
    title += "" if dtype == jnp.float32 else f", {jnp.dtype(dtype).name}"
    programs = {}
    for each, scan in {**scans(name, layers), EXACT: UNROLLED}.items():
        context.tell(f"{title}: {each}")
        ours = scan is lp_jax.scan or getattr(scan, "func", None) is lp_jax.scan
        of = lp_jax.value_and_grad if ours else jax.value_and_grad
        with jax.default_matmul_precision("highest" if each == EXACT else "default"):
            given = (MODELS[name](width, layers).weights if each == EXACT else weights), x, labels
            lowered = jax.jit(of(model.loss(scan))).lower(*given)
        programs[each] = context.pool.submit(_compiled, lowered)
    ready = {each: future.result() for each, future in programs.items()}
    exact, _ = ready.pop(EXACT)
    reference = jax.tree.map(np.asarray, exact(MODELS[name](width, layers).weights, x, labels)[1])
    contenders, errors, codes = [], {}, {}
    for each, (program, _) in ready.items():
        out = program(weights, x, labels)
        errors[each] = relative_error(out[1], reference)
        codes[each] = [int(code) for code in out[2]] if len(out) > 2 else None
        contenders.append(Contender(name=each, call=lambda program=program: program(weights, x, labels)))
    if name == "gru" and dtype == jnp.float32 and layers <= OF_CUDNN and (other := cudnn()):
        contenders.append(Contender(name="cuDNN", call=other.gradient(model, x, labels)))
    for row in timed(title, contenders, context):
        each = row["name"]
        yield {
            **row,
            "error": errors.get(each),
            "codes": codes.get(each),
            "compile_seconds": ready[each][1] if each in ready else None,
            **(taken(model, x) if each == "default" else {}),
        }


def timed(title: str, contenders: Sequence[Contender], context: Context) -> Rows:
    """Seconds of each contender, side by side; short calls are waited for a few at a time, as steps of a loop are."""
    rows = []
    for contender in contenders:
        jax.block_until_ready(contender.call())
        begin = time.perf_counter()
        jax.block_until_ready(contender.call())
        row = IN_A_ROW if time.perf_counter() - begin < LONG else 1
        rows.append((row, dataclasses.replace(contender, call=functools.partial(_in_a_row, contender.call, row))))
    timings = measure([each for _, each in rows], rounds=5, min_time=0.02, budget=1.0, tell=context.tell)
    for (row, contender), timing in zip(rows, timings, strict=True):
        yield {"title": title, "name": contender.name, "seconds": spread([s / row for s in timing.seconds])}


def _in_a_row(call: Callable[[], Any], number: int) -> Any:
    return [call() for _ in range(number)][-1]


def _compiled(lowered: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(compiler_options=dict(options or {})), time.perf_counter() - start


def training(title: str, name: str, model: Model, data: Data, limits: Limits, layers: int, context: Context) -> Rows:
    """Train from the same weights, by the same batches, to an accuracy; only the updates count, not the evaluations."""
    x, labels, test_x, test_labels = map(jnp.asarray, data)
    if context.quick:
        limits = limits._replace(every=2, updates=2)
    rng = np.random.default_rng(2)
    order = np.concatenate([rng.permutation(len(x)) for _ in range(-(-limits.updates * limits.batch // len(x)) + 1)])
    batches = jnp.asarray(order[: limits.updates * limits.batch].reshape(limits.updates, limits.batch))
    adam, programs = optax.adam(limits.rate), {}
    start = jax.tree.map(jnp.asarray, model.weights)

    def evaluate(weights: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        right = jnp.argmax(model.logits(weights, x, UNROLLED), -1) == labels
        return jnp.sum(right & (labels >= 0)) / jnp.sum(labels >= 0)

    def update(scan: Scan) -> Any:
        gradient = jax.value_and_grad(model.loss(scan))

        def step(state: Any, at: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
            weights, moments = state
            value, slope = gradient(weights, x[at], labels[at])
            change, moments = adam.update(slope, moments)
            return (optax.apply_updates(weights, change), moments), value

        return jax.jit(step, donate_argnums=0)

    state = start, adam.init(start)
    for each, scan in scans(name, layers).items():
        context.tell(f"{title}: {each}")
        programs[each] = context.pool.submit(_compiled, update(scan).lower(state, batches[0], x, labels))
    accuracy = _compiled(jax.jit(evaluate).lower(start, test_x, test_labels))[0]
    runs: dict[str, tuple[Callable[[], Any], float | None]] = {}
    ready = {each: future.result() for each, future in programs.items()}
    for each, (program, seconds) in ready.items():
        runs[each] = functools.partial(_Ours, program, start, adam, x, labels, batches, accuracy, data), seconds
    if name == "gru" and (other := cudnn()):
        runs["cuDNN"] = functools.partial(other.Training, model, data, limits, np.asarray(batches)), None
    for each, (make, seconds) in runs.items():
        context.tell(f"{title}: {each} trains")
        yield {
            "title": title,
            "name": each,
            **_train(make(), limits),
            "compile_seconds": seconds,
            **(taken(model, data.x[: limits.batch]) if each == "default" else {}),
        }


class _Ours:
    """A training by a compiled update; the arrays of its state are given away at each."""

    def __init__(
        self, program: Any, start: Any, adam: Any, x: Any, labels: Any, batches: Any, accuracy: Any, data: Data
    ):
        fresh = jax.tree.map(jnp.copy, start)
        self._program, self._state, self._rest = program, (fresh, adam.init(fresh)), (x, labels)
        self._batches, self._accuracy = list(batches), lambda w: accuracy(w, data.test_x, data.test_labels)
        spare = jax.tree.map(jnp.copy, self._state)
        jax.block_until_ready(program(spare, self._batches[0], *self._rest))

    def update(self, number: int) -> Any:
        self._state, value = self._program(self._state, self._batches[number], *self._rest)
        return value

    def wait(self, value: Any) -> float:
        jax.block_until_ready(self._state)
        return float(value)

    def accuracy(self) -> float:
        return float(self._accuracy(self._state[0]))


def _train(run: Any, limits: Limits) -> dict[str, Any]:
    """Updates, seconds, loss and accuracy at every evaluation, and the seconds to the accuracy that was wanted."""
    seconds, curve, done = 0.0, [], 0
    while done < limits.updates and seconds < limits.seconds:
        begin = time.perf_counter()
        for number in range(done, done + limits.every):
            value = run.update(number)
        loss = run.wait(value)
        seconds, done = seconds + time.perf_counter() - begin, done + limits.every
        curve.append([done, seconds, loss, run.accuracy()])
        if curve[-1][-1] >= limits.accuracy:
            break
    reached = curve[-1][-1] >= limits.accuracy
    return {
        "curve": curve,
        "update": seconds / done,
        "reached": seconds if reached else None,
        "accuracy": curve[-1][-1],
    }


@functools.cache
def cudnn() -> Any:
    """The module that trains by PyTorch, where it is installed and sees a GPU."""
    try:
        found = importlib.import_module("torch")
    except ModuleNotFoundError:
        return None
    return importlib.import_module("benchmarks.torch_gru") if found.cuda.is_available() else None


def _dense_training(context: Context) -> Rows:
    layers, limits = context.size(4096, 32), Limits(2e-3, 64, 10, 200, 15.0, 0.95)
    yield from training(f"dense 64, {layers} layers", "dense", dense(64, layers), digits(), limits, layers, context)


def _blocks_training(context: Context) -> Rows:
    for layers in (context.size(64, 4), context.size(256, 8)):
        width, limits = context.size(256, 16), Limits(1e-4, 256, 20, 200, 15.0, 2.0)
        title = f"blocks {width}, {layers} of four layers"
        yield from training(title, "blocks", blocks(width, layers), digits(), limits, layers, context)


def _recurrent_training(side: int) -> Task:
    def task(context: Context) -> Rows:
        steps, limits = context.size(side**2, 16), Limits(3e-3, 64, 20, 400, 15.0, 0.9)
        data = in_time(digits(context.size(side, 4)))
        for name, model in (("gru", gru(64)), ("paragru", diagonal(nn.ParaGRU, 64))):
            yield from training(f"{name} 64, {steps} pixels", name, model, data, limits, steps, context)

    return task


def _encoder_training(context: Context) -> Rows:
    if context.data is None:
        return
    width, layers = context.size(128, 16), context.size(128, 4)
    data, sizes, classes = tagging(context.data, context.size(48, 8))
    limits = Limits(1e-3, 16, 20, 300, 20.0, 0.9)
    model = encoder(width, layers, sizes, classes)
    yield from training(f"encoder {width}, {layers} blocks, GUM", "encoder", model, data, limits, layers, context)


def _gradients(*rows: tuple[str, int, int, int], dtypes: Sequence[Any] = (jnp.float32,)) -> Task:
    def task(context: Context) -> Rows:
        toys = dict.fromkeys((name, 4, 8, 2) for name, *_ in rows)
        for row in toys if context.quick else rows:
            for dtype in dtypes:
                yield from gradients(*row, context, dtype)

    return task


def _processor(context: Context) -> Rows:
    measured, known = planning.measure_processor(), planning.processor(*_here())
    for name in ("kernel", "flops", "bandwidth"):
        yield {"title": "the device", "name": name, "measured": getattr(measured, name), "known": getattr(known, name)}


def _here() -> tuple[str, str]:
    device = jax.devices()[0]
    return device.platform, device.device_kind


def _sweeps(context: Context) -> Rows:
    """Fixed numbers of sweeps; and what one product of a layer takes, for all layers at once and one after another."""
    for name, width, layers, batch in (("blocks", 256, 64, 256), ("dense", 64, 1024, 64)):
        width, layers, batch = context.size(width, 4), context.size(layers, 4), context.size(batch, 2)
        for dtype in (jnp.float32, jnp.bfloat16):
            model, kind = MODELS[name](width, layers).astype(dtype), jnp.dtype(dtype).name
            x, labels = jnp.ones((batch, 64)), jnp.zeros(batch, jnp.int32)
            weights, square = jax.tree.map(jnp.asarray, model.weights), jnp.ones((layers, width, width), dtype)
            one = square, jnp.ones((layers, batch, width), dtype)
            calls = {
                f"products of all layers at once, {kind}": (jax.jit(jnp.matmul), (one[1], square)),
                f"products one after another, {kind}": (jax.jit(_in_turn), one),
            }
            for number in (1, 2, 4, 8):
                sweeps = Picard(sweeps=number)
                scan = functools.partial(lp_jax.scan, solver=sweeps, adjoint_solver=sweeps)
                given = weights, x, labels
                calls[f"{number} sweeps, {kind}"] = jax.jit(jax.value_and_grad(model.loss(scan))), given
            yield from _programs(f"{name} {width}, {layers}, {batch} examples", calls, context)


def _in_turn(square: jax.Array, y: jax.Array) -> jax.Array:
    return lax.scan(lambda y, w: (y @ w, None), y[0], square, unroll=8)[0]


def _programs(title: str, calls: Mapping[str, tuple[Any, Any]], context: Context) -> Rows:
    compiled = {name: context.pool.submit(_compiled, f.lower(*given)) for name, (f, given) in calls.items()}
    return timed(
        title,
        [
            Contender(name=name, call=functools.partial(compiled[name].result()[0], *given))
            for name, (_, given) in calls.items()
        ],
        context,
    )


def _sums(context: Context) -> Rows:
    """Sums along the layers, forward and from the end."""
    x = jnp.ones((context.size(4096, 8), 64, 64))
    calls = {
        "cumsum": (jax.jit(lambda x: jnp.cumsum(x, 0)), (x,)),
        "cumsum from the end": (jax.jit(lambda x: lax.cumsum(x, 0, reverse=True)), (x,)),
        "cumsum of the reversed": (jax.jit(lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, 0), 0), 0)), (x,)),
        "associative scan": (jax.jit(lambda x: lax.associative_scan(jnp.add, x)), (x,)),
        "copy": (jax.jit(lambda x: x + 1), (x,)),
    }
    yield from _programs("sums along 4,096 layers of 64 x 64", calls, context)


def _loops_in_graphs(context: Context) -> Rows:
    """Loops as CUDA graphs, by an option of each program."""
    model = dense(64, context.size(1024, 8))
    given = jax.tree.map(jnp.asarray, model.weights), jnp.ones((64, 64)), jnp.zeros(64, jnp.int32)
    options = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,WHILE"} if _here()[0] == "gpu" else {}
    contenders = []
    for name, scan in {"lax.scan, unroll=8": UNROLLED, "default": lp_jax.scan}.items():
        for title, more in ((name, {}), (f"{name}, loops in graphs", options)):
            program, _ = _compiled(jax.jit(jax.value_and_grad(model.loss(scan))).lower(*given), more)
            contenders.append(Contender(name=title, call=functools.partial(program, *given)))
    yield from timed("loops in CUDA graphs, dense 64, 1,024 layers", contenders, context)


TASKS: dict[str, tuple[int, Task]] = {
    "gradients": (
        90,
        _gradients(
            ("dense", 64, 1024, 64),
            ("dense", 64, 4096, 64),
            ("blocks", 256, 64, 256),
            ("blocks", 256, 256, 256),
            ("gru", 16, 1024, 64),
            ("gru", 64, 1024, 64),
            ("paragru", 64, 1024, 64),
            ("paralstm", 64, 1024, 64),
        ),
    ),
    "processor": (10, _processor),
    "training: dense": (40, _dense_training),
    "training: blocks": (60, _blocks_training),
    "training: 64 pixels": (50, _recurrent_training(8)),
    "training: 784 pixels": (60, _recurrent_training(28)),
    "sweeps": (45, _sweeps),
    "sums": (10, _sums),
    "training: encoder": (70, _encoder_training),
    "lengths": (
        80,
        _gradients(
            *((name, 64, steps, 16) for steps in (8192, 65536) for name in ("paragru", "gru")),
            dtypes=(jnp.float32, jnp.bfloat16),
        ),
    ),
    "loops in graphs": (20, _loops_in_graphs),
}
"""By name: seconds that a task takes on an H100, roughly, and what it does. In the order of their worth."""


def table(result: dict[str, Any]) -> str:
    """A table for each title."""
    parts = []
    for title in dict.fromkeys(row["title"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["title"] == title]
        cells = [["", "ms", "IQR", "s to the accuracy", "accuracy", "error", "result", "predicted, ms", "compile, s"]]
        for row in rows:
            if "measured" in row:
                cells.append([f"{row['name']}: {row['measured']:.3g} measured, {row['known']:.3g} taken", *["–"] * 8])
                continue
            seconds = row.get("seconds")
            once = seconds["median"] if seconds else row["update"]
            name = f"{row['name']}: {row['took']}" if "took" in row else row["name"]
            cells.append([
                name,
                report.number(1e3 * once, 3),
                report.number(1e3 * (seconds["q3"] - seconds["q1"])) if seconds else "–",
                report.number(row.get("reached"), 3),
                report.number(row.get("accuracy"), 3),
                report.scientific(row.get("error")),
                "/".join(map(str, row["codes"])) if row.get("codes") else "–",
                report.number(1e3 * row["predicted"], 3) if "predicted" in row else "–",
                report.number(row.get("compile_seconds")),
            ])  # fmt: skip
        parts += [f"## {title}", report.pipes(cells)]
    return report.page(result, *parts)


def draw(result: dict[str, Any]) -> Figure:
    """Accuracy over seconds, a panel for each training."""
    trained = [row for row in result["rows"] if "curve" in row]
    titles = list(dict.fromkeys(row["title"] for row in trained)) or [""]
    columns = min(3, len(titles))
    figure = Figure(figsize=(5 * columns, 3.4 * -(-len(titles) // columns)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(-(-len(titles) // columns), columns)).ravel()
    for panel in panels[len(titles) :]:
        panel.set_axis_off()
    for panel, title in zip(panels, titles, strict=False):
        panel.set(title=title, xlabel="seconds of training", ylabel="accuracy", xscale="log")
        for row in trained:
            if row["title"] == title:
                _, seconds, _, accuracy = zip(*row["curve"], strict=True)
                panel.plot(seconds, accuracy, marker=".", label=row["name"])
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small", frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("gpu", __doc__ or "", _EXAMPLES)
    add_only(parser, f"Run only tasks with one of these in their names: {', '.join(TASKS)}.")
    add_numbers(parser, ("--seconds", SECONDS, f"Seconds within which tasks are begun (default: {SECONDS})."))
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="Folder of GUM's files, for the encoder's training."
    )
    parser.add_argument("--fresh", action="store_true", help="Measure tasks again that the folder has results of.")
    options = parser.parse_args(arguments)
    folder, begin, progress = results_folder(parser, options), time.perf_counter(), Progress()
    settings = {"seconds": options.seconds, "device": _here()[1]}
    result = new_result("gpu", f"Trainings and gradients on one {_here()[1]}", arguments, settings)
    earlier = {"rows": []} if options.fresh else report.kept(folder, "gpu")
    done = {row["task"] for row in earlier["rows"] if row.get("last")}
    result["rows"] = [row for row in earlier["rows"] if row["task"] in done]
    with ThreadPoolExecutor(cores()) as pool:
        context = Context(options.quick, options.data, pool, progress)
        for name, (about, task) in TASKS.items():
            left = options.seconds - (time.perf_counter() - begin)
            if name in done or not wanted(name, options):
                continue
            if left < about and not options.quick:
                result["left_out"].append({"name": name, "reason": f"takes some {about} s; {left:.0f} were left"})
                continue
            try:
                for row in task(context):
                    print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
                    result["rows"].append({"task": name, **row})
                    report.save(result, folder, draw, table)
            except Exception as error:  # of one task: the others are worth their time
                result["left_out"].append({"name": name, "reason": f"{type(error).__name__}: {error}"[:400]})
                continue
            if result["rows"] and result["rows"][-1]["task"] == name:
                result["rows"][-1]["last"] = True
            report.save(result, folder, draw, table)
    progress.clear()
    for left in result["left_out"]:
        print(f"Left out: {left['name']} ({left['reason']}).")
    print(table(result))
    return 0


_EXAMPLES = [
    ("", "all tasks, ten minutes"),
    ("--quick", "tiny, on any machine, to see that all works"),
    ("--only gradients --seconds 120", "one task"),
]

if __name__ == "__main__":
    sys.exit(main())
