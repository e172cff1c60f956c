"""Do predicted numbers of iterations hold? `planning.diagnose` on four examples, beside what solvers take on the batch.

Networks for pixels, points, words, characters and series, a pre-norm stack, blocks of reinforcement learning, recurrent cells
and a chain of Monte Carlo, each twice: at its start and trained (the chain: with two step sizes). Predicted and taken is the
number of iterations to residuals of 1e-3 forward and 1e-2 adjoint; "no" where a solver gives up. A prediction holds that is off
by at most two, or by a quarter.
"""

import dataclasses
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lp_jax
from benchmarks import corpora, networks, report
from benchmarks.command import Progress, add_only, common_parser, new_result, results_folder, wanted
from benchmarks.scan_problems import mala
from lp_jax import data, nn, planning, train
from lp_jax.planning._diagnose import Rehearsal
from lp_jax.train._supervised import inner

Case = tuple[str, str, lp_jax.Problem, Any]
"""A network's name, its state of training, what is solved, and the cotangent of the last state."""

EXAMPLES, TRAINED = 4, 100


class Learner(NamedTuple):
    """A network at its start, the batches of an epoch, and the learning rate of Adam."""

    model: nn.Classifier
    batches: Callable[[int], Iterable[Any]]
    rate: float = 3e-3


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, the exact training steps that it takes, its folder or file of data, and the number of examples."""

    name: str
    updates: int
    make: Callable[[Path], Learner]
    data: str | None = None
    examples: int | None = None


def shuffled(dataset: data.Dataset, size: int) -> Callable[[int], Iterable[Any]]:
    return lambda epoch: data.batches(dataset, size, seed=0, epoch=epoch)


def dense(
    dataset: data.Dataset, *, t1: float, width: int = 64, batch: int = 50, rate: float = 3e-3
) -> Learner:
    rngs = nnx.Rngs(0)
    opening = nn.DenseOpening(dataset.shape, width, rngs=rngs)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(width, rngs=rngs), 64, t1=t1, rngs=rngs)
    closing = nn.DenseClosing((width,), dataset.classes, rngs=rngs)
    return Learner(nn.Classifier(opening, trunk, closing), shuffled(dataset, batch), rate)


def convolutions(path: Path, *, width: int = 4) -> Learner:
    """Images of MNIST, with pixels from 0 to 1."""
    dataset = corpora.mnist(path)
    rngs = nnx.Rngs(0)
    *space, channels = dataset.shape
    opening = nn.ConvTransition(channels, width, kernel=(3, 3), factor=1, rngs=rngs)
    trunk = nn.LayerParallel(
        lambda rngs: nn.ConvResidual(width, kernel=(3, 3), rngs=rngs), 32, t1=1.0, rngs=rngs
    )
    closing = nn.DenseClosing((*space, width), dataset.classes, rngs=rngs)
    return Learner(nn.Classifier(opening, trunk, closing), shuffled(dataset, 50))


def transformer(
    sizes: Any,
    classes: int,
    length: int,
    *,
    layers: int,
    width: int,
    t1: float,
    causal: bool = False,
) -> nn.Classifier:
    rngs = nnx.Rngs(0)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.EncoderLayer(width, 4, causal=causal, depth=layers, rngs=rngs)

    trunk = nn.LayerParallel(make, layers, t1=t1, rngs=rngs)
    return nn.Classifier(
        nn.TokenOpening(sizes, width, max_length=length, rngs=rngs),
        trunk,
        nn.TokenClosing(width, classes, rngs=rngs),
        context=None if causal else lambda tokens: tokens[..., 0] > 0,
    )


def treebank(path: Path, *, layers: int, t1: float, batch: int) -> Learner:
    """Words of GUM, each with its part of speech."""
    lengths = (16, 32, 64, 144)
    words = corpora.gum(path, max_length=lengths[-1])

    def batches(epoch: int) -> Iterable[Any]:
        return corpora.bucketed(words.train, batch, lengths=lengths, seed=0, epoch=epoch)

    model = transformer(words.sizes, words.classes, lengths[-1], layers=layers, width=32, t1=t1)
    return Learner(model, batches, 1e-3)


def text(path: Path) -> Learner:
    """Characters of GUM; the class of each is the next one."""
    dataset = corpora.characters(path)
    (length,) = dataset.shape
    options: dict[str, Any] = {"layers": 16, "width": 64, "t1": 16.0, "causal": True}
    model = transformer(dataset.classes, dataset.classes, length, **options)
    return Learner(model, shuffled(dataset, 16), 1e-3)


def motions(path: Path, *, width: int = 64) -> Learner:
    """Series of BasicMotions; their time steps are the layers, each as long as one unit of time."""
    dataset = corpora.timeseries(path, "BasicMotions")
    channels = dataset.shape[-1]
    rngs = nnx.Rngs(0)
    gru = nn.GRU(channels, width, units=1, dt=1.0, rngs=rngs)
    head = nnx.Linear(width, dataset.classes, rngs=rngs)
    closing = nnx.Sequential(operator.itemgetter(-1), head)
    return Learner(nn.Classifier(lambda x: x, gru, closing), shuffled(dataset, 10))


_GUM = "gum/en_gum-ud-train.conllu.gz"

NETWORKS = [
    *(
        Network(
            f"digits, dense, T = {t1}",
            400,
            lambda path, t1=t1: dense(data.digits(seed=0), t1=t1),  # type: ignore[misc]
        )
        for t1 in (1.0, 4.0, 16.0)
    ),
    Network(
        "peaks, dense, T = 5",
        400,
        lambda path: dense(data.peaks(seed=0), t1=5.0, width=8, batch=40, rate=1e-2),
    ),
    Network("MNIST, convolutions, T = 1", 400, convolutions, "mnist10k", 10),
    Network(
        "GUM, encoder, T = 1",
        200,
        lambda path: treebank(path, layers=32, t1=1.0, batch=32),
        "gum",
    ),
    Network("text, decoder, h = 1", 200, text, _GUM, 4),
    Network("BasicMotions, implicit GRU", 240, motions, "ucr"),
    Network(
        "GUM, pre-norm, 48 layers, h = 1",
        TRAINED,
        lambda path: treebank(path, layers=48, t1=48.0, batch=16),
        "gum",
        16,
    ),
]


def experiments(folder: Path | None, tell: Callable[[str], object]) -> Iterator[Case]:
    """Networks at their start and trained."""
    for network in NETWORKS:
        if network.data is not None and folder is None:
            continue
        tell(f"{network.name}: training")
        made = network.make((folder or Path()) / (network.data or ""))
        unseen = next(iter(made.batches(1000)))
        batch = jax.tree.map(lambda x, most=network.examples: x[:most], unseen)
        optimizer = optax.adam(made.rate)
        loss_fn, params = train.classification(made.model)
        step_fn = train.make_train_step(loss_fn, optimizer)
        state = train.init_state(params, optimizer)
        batches = itertools.chain.from_iterable(map(made.batches, itertools.count()))
        for count in (0, network.updates):
            for training_batch in itertools.islice(batches, count):
                state, _ = step_fn(state, training_batch, *networks.SERIAL)
            problem, cotangent = inner(made.model, jax.tree.map(jnp.copy, state.params), batch)
            yield network.name, f"{count} updates" if count else "at its start", problem, cotangent


def blocks(tell: Callable[[str], object]) -> Iterator[Case]:
    """Blocks of four dense layers that learn digits."""
    tell("RL blocks: training")
    pixels, labels = load_digits(return_X_y=True)
    x = jnp.asarray(pixels[:64] / 8 - 1, jnp.float32)
    target = jax.nn.one_hot(jnp.asarray(labels[:64]), 64)
    network = networks.mlp(64, 64, 64)
    yield from _regression("RL blocks, 64 of width 64", network, x, target, TRAINED)


def cells(tell: Callable[[str], object]) -> Iterator[Case]:
    """Recurrent cells that learn whether they have seen an odd number of ones, and what a random target is."""
    rng = np.random.default_rng(0)
    tell("GRU: training")
    gru = networks.gru(16, 256, 32)
    yield from _classes("GRU, 2 units of 16, 256 steps", gru, 200)
    tell("ParaGRU: training")
    para = networks.NETWORKS["paragru"](16, 256, 32)
    yield from _regression(
        "ParaGRU of 16, 256 steps", para, para.x, rng.normal(size=para.target.shape), 200
    )
    tell("ParaGRU: learning parity")
    yield from _parity("ParaGRU, parity of 128 bits")


def _regression(
    name: str, network: networks.Network, x: Any, target: Any, updates: int
) -> Iterator[Case]:
    network = dataclasses.replace(network, x=np.asarray(x), target=np.asarray(target, np.float32))
    yield from _classes(name, network, updates)


def _classes(name: str, network: networks.Network, updates: int) -> Iterator[Case]:
    """A network of the suites before and after updates by Adam, with exact gradients, on its one batch."""
    weights, x, target = jax.tree.map(jnp.asarray, (network.weights, network.x, network.target))
    optimizer = optax.adam(3e-3)
    loss = network.loss()

    @jax.jit
    def update(weights: Any, state: Any) -> Any:
        gradient = jax.grad(lambda w: loss(w, x, target)[0])(weights)
        changes, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, changes), state

    state = optimizer.init(weights)
    for count in (0, updates):
        for _ in range(count):
            weights, state = update(weights, state)
        problem = lp_jax.Problem(**network.problem(weights, x, networks.SERIAL))
        y1 = problem.solve(solver=lp_jax.Serial()).y1
        cotangent = jax.grad(network.measure, argnums=1)(weights.closing, y1, target)
        yield name, f"{count} updates" if count else "at its start", problem, cotangent


def _parity(name: str) -> Iterator[Case]:
    """A cell of 8 units that reads 128 bits, one after another, and says of each prefix whether its ones are odd."""

    class Counter(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.cell = nn.ParaGRU(1, 8, rngs=rngs)
            self.head = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, bits: jax.Array) -> jax.Array:
            return self.head(self.cell(2 * bits[..., None] - 1))[..., 0]

    model = Counter(nnx.Rngs(0))
    model.cell.solver = nnx.static(lp_jax.Serial())
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-2)), wrt=nnx.Param
    )

    @nnx.jit
    def update(model: Any, optimizer: Any, bits: jax.Array) -> None:
        def loss(model: Any) -> jax.Array:
            return jnp.mean(
                optax.sigmoid_binary_cross_entropy(model(bits), jnp.cumsum(bits, axis=1) % 2)
            )

        optimizer.update(model, nnx.grad(loss)(model))

    rng = np.random.default_rng(0)
    for count in (0, 500):
        for _ in range(count):
            update(model, optimizer, rng.integers(0, 2, size=(32, 128)).astype(np.float32))
        bits = rng.integers(0, 2, size=(32, 128)).astype(np.float32)
        problem = model.cell.problem(2 * bits[..., None] - 1)
        yield name, f"{count} updates" if count else "at its start", problem, None


def chain(tell: Callable[[str], object]) -> Iterator[Case]:
    """MALA on the posterior of a logistic regression, 16 chains of 1,000 steps, with two step sizes."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(100, 4)), jnp.float32)
    sign = jnp.asarray(
        np.sign(np.asarray(x) @ [1.0, -1.0, 0.5, 0.0] + rng.logistic(size=100)), jnp.float32
    )

    def logp(w: jax.Array) -> jax.Array:
        return -jnp.sum(jax.nn.softplus(-sign * (x @ w))) - 0.5 * jnp.sum(w * w)

    noise = jnp.asarray(rng.normal(size=(1000, 16, 4)), jnp.float32)
    uniform = jnp.asarray(rng.uniform(size=(1000, 16)), jnp.float32)
    for size in (0.01, 0.05):
        body = mala(1000, logp, jnp.zeros(4), size=2 * size).body

        def step(w: jax.Array, layer: lp_jax.Layer, body: Any = body) -> jax.Array:
            return jax.vmap(body)(w, layer.data)[0]

        problem = lp_jax.Problem(step, None, jnp.zeros((16, 4)), data=(noise, uniform))
        yield "MALA, logistic regression, 1,000 steps", f"step size {size}", problem, None


