"""Whole trainings and gradients on one GPU: seconds to an accuracy, by the fastest exact program and by the default.

The most useful tasks run first. No task begins that the seconds left are too few for. Each row is written when it is measured,
and a second run goes on where the first one stopped. --quick runs tiny tasks on any machine, to see that all works.
The baseline is a scan with eight layers to a turn. Others are all layers written out and, for a GRU, that of cuDNN by PyTorch,
if it is installed.
"""

import dataclasses
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

import lp_jax
from benchmarks import report
from benchmarks.command import (
    Progress,
    add_numbers,
    add_only,
    common_parser,
    new_result,
    results_folder,
    wanted,
)
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
from lp_jax import Newton, Picard, Secant, nn, planning
from lp_jax._choice._processor import processor
from lp_jax.planning import _measure

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
    """Sizes, data, threads that compile, and progress: the same for all tasks."""

    quick: bool
    data: Path | None
    pool: ThreadPoolExecutor
    tell: Callable[[str], object]

    def size(self, whole: int, toy: int) -> int:
        return toy if self.quick else whole


Rows = Iterator[dict[str, Any]]
Task = Callable[[Context], Rows]


def network(name: str, width: int, layers: int, unit: str = "steps") -> str:
    """A network in words; ``unit`` is what a recurrent network goes through."""
    if name == "dense":
        return f"dense, {width} wide, {layers:,} layers"
    if name == "blocks":
        return f"{layers} blocks of four dense layers, {width} wide"
    if name == "encoder":
        return f"encoder, {width} wide, {layers} blocks"
    return f"{_CELLS[name]}, {width} units, {layers:,} {unit}"


_CELLS = {
    "gru": "GRU",
    "paragru": "ParaGRU",
    "paralstm": "ParaLSTM",
    "gru, resets": "GRU with resets",
    "paragru, resets": "ParaGRU with resets",
}


def scans(name: str, layers: int) -> dict[str, Scan]:
    """The scans that a network is computed by."""
    found: dict[str, Scan] = {"lax.scan, unroll=8": UNROLLED, "default": lp_jax.scan}
    if name == "blocks" and layers <= 64:
        found["written out"] = functools.partial(lax.scan, unroll=True)
    if name == "gru":
        found["Newton, shared"] = functools.partial(
            lp_jax.scan, solver=Newton(jacobian="shared", rtol=1e-3)
        )
        found["sweeps, secant"] = functools.partial(
            lp_jax.scan, solver=Secant(sweeps=64, rtol=1e-3)
        )
    return found


def taken(model: Model, x: Any) -> dict[str, Any]:
    """The default's solver in words, and its predicted seconds of value and gradient."""
    body, init, xs = model.parts(jax.tree.map(jnp.asarray, model.weights), jnp.asarray(x))
    default = planning.default(lp_jax.scanned(body, init, xs))
    about = default.solver.summary + (" at most" if default.solver.has_tolerance else "")
    return {"took": about, "predicted": default.seconds}


def gradients(
    name: str, width: int, layers: int, batch: int, context: Context, dtype: Any = jnp.float32
) -> Rows:
    """Time loss and gradient by every scan, side by side; errors are relative to a scan in full float32."""
    model = MODELS[name](width, layers).astype(dtype)
    rng = np.random.default_rng(1)
    shape = (batch, layers, 1) if name in RECURRENT else (batch, 64)
    x, labels = (
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        jnp.asarray(rng.integers(0, 10, batch)),
    )
    weights, title = (
        jax.tree.map(jnp.asarray, model.weights),
        f"{network(name, width, layers)}, {batch} examples",
    )
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
        contenders.append(
            Contender(name=each, call=lambda program=program: program(weights, x, labels))
        )
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
        rows.append(
            (
                row,
                dataclasses.replace(
                    contender, call=functools.partial(_in_a_row, contender.call, row)
                ),
            )
        )
    timings = measure(
        [each for _, each in rows], rounds=5, min_time=0.02, budget=1.0, tell=context.tell
    )
    for (row, contender), timing in zip(rows, timings, strict=True):
        yield {
            "title": title,
            "name": contender.name,
            "seconds": spread([s / row for s in timing.seconds]),
        }


def _in_a_row(call: Callable[[], Any], number: int) -> Any:
    return [call() for _ in range(number)][-1]


