"""Pictures: they show the numbers they were given, and nothing overlaps."""

import dataclasses
import importlib
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from problems import INJECT
from relaxation import Relaxation

import lp_jax
from lp_jax import viz
from lp_jax._solvers import _cycle, _serial
from lp_jax.planning._schedule import count
from lp_jax.viz._hierarchy import batches
from lp_jax.viz._schedule import timelines


def check_legible(figure):
    """No two texts cover each other, and none leaves the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, (width, height) = canvas.get_renderer(), canvas.get_width_height()
    texts = [
        figure._suptitle,
        figure._supxlabel,
        *(text for ax in figure.axes for text in ax.texts),
    ]
    for box in (text.get_window_extent(renderer) for text in texts if text is not None):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    texts += [
        text
        for ax in figure.axes
        for text in (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label)
    ]
    texts += [ax.get_legend() for ax in figure.axes]
    shown = [
        text for text in texts if text is not None and getattr(text, "get_text", lambda: "legend")()
    ]
    boxes = [text.get_window_extent(renderer).padded(-1) for text in shown]
    pairs = itertools.combinations(zip(shown, boxes, strict=True), 2)
    assert not [(text, other) for (text, a), (other, b) in pairs if a.overlaps(b)]


SOLVERS = {
    "two levels": (lp_jax.MGRIT(iterations=2), 64),
    "three levels, F": (lp_jax.MGRIT(levels=3, cycle="F", start="guess", coarse_step=INJECT), 1024),
    "four levels, W, a short interval": (lp_jax.MGRIT(levels=4, coarsening=2, cycle="W"), 37),
    "many iterations": (lp_jax.MGRIT(coarsening=16, iterations=12, relaxation="FCFCF"), 4096),
    "factors per level": (lp_jax.MGRIT(levels=3, coarsening=(8, 2), iterations=3), 100),
    "serial": (lp_jax.Serial(), 64),
    "Picard": (lp_jax.Picard(sweeps=3), 200),
    "windows": (lp_jax.Windowed(sweeps=3, windows=4), 200),
    "Newton": (lp_jax.Newton(jacobian="diagonal", batch_axes=1), 200),
    "too short to coarsen": (lp_jax.MGRIT(), 2),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_hierarchy_is_legible(name):
    solver, layers = SOLVERS[name]
    figure = viz.hierarchy(solver, layers, t1=2.0, adjoint_solver=lp_jax.MGRIT(iterations=1))
    assert figure.get_suptitle().startswith(f"{layers} layers")
    check_legible(figure)
    shown = "\n".join(text.get_text() for ax in figure.axes for text in ax.texts)
    span = 1
    for steps, factor in solver.grid(layers) if len(figure.axes) > 1 else []:
        assert f"{steps} steps" in shown
        assert layers % span or f"dt = {2.0 / layers * span:.4g}" in shown
        span *= factor


@pytest.mark.parametrize(  # of two levels all cycles are one; on more, every pair of two of the three
    ("kind", "levels", "skip"),
    [("V", 2, False), ("V", 2, True)]
    + [(kind, levels, (i + levels) % 2 == 0) for i, kind in enumerate("VFW") for levels in (3, 4)],
)
def test_the_path_drawn_is_the_one_that_the_solver_takes(kind, levels, skip, monkeypatch):
    spans = []  # of the levels that the cycle relaxes, and solves, in order

    def watched(original):
        def call(*args, **kwargs):
            spans.extend(level.span for level in args if isinstance(level, lp_jax.multigrid.Level))
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(_cycle, "relaxed", watched(_cycle.relaxed))
    monkeypatch.setattr(_serial, "march_and_emit", watched(_serial.march_and_emit))
    options = {
        "levels": levels,
        "coarsening": 2,
        "cycle": kind,
        "coarse_step": INJECT,
        "iterations": 1,
    }
    solver = lp_jax.MGRIT(start="cascade" if skip else "guess", **options)
    problem = lp_jax.Problem(
        lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(16), jnp.ones(())
    )
    jax.eval_shape(lambda: problem.solve(solver=solver).y1)
    # what the path goes down from, and the solves
    stops = viz.describe(solver, 16).stops
    pairs = zip(stops, [*stops[1:], stops[-1]], strict=True)
    downward = [
        stop.level for stop, after in pairs if after.level > stop.level or stop.label == "solve"
    ]
    assert downward == [int(math.log2(span)) for span in spans]


def test_skipped_down_cycle_starts_on_the_coarsest_level():
    stops = viz.describe(lp_jax.MGRIT(levels=3, relaxation=("F", "FCF"), iterations=2), 64).stops
    wanted = [(2, "solve"), (1, "F"), (0, "F"), (1, "FCF"), (2, "solve"), (1, "F"), (0, "FC")]
    assert [(stop.level, stop.label) for stop in stops] == wanted
    assert [stop.iteration for stop in stops if stop.iteration] == [1, 2]


# --- which layers, and which workers, compute when ------------------------------------------------------------------


def test_batches_of_a_solve_on_one_device():
    windows = batches(lp_jax.Windowed(sweeps=3, windows=4), 64)
    assert [batch[:2] for batch in windows] == [
        (16 * w, 16) for w in range(4) for _ in (1, 2)
    ] + 2 * [(0, 64)]
    assert [batch[:2] for batch in batches(lp_jax.Serial(), 5)] == [(n, 1) for n in range(5)]
    figure = viz.hierarchy(lp_jax.Windowed(sweeps=3, windows=4), 64)
    (ax,) = figure.axes
    spans = sorted(tuple(p.get_extents().intervalx) for c in ax.collections for p in c.get_paths())
    assert spans == sorted((float(first), float(first + number)) for first, number, _ in windows)
    # sweeps that are alike are drawn once, with their number; five are drawn as they are
    figure = viz.hierarchy(lp_jax.Picard(sweeps=32, rtol=1e-3), 64)
    (ax,) = figure.axes
    assert figure.get_suptitle() == "64 layers at once, 32 Picard sweeps at most: no coarse level"
    assert [text.get_text() for text in ax.texts] == ["···  at most 29 more, like these"] and len(
        ax.collections
    ) == 4
    (ax,) = viz.hierarchy(lp_jax.Picard(sweeps=5), 64).axes
    assert not ax.texts and len(ax.collections) == 6


IDENTITY = {"coarsening": 16, "coarse_step": lp_jax.Identity(), "storage": "all", "start": "guess"}


def test_timelines_by_hand():
    """Two relaxations and the final sweep forward; back one, the final sweep and the gradient.

    Then propagation in turn, and gradients at once.
    """
    there, back = timelines([lp_jax.MGRIT(iterations=n, **IDENTITY) for n in (2, 1)], 64, 4)
    for worker in range(4):
        mine = [block[1:] for block in there.blocks if block.worker == worker]
        assert mine == [("relaxation", 0, 16), ("relaxation", 16, 32), ("final sweep", 32, 48)]
        mine = [block[1:] for block in back.blocks if block.worker == worker]
        assert mine == [("relaxation", 0, 16), ("final sweep", 16, 32), ("gradient", 32, 48)]
    assert {message[:2] for message in there.messages} == {(0, 1), (1, 2), (2, 3)}
    assert {message[:2] for message in back.messages} == {(1, 0), (2, 1), (3, 2)}
    assert {message.time for message in there.messages} == {16, 32, 48}
    there, back = timelines((lp_jax.Serial(), lp_jax.Serial()), 64, 4)
    assert there.blocks == [
        (worker, "propagation", 16.0 * worker, 16.0 * (worker + 1)) for worker in range(4)
    ]
    assert there.messages == [(worker, worker + 1, 16.0 * (worker + 1)) for worker in range(3)]
    assert [block.worker for block in back.blocks] == [3, 2, 1, 0, 3, 2, 1, 0] and back.end == 80
    assert {block[1:] for block in back.blocks[4:]} == {("gradient", 64.0, 80.0)}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("at_once", [64, 1, 5])
def test_a_timeline_is_as_long_as_what_is_counted(workers, at_once):
    """Blocks of a worker follow each other without overlap, and take the time of the batches that are counted."""
    others = [
        lp_jax.MGRIT(levels=3, relaxation="FCF"),
        lp_jax.MGRIT(coarsest=lp_jax.Picard(sweeps=2)),
        Relaxation(),
    ]
    windows = lp_jax.Windowed(sweeps=2, windows=4, storage="states")
    for solver in (
        lp_jax.Serial(),
        lp_jax.Picard(sweeps=3),
        windows,
        lp_jax.Newton(relaxations=3),
        *others,
    ):
        solver = (
            dataclasses.replace(solver, at_once=at_once) if "at_once" in vars(solver) else solver
        )
        pair = solver, solver.for_adjoint()
        for line, adjoint in zip(timelines(pair, 64, workers), (False, True), strict=True):
            options = {
                "workers": workers,
                "at_once": 1,
                "kept": solver.keeps_states,
                "adjoint": adjoint,
            }
            assert line.end == pytest.approx(count(pair[adjoint], 64, **options).batches.total())
            for worker in range(workers):
                mine = [block for block in line.blocks if block.worker == worker]
                assert all(b.start >= a.end - 1e-9 for a, b in itertools.pairwise(mine))
            assert bool(line.messages) == (workers > 1)


SCHEDULES = {
    "intervals": (lp_jax.MGRIT(iterations=2, **IDENTITY), 64, 4),
    "fewer intervals than workers": (lp_jax.MGRIT(levels=3), 64, 8),
    "coarse levels": (lp_jax.MGRIT(levels=3, coarse_step=INJECT), 256, 8),
    "windows": (lp_jax.Windowed(sweeps=3, windows=4), 64, 4),
    "Newton": (lp_jax.Newton(iterations=2), 64, 4),
    "alone": (lp_jax.Serial(), 64, 1),
    "many": (lp_jax.Picard(sweeps=3), 1000, 40),
    "from outside": (Relaxation(iterations=2), 64, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_legible_and_show_every_worker(name):
    solver, layers, workers = SCHEDULES[name]
    figure = viz.schedule(solver, layers, workers=workers)
    check_legible(figure)
    (ax,) = figure.axes
    busy = {
        round(path.get_extents().y0 + 0.3) for c in ax.collections for path in c.get_paths()[:1]
    }
    active = min(workers, -(-layers // solver.unit(layers)))
    assert set(range(active)) <= busy or solver.exact
    named = [label.get_text() for label in ax.get_yticklabels()]
    assert named[0].startswith("worker 0: layers 0-") and named[-1].startswith("serial")
    assert ("no layers" in "".join(named)) == (name == "fewer intervals than workers")
    assert figure.get_suptitle().endswith(f"{3 * layers} serially")
    assert ("drawn as one evaluation" in figure.get_supxlabel()) == (name == "Newton")


def test_a_schedule_refuses_no_layers():
    for wrong in ({"num_layers": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="must be at least 1; got 0"):
            viz.schedule(lp_jax.Serial(), **{"num_layers": 8} | wrong)


def test_a_notebook_shows_a_figure_without_pyplot():
    image, shown = viz.hierarchy(lp_jax.MGRIT(), 16)._repr_png_()
    assert image.startswith(b"\x89PNG") and shown["width"] == 72 * 12


def test_the_pictures_of_the_pages_are_those_that_are_drawn_today(monkeypatch):
    """Their numbers and texts; ``python docs/images.py`` draws them anew."""
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    images = importlib.import_module("images")
    drawn, stored = images.figures(), json.loads((docs / "images" / "data.json").read_text())
    assert set(stored) == set(drawn)
    for name, figure in drawn.items():
        assert json.loads(json.dumps(images.data(figure))) == stored[name], name
        assert (docs / "images" / name).is_file()
