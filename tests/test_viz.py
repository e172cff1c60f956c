"""Pictures: they show the numbers they were given, and nothing overlaps."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import lp_jax
from lp_jax import _serial, viz
from lp_jax.train import flat

INJECT = lp_jax.Rediscretize(params="inject")


def rows(accuracy, steps=40):
    train = [{"kind": "train", "step": i, "loss": 2.0 / i} for i in range(1, steps + 1)]
    return [*train, *({"kind": "test", "step": i, "accuracy": accuracy} for i in (1, steps))]


def probe(step, forward, adjoint):
    return {"kind": "probe", "step": step} | flat("forward_residual", forward) | flat("adjoint_residual", adjoint)


def drawn(figure):
    """The renderer that the layout was made with."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def texts_overlap(figure):
    """Pairs of texts that cover each other, anywhere on the figure."""
    renderer = drawn(figure)
    found = [text for ax in figure.axes for text in ax.texts]
    found += [text for ax in figure.axes for text in (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label)]
    found += [text for text in (figure._suptitle, figure._supxlabel) if text is not None]
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in found if text.get_text()]
    legends = [ax.get_legend() for ax in figure.axes]
    boxes += [("legend", legend.get_window_extent(renderer).padded(-1)) for legend in legends if legend is not None]
    return [(a, b) for (a, box), (b, other) in itertools.combinations(boxes, 2) if box.overlaps(other)]


def texts_outside(figure):
    """Texts that leave the figure."""
    renderer = drawn(figure)
    found = [text for ax in figure.axes for text in ax.texts] + [figure._suptitle, figure._supxlabel]
    width, height = figure.canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in found if text is not None]
    return [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]


def test_curves_show_both_runs(tmp_path):
    figure = viz.curves({"layer-parallel": rows(0.98), "serial": rows(0.975)})
    assert figure.get_suptitle() == "Layer-parallel training reaches 98.0% test accuracy, serial 97.5%"
    loss_ax, accuracy_ax = figure.axes
    thin, mean = loss_ax.lines[:2]
    np.testing.assert_array_equal(thin.get_ydata(), 2.0 / np.arange(1, 41))
    assert mean.get_ydata()[-1] == pytest.approx(2.0 / 40, rel=0.05)
    assert [line.get_ydata()[-1] for line in accuracy_ax.lines] == [0.98, 0.975]
    assert figure.canvas.manager is None  # no window, no global list of figures
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert texts_overlap(figure) == [] and texts_outside(figure) == []


def test_costs_are_drawn_against_work_and_against_depth():
    def spent(steps, depth):
        train = [{"kind": "train", "step": i, "loss": 2.0 / i, "work": 192 * i} for i in range(1, steps + 1)]
        return [row | {"depth": None if depth is None else depth * row["step"]} for row in train]

    figure = viz.costs({"one-shot": spent(40, 12), "serial": spent(40, 192), "mgopt": spent(9, None)})
    by_work, by_depth = figure.axes
    assert [line.get_label() for line in by_work.lines] == ["one-shot", "serial", "mgopt"]
    assert [line.get_label() for line in by_depth.lines] == ["one-shot", "serial"]
    assert [line.get_xdata()[-1] for line in by_depth.lines] == [480, 7680]
    assert texts_overlap(figure) == [] and texts_outside(figure) == []
    with pytest.raises(ValueError, match="runs is empty"):
        viz.costs({})
    with pytest.raises(ValueError, match="'serial' has no row of kind 'train'"):
        viz.costs({"serial": []})


def test_curves_without_evaluations_or_with_gaps():
    gaps = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, None), (2, 1.0))]
    figure = viz.curves({"serial": gaps})
    assert figure.get_suptitle() == "Training"
    with pytest.raises(ValueError, match="runs is empty"):
        viz.curves({})
    with pytest.raises(ValueError, match="'serial' has no row of kind 'train'"):
        viz.curves({"serial": []})


def test_residuals_show_first_and_last_probe():
    probes = [probe(step, [None, 1.0, 0.1], [None, 0.5, 0.01]) for step in range(1, 12)]
    figure = viz.residuals(probes, moments=3)
    assert figure.get_suptitle() == "A cycle divides the residual norm by 10 to 50"
    forward, adjoint = figure.axes
    assert [line.get_label() for line in forward.lines] == ["step 1", "step 6", "step 11"]
    np.testing.assert_array_equal(forward.lines[0].get_xdata(), [2, 3])
    np.testing.assert_array_equal(adjoint.lines[0].get_ydata(), [0.5, 0.01])
    assert texts_overlap(figure) == [] and texts_outside(figure) == []