def _compiled(lowered: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(compiler_options=dict(options or {})), time.perf_counter() - start


def training(
    title: str, name: str, model: Model, data: Data, limits: Limits, layers: int, context: Context
) -> Rows:
    """Train from the same weights, by the same batches, to an accuracy; only the updates count, not the evaluations."""
    x, labels, test_x, test_labels = map(jnp.asarray, data)
    if context.quick:
        limits = limits._replace(every=2, updates=2)
    rng = np.random.default_rng(2)
    order = np.concatenate(
        [rng.permutation(len(x)) for _ in range(-(-limits.updates * limits.batch // len(x)) + 1)]
    )
    batches = jnp.asarray(
        order[: limits.updates * limits.batch].reshape(limits.updates, limits.batch)
    )
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
        programs[each] = context.pool.submit(
            _compiled, update(scan).lower(state, batches[0], x, labels)
        )
    accuracy = _compiled(jax.jit(evaluate).lower(start, test_x, test_labels))[0]
    runs: dict[str, tuple[Callable[[], Any], float | None]] = {}
    ready = {each: future.result() for each, future in programs.items()}
    for each, (program, seconds) in ready.items():
        runs[each] = (
            functools.partial(_Ours, program, start, adam, x, labels, batches, accuracy, data),
            seconds,
        )
    if name == "gru" and (other := cudnn()):
        runs["cuDNN"] = (
            functools.partial(other.Training, model, data, limits, np.asarray(batches)),
            None,
        )
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
        self,
        program: Any,
        start: Any,
        adam: Any,
        x: Any,
        labels: Any,
        batches: Any,
        accuracy: Any,
        data: Data,
    ):
        fresh = jax.tree.map(jnp.copy, start)
        self._program, self._state, self._rest = program, (fresh, adam.init(fresh)), (x, labels)
        self._batches, self._accuracy = (
            list(batches),
            lambda w: accuracy(w, data.test_x, data.test_labels),
        )
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
    width, layers = context.size(64, 8), context.size(4096, 8)
    title, limits = network("dense", width, layers), Limits(2e-3, 64, 10, 200, 15.0, 0.95)
    yield from training(title, "dense", dense(width, layers), digits(), limits, layers, context)


def _blocks_training(context: Context) -> Rows:
    for layers in (context.size(64, 4), context.size(256, 8)):
        width, limits = context.size(256, 16), Limits(1e-4, 256, 20, 200, 15.0, 2.0)
        title = network("blocks", width, layers)
        yield from training(
            title, "blocks", blocks(width, layers), digits(), limits, layers, context
        )


def _recurrent_training(side: int) -> Task:
    def task(context: Context) -> Rows:
        steps, limits = context.size(side**2, 16), Limits(3e-3, 64, 20, 400, 15.0, 0.9)
        data = in_time(digits(context.size(side, 4)))
        for name, model in (("gru", gru(64)), ("paragru", diagonal(nn.ParaGRU, 64))):
            yield from training(
                network(name, 64, steps, "pixels"), name, model, data, limits, steps, context
            )

    return task


def _encoder_training(context: Context) -> Rows:
    if context.data is None:
        return
    width, layers = context.size(128, 16), context.size(128, 4)
    data, sizes, classes = tagging(context.data, context.size(48, 8))
    limits = Limits(1e-3, 16, 20, 300, 20.0, 0.9)
    model = encoder(width, layers, sizes, classes)
    yield from training(
        f"{network('encoder', width, layers)}, GUM", "encoder", model, data, limits, layers, context
    )


def _gradients(*rows: tuple[str, int, int, int], dtypes: Sequence[Any] = (jnp.float32,)) -> Task:
    def task(context: Context) -> Rows:
        toys = dict.fromkeys((name, 4, 8, 2) for name, *_ in rows)
        for row in toys if context.quick else rows:
            for dtype in dtypes:
                yield from gradients(*row, context, dtype)

    return task


def _processor(context: Context) -> Rows:
    """The numbers by which the default chooses: the start of a kernel in a loop of 2,048 layers of three, products, memory."""
    layers, kernels, known = 2048, 3, processor(*_here())
    weights, y = jnp.zeros((layers, 16, 16), jnp.float32), jnp.zeros((16, 16), jnp.float32)

    def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ w), None

    unroll = known.loop_unroll(layers, layer, y, weights[0])
    propagate = jax.jit(lambda w, y: lax.scan(layer, y, w, unroll=unroll)[0])
    measured = {
        "kernel": _median(functools.partial(propagate, weights, y)) / layers / kernels,
        "flops": _rate(jax.jit(jnp.matmul), lambda n: (n, n), lambda n: 2 * n**3),
        "bandwidth": _rate(
            jax.jit(jnp.add), lambda n: (n * n, 16), lambda n: 2 * 16 * n * n * 4
        ),  # read and written
    }
    for name, value in measured.items():
        yield {
            "title": "the device",
            "name": name,
            "measured": value,
            "known": getattr(known, name),
        }


def _rate(
    call: Callable[..., jax.Array],
    shape: Callable[[int], tuple[int, int]],
    work: Callable[[int], int],
) -> float:
    """Work per second of ``call(x, x)``, with arrays so large that the start of the call does not count."""
    size, largest, long = 512, 8192, 2e-3
    while True:
        x = jnp.ones(shape(size), jnp.float32)
        taken = _median(functools.partial(call, x, x))
        if taken > long or size == largest:
            return work(size) / taken
        size *= 2


def _median(call: Callable[[], jax.Array]) -> float:
    return _measure.seconds([call], samples=5)[0]


def _here() -> tuple[str, str]:
    device = jax.devices()[0]
    return device.platform, device.device_kind


def _sweeps(context: Context) -> Rows:
    """Fixed numbers of sweeps; and what one product of a layer takes, for all layers at once and one after another."""
    for name, width, layers, batch in (("blocks", 256, 64, 256), ("dense", 64, 1024, 64)):
        width, layers, batch = (
            context.size(width, 4),
            context.size(layers, 4),
            context.size(batch, 2),
        )
        for dtype in (jnp.float32, jnp.bfloat16):
            model, kind = MODELS[name](width, layers).astype(dtype), jnp.dtype(dtype).name
            x, labels = jnp.ones((batch, 64)), jnp.zeros(batch, jnp.int32)
            weights, square = (
                jax.tree.map(jnp.asarray, model.weights),
                jnp.ones((layers, width, width), dtype),
            )
            one = square, jnp.ones((layers, batch, width), dtype)
            calls = {
                f"products of all layers at once, {kind}": (jax.jit(jnp.matmul), (one[1], square)),
                f"products one after another, {kind}": (jax.jit(_in_turn), one),
            }
            for number in (1, 2, 4, 8):
                sweeps = Picard(sweeps=number)
                scan = functools.partial(lp_jax.scan, solver=sweeps, adjoint_solver=sweeps)
                given = weights, x, labels
                calls[f"{number} {'sweep' if number == 1 else 'sweeps'} each way, {kind}"] = (
                    jax.jit(jax.value_and_grad(model.loss(scan))),
                    given,
                )
            yield from _programs(
                f"fixed sweeps: {network(name, width, layers)}, {batch} examples", calls, context
            )


def _in_turn(square: jax.Array, y: jax.Array) -> jax.Array:
    return lax.scan(lambda y, w: (y @ w, None), y[0], square, unroll=8)[0]


def _programs(title: str, calls: Mapping[str, tuple[Any, Any]], context: Context) -> Rows:
    compiled = {
        name: context.pool.submit(_compiled, f.lower(*given)) for name, (f, given) in calls.items()
    }
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
    layers = context.size(4096, 8)
    x = jnp.ones((layers, 64, 64))
    calls = {
        "cumsum": (jax.jit(lambda x: jnp.cumsum(x, 0)), (x,)),
        "cumsum from the end": (jax.jit(lambda x: lax.cumsum(x, 0, reverse=True)), (x,)),
        "cumsum of the reversed": (
            jax.jit(lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, 0), 0), 0)),
            (x,),
        ),
        "associative scan": (jax.jit(lambda x: lax.associative_scan(jnp.add, x)), (x,)),
        "copy": (jax.jit(lambda x: x + 1), (x,)),
    }
    yield from _programs(f"sums along {layers:,} layers of 64 x 64", calls, context)


