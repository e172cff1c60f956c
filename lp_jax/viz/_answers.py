"""Pictures of a trained model's answers: confusion matrices of classes, answers against true values."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lp_jax.viz._style import BLUE, DASHED, INK, LABEL, NOTE, TICK, dress, figure

_MOST_NAMES, _MOST_PANELS = 40, 4  # legible along an axis, and side by side


def confusion(matrix: np.ndarray, names: Sequence[str] = ()) -> Figure:
    """Draw a confusion matrix: right and wrong answers, class by class.

    Args:
        matrix: counts ``(classes, classes)``: a row for each true class, a column for each answer.
        names: names of the classes; without names, their numbers are shown.

    Raises:
        ValueError: if the matrix is not square or holds no count, or the number of names differs.

    Example:
        >>> import numpy as np
        >>> from lp_jax import viz
        >>> viz.confusion(np.diag([9, 8]) + 1, ["cat", "dog"]).axes[0].get_title(loc="left")
        '19 of 21 answers are right'
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.sum() == 0:
        raise ValueError(
            f"matrix must be square and hold a count; got shape {matrix.shape}, sum {matrix.sum()}."
        )
    if names and len(names) != len(matrix):
        raise ValueError(f"names must be {len(matrix)}, one for each class; got {len(names)}.")
    shares = 100 * matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    classes = len(matrix)
    right = int(np.trace(matrix))
    size = min(14.0, 5.5 + 0.35 * classes)
    fig = figure(f"Accuracy {right / matrix.sum():.1%}", width=size + 1.5, height=size)
    ax = fig.subplots()
    image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    dress(
        ax,
        x="answer of the network",
        y="true class",
        title=f"{right:,} of {matrix.sum():,} answers are right",
    )
    ax.grid(False)
    if classes <= _MOST_NAMES:
        labels = list(names) or [str(i) for i in range(classes)]
        ax.set_xticks(
            range(classes), labels, rotation=90 if max(map(len, labels)) * classes > 60 else 0
        )
        ax.set_yticks(range(classes), labels)
        for i, j in zip(*np.nonzero(shares >= 0.5), strict=True):
            colour = "white" if shares[i, j] > 55 else INK
            ax.text(
                j,
                i,
                f"{shares[i, j]:.0f}",
                color=colour,
                ha="center",
                va="center",
                fontsize=min(NOTE, 200 / classes),
            )
    bar = fig.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label("percent of the true class", fontsize=LABEL, color=INK)
    bar.ax.tick_params(labelsize=TICK)
    return fig


def predictions(truth: np.ndarray, answers: np.ndarray) -> Figure:
    """Draw answers against true values, of shapes ``(samples,)`` or ``(samples, values)``; a panel for each value, at most four.

    ValueError if the shapes differ, the number of axes is wrong, or there is no sample.

    Example:
        >>> import numpy as np
        >>> from lp_jax import viz
        >>> truth = np.arange(10.0)
        >>> viz.predictions(truth, truth + 0.1).get_suptitle()
        'Typical error 0.1; values spread by 2.9'
    """
    truth = np.asarray(truth, float)
    answers = np.asarray(answers, float)
    if truth.shape != answers.shape or truth.ndim not in (1, 2) or truth.size == 0:
        raise ValueError(
            f"truth and answers must have one shape, (samples,) or (samples, values); got {truth.shape} and {answers.shape}."
        )
    truth, answers = truth.reshape(len(truth), -1), answers.reshape(len(truth), -1)
    errors = np.sqrt(np.mean((answers - truth) ** 2, axis=0))
    spreads = np.std(truth, axis=0)
    count = min(len(errors), _MOST_PANELS)
    single = count == 1
    worse = int(np.sum((errors >= spreads) & (errors > 0)))
    title = (
        f"Typical error {errors[0]:.2g}; values spread by {spreads[0]:.2g}" if single else "Answers"
    )
    if not single and (known := spreads > 0).any():
        shares = errors[known] / spreads[known]
        ends = dict.fromkeys(f"{share:.2g}" for share in (shares.min(), shares.max()))
        title = f"Typical errors are {' to '.join(ends)} of how far values spread"
    if worse:
        title += ":\nno better than always answering the mean"
        title += "" if single else f", for {worse} of {len(errors)} values"
    fig = figure(title, width=6.5 if single else 4.8 * count, height=6.5 if single else 5.2)
    for number, ax in enumerate(fig.subplots(1, count, squeeze=False)[0]):
        t = truth[:, number]
        a = answers[:, number]
        line = [float(np.nanmin([t, a])), float(np.nanmax([t, a]))]
        ax.plot(line, line, **DASHED)
        ax.plot(
            t,
            a,
            "o",
            color=BLUE,
            markersize=4,
            alpha=min(1.0, 30 / np.sqrt(len(t))),
            markeredgewidth=0,
        )
        ax.set_aspect("equal")
        title = f"Value {number + 1}: typical error {errors[number]:.2g}"
        title = "On the dashed line, the answer is the true value" if single else title
        dress(ax, x="true value", y="answer" if number == 0 else "", title=title)
    return fig
