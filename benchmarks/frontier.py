"""The best gradient for the work: error of the gradient against depth and work, for every kind of solver.

On networks at their initial parameters and trained for a while (exactly, here and now), each solver's gradient on one
batch is compared with the exact one. What a solver costs is counted in products of layers (`benchmarks.critical_path`):
depth is how many wait for each other, which decides where a layer fills only a part of a device; work is how many there
are, which decides where it fills all of it. What the result holds already is not measured again.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.progress import Progress

import lp_jax
from benchmarks.critical_path import Cost, training_step
from benchmarks.manifest import device_slug, manifest
from benchmarks.problems import prepared
from lp_jax import _tree
from lp_jax._chain import Chain
from lp_jax._level import Operand
from lp_jax._pytree import register
from lp_jax._solver import Solver
from lp_jax._types import PyTree, State
from lp_jax.cli._experiment import Experiment, experiment
from lp_jax.planning import code
from lp_jax.train import gradient_error, init_state, make_train_step, residuals
from lp_jax.viz import _style as style


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network, and the numbers of exact training steps after which gradients are compared, on so many examples."""

    name: str
    problem: str
    model: str
    steps: tuple[int, ...]
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    newton: bool = False
    examples: int | None = None


_DECODER = {"layers": 16, "t1": 16.0, "width": 64, "batch_size": 16}
NETWORKS = [
    *(
        Network(name=f"digits, dense, T = {t1}", problem="digits", model="dense", steps=(0, 840), options={"t1": t1})
        for t1 in (1.0, 4.0, 16.0)
    ),
    Network(name="peaks, dense, T = 5", problem="peaks", model="dense", steps=(5000,)),
    Network(
        name="MNIST, convolutions, T = 1",
        problem="mnist",
        model="conv",
        steps=(0, 400),
        data="mnist10k",
        options={"width": 4},
        examples=10,
    ),
    Network(
        name="GUM, encoder, T = 1",
        problem="gum",
        model="transformer",
        steps=(0, 200),
        data="gum",
        options={"layers": 32, "width": 32, "t1": 1.0},
    ),
    Network(
        name="text, decoder, h = 1",
        problem="text",
        model="transformer",
        steps=(0, 200, 1200),
        data="gum/en_gum-ud-train.conllu.gz",
        options=_DECODER,
        examples=4,
    ),
    Network(
        name="BasicMotions, implicit GRU",
        problem="timeseries",
        model="gru",
        steps=(0, 240),
        data="ucr",
        options={"name": "BasicMotions"},
        newton=True,
    ),
]


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(lp_jax.Picard):
    """`Picard` steps over every second layer of an interval, their increments counted twice."""

    def coarsen(self, chain: Chain, level: int, span: int, *, looped: bool) -> dict[str, Any]:
        step, xs = chain.grouped(level, span)
        every = min(2, span)
        taken = jax.tree.map(lambda x: x[:, ::every], xs)

        def longer(u: State, x: Operand, shared: PyTree) -> State:
            return jax.tree.map(lambda y, z: y + every * (z - y), u, step(u, x, shared))

        def solve_interval(u: State, x: PyTree, shared: PyTree) -> State:
            return self._interval(longer, u, x, None, shared, looped)

        return {"step": solve_interval, "xs": taken}


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondOrder(lp_jax.Picard):
    """The first two terms of an interval's expansion: increments at the state that enters, and how they change each other."""

    def coarsen(self, chain: Chain, level: int, span: int, *, looped: bool) -> dict[str, Any]:
        step, xs = chain.grouped(level, span)

        def solve_interval(u: State, x: PyTree, shared: PyTree) -> State:
            def stepped(y: State, x: Operand) -> State:
                return step(y, x, shared)

            increments = jax.vmap(lambda x: _tree.sub(stepped(u, x), u))(x)
            moved = jax.tree.map(lambda d: jnp.cumsum(d, axis=0) - d, increments)  # what enters a layer, less u
            changes = jax.vmap(lambda x, v: _tree.sub(jax.jvp(lambda y: stepped(y, x), (u,), (v,))[1], v))(x, moved)
            return jax.tree.map(lambda y, d, c: y + jnp.sum(d + c, axis=0), u, increments, changes)

        return {"step": solve_interval, "xs": xs}