def compared(name: str, state: str, problem: lp_jax.Problem, cotangent: Any) -> dict[str, Any]:
    """A row: what was predicted, and what the same solvers take on the whole batch."""
    few = planning.diagnose(problem, cotangent=cotangent, examples=EXAMPLES)
    whole = planning.diagnose(
        problem,
        cotangent=cotangent,
        examples=10**6,
        solvers=[(r.solver, r.adjoint_solver) for r in few.rehearsals],
    )
    pairs = zip(few.rehearsals, whole.rehearsals, strict=True)
    return {
        "network": name,
        "state": state,
        "layers": few.layers,
        "lipschitz": few.lipschitz,
        "lyapunov": few.lyapunov,
        "growth": few.growth,
        "solvers": {type(p.solver).__name__: [_ended(p), _ended(t)] for p, t in pairs},
    }


def _ended(r: Rehearsal) -> list[int | None]:
    """Iterations forward and adjoint; None where a solver gave up."""
    sides = ((r.iterations, r.result), (r.adjoint_iterations, r.adjoint_result))
    return [iterations if result == 0 else None for iterations, result in sides]


def holds(predicted: int | None, taken: int | None) -> bool:
    """Whether a prediction is off by at most two, or by a quarter; of what does not converge, whether it says so."""
    if predicted is None or taken is None:
        return predicted is taken
    return abs(predicted - taken) <= max(2, 0.25 * taken)


