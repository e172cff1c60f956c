"""Pictures of training runs: curves, races, costs, residuals and gradient errors."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lp_jax.planning._words import numbered
from lp_jax.train._divergence import convergence_warning
from lp_jax.train._log import unflat
from lp_jax.viz._style import (
    DASHED,
    INK,
    dress,
    figure,
    legend,
    line_style,
    logarithmic,
    note,
    number,
    whole_numbers,
)

Rows = Sequence[Mapping[str, object]]
Runs = Mapping[str, Rows]
"""Rows of runs, by their names."""


def curves(runs: Runs) -> Figure:
    """Draw training loss and test accuracy against steps, a line for each run: rows of its `lp_jax.train.Log`, by its name.

    Without accuracies, as in a regression, the test loss is drawn instead.

    Raises:
        ValueError: if there are no runs, or a run has no step of training.

    Example:
        >>> from lp_jax import viz
        >>> rows = [{"kind": "train", "step": 1, "loss": 2.3}, {"kind": "test", "step": 1, "accuracy": 0.1}]
        >>> [ax.get_ylabel() for ax in viz.curves({"serial": rows}).axes]
        ['training loss', 'test accuracy']
    """
    window, losses = _losses(runs)
    of_classes = any(
        np.isfinite(_columns(rows, "test", "accuracy")[1]).any() for rows in runs.values()
    )
    score, shown = ("accuracy", "{:.1%}") if of_classes else ("loss", "{:.3g}")
    tests = {name: _columns(rows, "test", score) for name, rows in runs.items()}
    final = {name: shown.format(scores[-1]) for name, (_, scores) in tests.items() if scores.size}
    title = "Training"
    if final:
        (first, best), *others = final.items()
        reached = f"{best} test accuracy" if of_classes else f"a test loss of {best}"
        ends = (f", {name} {value}" for name, value in others)
        title = "".join([f"{first.capitalize()} training reaches {reached}", *ends])
    fig = figure(title)
    loss_ax, test_ax = fig.subplots(1, 2)
    for i, (name, (steps, values, means)) in enumerate(losses.items()):
        if window > 1:
            loss_ax.plot(steps, values, color=line_style(i)["color"], linewidth=0.7, alpha=0.3)
        loss_ax.plot(steps, means, label=name, **line_style(i))
        test_ax.plot(
            *tests[name], label=f"{name}: {final[name]}" if name in final else name, **line_style(i)
        )
    logarithmic(loss_ax, "y")
    mean = f", and its mean over {window} steps" if window > 1 else ""
    dress(loss_ax, x="training step", y="training loss", title=f"Loss of each batch{mean}")
    dress(test_ax, x="training step", y=f"test {score}", title=f"Test {score} of the exact network")
    if of_classes:
        _accuracy_axis(test_ax, [scores for _, scores in tests.values()])
    else:
        logarithmic(test_ax, "y")
    legend(loss_ax, "upper right")
    legend(test_ax, "lower right" if of_classes else "upper right")
    return fig


def race(runs: Runs, *, target: float | None = None) -> Figure:
    """Draw test accuracy against seconds of training, and the time at which each run reached a target.

    Seconds are the sum of ``step_time`` up to an evaluation. The title compares the fastest run with the first one.

    Args:
        runs: as for `curves`, with its errors; rows of kind "train" have ``step_time``, those of kind "test" ``accuracy``.
        target: accuracy to reach, from 0 to 1; None takes the best one that all runs reach.

    Example:
        >>> from lp_jax import viz
        >>> def log(seconds):
        ...     train = [{"kind": "train", "step": n, "step_time": seconds} for n in (1, 2)]
        ...     return train + [{"kind": "test", "step": n, "accuracy": 0.45 * n} for n in (1, 2)]
        >>> viz.race({"serial": log(0.2), "layer-parallel": log(0.1)}, target=0.9).get_suptitle()
        'Layer-parallel training reaches 90.0% in 0.2 s, serial training in 0.4 s'
    """
    _require(runs, "train", "test")
    lines = {}
    for name, rows in runs.items():
        steps, times = _columns(rows, "train", "step_time")
        evaluated, accuracies = _columns(rows, "test", "accuracy")
        if not np.isfinite(accuracies).any():
            raise ValueError(f"the run {name!r} has no row of kind 'test' with an accuracy.")
        total = np.cumsum([0.0, *np.nan_to_num(times)])
        lines[name] = total[np.searchsorted(steps, evaluated, side="right")], accuracies
    if target is None:
        target = min(float(np.nanmax(accuracies)) for _, accuracies in lines.values())
    passed = {name: seconds[accuracies >= target] for name, (seconds, accuracies) in lines.items()}
    reached = {name: float(seconds[0]) for name, seconds in passed.items() if seconds.size}
    fig = figure(_race_title(next(iter(runs)), reached, target))
    ax = fig.subplots()
    for i, (name, (seconds, accuracies)) in enumerate(lines.items()):
        ax.plot(seconds, accuracies, label=name, **line_style(i))
        if name in reached:
            look = line_style(i, marked=True) | {
                "markersize": 12,
                "markeredgecolor": "white",
                "zorder": 5,
            }
            ax.plot([reached[name]], [target], **look)
    ax.axhline(target, **DASHED)
    ax.set_xlim(left=0)
    _accuracy_axis(ax, [accuracies for _, accuracies in lines.values()], target)
    dress(
        ax,
        x="seconds of training",
        y="test accuracy",
        title=f"Markers: where {target:.1%} is reached",
    )
    legend(ax, "lower right")
    return fig


def costs(runs: Runs) -> Figure:
    """Draw training loss against its cost: work and depth.

    Args:
        runs: as for `curves`, with its errors. Rows of kind "train" have ``loss``, and up to there ``work``, evaluations of
            layers times their examples, and ``depth``, evaluations one after another. The second half shows runs with depth only.

    Example:
        >>> from lp_jax import viz
        >>> rows = [{"kind": "train", "step": n, "loss": 1 / n, "work": 192 * n, "depth": 12 * n} for n in (1, 2, 3)]
        >>> [ax.get_xlabel() for ax in viz.costs({"one-shot": rows}).axes]
        ['layers x examples evaluated', 'layers evaluated one after the other']
    """
    window, losses = _losses(runs)
    mean = f", mean over {window} steps" if window > 1 else ""
    fig = figure("Training loss against its cost")
    axes = fig.subplots(1, 2, sharey=True)
    labels = "layers x examples evaluated", "layers evaluated one after the other"
    titles = "Work: all evaluations", "Depth: evaluations that wait for each other"
    for ax, column, x, title in zip(axes, ("work", "depth"), labels, titles, strict=True):
        for i, (name, rows) in enumerate(runs.items()):
            _, spent = _columns(rows, "train", column)
            if not np.isnan(spent).all():
                ax.plot(spent, losses[name][2], label=name, **line_style(i))
        logarithmic(ax, "x", "y")
        dress(ax, x=x, y=f"training loss{mean}" if column == "work" else "", title=title)
    legend(axes[0], "lower left")
    return fig


def residuals(
    rows: Rows, *, iteration: str = "cycle", solvers: tuple[str, str] = ("", "")
) -> Figure:
    """Draw the residual norm per cycle, forward and adjoint, at four moments of training, the first and the last included.

    Args:
        rows: rows of a `lp_jax.train.Log`; those of kind "probe" have ``forward_residual_1``, ..., ``adjoint_residual_1``, ...
            With ``forward_scale`` and ``adjoint_scale``, norms of states, the title distinguishes growth from rounding.
        iteration: name of an iteration.
        solvers: names of the forward and the adjoint solver, for the titles.

    Raises:
        ValueError: if no row has residual norms.

    Example:
        >>> from lp_jax import viz
        >>> norms = {f"{solve}_residual_{k}": 0.1**k for solve in ("forward", "adjoint") for k in (1, 2, 3)}
        >>> viz.residuals([{"kind": "probe", "step": 1, **norms}]).get_suptitle()
        'The residual norm falls by a factor of 100'
    """
    probes = [row for row in rows if row["kind"] == "probe" and unflat("forward_residual", row)]
    if not probes:
        raise ValueError("rows holds no row of kind 'probe' with residual norms.")
    chosen = [
        probes[i] for i in sorted(set(np.linspace(0, len(probes) - 1, 4).round().astype(int)))
    ]
    solves = "forward", "adjoint"
    histories = {
        solve: [np.array(unflat(f"{solve}_residual", row)) for row in chosen] for solve in solves
    }
    fig = figure(_residuals_title(chosen, histories, iteration))
    axes = fig.subplots(1, 2)
    for ax, (solve, norms_at), name in zip(axes, histories.items(), solvers, strict=True):
        for i, (row, norms) in enumerate(zip(chosen, norms_at, strict=True)):
            known = np.flatnonzero(norms >= 0)
            shade = 0.35 + 0.65 * (i + 1) / len(chosen)
            ax.plot(
                known + 1,
                norms[known],
                alpha=shade,
                label=f"step {row['step']}",
                **line_style(i, marked=True),
            )
        logarithmic(ax, "y")
        ax.margins(x=0.08)
        whole_numbers(ax.xaxis)
        title = "\n".join([f"{solve.capitalize()} solve", *textwrap.wrap(name, 40)])
        dress(ax, x=iteration, y="residual norm", title=title)
    legend(axes[0], "upper right")
    if not any(norms[0] >= 0 for norms_at in histories.values() for norms in norms_at):
        first = f"{iteration.capitalize()} 1 starts from the coarsest level and measures nothing."
        note(fig, f"{first} Norms level off at rounding.")
    return fig


def gradient_errors(
    errors: Mapping[str, Sequence[float]],
    *,
    run: tuple[str, float, float] | None = None,
    iteration: str = "cycle",
    choice: str = "coarse step",
) -> Figure:
    r"""Draw the relative error of the layer-parallel gradient against the number of iterations, a line for each solver.

    Args:
        errors: for each solver's name, its errors after 1, 2, 3, ... iterations, forward and adjoint alike.
        run: a training run, drawn as a star: a label, its forward iterations, its gradient error.
        iteration: name of an iteration.
        choice: title of the legend.

    Raises:
        ValueError: if there are no errors.

    Example:
        >>> from lp_jax import viz
        >>> figure = viz.gradient_errors({"injection": [0.4, 0.1, 0.03], "1 Picard sweep": [0.02, 1e-3, 1e-4]})
        >>> figure.get_suptitle()
        'After 2 cycles, the gradient error is 0.1 with injection,\n0.001 with 1 Picard sweep'
    """
    if not errors:
        raise ValueError("errors is empty; give the errors of at least one solver.")
    # the best and the worst after two iterations; later, rounding may hide the difference
    count = min([len(values) for values in errors.values()] + [2] * (len(errors) > 1))
    at = {name: values[count - 1] for name, values in errors.items()}
    worst = max(at, key=at.__getitem__)
    best = min(at, key=at.__getitem__)
    after = f"After {numbered(count, iteration)}, the gradient error is {number(at[worst])} with {worst}"
    fig = figure(after if worst == best else f"{after},\n{number(at[best])} with {best}")
    ax = fig.subplots()
    for i, (name, values) in enumerate(errors.items()):
        ax.plot(np.arange(1, len(values) + 1), values, label=name, **line_style(i, marked=True))
    if run is not None:
        name, iterations, error = run
        ax.plot(
            [iterations],
            [error],
            "*",
            color=INK,
            markersize=20,
            label=name,
            markeredgecolor="white",
            zorder=5,
        )
    logarithmic(ax, "y")
    whole_numbers(ax.xaxis)
    ax.margins(x=0.06)
    dress(ax, x=f"{iteration}s, forward and adjoint", y="relative error of the gradient")
    legend(ax, "outside", title=choice)
    return fig


def _columns(rows: Rows, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the rows of a kind that have a value of this name, and the values."""
    pairs = [(row["step"], row[name]) for row in rows if row["kind"] == kind and name in row]
    return np.array([step for step, _ in pairs], float), np.array(
        [value for _, value in pairs], float
    )  # None is NaN


