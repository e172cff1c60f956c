"""``lp-jax demo``: what its table says."""

import json

import jax
import numpy as np
import pytest

from lp_jax import train
from lp_jax.cli import _demo


def a_log(times, accuracies, deeper=()):
    """The log of one step an epoch; a row of kind "depth" before the steps named."""
    log = train.Log()
    for step, (seconds, accuracy) in enumerate(zip(times, accuracies, strict=True)):
        if step == 0 or step in deeper:
            log.write(kind="depth", step=step, layers=64)
        log.write(kind="train", step=step + 1, step_time=seconds)
        log.write(kind="test", step=step + 1, accuracy=accuracy)
    return log


def test_the_first_step_of_each_depth_counts_like_the_next_and_the_rest_is_compilation():
    log = a_log([5.0, 1.0, 1.0, 7.0, 2.0], [0.1, 0.5, 0.9, 0.8, 0.9], deeper={3})
    seconds, accuracies = zip(*_demo.curve(log), strict=True)
    assert seconds == pytest.approx((1, 2, 3, 5, 7)) and accuracies == (0.1, 0.5, 0.9, 0.8, 0.9)


def test_times_are_told_to_an_accuracy_that_all_end_with_and_beside_the_exact_run():
    exact = a_log([9.0, 2.0, 2.0, 2.0], [0.2, 0.6, 0.9, 0.95])
    fast = a_log([9.0, 1.0, 1.0, 1.0], [0.2, 0.9, 0.8, 0.9])
    runs = {
        "exact": _demo.Run(_demo.curve(exact), []),
        "fast": _demo.Run(_demo.curve(fast), [1e-3, 0.1]),
    }
    target, seconds = _demo.reached(runs)
    assert target == 0.9 and seconds == {"exact": 6.0, "fast": 2.0}
    cells = [list(column.cells) for column in _demo.table(target, runs, seconds).columns]
    assert cells[1] == [" 6.00 s (1.00)", " 2.00 s (0.33)"]
    assert cells[2] == [" 8.00 s (1.00)", " 4.00 s (0.50)"]
    assert cells[3] == ["95.0%", "90.0%"]
    assert cells[4] == ["none", "1e-03, 1e-01"]
    figure = _demo.race(target, runs, seconds)
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
    close, rough = (runs[name]["errors"][-1] for name in parallel)
    assert 1e-7 < close < 0.1 < 5 * rough and 3 * close < rough
    accuracy = {name: run["curve"][-1][1] for name, run in runs.items()}
    # one held-out image in a hundred, as training in single precision makes rounding grow
    for name in ("data parallel", "layer-parallel"):
        np.testing.assert_allclose(accuracy[name], accuracy["exact"], atol=0.01)
    assert "an exact step is 192 evaluations of one layer" in printed
    assert "is 7 evaluations of 32 layers at once: 4 forward, 2 adjoint and the gradient" in printed
    assert "layer-parallel, rough" in printed


def test_layers_that_cannot_be_halved_are_refused():
    with pytest.raises(Exception, match="--layers must be a multiple of 64; got 100"):
        _demo.run(["--layers", "100"])
