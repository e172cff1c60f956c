"""Draws the pictures of the README and the documentation.

``python docs/images.py`` draws those that follow from the solvers and from kept measurements, in seconds.
``python docs/images.py --measure`` draws race.png and gradient_error.png too, for which it trains networks: a few minutes.

The numbers drawn are stored in images/data.json, and a test compares them.
"""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import lp_jax
from lp_jax import data as datasets, nn, planning, train, viz

ROOT, IMAGES = Path(__file__).resolve().parents[1], Path(__file__).resolve().with_suffix("")
GALLERY = ROOT / "docs" / "gallery.md"
INTERVALS = {"coarsening": 8, "coarse_step": lp_jax.Identity(), "storage": "all", "start": "guess"}


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
    problem = lp_jax.Problem(
        lambda y, at: y + at.dt * jnp.tanh(y @ at.params[0] + at.params[1]), params, y0, t1=2.0
    )
    machine = dataclasses.replace(
        planning.estimate(problem, device="H100"), latency=5e-6, bandwidth=4e11
    )
    # as long as it takes, because a busy machine would leave probes out
    return viz.plan(lp_jax.plan(problem, machine=machine, error=1e-3, seconds=3600))


def scaling():
    """Return the picture of docs/planning.md for several devices: layers that fill an H100, messages of 10 us at 200 GB/s."""
    shapes = (
        jax.ShapeDtypeStruct((64, 8192, 8192), "float32"),
        jax.ShapeDtypeStruct((4096, 8192), "float32"),
    )
    problem = lp_jax.Problem(lambda y, at: y + at.dt * jnp.tanh(y @ at.params), *shapes)
    machine = dataclasses.replace(
        planning.estimate(problem, device="H100"), latency=1e-5, bandwidth=2e11
    )
    return viz.plan(planning.choose(64, machine, workers=8))


# Runs of benchmarks/results/cpu/drift.json whose lines lie on others.
ALIKE = (
    "serial, penalty 0.01",
    "serial, penalty 0.05",
    "sweeps to 1e-3, penalty 0.02",
    "sweeps to 1e-3",
)
ALIKE += ("sweeps to 1e-3, buffers", "sweeps, controller 0.1", "sweeps, controller 0.03")


def drift():
    """Return the picture of a decoder's drift: sweeps and gradient errors against steps, and the loss by a few sweeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import report

    result = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "drift.json").read_text())
    fig = report.figure(result, width=17, height=5.2)
    needed, errors, quality = fig.subplots(1, 3)
    for number, row in enumerate(row for row in result["rows"] if row["run"] not in ALIKE):
        steps = [mark["step"] for mark in row["marks"]]
        look = {"color": f"C{number}", "marker": "os^DvP*X"[number % 8], "label": row["run"]}
        needed.plot(steps, [mark["sweeps"] for mark in row["marks"]], **look)
        errors.plot(steps, [mark["injection_error"] for mark in row["marks"]], **look)
        quality.plot(range(1, 9), [abs(x - row["test_loss"]) for x in row["by_sweeps"]], **look)
    errors.set_yscale("log")
    quality.set(yscale="log", ylim=(1e-5, 10))
    report.dress(needed, title="Sweeps to 1e-3", x="training step", y="sweeps")
    report.dress(
        errors, title="Gradient error of injection, 2/1", x="training step", y="relative error"
    )
    report.dress(
        quality,
        title="Trained networks, evaluated by a few sweeps",
        x="sweeps",
        y="distance from the exact test loss",
    )
    quality.legend(fontsize=9, frameon=False, loc="lower left")
    return fig


def at_once():
    """Return the picture of the grid that benchmarks/at_once.py keeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.at_once import draw

    return draw(json.loads((ROOT / "benchmarks" / "results" / "cpu" / "at_once.json").read_text()))


def gpu_trainings():
    """Return the file of the picture of the trainings that benchmarks/gpu.py keeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import gpu, report

    return report.picture(
        gpu.draw(json.loads((ROOT / "benchmarks" / "results" / "gpu" / "gpu.json").read_text()))
    )


def tunnel():
    """Return the file of the picture of devices in emulated time that benchmarks/tunnel.py keeps."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import report
    from benchmarks.tunnel import draw

    kept = ROOT / "benchmarks" / "results" / "cpu" / "tunnel.json"
    return report.picture(draw(json.loads(kept.read_text())))


def pod():
    """Return the file of the picture of rows of chips that benchmarks/pod.py keeps."""
    from benchmarks import report
    from benchmarks.pod import draw

    kept = ROOT / "benchmarks" / "results" / "tpu" / "pod.json"
    return report.picture(draw(json.loads(kept.read_text())))