COARSE_STEPS: Mapping[str, lp_jax.Rediscretize | Solver] = {
    "injection": lp_jax.Rediscretize(params="inject"),
    "mean": lp_jax.Rediscretize(params="mean"),
    "identity": lp_jax.Picard(sweeps=0),
    "half of the layers": Sample(sweeps=1),
    "second order": SecondOrder(sweeps=1),
    "Picard 1": lp_jax.Picard(sweeps=1),
    "Picard 2": lp_jax.Picard(sweeps=2),
    "Picard 3": lp_jax.Picard(sweeps=3),
    "Picard 1, trajectory": lp_jax.Picard(sweeps=1, around="trajectory"),
    "Picard 2, trajectory": lp_jax.Picard(sweeps=2, around="trajectory"),
}
GRIDS = ((2, 4), (2, 8), (3, 4))
CYCLES = ((1, 1), (2, 1), (2, 2), (3, 3))


DAMPINGS: Mapping[str, lp_jax.Damping] = {
    "shrunk by 0.1": lp_jax.Shrink(by=0.1),
    "shrunk by 0.3": lp_jax.Shrink(by=0.3),
    "clipped to 1": lp_jax.Clip(limit=1.0),
    "clipped to 2": lp_jax.Clip(limit=2.0),
}
"""Of the forward iterations alone: the adjoint system is linear, and one iteration solves it."""


class Setting(NamedTuple):
    """A kind of solver, and the solvers of the forward and the adjoint system."""

    kind: str
    forward: Solver
    adjoint: Solver

    def describe(self) -> str:
        """In a few words."""
        if self.forward.has_tolerance:
            return f"{self.kind}, {self.forward.rtol:g}/{self.adjoint.rtol:g}"
        cycles = f"{self.forward.iterations}/{self.adjoint.iterations}"
        if isinstance(self.forward, lp_jax.MGRIT):
            return f"{self.forward.levels} levels, factor {self.forward.coarsening}, {self.kind}, {cycles}"
        return f"{self.kind}, {cycles}"


def settings(network: Network, layers: int) -> list[Setting]:
    """All that are compared on a network of so many layers."""
    found = [*_multigrid(layers), *_picard()]
    if network.model == "conv":  # a convolution has a gradient of its own on a CPU, and no forward mode
        found = [setting for setting in found if setting.kind != "second order"]
    return [*found, *_newton()] if network.newton else found


def _multigrid(layers: int) -> Iterator[Setting]:
    for kind, coarse_step in COARSE_STEPS.items():
        for levels, factor in _grids(kind, layers):
            solver = lp_jax.MGRIT(
                levels=levels,
                coarsening=factor,
                coarse_step=coarse_step,
                skip_downcycle=kind != "identity",
                storage="all",
            )
            if len(solver.plan(layers)) < levels:
                continue
            yield from _cycles(kind, solver)
            if kind == "Picard 1" and levels == 2:
                for sweeps in (3, 6):
                    coarsest = lp_jax.Picard(sweeps=sweeps)
                    yield from _cycles(
                        f"{kind}, coarsest Picard {sweeps}", dataclasses.replace(solver, coarsest=coarsest)
                    )


