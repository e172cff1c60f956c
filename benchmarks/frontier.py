"""The best gradient for the work: error of the gradient against depth and work, for every kind of solver.

On networks at their initial parameters and trained for a while (exactly, here and now), each solver's gradient on one
batch is compared with the exact one. What a solver costs is counted in products of layers (`benchmarks.critical_path`):
depth is how many wait for each other, which decides where a layer fills only a part of a device; work is how many there
are, which decides where it fills all of it. What the result holds already is not measured again.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, common_parser, results_folder
from benchmarks.critical_path import training_step
from benchmarks.manifest import manifest
from benchmarks.networks import SERIAL, Pair
from benchmarks.problems import Experiment, load, taken
from lp_jax.train import gradient_error, init_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, and the numbers of exact training steps after which gradients are compared, on so many examples."""

    name: str
    problem: str
    model: str
    steps: tuple[int, ...]
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    examples: int | None = None


_GUM = "gum/en_gum-ud-train.conllu.gz"
_ENCODER = {"layers": 32, "width": 32, "t1": 1.0}
_DECODER = {"layers": 16, "width": 64, "t1": 16.0, "batch_size": 16}
_GRU = {"name": "BasicMotions"}

NETWORKS = [
    *(Network(f"digits, dense, T = {t1}", "digits", "dense", (0, 840), options={"t1": t1}) for t1 in (1.0, 4.0, 16.0)),
    Network("peaks, dense, T = 5", "peaks", "dense", (5000,)),
    Network("MNIST, convolutions, T = 1", "mnist", "conv", (0, 400), "mnist10k", {"width": 4}, 10),
    Network("GUM, encoder, T = 1", "gum", "transformer", (0, 200), "gum", _ENCODER),
    Network("text, decoder, h = 1", "text", "transformer", (0, 200, 1200), _GUM, _DECODER, 4),
    Network("BasicMotions, implicit GRU", "timeseries", "gru", (0, 240), "ucr", _GRU),
]

Step = Callable[[Any, lp_jax.Layer], Any]


def half_of_the_layers(step: Step, y: Any, layers: lp_jax.Layer) -> Any:
    """A coarse step: increments of every second layer, counted twice."""
    every = min(2, len(layers.index))
    stepped = jax.vmap(lambda layer: step(y, layer))(jax.tree.map(lambda x: x[::every], layers))
    return jax.tree.map(lambda u, v: u + every * jnp.sum(v - u[None], axis=0), y, stepped)


def second_order(step: Step, y: Any, layers: lp_jax.Layer) -> Any:
    """A coarse step: increments at the state that enters, and to first order how they change each other."""
    stepped = jax.vmap(lambda layer: step(y, layer))(layers)
    increments = jax.tree.map(lambda u, v: v - u[None], y, stepped)
    moved = jax.tree.map(lambda d: jnp.cumsum(d, axis=0) - d, increments)  # what enters a layer, less y

    def pushed(layer: lp_jax.Layer, v: Any) -> Any:
        return jax.jvp(lambda u: step(u, layer), (y,), (v,))[1]

    tangents = jax.vmap(pushed)(layers, moved)
    return jax.tree.map(lambda u, d, t, v: u + jnp.sum(d + t - v, axis=0), y, increments, tangents, moved)


def settings(model: str) -> dict[str, Pair]:
    """Forward and adjoint solver of all that are compared on a model, by name: kind, forward / adjoint iterations."""
    picard = {sweeps: lp_jax.Picard(sweeps=sweeps) for sweeps in (1, 2, 3)}
    found = {
        **_multigrid("injection", 2, 1, coarse_step=lp_jax.Rediscretize()),
        **_multigrid("injection", 2, 1, levels=3, coarse_step=lp_jax.Rediscretize()),
        **_multigrid("mean", 2, 1, coarse_step=lp_jax.Rediscretize(params="mean")),
        **_multigrid("half of the layers", 2, 1, coarse_step=half_of_the_layers),
        **_multigrid("Picard 1", 2, 1, coarse_step=picard[1]),
        **_multigrid("Picard 1, coarsest Picard 3", 2, 1, coarse_step=picard[1], coarsest=picard[3]),
        **_multigrid("second order", 2, 1, coarse_step=second_order),
        **_multigrid("Picard 2", 2, 1, coarse_step=picard[2]),
        **_multigrid("Picard 2, trajectory", 2, 1, coarse_step=lp_jax.Picard(sweeps=2, around="trajectory")),
        **_multigrid("Picard 3", 1, 1, coarse_step=picard[3]),
    }
    if model == "conv":  # a convolution has a gradient of its own on a CPU, and no forward mode
        del found["2 levels, factor 4, second order, 2/1"]
    for windows, sweeps in ((1, 7), (1, 9), (1, 13), (4, 7), (8, 5)):
        kind = "global Picard" if windows == 1 else f"Picard, {windows} windows"
        forward, adjoint = (lp_jax.Picard(sweeps=k, windows=windows) for k in (sweeps, sweeps - 1))
        found[f"{kind}, {sweeps}/{sweeps - 1}"] = forward, adjoint
    tolerant = lp_jax.Picard(sweeps=64, rtol=1e-3)
    found["Picard to a tolerance, 0.001/0.01"] = tolerant, dataclasses.replace(tolerant, rtol=1e-2)
    return found | (_newton() if model == "gru" else {})


