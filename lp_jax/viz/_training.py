"""Pictures of a training run: curves, residuals and gradient errors."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

from lp_jax.train._divergence import convergence_warning
from lp_jax.train._log import unflat
from lp_jax.viz._style import COLOURS, GREY, INK, LABEL, MARKERS, NOTE, dress, figure, legend, logarithmic

Rows = Sequence[Mapping[str, object]]


def curves(runs: Mapping[str, Rows]) -> Figure:
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
    if not runs:
        raise ValueError("runs is empty; give the rows of at least one run.")
    of_classes = any(np.isfinite(columns(rows, "test", "accuracy")[1]).any() for rows in runs.values())
    score, shown = ("accuracy", "{:.1%}") if of_classes else ("loss", "{:.3g}")
    final = {name: _last(rows, score) for name, rows in runs.items()}
    fig = figure(_curves_title(final, score, shown))
    loss_ax, test_ax = fig.subplots(1, 2)
    for i, (name, rows) in enumerate(runs.items()):
        style = {"color": COLOURS[i], "linestyle": ("-", "--", ":")[i % 3]}
        steps, losses = columns(rows, "train", "loss")
        if not steps.size:
            raise ValueError(f"the run {name!r} has no row of kind 'train'.")
        loss_ax.plot(steps, losses, color=COLOURS[i], linewidth=0.7, alpha=0.3)
        loss_ax.plot(steps, _smooth(losses), linewidth=2.2, label=name, **style)
        steps, scores = columns(rows, "test", score)
        ends = name if final[name] is None else f"{name}: {shown.format(final[name])}"
        test_ax.plot(steps, scores, linewidth=2.2, label=ends, **style)
    logarithmic(loss_ax)
    dress(loss_ax, x="training step", y="training loss", title="Loss of each batch, and its running mean")
    dress(test_ax, x="training step", y=f"test {score}", title=f"Test {score} of the exact network")
    if of_classes:
        accuracy_axis(test_ax, runs)
    else:
        logarithmic(test_ax)
    legend(loss_ax, loc="upper right")
    legend(test_ax, loc="lower right" if of_classes else "upper right")
    return fig


class _Plain(LogFormatter):
    """A LogFormatter without exponents."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def costs(runs: Mapping[str, Rows]) -> Figure:
    """Draw training loss against its cost: work and depth.

    Args:
        runs: rows of each run, by its name. Rows of kind "train" have ``loss``, and ``work`` and ``depth`` up to there. Work is
            evaluations of layers times their examples. Depth is evaluations one after another. A run without depth is left out
            of the second half.

    Raises:
        ValueError: if there are no runs, or a run has no step of training.

    Example:
        >>> from lp_jax import viz
        >>> rows = [{"kind": "train", "step": n, "loss": 1 / n, "work": 192 * n, "depth": 12 * n} for n in (1, 2, 3)]
        >>> [ax.get_xlabel() for ax in viz.costs({"one-shot": rows}).axes]
        ['layers x examples evaluated', 'layers evaluated one after the other']
    """
    if not runs:
        raise ValueError("runs is empty; give the rows of at least one run.")
    fig = figure("What the loss has cost")
    axes = fig.subplots(1, 2, sharey=True)
    labels = "layers x examples evaluated", "layers evaluated one after the other"
    titles = "Work: what one device does", "Depth: what no number of devices can shorten"
    for ax, column, x, title in zip(axes, ("work", "depth"), labels, titles, strict=True):
        for i, (name, rows) in enumerate(runs.items()):
            _, losses = columns(rows, "train", "loss")
            if not losses.size:
                raise ValueError(f"the run {name!r} has no row of kind 'train'.")
            _, spent = columns(rows, "train", column)
            if not np.isnan(spent).all():
                style = {"color": COLOURS[i], "linestyle": ("-", "--", ":")[i % 3]}
                ax.plot(spent, _smooth(losses), linewidth=2.2, label=name, **style)
        ax.set_xscale("log")
        logarithmic(ax)
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter=_Plain(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
        dress(ax, x=x, y="training loss, running mean" if column == "work" else "", title=title)
    legend(axes[0], loc="lower left")
    return fig


def residuals(rows: Rows, *, moments: int = 4, iteration: str = "cycle", solvers: tuple[str, str] = ("", "")) -> Figure:
    """Draw the residual norm per cycle, forward and adjoint, at a few moments of training.

    Args:
        rows: rows of a `lp_jax.train.Log`; those of kind "probe" with columns ``forward_residual_1``, ... and
            ``adjoint_residual_1``, ... are drawn. With ``forward_scale`` and ``adjoint_scale``, norms of states, the title
            distinguishes growth from rounding.
        moments: number of moments, evenly chosen, including the first and the last.
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
    chosen = [probes[i] for i in sorted(set(np.linspace(0, len(probes) - 1, moments).round().astype(int)))]
    histories = {solve: [_history(row, solve) for row in chosen] for solve in ("forward", "adjoint")}
    fig = figure(_residuals_title(chosen, histories, iteration))
    axes = fig.subplots(1, 2)
    for ax, (solve, norms_at), name in zip(axes, histories.items(), solvers, strict=True):
        for i, (row, norms) in enumerate(zip(chosen, norms_at, strict=True)):
            cycles = np.arange(1, len(norms) + 1)
            known = norms >= 0
            shade = 0.35 + 0.65 * (i + 1) / len(chosen)
            ax.plot(
                cycles[known],
                norms[known],
                marker=MARKERS[i],
                markersize=8,
                linewidth=2.2,
                alpha=shade,
                color=COLOURS[i],
                label=f"step {row['step']}",
            )
        logarithmic(ax)
        longest = max(np.flatnonzero(norms >= 0)[-1] + 1 if np.any(norms >= 0) else 1 for norms in norms_at)
        ax.set_xlim(0.8, max(longest, 2) + 0.2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        dress(
            ax,
            x=iteration,
            y="residual norm",
            title="\n".join([f"{solve.capitalize()} solve", *textwrap.wrap(name, 48)]),
        )
    legend(axes[0], loc="upper right")
    if not any(norms[0] >= 0 for norms_at in histories.values() for norms in norms_at):
        note = f"{iteration.capitalize()} 1 starts from the coarsest level and measures nothing. Norms level off at rounding."
        fig.supxlabel(note, fontsize=NOTE, color=GREY, x=0.02, ha="left")
    return fig


def gradient_errors(
    errors: Mapping[str, Sequence[float]],
    *,
    work: Mapping[str, Sequence[float]] | None = None,
    run: tuple[str, float, float] | None = None,
    iteration: str = "cycle",
    choice: str = "coarse step",
) -> Figure:
    r"""Draw the relative error of the layer-parallel gradient against its work, a line for each solver.

    Args:
        errors: for each solver's name, its errors after 1, 2, 3, ... iterations, forward and adjoint alike.
        work: for each solver's name, the work of a training step with as many iterations, in multiples of serial propagation's
            (`lp_jax.planning.training_step` counts it). None draws errors against the number of iterations.
        run: a training run, drawn as a star: a label, its forward iterations (its work, if ``work`` is given), its gradient
            error.
        iteration: name of an iteration.
        choice: title of the legend.

    Raises:
        ValueError: if there are no errors, or ``work`` does not match them.

    Example:
        >>> from lp_jax import viz
        >>> figure = viz.gradient_errors({"injection": [0.4, 0.1, 0.03], "1 Picard sweep": [0.02, 1e-3, 1e-4]})
        >>> figure.get_suptitle()
        'After 2 cycles, the gradient error is 0.1 with injection,\n0.001 with 1 Picard sweep'
    """
    if not errors:
        raise ValueError("errors is empty; give the errors of at least one solver.")
    if work is not None and {name: len(at) for name, at in work.items()} != {n: len(v) for n, v in errors.items()}:
        raise ValueError("work must have a number for each error, by the same names.")
    fig = figure(_errors_title(errors, iteration))
    ax = fig.subplots()
    for i, (name, values) in enumerate(errors.items()):
        ax.plot(
            np.arange(1, len(values) + 1) if work is None else work[name],
            values,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=9,
            linewidth=2.4,
            label=name,
        )
    if run is not None:
        name, count, error = run
        ax.plot(
            [count],
            [error],
            "*",
            color=INK,
            markersize=20,
            label=name,
            markeredgecolor="white",
            linestyle="none",
            zorder=5,
        )
    logarithmic(ax)
    if work is None:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.margins(x=0.06)
        x = f"{iteration}s, forward and adjoint"
    else:
        ax.set_xlim(left=0)
        ax.axvline(1.0, color=GREY, linewidth=1.4, linestyle=(0, (2, 2)), label="work of serial propagation", zorder=1)
        x = "work of a training step, in multiples of serial propagation's"
    dress(ax, x=x, y="relative error of the gradient")
    ax.legend(
        title=choice,
        title_fontsize=LABEL,
        alignment="left",
        fontsize=LABEL,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )
    return fig


def columns(rows: Rows, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the rows of a kind that have a value of this name, and the values."""
    pairs = [(row["step"], row[name]) for row in rows if row["kind"] == kind and name in row]
    steps = np.array([step for step, _ in pairs], dtype=float)
    return steps, np.array([math.nan if value is None else value for _, value in pairs], dtype=float)


def _last(rows: Rows, score: str) -> float | None:
    _, values = columns(rows, "test", score)
    return float(values[-1]) if values.size else None


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the running mean over the last steps, in a window that grows with the run."""
    window = max(1, len(values) // 30)
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    starts = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    ends = np.arange(1, len(values) + 1)
    return (sums[ends] - sums[starts]) / (ends - starts)


def accuracy_axis(ax: Axes, runs: Mapping[str, Rows]) -> None:
    """Set the y-axis to most of the curve, up to 100 %: the first evaluations, near chance, would flatten the rest."""
    values = np.concatenate([columns(rows, "test", "accuracy")[1] for rows in runs.values()])
    low = float(np.nanquantile(values, 0.1)) if values.size else 0.0
    ax.set_ylim(max(0.0, 1 - 1.4 * (1 - low)), 1.0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _curves_title(final: Mapping[str, float | None], score: str, shown: str) -> str:
    known = {name: shown.format(value) for name, value in final.items() if value is not None}
    if not known:
        return "Training"
    first, *others = known
    reached = f"{known[first]} test accuracy" if score == "accuracy" else f"a test loss of {known[first]}"
    return f"{first.capitalize()} training reaches {reached}" + "".join(f", {name} {known[name]}" for name in others)


def _history(row: Mapping[str, object], solve: str) -> np.ndarray:
    return np.array(unflat(f"{solve}_residual", row))


def _residuals_title(chosen: Rows, histories: Mapping[str, Sequence[np.ndarray]], iteration: str) -> str:
    """Title with the reduction of each solve's residual norm. Norms at the level of rounding do not count as growth."""
    factors, grown = [], []
    for solve, norms_at in histories.items():
        for row, norms in zip(chosen, norms_at, strict=True):
            known = norms[norms > 0]  # neither unmeasured nor exactly solved
            if len(known) > 1:
                factors.append(float(known[0] / known[-1]))
                scale = float(row.get(f"{solve}_scale") or 0.0)  # type: ignore[arg-type]
                if convergence_warning(solve, known.tolist(), scale):
                    grown.append(1 / factors[-1])
    if not factors:
        return f"Residual norm in each {iteration}"
    if grown:
        return f"The residual norm grows in {len(grown)} of {len(factors)} solves, by up to {_number(max(grown))}"
    lowest, highest = _number(min(factors)), _number(max(factors))
    if max(factors) < _SETTLED:
        return "The residual norms are as small as rounding lets them be"
    if min(factors) < _SETTLED:
        return f"The residual norm falls by factors of up to {highest}"
    return f"The residual norm falls by a factor of {lowest}" + (f" to {highest}" if highest != lowest else "")


_SETTLED = 1.5  # a smaller reduction does not count as one


def _errors_title(errors: Mapping[str, Sequence[float]], iteration: str) -> str:
    """Title with the best and the worst after two iterations; later, rounding may hide the difference."""
    count = min([len(values) for values in errors.values()] + [2] * (len(errors) > 1))
    at = {name: values[count - 1] for name, values in errors.items()}
    worst, best = max(at, key=at.__getitem__), min(at, key=at.__getitem__)
    title = f"After {count} {iteration}{'s' * (count > 1)}, the gradient error is {_number(at[worst])} with {worst}"
    return title if worst == best else f"{title},\n{_number(at[best])} with {best}"


def _number(value: float) -> str:
    """Format with two digits, or with one and a power of ten if that is shorter."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{float(f'{value:.2g}'):g}"
    digit, exponent = f"{value:.0e}".split("e")
    return f"{digit}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