def _require(runs: Runs, *kinds: str) -> None:
    """Refuse a picture without runs, or with one that has no row of a kind."""
    if not runs:
        raise ValueError("runs is empty; give the rows of at least one run.")
    for name, rows in runs.items():
        if missing := [kind for kind in kinds if not any(row["kind"] == kind for row in rows)]:
            raise ValueError(f"the run {name!r} has no row of kind {missing[0]!r}.")


def _losses(
    runs: Runs,
) -> tuple[int, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Return the steps of training of each run, their losses, and the means over the last ``window`` steps; window first.

    The window is a thirtieth of the longest run.
    """
    _require(runs, "train")
    losses = {name: _columns(rows, "train", "loss") for name, rows in runs.items()}
    window = max(1, *(len(steps) // 30 for steps, _ in losses.values()))
    lasts = {
        name: [v[max(0, end - window) : end] for end in range(1, len(v) + 1)]
        for name, (_, v) in losses.items()
    }
    return window, {
        name: (*losses[name], np.array(list(map(np.mean, parts)))) for name, parts in lasts.items()
    }


def _accuracy_axis(ax: Axes, lines: Sequence[np.ndarray], *shown: float) -> None:
    """Set the y-axis to where the better half of the evaluations lies, and ``shown``; the first ones would flatten it."""
    values = [value for line in lines for value in line if math.isfinite(value)]
    low = min([float(np.median(values)), *shown])
    high = max([*values, *shown])
    space = max(high - low, 0.01) / 2
    ax.set_ylim(max(0.0, low - space), min(1.0, high + space))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _residuals_title(
    chosen: Rows, histories: Mapping[str, Sequence[np.ndarray]], iteration: str
) -> str:
    """Title with the reduction of each solve's residual norm. Norms at the level of rounding do not count as growth."""
    factors = []
    grown = []
    for solve, norms_at in histories.items():
        for row, norms in zip(chosen, norms_at, strict=True):
            known = norms[norms > 0].tolist()  # neither unmeasured nor exactly solved
            if len(known) > 1:
                factors.append(known[0] / known[-1])
                scale = float(row.get(f"{solve}_scale") or 0.0)  # type: ignore[arg-type]
                if convergence_warning(solve, known, scale):
                    grown.append(1 / factors[-1])
    if not factors:
        return f"Residual norm in each {iteration}"
    if grown:
        return f"The residual norm grows in {len(grown)} of {len(factors)} solves, by up to {number(max(grown))}"
    lowest = number(min(factors))
    highest = number(max(factors))
    if max(factors) < _SETTLED:
        return "The residual norms are as small as rounding lets them be"
    if min(factors) < _SETTLED:
        return f"The residual norm falls by factors of up to {highest}"
    return f"The residual norm falls by a factor of {lowest}" + (
        f" to {highest}" if highest != lowest else ""
    )


_SETTLED = 1.5  # a smaller reduction does not count as one


def _race_title(first: str, seconds: Mapping[str, float], target: float) -> str:
    """The time of the fastest run, and that of the first one."""
    if not seconds:
        return f"No run reaches {target:.1%}"
    best = min(seconds, key=seconds.__getitem__)
    title = f"{best[:1].upper()}{best[1:]} training reaches {target:.1%} in {seconds[best]:.3g} s"
    if first == best:
        return title
    return f"{title}, {first} training " + (
        f"in {seconds[first]:.3g} s" if first in seconds else "never"
    )
