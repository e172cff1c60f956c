"""Draws the pictures of the README and the documentation.

``python docs/images.py`` draws those that follow from the solvers and from kept measurements, in seconds.
``python docs/images.py --measure`` draws race.png and gradient_error.png too, for which it trains networks: a few minutes.

The numbers drawn are stored in images/data.json, and a test compares them.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import lp_jax
from lp_jax import planning, viz

ROOT, IMAGES = Path(__file__).parents[1], Path(__file__).with_suffix("")
INTERVALS = {"coarsening": 8, "coarse_step": lp_jax.Identity(), "storage": "all", "start": "guess"}
MEASURED = {
    "race.png": ["demo", "--seed", "1"],
    "gradient_error.png": ["train", "digits", "--solver", "MGRIT"],
}
"""Pictures by the arguments of lp-jax that draw them."""


def figures():
    """Return the pictures that follow from what solvers say of themselves, by the name of their file."""
    levels = lp_jax.MGRIT(levels=3, coarsening=4, iterations=2)
    forward, adjoint = (lp_jax.MGRIT(iterations=n, **INTERVALS) for n in (2, 1))
    return {
        "hierarchy.png": viz.hierarchy(levels, 64, t1=2.0),
        "cycle.png": viz.hierarchy(lp_jax.MGRIT(coarsening=4, iterations=2, start="guess"), 16),
        "schedule.png": viz.schedule(forward, 64, workers=8, adjoint_solver=adjoint),
    }


def plan():
    """Return the picture of the plan of docs/planning.md: 256 layers on an H100, messages of 5 us at 400 GB/s."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.random.normal(keys[0], (256, 64, 64)) / 8, jnp.zeros((256, 64))
    y0 = jax.random.normal(keys[1], (32, 64))
    problem = lp_jax.Problem(lambda y, at: y + at.dt * jnp.tanh(y @ at.params[0] + at.params[1]), params, y0, t1=2.0)
    machine = dataclasses.replace(planning.estimate(problem, device="H100"), latency=5e-6, bandwidth=4e11)
    return viz.plan(lp_jax.plan(problem, machine=machine, error=1e-3))


def drift():
    """Return the picture of the measurements that benchmarks/drift.py keeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.drift import draw

    return draw(json.loads((ROOT / "benchmarks" / "results" / "cpu" / "drift.json").read_text()))


def at_once():
    """Return the picture of the grid that benchmarks/at_once.py keeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.at_once import draw

    return draw(json.loads((ROOT / "benchmarks" / "results" / "cpu" / "at_once.json").read_text()))


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


def measure():
    """Train, and keep the pictures of how it went."""
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in MEASURED.items():
            out = Path(folder, name).with_suffix("")
            subprocess.run([sys.executable, "-m", "lp_jax", *arguments, "--out", str(out)], check=True)
            shutil.copy(out / name, IMAGES / name)


if __name__ == "__main__":
    drawn = figures()
    for name, figure in drawn.items():
        figure.savefig(IMAGES / name)
    (IMAGES / "data.json").write_text(json.dumps({name: data(figure) for name, figure in drawn.items()}) + "\n")
    for name, figure in {"plan.png": plan(), "drift.png": drift(), "at_once.png": at_once()}.items():
        figure.savefig(IMAGES / name)
    if "--measure" in sys.argv[1:]:
        measure()
