"""Time against accuracy."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lp_jax.viz._style import DASHED, dress, figure, legend, line_style, marked_style
from lp_jax.viz._training import Rows, accuracy_axis, columns, require_runs


def race(runs: Mapping[str, Rows], *, target: float | None = None) -> Figure:
    """Draw test accuracy against seconds of training, and the time at which each run reached a target.

    Seconds are the sum of ``step_time`` up to the step of an evaluation, without the time of evaluations. The title names
    the fastest run and the first one.

    Args:
        runs: rows of each run's `lp_jax.train.Log`, by its name: those of kind "train" with ``step`` and ``step_time``, in
            seconds, those of kind "test" with ``step`` and ``accuracy``. The other runs are compared with the first one.
        target: accuracy to reach, from 0 to 1; None takes the best one that all runs reach.

    Raises:
        ValueError: if there are no runs, or a run has no step of training or no evaluation.

    Example:
        >>> from lp_jax import viz
        >>> def log(seconds):
        ...     train = [{"kind": "train", "step": n, "step_time": seconds} for n in (1, 2)]
        ...     return train + [{"kind": "test", "step": n, "accuracy": 0.45 * n} for n in (1, 2)]
        >>> viz.race({"serial": log(0.2), "layer-parallel": log(0.1)}, target=0.9).get_suptitle()
        'Layer-parallel training reaches 90.0% in 0.2 s, serial training in 0.4 s'
    """
    require_runs(runs)
    lines = {name: _accuracies(name, rows) for name, rows in runs.items()}
    if target is None:
        target = min(float(np.nanmax(accuracies)) for _, accuracies in lines.values())
    reached = {name: _first(*line, target) for name, line in lines.items()}
    fig = figure(_title(reached, target))
    ax = fig.subplots()
    for i, (name, (seconds, accuracies)) in enumerate(lines.items()):
        ax.plot(seconds, accuracies, label=name, **line_style(i))
        if (at := reached[name]) is not None:
            ax.plot([at], [target], **marked_style(i) | {"markersize": 12}, markeredgecolor="white", zorder=5)
    ax.axhline(target, **DASHED)
    ax.set_xlim(left=0)
    accuracy_axis(ax, runs)
    dress(ax, x="seconds of training", y="test accuracy", title=f"Markers: where {target:.1%} is reached")
    legend(ax, "lower right")
    return fig


def _title(reached: Mapping[str, float | None], target: float) -> str:
    """The time of the fastest run, and that of the first one."""
    times = {name: seconds for name, seconds in reached.items() if seconds is not None}
    if not times:
        return f"No run reaches {target:.1%}"
    first, best = next(iter(reached)), min(times, key=lambda name: times[name])
    title = f"{best[:1].upper()}{best[1:]} training reaches {target:.1%} in {times[best]:.3g} s"
    if first == best:
        return title
    return f"{title}, {first} training " + (f"in {times[first]:.3g} s" if first in times else "never")


def _accuracies(name: str, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of training before each evaluation, and its accuracy."""
    steps, times = columns(rows, "train", "step_time")
    evaluated, accuracies = columns(rows, "test", "accuracy")
    for kind, values in (("train", steps), ("test", accuracies[np.isfinite(accuracies)])):
        if not values.size:
            what = "" if kind == "train" else " with an accuracy"
            raise ValueError(f"the run {name!r} has no row of kind {kind!r}{what}.")
    total = np.concatenate([np.zeros(1), np.cumsum(np.nan_to_num(times))])
    return total[np.searchsorted(steps, evaluated, side="right")], accuracies


def _first(seconds: np.ndarray, accuracies: np.ndarray, target: float) -> float | None:
    """Return the seconds at the first evaluation that reached the target; None if none did."""
    reached = np.flatnonzero(accuracies >= target)
    return float(seconds[reached[0]]) if reached.size else None
