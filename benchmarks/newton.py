"""Newton's method on the states of recurrent networks: how far they are from the exact ones, iteration by iteration.

Implicit GRUs as they are drawn, and one that is trained here and now, exactly; in single and in double precision; with full
Jacobians and with their diagonals, from the constant guess and after sweeps of relaxation. No times.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure

import lp_jax
from benchmarks import frontier, gru, report
from benchmarks.command import Progress
from benchmarks.harness import Tell
from benchmarks.manifest import device_slug, manifest
from benchmarks.problems import prepared
from lp_jax import _tree
from lp_jax.cli._experiment import experiment
from lp_jax.nn import GRU

ROWS = ((16, 128), (64, 128), (16, 1024), (64, 1024))
"""Units and time steps of networks at their initial parameters."""

BATCH, ITERATIONS, CLOSE = 4, 10, 1e-6
PRECISIONS = ("float32", "float64")
SOLVERS = {
    f"{jacobian}{word}": lp_jax.Newton(jacobian=jacobian, iterations=1, relaxations=relaxations, batch_axes=1)
    for jacobian in ("full", "diagonal")
    for word, relaxations in (("", 0), (", 16 relaxations", 16))
}

Problem = dict[str, Any]
"""Arguments of `lp_jax.solve`."""


def drawn(width: int, steps: int) -> Problem:
    """Two stacked units at their initial parameters."""
    module = GRU(gru.FEATURES, width, units=gru.UNITS, rngs=nnx.Rngs(0))
    return module.problem(jnp.asarray(gru.Problem.random(width, steps, BATCH).x))


def trained(data: Path) -> Iterator[tuple[str, Problem]]:
    """The frontier's recurrent network, after each number of training steps."""
    (network,) = (network for network in frontier.NETWORKS if network.newton)
    settings, task = prepared(network.problem, network.model, data / (network.data or ""), seed=0, **network.options)
    made = experiment(settings, task)
    x, _ = next(iter(made.batches(1000)))  # of no epoch that is trained on
    for steps, params in frontier.trained(network, settings.training.learning_rate, made):
        model = nnx.merge(nnx.graphdef(made.model), params)
        title = f"{settings.sources['name']}, {settings.model.width} units, {settings.layers} steps, "
        yield title + (f"trained for {steps}" if steps else "at its start"), model.trunk.problem(model.opening(x))


def errors(problem: Problem, solver: lp_jax.Newton, iterations: int) -> list[float]:
    """Largest error of all numbers of all states after each iteration, as a part of the largest number."""
    step, t1 = problem["step"], problem["t1"]
    arrays = {name: problem[name] for name in ("y0", "shared", "data")}

    @functools.partial(jax.jit, static_argnums=0)
    def states(solver: Any, guess: Any, arrays: Problem) -> Any:
        return lp_jax.solve(step, None, t1=t1, solver=solver, guess=guess, **arrays).trajectory

    u = jax.tree.map(lambda y: jnp.repeat(y[None], round(float(t1)), axis=0), problem["y0"])  # a step lasts 1
    exact = states(lp_jax.Serial(checkpoint_every=1), u, arrays)
    found = []
    for number in range(iterations):
        u = states(solver if number == 0 else dataclasses.replace(solver, relaxations=0), u, arrays)
        off, size = (max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(t)) for t in (_tree.sub(u, exact), exact))
        found.append(off / size)
    return found


def measure(title: str, problem: Problem, iterations: int, tell: Tell) -> Iterator[dict[str, Any]]:
    """A line for each solver and precision."""
    arrays = {name: problem[name] for name in ("y0", "shared", "data")}
    for precision, (name, solver) in itertools.product(PRECISIONS, SOLVERS.items()):
        tell(f"{title}: {name}, {precision}")
        with jax.enable_x64(precision == "float64"):
            cast = jax.tree.map(functools.partial(jnp.asarray, dtype=precision), arrays)
            found = errors(problem | cast, solver, iterations)
        yield {"network": title, "solver": name, "precision": precision, "errors": found}


