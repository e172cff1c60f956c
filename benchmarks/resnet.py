"""Suite 1: a training step of a convolutional ResNet, on 28 x 28 images.

Opening layer relu(conv(y)), N layers ``y + h relu(conv(relu(conv(y))))`` with h = 1/N, closing layers
C*784 -> 32 -> 10, batch 50; forward, backward and update of SGD with momentum. Images and labels are random: the
time of a step does not depend on them.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import lp_jax
from benchmarks import report
from benchmarks.command import Field, Row, Suite, run, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import jax_threads
from benchmarks.propagation import Pair, Propagate, scan, solved, two_one
from benchmarks.training import Trainer
from lp_jax.nn import convolve

FORMULATIONS = ("auto", "products", "xla")
HIDDEN, CLASSES = 32, 10


class Convolved(NamedTuple):
    """Weights of a residual layer, stacked over the layers: (N, C, C, 3, 3) and (N, C), twice."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any


class Network(NamedTuple):
    """All weights; matrices are (in, out), convolutions (out, in, 3, 3)."""

    opening: tuple[Any, Any]
    layers: Convolved
    closing: tuple[tuple[Any, Any], tuple[Any, Any]]


class Problem(NamedTuple):
    """What all contenders start from, as NumPy arrays in float32."""

    network: Network
    images: np.ndarray  # (batch, 1, size, size)
    labels: np.ndarray

    @classmethod
    def random(cls, channels: int, layers: int, *, size: int, batch: int) -> "Problem":
        """Weights as PyTorch draws them: uniform within 1 / sqrt(fan in)."""
        rng = np.random.default_rng(0)

        def uniform(fan_in: int, *shape: int) -> np.ndarray:
            return (rng.uniform(-1, 1, shape) / math.sqrt(fan_in)).astype(np.float32)

        def convolved(inputs: int, *stack: int) -> tuple[np.ndarray, np.ndarray]:
            return uniform(9 * inputs, *stack, channels, inputs, 3, 3), uniform(9 * inputs, *stack, channels)

        def dense(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
            return uniform(inputs, inputs, outputs), uniform(inputs, outputs)

        network = Network(
            opening=convolved(1),
            layers=Convolved(*convolved(channels, layers), *convolved(channels, layers)),
            closing=(dense(channels * size**2, HIDDEN), dense(HIDDEN, CLASSES)),
        )
        images = rng.normal(size=(batch, 1, size, size)).astype(np.float32)
        return cls(network, images, rng.integers(0, CLASSES, batch).astype(np.int32))


def convolution(formulation: str, y: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """Images (batch, height, width, channels), weights (out, in, 3, 3)."""
    return convolve(y, w.transpose(2, 3, 1, 0), formulation=formulation) + b[None, None, None]


def residual_layer(formulation: str, y: jax.Array, layer: Convolved, h: Any) -> jax.Array:
    inner = jax.nn.relu(convolution(formulation, y, layer.w1, layer.b1))
    return y + h * jax.nn.relu(convolution(formulation, inner, layer.w2, layer.b2))


PAIRS: dict[str, Pair] = {
    "Serial": (lp_jax.Serial(), lp_jax.Serial()),
    "MGRIT 1 level": (lp_jax.MGRIT(levels=1), lp_jax.MGRIT(levels=1)),
    "MGRIT 3 levels, injection": two_one(levels=3, coarsening=4, coarse_step=lp_jax.Rediscretize()),
    "MGRIT 3 levels, Picard 1": two_one(levels=3, coarsening=4, coarse_step=lp_jax.Picard(sweeps=1)),
    "MGRIT 2 levels, Picard 1": two_one(levels=2, coarsening=4, coarse_step=lp_jax.Picard(sweeps=1)),
}
EXACT = ("Serial", "MGRIT 1 level")

SOLVERS: dict[str, tuple[str, Propagate]] = {
    name: ("exact" if name in EXACT else "iterated", solved(*pair)) for name, pair in PAIRS.items()
}


def classifier_loss(
    propagate: Propagate, formulation: str, network: Network, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy, and the last residual norm."""
    y = jax.nn.relu(convolution(formulation, images.transpose(0, 2, 3, 1), *network.opening))
    y, residual = propagate(functools.partial(residual_layer, formulation), network.layers, y)
    (w1, b1), (w2, b2) = network.closing
    hidden = jax.nn.relu(y.transpose(0, 3, 1, 2).reshape(labels.size, -1) @ w1 + b1[None])  # PyTorch's order
    logits = jax.nn.log_softmax(hidden @ w2 + b2[None])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1)), residual


def trainer(
    propagate: Propagate,
    formulation: str,
    problem: Problem,
    place: Callable[[Network], Network] = lambda network: network,
    *,
    ahead: bool = True,
) -> Trainer:
    """Training steps with JAX; ``place`` puts the weights where they belong."""
    loss = functools.partial(classifier_loss, propagate, formulation)
    network, images, labels = jax.tree.map(jnp.array, tuple(problem))
    return Trainer(loss, place(network), (images, labels), lambda network: network.layers, ahead=ahead)


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    """The baseline first: a scan with the chosen convolution."""
    size, batch = (8, 4) if options.quick else (28, 50)
    chosen = options.conv
    problem = Problem.random(*row, size=size, batch=batch)
    entries: list[tuple[str, str, Propagate, str]] = [("lax.scan", "scan", scan, chosen)]
    entries += [(f"lax.scan, {c}", "other scan", scan, c) for c in FORMULATIONS if c not in (chosen, "auto")]
    entries += [(name, family, propagate, chosen) for name, (family, propagate) in SOLVERS.items()]
    contenders: list[Contender] = []
    exact = None
    for name, family, propagate, formulation in entries:
        if exact is not None and not wanted(name, options):
            continue
        tell(f"compiling {name}")
        steps = trainer(propagate, formulation, problem)
        exact = steps.gradient if exact is None else exact
        facts = {
            "family": family,
            "convolution": formulation,
            "threads": jax_threads(),
            "gradient_error": relative_error(steps.gradient, exact),
        }
        contenders.append(Contender(name=name, call=steps, facts=facts | steps.facts))
    names = {f"PyTorch, {n} thread{'s' * (n > 1)}": n for n in options.torch_threads}
    names = {name: n for name, n in names.items() if wanted(name, options)}
    if names and (reason := why_no_torch()) is not None:
        return Field(contenders, [("PyTorch", reason)])
    for name, threads in names.items():
        from benchmarks.torch_loop import ResNetLoop

        tell(f"first step of {name}")
        loop = ResNetLoop(problem, threads)
        facts = {
            "family": "torch",
            "threads": threads,
            "gradient_error": relative_error(loop.gradient, exact),
            "residual_norm": math.nan,
        }
        contenders.append(Contender(name=name, call=loop, before=loop.take_threads, facts=facts))
    return Field(contenders, [])


def why_no_torch() -> str | None:
    """The reason to leave PyTorch out, or None."""
    if jax.default_backend() != "cpu":
        return "its loop is timed on a CPU only"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error}; it is in the extra bench: pip install -e '.[bench]'"
    return None


def draw(result: report.Result) -> Figure:
    """A panel of bars per row."""
    rows = result["rows"]
    most = max(len(row["contenders"]) for row in rows)
    fig = report.figure(result, width=3.2 + 4.4 * len(rows), height=1.8 + 0.56 * most)
    for i, ax in enumerate(fig.subplots(1, len(rows), squeeze=False)[0]):
        report.bars(ax, rows[i]["contenders"])
        report.dress(ax, title=rows[i]["title"], x="ms per step, × lax.scan, gradient error", grid="x")
        names = [c["name"] for c in rows[i]["contenders"]]
        ax.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), color=report.INK)
    return fig


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conv",
        choices=FORMULATIONS,
        default="auto",
        help="formulation of the convolution for baseline and solvers, as for lp_jax.nn.convolve; the scan is timed with the "
        "others too (default: auto)",
    )
    parser.add_argument(
        "--torch-threads",
        nargs="+",
        type=int,
        choices=range(1, 257),
        metavar="N",
        default=[1, 2],
        help="of PyTorch, each a contender (default: 1 2)",
    )


SUITE = Suite(
    name="resnet",
    title="Training step of a convolutional ResNet",
    about=__doc__ or "",
    examples=[
        ("", "the three rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows 8,64 --rounds 30", "one row, with more rounds"),
        ("--threads 1 --torch-threads 1", "one thread for everyone"),
        ("--conv xla", "solvers on XLA's own convolution"),
    ],
    sizes=("channels", "layers"),
    rows=[(3, 32), (8, 64), (4, 256)],
    quick_rows=[(2, 32)],
    field=field,
    draw=draw,
    add_options=_add_options,
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