def _multigrid(kind: str, forward: int, adjoint: int, *, levels: int = 2, **fields: Any) -> dict[str, Pair]:
    first, second = (
        lp_jax.MGRIT(levels=levels, coarsening=4, iterations=k, storage="all", **fields) for k in (forward, adjoint)
    )
    return {f"{levels} levels, factor 4, {kind}, {forward}/{adjoint}": (first, second)}


def _newton() -> dict[str, Pair]:
    """The adjoint system is linear: with full Jacobians one iteration solves it."""
    found: dict[str, Pair] = {}
    for jacobian, relaxations, iterations in itertools.product(("full", "diagonal"), (0, 12, 16), (4, 6)):
        solver = lp_jax.Newton(jacobian=jacobian, iterations=iterations, relaxations=relaxations, batch_axes=1)
        adjoint = solver.for_adjoint()
        before = f", {relaxations} relaxations" if relaxations else ""
        found[f"Newton, {jacobian}{before}, {iterations}/{adjoint.iterations}"] = solver, adjoint
    return found


_PROGRAMS = 20  # that are kept at once: hundreds exhaust the memory maps of a process


def measure(
    network: Network,
    data: Path,
    tell: Callable[[str], object],
    done: Collection[tuple[str, int, str]],
    most: int | None,
) -> Iterator[dict[str, Any]]:
    """One row for each setting and number of training steps that is not done yet, of the first ``most`` settings."""
    pairs = settings(network.model)
    wanted = [(name, n) for name in itertools.islice(pairs, most) for n in network.steps]
    wanted = [(name, n) for name, n in wanted if (network.name, n, name) not in done]
    if not wanted:
        return
    made = load(network.problem, network.model, data / (network.data or ""), seed=0, **network.options)
    unseen = next(iter(made.batches(1000)))  # of no epoch that is trained on
    batch = jax.tree.map(lambda x: x[: network.examples], unseen)
    jax.config.update("jax_disable_most_optimizations", False)
    tell(f"{network.name}: training")
    states = dict(trained(made, network.steps))
    jax.config.update("jax_disable_most_optimizations", True)  # a program runs a few times: compiling takes the time
    layers = made.settings.layers
    serial = training_step(layers, *SERIAL)
    for number, (name, steps) in enumerate(wanted):
        if number % _PROGRAMS == 0:
            jax.clear_caches()
        tell(f"{network.name}, {steps} steps: {name}")
        error = gradient_error(made.loss_fn, states[steps], batch, *pairs[name])
        spent = training_step(layers, *taken(made, states[steps], batch, pairs[name]))
        yield {
            "network": network.name,
            "steps": steps,
            "setting": name,
            "depth": spent.depth / serial.depth,
            "work": spent.work / serial.work,
            "error": float(error.groups["trunk"]),
            "cosine": float(error.cosine),
        }


def trained(made: Experiment, steps: Sequence[int]) -> Iterator[tuple[int, Any]]:
    optimizer = optax.adam(made.settings.training.learning_rate)
    step_fn = make_train_step(made.loss_fn, optimizer)
    state = init_state(made.params, optimizer)
    batches = itertools.chain.from_iterable(map(made.batches, itertools.count()))
    for wanted in steps:
        for batch in itertools.islice(batches, wanted - int(state.step)):
            state, _ = step_fn(state, batch, *SERIAL)
        yield wanted, jax.tree.map(jnp.copy, state.params)