def table(result: dict[str, Any]) -> str:
    """Errors, and the iterations that bring them to the target."""
    lines = [
        f"# {result['title']}",
        "",
        report.origin(result),
        "",
        "Largest error of any number of any state, as a part of the largest of these. Diagonal Jacobians take as many "
        "evaluations as full ones, and the memory of states.",
        "",
    ]
    for title in dict.fromkeys(row["network"] for row in result["rows"]):
        here = [row for row in result["rows"] if row["network"] == title]
        count = len(here[0]["errors"])
        lines += [f"## {title}", ""]
        lines.append(
            f"| Jacobians | precision | iterations to {CLOSE:.0e} | " + " | ".join(map(str, range(1, count + 1))) + " |"
        )
        lines.append("|---|---|--:" + "|--:" * count + "|")
        for row in here:
            needed = next((str(k) for k, error in enumerate(row["errors"], 1) if error <= CLOSE), "–")
            cells = " | ".join(f"{error:.0e}" for error in row["errors"])
            lines.append(f"| {row['solver']} | {row['precision']} | {needed} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """A panel per network: error against iterations, in double precision."""
    titles = list(dict.fromkeys(row["network"] for row in result["rows"]))
    columns = min(3, len(titles))
    fig = report.figure(result, width=5.4 * columns, height=4.4 * math.ceil(len(titles) / columns) + 1)
    axes = fig.subplots(math.ceil(len(titles) / columns), columns, squeeze=False, sharey=True)
    for number, title in enumerate(titles):
        ax = axes.flat[number]
        for index, name in enumerate(SOLVERS):
            (row,) = (
                r
                for r in result["rows"]
                if (r["network"], r["solver"], r["precision"]) == (title, name, PRECISIONS[-1])
            )
            ax.plot(
                range(1, len(row["errors"]) + 1),
                [max(error, 1e-16) for error in row["errors"]],
                marker="o",
                color=report.COLOURS["iterated" if index // 2 else "exact"],
                linestyle="-" if index % 2 else ":",
                label=name,
            )
        ax.axhline(CLOSE, color=report.INK, linewidth=1)
        ax.set_yscale("log")
        ax.set_ylim(1e-16, 1e3)
        report.dress(ax, title=title, x="iterations", y="error of the states" if number % columns == 0 else "")
    for ax in axes.flat[len(titles) :]:
        ax.set_visible(False)
    axes[0][0].legend(fontsize=10, frameon=False)
    return fig


def main(arguments: Sequence[str] | None = None) -> None:
    """Iterate, and write numbers, table and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newton", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with ucr/; without it, no trained network")
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="UNITS,STEPS",
        type=lambda text: tuple(map(int, text.split(","))),
        default=ROWS,
        help="networks at their initial parameters (default: all)",
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the files go (default: benchmarks/results/DEVICE)")
    options = parser.parse_args(arguments)
    if any(len(row) != 2 or min(row) < 1 for row in options.rows) or options.iterations < 1:
        parser.error(
            f"--rows takes UNITS,STEPS and --iterations a number of at least 1; got {options.rows}, {options.iterations}"
        )
    folder = options.out or Path(__file__).parent / "results" / device_slug()
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    problems = ((f"{width} units, {steps} steps, at its start", drawn(width, steps)) for width, steps in options.rows)
    rows = [
        row
        for title, problem in itertools.chain(problems, trained(options.data) if options.data else ())
        for row in measure(title, problem, options.iterations, progress)
    ]
    progress.clear()
    result = {
        "suite": "newton",
        "title": "States of recurrent networks by Newton's method",
        "manifest": manifest("benchmarks.newton", sys.argv[1:] if arguments is None else arguments),
        "rows": rows,
    }
    report.save(result, folder, draw, table)
    print(table(result))


if __name__ == "__main__":
    main()
