"""``lp-jax demo``: what its table says."""

import json

import jax
import numpy as np
import pytest

from lp_jax import train
from lp_jax.cli import _demo


def a_log(times, accuracies, deeper=(), errors=()):
    """The log of one step an epoch; a row of kind "depth" before the steps named."""
    log = train.Log()
    for step, (seconds, accuracy) in enumerate(zip(times, accuracies, strict=True)):
        if step == 0 or step in deeper:
            log.write(kind="depth", step=step, layers=64)
        log.write(kind="train", step=step + 1, step_time=seconds)
        log.write(kind="test", step=step + 1, accuracy=accuracy)
    _demo.without_compilation(log)
    for error in errors:
        log.write(kind="probe", step=0, gradient_error=error)
    return log


def test_the_first_step_of_each_depth_counts_like_the_next_and_the_rest_is_compilation():
    log = a_log([5.0, 1.0, 1.0, 7.0, 2.0], [0.1, 0.5, 0.9, 0.8, 0.9], deeper={3})
    seconds, accuracies = zip(*_demo.curve(log), strict=True)
    assert seconds == pytest.approx((1, 2, 3, 5, 7)) and accuracies == (0.1, 0.5, 0.9, 0.8, 0.9)


def test_times_are_told_to_an_accuracy_that_all_end_with_and_beside_the_first_run():
    runs = {
        "exact": a_log([9.0, 2.0, 2.0, 2.0], [0.2, 0.6, 0.9, 0.95]),
        "fast": a_log([9.0, 1.0, 1.0, 1.0], [0.2, 0.9, 0.8, 0.9], errors=(1e-3, 0.1)),
    }
    target, numbers = _demo.numbers_of(runs)
    assert target == 0.9
    assert (numbers["exact"]["seconds"], numbers["fast"]["seconds"]) == (6.0, 2.0)
    assert (numbers["exact"]["accuracy"], numbers["fast"]["accuracy"]) == (0.95, 0.9)
    cells = [list(column.cells) for column in _demo.table(target, numbers).columns]
    assert cells[1] == [" 6.00 s (1.00)", " 2.00 s (0.33)"] and cells[2] == [
        " 8.00 s (1.00)",
        " 4.00 s (0.50)",
    ]
    assert cells[4] == ["none", "1e-03, 1e-01"]
    curves = {name: _demo.curve(log) for name, log in runs.items()}
    figure = _demo.race(target, numbers, curves)
    wanted = "Fast training reaches 90.0% in 2 s, exact training in 6 s"
    assert figure.get_suptitle() == wanted
    (ax,) = figure.axes
    named = {line.get_label(): line for line in ax.lines}
    assert named["fast"].get_xdata().tolist() == [1, 2, 3, 4]
    assert ax.get_ylim()[0] < 0.9 < ax.get_ylim()[1]


def test_the_demo_trains_on_two_devices_and_tells_the_error_of_its_gradients(
    tmp_path, monkeypatch, capsys
):
    """Sweeps follow the exact gradient, and are not exact; the rough ones less so. The reason below the table is a count."""
    monkeypatch.setattr(_demo, "_MOST_WORKERS", 2)
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        _demo.run(["--layers", "64", "--epochs", "2", "--no-pictures", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    parallel = ["layer-parallel", "layer-parallel, rough"]
    assert list(runs) == ["exact", "data parallel", *parallel, "nested", "nested, layer-parallel"]
    close, rough = (runs[name]["last_error"] for name in parallel)
    assert 1e-7 < close < 0.1 < 5 * rough and 3 * close < rough
    np.testing.assert_allclose(
        runs["data parallel"]["accuracy"], runs["exact"]["accuracy"], atol=0.01
    )
    np.testing.assert_allclose(
        runs["layer-parallel"]["accuracy"], runs["exact"]["accuracy"], atol=0.01
    )
    assert "an exact step is 192 evaluations of one layer" in printed
    assert "is 7 evaluations of 32 layers at once: 4 forward, 2 adjoint and the gradient" in printed
    assert "layer-parallel, rough" in printed


def test_layers_that_cannot_be_halved_are_refused():
    with pytest.raises(Exception, match="--layers must be a multiple of 64; got 100"):
        _demo.run(["--layers", "100"])