def front(rows: Sequence[Mapping[str, Any]], price: str) -> list[Mapping[str, Any]]:
    """Rows that no other one beats in both error and price, cheapest first."""
    best, kept = math.inf, []
    for row in sorted(rows, key=lambda row: (row[price], row["error"])):
        if row["error"] < best:
            best = row["error"]
            kept.append(row)
    return kept


def _panels(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for name, steps in dict.fromkeys((row["network"], row["steps"]) for row in rows):
        here = [row for row in rows if (row["network"], row["steps"]) == (name, steps)]
        yield f"{name}, {steps} training steps", here


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For every network: error, depth and work of each setting."""
    parts = [_LEGEND]
    for title, here in _panels(rows):
        cells = [["", "depth", "work", "error", "cosine"]]
        for row in here:
            error = f"{row['error']:.0e}" if math.isfinite(row["error"]) else "diverges"
            cells.append([row["setting"], f"{row['depth']:.2f}", f"{row['work']:.1f}", error, f"{row['cosine']:.4f}"])
        parts += [f"## {title}", report.pipes(cells)]
    return "\n\n".join(parts) + "\n"


_LEGEND = (
    "Error: relative 2-norm error of the gradient, and its cosine with the exact one. Depth (products that wait for each "
    "other) and work (products) are multiples of those of serial propagation and its gradient. Behind a kind of solver are "
    "its iterations, forward / adjoint. Trajectory: coarse steps around the F-points of the last relaxation. Half of the "
    "layers: increments of every second layer, counted twice. Second order: increments, and how they change each other."
)


KINDS = [
    *("injection", "mean", "half of the layers", "Picard 1", "second order", "Picard 2", "Picard 3", "global Picard"),
    *("windows", "tolerance", "Newton, full", "Newton, diagonal"),
]


def draw(result: report.Result) -> Figure:
    """A panel per network as it was trained longest: error against depth, the front as a line."""
    panels = list({here[0]["network"]: (title, here) for title, here in _panels(result["rows"])}.values())
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    fig = report.figure(result, width=2 + 5.2 * columns, height=1.5 + 4.2 * lines)
    axes = fig.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, here) in zip(axes, panels, strict=False):
        for number, kind in enumerate(KINDS):
            points = [row for row in here if next(k for k in KINDS if k in row["setting"]) == kind]
            look = {"color": f"C{number % 10}", "marker": "os^DvP*X"[number % 8], "markersize": 9, "linestyle": ""}
            depths = [row["depth"] for row in points]
            ax.plot(depths, [max(row["error"], 1e-7) for row in points], label=kind, **look)
        best = front(here, "depth")
        ax.step([row["depth"] for row in best], [row["error"] for row in best], where="post", color=report.INK)
        report.dress(ax, title=title, x="depth / serial", y="error of the gradient")
    axes[0].set(xscale="log", yscale="log", ylim=(5e-8, 30))
    axes[0].xaxis.set_major_formatter("{x:g}")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=13, frameon=False)
    return fig


def _save(out: Path, rows: list[dict[str, Any]], described: dict[str, Any]) -> None:
    names = [network.name for network in NETWORKS]
    rows.sort(key=lambda row: (names.index(row["network"]), row["steps"]))
    title = "Error of the gradient against depth and work"
    result = {"suite": "frontier", "title": title, "manifest": described, "rows": rows}
    report.save(result, out, draw, lambda result: f"# {title}\n\n{report.origin(result)}\n\n{table(result['rows'])}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("frontier", __doc__ or "")
    parser.add_argument(
        "--data", type=Path, help="folder with mnist10k/, gum/ and ucr/; without it, digits and peaks only"
    )
    parser.add_argument("--networks", nargs="+", metavar="TEXT", help="those with one of these in their names")
    options = parser.parse_args(arguments)
    out = results_folder(parser, options)
    networks = [n for n in NETWORKS if not options.networks or any(text in n.name for text in options.networks)]
    if options.data is None:
        networks = [n for n in networks if n.data is None]
    if options.quick:
        networks = [dataclasses.replace(n, steps=tuple(min(s, 3) for s in n.steps[:2])) for n in networks[:1]]
    rows = [] if options.quick else report.kept(out, "frontier")
    done = {(row["network"], row["steps"], row["setting"]) for row in rows}
    described = manifest("benchmarks.frontier", sys.argv[1:] if arguments is None else arguments)
    progress = Progress()
    for network in networks:
        for row in measure(network, options.data or Path(), progress, done, 4 if options.quick else None):
            rows.append(row)
        _save(out, rows, described)
        jax.clear_caches()
    progress.clear()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