def _loops_in_graphs(context: Context) -> Rows:
    """Loops as CUDA graphs, by an option of each program."""
    layers = context.size(1024, 8)
    model = dense(64, layers)
    given = jax.tree.map(jnp.asarray, model.weights), jnp.ones((64, 64)), jnp.zeros(64, jnp.int32)
    options = (
        {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,WHILE"} if _here()[0] == "gpu" else {}
    )
    contenders = []
    for name, scan in {"lax.scan, unroll=8": UNROLLED, "default": lp_jax.scan}.items():
        for title, more in ((name, {}), (f"{name}, loops in graphs", options)):
            program, _ = _compiled(
                jax.jit(jax.value_and_grad(model.loss(scan))).lower(*given), more
            )
            contenders.append(Contender(name=title, call=functools.partial(program, *given)))
    yield from timed(f"loops in CUDA graphs: {network('dense', 64, layers)}", contenders, context)


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
    "resets": (30, _gradients(("paragru, resets", 64, 1024, 16), ("gru, resets", 64, 1024, 16))),
    "loops in graphs": (20, _loops_in_graphs),
}
"""By name: seconds that a task takes on an H100, roughly, and what it does. In the order of their worth."""


def _once(row: dict[str, Any]) -> float:
    """Seconds of an update or of a call."""
    return float(row["update"] if "update" in row else row["seconds"]["median"])