def gallery():
    """Yield the figures that the code of docs/gallery.md draws, by the name of the picture below it."""
    sys.path.insert(0, str(ROOT))
    names = {"__name__": "gallery"}
    for code, picture in re.findall(
        r"^```python\n(.*?)^```\n\n!\[.*?\]\(images/(.*?)\)", GALLERY.read_text(), re.M | re.S
    ):
        with plt.rc_context(
            {"figure.figsize": (7, 3.6), "figure.constrained_layout.use": True, "savefig.dpi": 110}
        ):
            exec(code, names)
        yield picture, names["fig"]


def data(figure):
    """Return the texts and the numbers that a picture shows."""
    axes = []
    for ax in figure.axes:
        lines = [
            [list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))]
            for line in ax.lines
        ]
        blocks = [
            path.vertices.tolist()
            for found in ax.collections
            for path in found.get_paths()
            if len(path) == 5
        ]
        points = [found.get_offsets().tolist() for found in ax.collections]
        axes.append(
            {
                "texts": [text.get_text() for text in ax.texts],
                "lines": lines,
                "blocks": blocks,
                "points": points,
            }
        )
    return {"title": figure.get_suptitle(), "note": figure.get_supxlabel(), "axes": axes}


def gradient_error():
    """Return the picture of docs/mgrit.md: gradient errors of four coarse steps, for a network that has learned the digits."""
    digits, rngs, solver = datasets.digits(), nnx.Rngs(0), lp_jax.MGRIT()
    opening = nn.DenseOpening(digits.shape, 64, rngs=rngs)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(64, rngs=rngs), 64, t1=2.0, rngs=rngs)
    model = nn.Classifier(opening, trunk, nn.DenseClosing((64,), 10, rngs=rngs))
    loss_fn, params = train.classification(model)
    optimizer = optax.adam(3e-3)
    state, step_fn = train.init_state(params, optimizer), train.make_train_step(loss_fn, optimizer)
    for epoch in range(30):
        for batch in datasets.batches(digits, 50, seed=0, epoch=epoch):
            state, _ = step_fn(state, batch, solver, solver)
    coarse_steps = {
        "injection": lp_jax.Rediscretize(params="inject"),
        "mean of parameters": lp_jax.Rediscretize(params="mean"),
        "1 Picard sweep": lp_jax.Picard(sweeps=1),
        "2 Picard sweeps": lp_jax.Picard(sweeps=2),
    }
    fig, ax = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    for (name, coarse_step), marker in zip(coarse_steps.items(), "os^D", strict=True):
        cycles = [lp_jax.MGRIT(coarse_step=coarse_step, iterations=n) for n in (1, 2, 3)]
        pairs = [lambda p, s=s: loss_fn(p, batch, s, s)[0] for s in cycles]
        errors = [lp_jax.gradient_error(loss)(state.params).relative for loss in pairs]
        ax.semilogy([1, 2, 3], errors, marker=marker, label=name)
    ax.set(
        xlabel="cycles, forward and adjoint",
        ylabel="relative error of the gradient",
        xticks=[1, 2, 3],
    )
    ax.set_title("Coarse steps: 64 layers that have learned the digits", loc="left")
    ax.grid(True, color="#DDDDDD")
    ax.legend(title="coarse step", frameon=False)
    return fig


def measure():
    """Train, and keep the pictures of how it went."""
    gradient_error().savefig(IMAGES / "gradient_error.png")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lp_jax", "demo", "--seed", "1", "--out", folder]
        subprocess.run(command, check=True)
        shutil.copy(Path(folder, "race.png"), IMAGES / "race.png")


if __name__ == "__main__":
    # the gallery comes first, because its page sets the number of devices, which JAX takes until it first runs
    for name, figure in gallery():
        figure.savefig(IMAGES / name)
    drawn = figures()
    for name, figure in drawn.items():
        figure.savefig(IMAGES / name)
    (IMAGES / "data.json").write_text(
        json.dumps({name: data(figure) for name, figure in drawn.items()}) + "\n"
    )
    for name, figure in {
        "plan.png": plan(),
        "scaling.png": scaling(),
        "drift.png": drift(),
        "at_once.png": at_once(),
    }.items():
        figure.savefig(IMAGES / name)
    (IMAGES / "gpu_trainings.png").write_bytes(gpu_trainings())
    (IMAGES / "tunnel.png").write_bytes(tunnel())
    (IMAGES / "pod.png").write_bytes(pod())
    if "--measure" in sys.argv[1:]:
        measure()