def test_residuals_that_grow_are_in_the_title():
    figure = viz.residuals([probe(1, [1.0, 3.0], [1.0, 0.5])])
    assert figure.get_suptitle() == "The residual norm grows in some cycles, by up to 3"
    with pytest.raises(ValueError, match="no row of kind 'probe'"):
        viz.residuals(rows(0.9))


def test_gradient_errors_and_the_runs_own():
    errors = {"injection": [0.9, 0.1, 0.01], "2 Picard sweeps": [5e-3, 6e-6, 7e-7]}
    figure = viz.gradient_errors(errors, run=("this run", 2, 0.03))
    wanted = "After 2 cycles, the gradient error is 0.1 with injection,\n6×10⁻⁶ with 2 Picard sweeps"
    assert figure.get_suptitle() == wanted
    (ax,) = figure.axes
    assert ax.get_yscale() == "log"
    for line, values in zip(ax.lines, [*errors.values(), [0.03]], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values)
    assert list(ax.lines[2].get_xdata()) == [2]
    assert texts_overlap(figure) == [] and texts_outside(figure) == []
    with pytest.raises(ValueError, match="errors is empty"):
        viz.gradient_errors({})


def test_gradient_errors_that_are_zero_or_alone_have_a_title_too():
    figure = viz.gradient_errors({"Picard": [0.5, 0.0, 0.0]}, iteration="sweep")
    assert figure.get_suptitle() == "After 3 sweeps, the gradient error is 0 with Picard"


SOLVERS = {
    "two levels": (lp_jax.MGRIT(iterations=2), 64),
    "three levels, F": (lp_jax.MGRIT(levels=3, cycle="F", skip_downcycle=False, coarse_step=INJECT), 1024),
    "four levels, W, a short interval": (lp_jax.MGRIT(levels=4, coarsening=2, cycle="W"), 37),
    "many iterations": (lp_jax.MGRIT(coarsening=16, iterations=12, relaxation="FCFCF"), 4096),
    "factors per level": (lp_jax.MGRIT(levels=3, coarsening=(8, 2), iterations=3), 100),
    "serial": (lp_jax.Serial(), 64),
    "Picard": (lp_jax.Picard(sweeps=3), 200),
    "windows": (lp_jax.Picard(sweeps=3, windows=4), 200),
    "Newton": (lp_jax.Newton(jacobian="diagonal", batch_axes=1), 200),
    "too short to coarsen": (lp_jax.MGRIT(), 2),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_hierarchy_is_legible(name, tmp_path):
    solver, layers = SOLVERS[name]
    figure = viz.hierarchy(solver, layers, t1=2.0, adjoint_solver=lp_jax.MGRIT(iterations=1))
    assert figure.get_suptitle().startswith(f"{layers} layers")
    assert texts_overlap(figure) == [] and texts_outside(figure) == []
    shown = "\n".join(text.get_text() for text in figure.axes[0].texts)
    span = 1
    for steps, factor in solver.grid(layers):
        assert f"{steps} steps" in shown
        if layers % span == 0:
            assert f"dt = {2.0 / layers * span:.4g}" in shown
        span *= factor


@pytest.mark.parametrize("kind", ["V", "F", "W"])
@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize("skip", [False, True])
def test_the_path_drawn_is_the_one_that_the_solver_takes(kind, levels, skip, monkeypatch):
    spans = []  # of the levels that the cycle relaxes, and solves, in order

    def watched(original):
        def call(*args, **kwargs):
            spans.extend(level.span for level in args if isinstance(level, lp_jax.Level))
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(lp_jax.MGRIT, "pre_relax", watched(lp_jax.MGRIT.pre_relax))
    monkeypatch.setattr(_serial, "march", watched(_serial.march))
    hierarchy = {"levels": levels, "coarsening": 2, "cycle": kind, "coarse_step": INJECT}
    solver = lp_jax.MGRIT(iterations=1, skip_downcycle=skip, **hierarchy)

    def step(y, layer):
        return y + layer.dt * layer.params * y

    jax.eval_shape(lambda params: lp_jax.solve(step, params, jnp.ones(()), solver=solver).y1, jnp.ones(16))

    # what the path goes down from, and the solves
    stops = solver.stops(16, 1)
    after = [*stops[1:], stops[-1]]
    downward = [
        stop.level for stop, next in zip(stops, after, strict=True) if next.level > stop.level or stop.label == "solve"
    ]
    assert downward == [int(math.log2(span)) for span in spans]


def test_skipped_down_cycle_starts_on_the_coarsest_level():
    stops = lp_jax.MGRIT(levels=3, relaxation=("F", "FCF")).stops(64, 2)
    wanted = [(2, "solve"), (1, "F"), (0, "F"), (1, "FCF"), (2, "solve"), (1, "F"), (0, "FC")]
    assert [(stop.level, stop.label) for stop in stops] == wanted
    assert [stop.iteration for stop in stops if stop.iteration] == [1, 2]