def _name(row: dict[str, Any], first: dict[str, Any]) -> str:
    return f"{row['name']}: {row['took']}" if "took" in row else str(row["name"])


def _ratio(row: dict[str, Any], first: dict[str, Any]) -> str:
    return (
        report.number(_once(row) / _once(first), 3) if first["name"].startswith("lax.scan") else "–"
    )


_UNITS = {"kernel": "s", "flops": "1/s", "bandwidth": "bytes/s"}
_TIMES: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]]] = [
    ("ratio", _ratio),
    (
        "predicted ms",
        lambda row, _: report.number(1e3 * row["predicted"], 3) if "predicted" in row else "–",
    ),
    ("compile s", lambda row, _: report.number(row.get("compile_seconds"))),
]
COLUMNS: dict[
    str, tuple[str, list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]]]]
] = {
    "curve": (
        "Trainings",
        [
            ("", _name),
            ("ms an update", lambda row, _: report.number(1e3 * _once(row), 3)),
            *_TIMES,
            ("updates", lambda row, _: str(row["curve"][-1][0])),
            ("accuracy", lambda row, _: report.number(row["accuracy"], 3)),
            ("s to the accuracy", lambda row, _: report.number(row["reached"], 3)),
        ],
    ),
    "seconds": (
        "Loss and gradient, and other programs",
        [
            ("", _name),
            ("ms", lambda row, _: report.number(1e3 * _once(row), 3)),
            (
                "IQR",
                lambda row, _: report.number(1e3 * (row["seconds"]["q3"] - row["seconds"]["q1"])),
            ),
            *_TIMES,
            ("error", lambda row, _: report.scientific(row.get("error"))),
            ("result", lambda row, _: ", ".join(map(str, row.get("codes") or "–"))),
        ],
    ),
    "measured": (
        "The processor",
        [
            ("", lambda row, _: f"{row['name']}, {_UNITS[row['name']]}"),
            ("measured", lambda row, _: report.scientific(row["measured"])),
            ("taken by the default", lambda row, _: report.scientific(row["known"])),
        ],
    ),
}
"""By the key that a row of the kind has: its heading and its columns, from a row and the first one of its table."""

LEGEND = (
    "Same weights and batches in each table. ms an update: seconds of all updates over their number; evaluations do not "
    "count. ms: median, and interquartile range. ratio: to the first line. predicted: by the default, for value and gradient. "
    "accuracy: on held-out examples, at the end. s to the accuracy: seconds of updates until it ended the training, at 95 % "
    "of dense layers and 90 % of recurrent networks and encoders. error: relative 2-norm error of the gradient, against a scan "
    "with products in full float32; the scan's own is that of TF32 or bfloat16. result: forward, adjoint: 0 to the "
    "tolerance, 1 one layer after another as nothing is predicted to be faster, 2 the same as the tolerance was not met, 3 not "
    'converged, 4 not finite. "Newton, shared" and "sweeps, secant" have no fallback. cuDNN: by PyTorch, which starts each '
    "operation from Python and is waited for after each gradient; its gradient was not compared."
)


