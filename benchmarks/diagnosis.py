"""Do predicted numbers of iterations hold? `planning.diagnose` on four examples, beside what solvers take on the batch.

Networks of the command line, a pre-norm stack, blocks of reinforcement learning, recurrent cells and a chain of Monte
Carlo, each twice: at its start and trained (the chain: with two step sizes). Predicted and taken is the number of iterations
to residuals of 1e-3 forward and 1e-2 adjoint; "no" where a solver gives up. A prediction holds that is off by at most two, or by
a quarter.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import lp_jax
from benchmarks import networks, report
from benchmarks.command import Progress, add_only, common_parser, new_result, results_folder, wanted
from benchmarks.scan_problems import mala
from lp_jax import planning
from lp_jax.cli._experiment import experiment
from lp_jax.cli._problems import prepare
from lp_jax.planning._diagnose import Rehearsal
from lp_jax.train import init_state, make_train_step
from lp_jax.train._supervised import inner

Case = tuple[str, str, lp_jax.Problem, Any]
"""A network's name, its state of training, what is solved, and the cotangent of the last state."""

EXAMPLES, TRAINED = 4, 100


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of the command line, the exact training steps that it takes, and the number of examples."""

    name: str
    problem: str
    model: str
    updates: int
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    examples: int | None = None


_GUM = "gum/en_gum-ud-train.conllu.gz"
_ENCODER = {"layers": 32, "width": 32, "t1": 1.0}
_DECODER = {"layers": 16, "width": 64, "t1": 16.0, "batch_size": 16}
_STACK = {"layers": 48, "width": 32, "t1": 48.0, "batch_size": 16}

NETWORKS = [
    *(
        Network(f"digits, dense, T = {t1}", "digits", "dense", 400, options={"t1": t1})
        for t1 in (1.0, 4.0, 16.0)
    ),
    Network("peaks, dense, T = 5", "peaks", "dense", 400),
    Network("MNIST, convolutions, T = 1", "mnist", "conv", 400, "mnist10k", {"width": 4}, 10),
    Network("GUM, encoder, T = 1", "gum", "transformer", 200, "gum", _ENCODER),
    Network("text, decoder, h = 1", "text", "transformer", 200, _GUM, _DECODER, 4),
    Network(
        "BasicMotions, implicit GRU", "timeseries", "gru", 240, "ucr", {"name": "BasicMotions"}
    ),
    Network("GUM, pre-norm, 48 layers, h = 1", "gum", "transformer", TRAINED, "gum", _STACK, 16),
]


def experiments(data: Path | None, tell: Callable[[str], object]) -> Iterator[Case]:
    """Networks of the command line, at their start and trained."""
    for network in NETWORKS:
        if network.data is not None and data is None:
            continue
        tell(f"{network.name}: training")
        path = (data or Path()) / (network.data or "")
        made = experiment(
            *prepare(
                network.problem, {"model": network.model, "data": path, "seed": 0} | network.options
            )
        )
        unseen = next(iter(made.batches(1000)))
        batch = jax.tree.map(lambda x, most=network.examples: x[:most], unseen)
        optimizer = optax.adam(made.settings.training.learning_rate)
        step_fn = make_train_step(made.loss_fn, optimizer)
        state = init_state(made.params, optimizer)
        batches = itertools.chain.from_iterable(map(made.batches, itertools.count()))
        for count in (0, network.updates):
            for training_batch in itertools.islice(batches, count):
                state, _ = step_fn(state, training_batch, *networks.SERIAL)
            problem, cotangent = inner(
                made.model, jax.tree.map(jnp.copy, state.params), batch, made.task.measure
            )
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
    from flax import nnx

    from lp_jax import nn

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