def _grids(kind: str, layers: int) -> Sequence[tuple[int, int]]:
    """Levels and coarsening factors; one interval for each of two, four and eight workers where intervals are skipped."""
    if kind == "identity":
        return [(2, layers // workers) for workers in (8, 4, 2) if layers % workers == 0]
    if kind in ("mean", "half of the layers", "second order"):
        return GRIDS[:1]
    return [grid for grid in GRIDS if grid[0] == 2] if "trajectory" in kind else GRIDS


def _cycles(kind: str, solver: lp_jax.MGRIT) -> Iterator[Setting]:
    for forward, adjoint in CYCLES:
        yield Setting(kind, *(dataclasses.replace(solver, iterations=k) for k in (forward, adjoint)))


def _picard() -> Iterator[Setting]:
    for sweeps in (1, 2, 3, 4, 6, 8, 12):
        yield Setting("global Picard", lp_jax.Picard(sweeps=sweeps + 1), lp_jax.Picard(sweeps=sweeps))
    for windows in (2, 4, 8):
        for sweeps in (2, 3, 4, 6):
            pair = (lp_jax.Picard(sweeps=k, windows=windows) for k in (sweeps + 1, sweeps))
            yield Setting(f"Picard, {windows} windows", *pair)
    for rtol in (1e-1, 1e-2, 1e-3, 1e-4):
        pair = (lp_jax.Picard(sweeps=64, rtol=tolerance) for tolerance in (rtol, 10 * rtol))
        yield Setting("Picard to a tolerance", *pair)


def _newton() -> Iterator[Setting]:
    for jacobian, iterations in itertools.product(("full", "diagonal"), (1, 2, 3, 4, 5, 6)):
        solver = lp_jax.Newton(jacobian=jacobian, iterations=iterations, batch_axes=1)
        yield Setting(f"Newton, {jacobian}", solver, solver.for_adjoint())
    for jacobian, relaxations, iterations in itertools.product(
        ("full", "diagonal"), (8, 12, 16, 32), (1, 2, 3, 4, 5, 6)
    ):
        solver = lp_jax.Newton(jacobian=jacobian, iterations=iterations, relaxations=relaxations, batch_axes=1)
        yield Setting(f"Newton, {jacobian}, {relaxations} relaxations", solver, solver.for_adjoint())
    for (word, damping), iterations in itertools.product(DAMPINGS.items(), (2, 3, 4, 5, 6, 10)):
        solver = lp_jax.Newton(jacobian="full", iterations=iterations, batch_axes=1, damping=damping)
        yield Setting(f"Newton, {word}", solver, dataclasses.replace(solver, damping=None).for_adjoint())


def measure(
    network: Network,
    data: Path,
    tell: Callable[[str], object],
    done: Collection[tuple[str, int, str]],
    most: int | None,
) -> Iterator[dict[str, Any]]:
    """One line for each setting and number of training steps that is not done yet, of the first ``most``."""
    options, task = prepared(network.problem, network.model, data / (network.data or ""), seed=0, **network.options)
    made = experiment(options, task)
    open_ones = [
        (setting, steps)
        for setting in settings(network, options.layers)[:most]
        if (steps := [n for n in network.steps if (network.name, n, setting.describe()) not in done])
    ]
    if not open_ones:
        return
    unseen = next(iter(made.batches(1000)))  # of no epoch that is trained on
    batch = jax.tree.map(lambda x: x[: network.examples], unseen)
    jax.config.update("jax_disable_most_optimizations", False)
    tell(f"{network.name}: training")
    states = dict(trained(network, options.training.learning_rate, made))
    jax.config.update("jax_disable_most_optimizations", True)  # a program runs a few times: compiling takes the time
    serial = training_step(options.layers, lp_jax.Serial())
    for number, (setting, open_steps) in enumerate(open_ones):
        if number % _PROGRAMS == 0:
            jax.clear_caches()
        for steps in open_steps:
            params = states[steps]
            tell(f"{network.name}, {steps} steps: {setting.describe()}")
            error = gradient_error(made.loss_fn, params, batch, setting.forward, setting.adjoint)
            cost = _cost(options.layers, _taken(setting, made, params, batch))
            yield {
                "network": network.name,
                "steps": steps,
                "layers": options.layers,
                "kind": setting.kind,
                "setting": setting.describe(),
                "forward": code(setting.forward),
                "adjoint": code(setting.adjoint),
                "depth": cost.depth / serial.depth,
                "work": cost.work / serial.work,
                "error": float(error.groups["trunk"]),
                "cosine": float(error.cosine),
            }


_PROGRAMS = 20  # that are kept at once: hundreds exhaust the memory maps of a process


def trained(network: Network, learning_rate: float, made: Experiment) -> Iterator[tuple[int, PyTree]]:
    """The parameters after each number of training steps."""
    optimizer = optax.adam(learning_rate)
    step_fn = make_train_step(made.loss_fn, optimizer)
    state = init_state(made.params, optimizer)
    batches = itertools.chain.from_iterable(map(made.batches, itertools.count()))
    for steps in network.steps:
        for batch in itertools.islice(batches, steps - int(state.step)):
            state, _ = step_fn(state, batch, lp_jax.Serial(), lp_jax.Serial())
        yield steps, jax.tree.map(jnp.copy, state.params)


def _taken(setting: Setting, made: Experiment, params: PyTree, batch: Any) -> Setting:
    """With the iterations that its tolerances took."""
    if not setting.forward.has_tolerance:
        return setting
    solves = residuals(made.model, params, batch, setting.forward, setting.adjoint)
    taken = (s.with_effort(int(stats.iterations)) for s, stats in zip(setting[1:], solves[:2], strict=True))
    return Setting(setting.kind, *taken)


def _cost(layers: int, setting: Setting) -> Cost:
    def counted(solver: Solver) -> Solver:  # a layer that is one product has a single example
        return dataclasses.replace(solver, batch_axes=0) if isinstance(solver, lp_jax.Newton) else solver

    return training_step(layers, counted(setting.forward), counted(setting.adjoint))


def front(rows: Sequence[Mapping[str, Any]], price: str) -> list[Mapping[str, Any]]:
    """Rows that no other one beats in both error and price, cheapest first."""
    best, kept = math.inf, []
    for row in sorted(rows, key=lambda row: (row[price], row["error"])):
        if row["error"] < best:
            best = row["error"]
            kept.append(row)
    return kept


DEPTHS, WORKS = (0.1, 0.15, 0.25, 0.5, 1.0), (2.5, 4.0, 6.0, 10.0, 30.0)


def best(rows: Iterable[Mapping[str, Any]], **limits: float) -> Mapping[str, Any] | None:
    """The row of least error among those within the limits, or None."""
    within = [row for row in rows if all(row[name] <= limit for name, limit in limits.items())]
    return min(within, key=lambda row: row["error"], default=None)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For every network: the least error for so much depth and work, and what beats injection at its own depth."""
    lines = [_LEGEND, ""]
    for name, steps in dict.fromkeys((row["network"], row["steps"]) for row in rows):
        here = [row for row in rows if (row["network"], row["steps"]) == (name, steps)]
        lines += [f"## {name}, {steps} steps of training", ""]
        lines += ["| | " + " | ".join(f"work up to {work:g}" for work in WORKS) + " |", "|---" * (len(WORKS) + 1) + "|"]
        for depth in DEPTHS:
            found = [best(here, depth=depth, work=work) for work in WORKS]
            cells = ["–" if row is None else f"{row['error']:.0e}: {row['setting']}" for row in found]
            lines.append(f"| depth up to {depth:g} | " + " | ".join(cells) + " |")
        lines.append("")
        for row in here:
            if row["kind"] == "injection" and row["setting"].endswith("2/1"):
                winner = best(here, depth=row["depth"])
                assert winner is not None
                lines.append(
                    f"- {row['setting']}: error {row['error']:.1e}, cosine {row['cosine']:.2f}, at depth {row['depth']:.2f}. "
                    f"The best at no greater depth, {winner['setting']}: {winner['error']:.1e}, cosine {winner['cosine']:.4f}."
                )
        lines.append("")
    return "\n".join(lines)


_LEGEND = (
    "The least error of the gradient within so much depth (products that wait for each other) and work (products), both as "
    "multiples of serial propagation and its gradient. Behind a kind of solver are its iterations, forward / adjoint. "
    "Trajectory: coarse steps around the F-points of the last relaxation. Half of the layers: increments of every second "
    "layer, counted twice."
)


def draw(rows: Sequence[Mapping[str, Any]], price: str) -> Figure:
    """A panel per network: error against what it costs, the front as a line."""
    panels = list(dict.fromkeys((row["network"], row["steps"]) for row in rows))
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    words = {"depth": "products that wait for each other", "work": "products"}[price]
    fig = style.figure(
        f"Error of the gradient against the number of {words}", width=6 * columns, height=4.6 * height + 1
    )
    axes = fig.subplots(height, columns, squeeze=False, sharey=True)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for number, (name, steps) in enumerate(panels):
        ax = axes[number // columns][number % columns]
        here = [row for row in rows if (row["network"], row["steps"]) == (name, steps)]
        for index, kind in enumerate(kinds):
            points = [row for row in here if row["kind"] == kind]
            ax.plot(
                [row[price] for row in points],
                [max(row["error"], 1e-7) for row in points],
                linestyle="",
                marker=style.MARKERS[index // len(style.COLOURS) % len(style.MARKERS)],
                color=style.COLOURS[index % len(style.COLOURS)],
                label=kind if number == 0 else None,
                alpha=0.8,
            )
        best = front(here, price)
        ax.step([row[price] for row in best], [max(row["error"], 1e-7) for row in best], where="post", color=style.INK)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_yscale("log")
        ax.set_ylim(1e-7, 30)
        bottom, left = number >= len(panels) - columns, number % columns == 0
        style.dress(
            ax,
            x=f"{price} / serial" if bottom else "",
            y="error of the gradient" if left else "",
            title=f"{name}\n{steps} steps of training",
        )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    fig.legend(loc="outside lower center", ncols=6, fontsize=style.TICK, frameon=False)
    return fig


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return [network.name for network in NETWORKS].index(row["network"]), row["steps"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write numbers, table and pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with mnist10k/, gum/ and ucr/; without it, digits alone")
    parser.add_argument("--networks", nargs="+", metavar="TEXT", help="those with one of these in their names")
    parser.add_argument("--quick", action="store_true", help="few settings and steps, to try it out; kept apart")
    parser.add_argument("--out", type=Path, help="where results go (default: benchmarks/results/DEVICE)")
    options = parser.parse_args(arguments)
    out = options.out or Path(__file__).parent / ("scratch" if options.quick else "results") / device_slug()
    out.mkdir(parents=True, exist_ok=True)
    networks = [n for n in NETWORKS if not options.networks or any(text in n.name for text in options.networks)]
    if options.data is None:
        networks = [n for n in networks if n.data is None]
    if options.quick:
        networks = [dataclasses.replace(n, steps=tuple(min(s, 3) for s in n.steps[:2])) for n in networks]
    rows: list[dict[str, Any]] = []
    if not options.quick and (out / "frontier.json").exists():
        rows = json.loads((out / "frontier.json").read_text(encoding="utf-8"))["rows"]
    done = {(row["network"], row["steps"], row["setting"]) for row in rows}
    described = manifest("benchmarks.frontier", sys.argv[1:] if arguments is None else arguments)
    with Progress() as progress:
        bar = progress.add_task("", total=None)
        for network in networks:
            data, most = options.data or Path(), 4 if options.quick else None
            for row in measure(network, data, lambda text: progress.update(bar, description=text), done, most):
                rows = sorted([*rows, row], key=_place)
                document = {"suite": "frontier", "manifest": described, "rows": rows}
                (out / "frontier.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            jax.clear_caches()
            text = "# Gradient error against depth and work\n\n" + table(rows)
            (out / "frontier.md").write_text(text, encoding="utf-8")
            for price in ("depth", "work"):
                draw(rows, price).savefig(out / f"frontier_{price}.png")


if __name__ == "__main__":
    main()