def judged(rows: Sequence[dict[str, Any]]) -> list[tuple[int | None, int | None]]:
    """All predictions, each with what was taken."""
    pairs = [pair for row in rows for pair in row["solvers"].values()]
    return [both for predicted, taken in pairs for both in zip(predicted, taken, strict=True)]


def table(result: report.Result) -> str:
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["solvers"]))
    cells = [["network", "", "layers", "L T", "Lyapunov", *names]]
    for row in rows:
        solved = [_cell(row["solvers"].get(name)) for name in names]
        numbers = [f"{row['layers']}", f"{row['lipschitz']:.3g}", f"{row['lyapunov']:+.1e}"]
        cells.append([row["network"], row["state"], *numbers, *solved])
    every = judged(rows)
    right = sum(holds(*both) for both in every)
    wrong = sum(predicted is not None and taken is None for predicted, taken in every)
    last = (
        f"{right} of {len(every)} predictions hold. {wrong} say that a solver converges where it does not. "
        "L T: Lipschitz constant times T. Lyapunov: exponent per layer. Solvers: iterations forward/adjoint, predicted from "
        f"{EXAMPLES} examples -> taken on the batch; no: gives up."
    )
    return report.page(result, report.pipes(cells), last)


def _cell(sides: list[list[int | None]] | None) -> str:
    if sides is None:
        return ""
    predicted, taken = ("/".join("no" if n is None else str(n) for n in side) for side in sides)
    return f"{predicted} -> {taken}"


EXAMPLES_OF_CALLS = [
    ("", "networks that need no files"),
    ("--data FOLDER --only GUM", "networks on GUM"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("diagnosis", __doc__ or "", EXAMPLES_OF_CALLS)
    parser.add_argument(
        "--data",
        type=Path,
        help="Folder with mnist10k/, gum/ and ucr/. Without it, only networks that need no files run.",
    )
    add_only(parser, "Run only networks with one of these in their names.")
    options = parser.parse_args(arguments)
    folder, progress = results_folder(parser, options), Progress()
    result = new_result("diagnosis", "Iterations predicted and taken", arguments)
    parts = (
        []
        if options.quick
        else [experiments(options.data, progress), blocks(progress), cells(progress)]
    )
    for case in itertools.chain(*parts, chain(progress)):
        if not wanted(case[0], options):
            continue
        progress(f"{case[0]}, {case[1]}: solving")
        result["rows"].append(compared(*case))
        report.save(result, folder, text=table)
        jax.clear_caches()
    progress.clear()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