def _by_title(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each task and title."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["title"]), []).append(row)
    return list(groups.values())


def table(result: dict[str, Any]) -> str:
    """A table for each title, without columns of dashes; trainings first."""
    parts = list(result.get("notes", []))
    runs = {
        row["manifest"]["date"]: report.origin(row) for row in result["rows"] if "manifest" in row
    }
    for kind, (heading, columns) in COLUMNS.items():
        groups = _by_title(row for row in result["rows"] if kind in row)
        parts += [f"## {heading}"] * bool(groups)
        for rows in groups:
            lines = [[head, *(text(row, rows[0]) for row in rows)] for head, text in columns]
            shown = [line for line in lines if any(cell != "–" for cell in line[1:])]
            parts += [f"### {rows[0]['title']}"] * (kind != "measured") + [
                report.pipes(list(zip(*shown, strict=True)))
            ]
            for date in dict.fromkeys(row["manifest"]["date"] for row in rows if "manifest" in row):
                parts.append(f"Run of {date[:16].replace('T', ' ')}, [below](#earlier-runs).")
    parts += [
        LEGEND,
        *(f"Left out: {left['name']} ({left['reason']})." for left in result["left_out"]),
    ]
    return report.page(
        result,
        *parts,
        *(["## Earlier runs", *(runs[date] for date in sorted(runs))] if runs else []),
    )


COLOURS = {
    "lax.scan, unroll=8": report.COLOURS["scan"],
    "written out": report.COLOURS["other scan"],
    "default": report.COLOURS["iterated"],
    "Newton, shared": report.COLOURS["exact"],
    "sweeps, secant": report.COLOURS["ranks"],
    "cuDNN": report.COLOURS["torch"],
}


_BROAD: dict[str, Any] = {
    "linewidth": 5.0,
    "alpha": 0.35,
}  # below the default's line, which may lie on it
_NARROW: dict[str, Any] = {"linewidth": 1.8, "marker": ".", "markersize": 5}


def draw(result: dict[str, Any]) -> Figure:
    """Accuracy over seconds, a panel for each training."""
    trained = _by_title(row for row in result["rows"] if "curve" in row)
    columns, lines = min(4, len(trained)), -(-len(trained) // 4)
    about = f"Accuracy over seconds of training, one {result['manifest']['device']['kind']}"
    figure = report.figure(
        result | {"title": about}, width=max(9, 4.8 * columns), height=1.7 + 3.3 * lines
    )
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for number, panel in enumerate(panels.flat):
        if number >= len(trained):
            panel.set_visible(False)
            continue
        for row in trained[number]:
            _, seconds, _, accuracy = zip(*row["curve"], strict=True)
            look = _BROAD if row["name"].startswith("lax.scan") else _NARROW
            panel.plot(
                seconds,
                [100 * x for x in accuracy],
                color=COLOURS[row["name"]],
                label=row["name"],
                **look,
            )
        report.dress(
            panel,
            title=trained[number][0]["title"],
            x="seconds of training" if number + columns >= len(trained) else "",
            y="accuracy, %" if number % columns == 0 else "",
        )
        panel.set(xscale="log", ylim=(0, 102))
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=12))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
    named = {line.get_label(): line for panel in panels.flat for line in panel.lines}
    shown = {name: named[name] for name in COLOURS if name in named}
    figure.legend(
        shown.values(), shown, loc="outside lower right", ncols=6, fontsize=12, frameon=False
    )
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("gpu", __doc__ or "", _EXAMPLES)
    add_only(parser, f"Run only tasks with one of these in their names: {', '.join(TASKS)}.")
    add_numbers(
        parser,
        ("--seconds", SECONDS, f"Seconds within which tasks are begun (default: {SECONDS})."),
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="Folder of GUM's files, for the encoder's training.",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="Measure tasks again that the folder has results of."
    )
    options = parser.parse_args(arguments)
    folder, begin, progress = results_folder(parser, options), time.perf_counter(), Progress()
    settings = {"seconds": options.seconds, "device": _here()[1]}
    result = new_result("gpu", f"Trainings and gradients on one {_here()[1]}", arguments, settings)
    earlier = {"rows": []} if options.fresh else report.kept(folder, "gpu")
    done = {row["task"] for row in earlier["rows"] if row.get("last")}
    result["rows"] = [
        {"manifest": earlier["manifest"], **row} for row in earlier["rows"] if row["task"] in done
    ]
    with ThreadPoolExecutor(cores()) as pool:
        context = Context(options.quick, options.data, pool, progress)
        for name, (about, task) in TASKS.items():
            left = options.seconds - (time.perf_counter() - begin)
            if name in done or not wanted(name, options):
                continue
            if left < about and not options.quick:
                result["left_out"].append(
                    {"name": name, "reason": f"takes some {about} s; {left:.0f} were left"}
                )
                continue
            try:
                for row in task(context):
                    progress.clear()
                    print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
                    result["rows"].append({"task": name, **row})
                    _save(result, folder)
            except Exception as error:  # of one task: the others are worth their time
                result["left_out"].append(
                    {"name": name, "reason": f"{type(error).__name__}: {error}"[:400]}
                )
                continue
            if result["rows"] and result["rows"][-1]["task"] == name:
                result["rows"][-1]["last"] = True
            else:
                result["left_out"].append({"name": name, "reason": "needs --data FOLDER"})
    progress.clear()
    _save(result, folder)
    for left in result["left_out"]:
        print(f"Left out: {left['name']} ({left['reason']}).")
    print(table(result))
    return 0


def _save(result: dict[str, Any], folder: Path) -> None:
    report.save(
        result, folder, draw if any("curve" in row for row in result["rows"]) else None, table
    )


_EXAMPLES = [
    ("", "all tasks, ten minutes"),
    ("--quick", "tiny, on any machine, to see that all works"),
    ("--only gradients --seconds 120", "one task"),
]

if __name__ == "__main__":
    sys.exit(main())
