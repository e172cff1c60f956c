"""Which classes a model takes for which."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lp_jax.viz._style import INK, NOTE, TICK, dress, figure

_MOST_NAMES = 40  # that can be told apart along an axis


def confusion(matrix: np.ndarray, names: Sequence[str] = ()) -> Figure:
    """Right and wrong answers, class by class.

    Args:
        matrix: counts ``(classes, classes)``: a row for each true class, a column for each answer.
        names: of the classes; their numbers if there are none.

    Raises:
        ValueError: for a matrix that is not square, without a count, or with another number of names.

    Example:
        >>> import numpy as np
        >>> from lp_jax import viz
        >>> viz.confusion(np.diag([9, 8]) + 1, ["cat", "dog"]).axes[0].get_title(loc="left")
        '19 of 21 right; per row, in percent of the true class'
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.sum() == 0:
        raise ValueError(f"matrix must be square and hold a count; got shape {matrix.shape}, sum {matrix.sum()}.")
    if names and len(names) != len(matrix):
        raise ValueError(f"names must be {len(matrix)}, one for each class; got {len(names)}.")
    shares = 100 * matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    classes, right = len(matrix), int(np.trace(matrix))
    size = min(14.0, 5.5 + 0.35 * classes)
    fig = figure(f"Accuracy {right / matrix.sum():.1%}", width=size + 1.5, height=size)
    ax = fig.subplots()
    image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    dress(
        ax, x="answer", y="truth", title=f"{right:,} of {matrix.sum():,} right; per row, in percent of the true class"
    )
    ax.grid(False)
    if classes <= _MOST_NAMES:
        labels = list(names) or [str(i) for i in range(classes)]
        ax.set_xticks(range(classes), labels, rotation=90 if max(map(len, labels)) > 2 else 0)
        ax.set_yticks(range(classes), labels)
        for i, j in zip(*np.nonzero(shares >= 0.5), strict=True):
            colour = "white" if shares[i, j] > 55 else INK
            ax.text(
                j, i, f"{shares[i, j]:.0f}", ha="center", va="center", fontsize=min(NOTE, 200 / classes), color=colour
            )
    bar = fig.colorbar(image, ax=ax, shrink=0.8)
    bar.ax.tick_params(labelsize=TICK)
    return fig
