"""Draws the pictures of the README and the documentation: ``python docs/images.py``.

Those of solvers follow from what the solvers say of themselves. Those that need a measurement are left as they are: lp-jax train
draws gradient_error.png, lp-jax plan draws plan.png. The numbers drawn are stored in images/data.json.
"""

import json
from pathlib import Path

import lp_jax
from lp_jax import viz

IMAGES = Path(__file__).with_suffix("")
INTERVALS = {"coarsening": 8, "coarse_step": lp_jax.Picard(sweeps=0), "storage": "all", "skip_downcycle": False}


def figures():
    """Return the pictures by the name of their file."""
    levels = lp_jax.MGRIT(levels=3, coarsening=4, iterations=2)
    forward, adjoint = (lp_jax.MGRIT(iterations=n, **INTERVALS) for n in (2, 1))
    return {
        "hierarchy.png": viz.hierarchy(levels, 64, t1=2.0),
        "cycle.png": viz.hierarchy(lp_jax.MGRIT(coarsening=4, iterations=2, skip_downcycle=False), 16),
        "schedule.png": viz.schedule(forward, 64, workers=8, adjoint_solver=adjoint),
    }


def data(figure):
    """Return the texts and the numbers that a picture shows."""
    axes = []
    for ax in figure.axes:
        lines = [[list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))] for line in ax.lines]
        blocks = [path.vertices.tolist() for found in ax.collections for path in found.get_paths() if len(path) == 5]
        points = [found.get_offsets().tolist() for found in ax.collections]
        axes.append(
            {"texts": [text.get_text() for text in ax.texts], "lines": lines, "blocks": blocks, "points": points}
        )
    return {"title": figure.get_suptitle(), "note": figure.get_supxlabel(), "axes": axes}


if __name__ == "__main__":
    drawn = figures()
    for name, figure in drawn.items():
        figure.savefig(IMAGES / name)
    (IMAGES / "data.json").write_text(json.dumps({name: data(figure) for name, figure in drawn.items()}) + "\n")
