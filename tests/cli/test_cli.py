"""The command line: options, results, resuming, and one line for everything that can go wrong."""

import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import data_files
import jax
import numpy as np
import pytest
from command import one_line, run
from problems import INJECT, machine

import lp_jax
from lp_jax import planning, train, viz
from lp_jax.cli import _errors, _experiment, _models, _options, _problems, _report, _train, main
from lp_jax.planning._schedule import count
from lp_jax.planning._words import code

# optax's Adam raises floats to an integer step count
pytestmark = pytest.mark.usefixtures("standard_promotion")


SMALL = [
    "--layers",
    "8",
    "--width",
    "6",
    "--batch-size",
    "200",
    "--epochs",
    "2",
    "--log-every",
    "3",
]
STEPS = 2 * (1437 // 200)
SWEEPS = ["--solver", "Picard", "--solver.sweeps", "2"]  # compiles quickly, and so do these cycles
MEAN = ["--solver.coarse_step", "Rediscretize", "--solver.coarse_step.params", "mean"]
CYCLES = ["--solver", "MGRIT", "--solver.iterations", "1", *MEAN]


@pytest.fixture
def unmeasured(monkeypatch):
    """Call it where a run goes on: its probes and tests are those of the first call, and programs of their own."""
    return lambda: monkeypatch.setattr(_train, "_measures", lambda *given: [])


@pytest.fixture
def cli(capsys):
    return functools.partial(run, capsys)


def rows_of(folder, kind="train"):
    return train.Log(folder / "metrics.jsonl").of(kind)


def test_help_shows_examples_groups_and_defaults(cli):
    code, out, _ = cli("train", "mnist", "--model", "conv", "--help-all")
    assert code == 0 and "lp-jax train mnist --data ~/mnist" in out
    for title in (
        "Data and model:",
        "Residual layers of two convolutions:",
        "Training:",
        "Solvers:",
        "Output:",
    ):
        assert f"\n{title}\n" in out
    for option, default in (
        ("--layers", "32"),
        ("--t1", "1.0"),
        ("--epochs", "5"),
        ("--stride", "1"),
    ):
        assert re.search(rf"{option} [^-]*default: {default}\)", " ".join(out.split()))
    assert "default: null" not in out and "--heads" not in out


@pytest.mark.parametrize("kind", [lp_jax.MGRIT, lp_jax.Picard, lp_jax.Newton, lp_jax.Serial])
def test_every_field_of_a_solver_is_an_option(cli, kind):
    code, out, _ = cli("train", "digits", "--solver.help", kind.__name__)
    assert code == 0 and all(f"--solver.{field.name}" in out for field in dataclasses.fields(kind))


def options(*args, stored=()):
    """The options that the command would take, and as what it would store them."""
    known = _problems.PROBLEMS["digits"]
    parser = _options.parser_of("lp-jax train", known, "dense", "")
    _options.add_training(parser, known.models["dense"], "digits")
    return _options.parse(parser, known, list(_options.spelled_out(args)), dict(stored))


def solvers(*args, model=_models.Dense()):
    """The solvers of a command line; what is stored of them gives the same ones."""
    given, stored = options(*args)
    found = _options.solvers(given, model)
    assert _options.solvers(options(stored=json.loads(json.dumps(stored)))[0], model) == found
    return found


FULL = lp_jax.MGRIT(
    levels=3, coarsening=(4, 2), rtol=1e-3, relaxation=("FCF", "FCFCF"), cycle="W", at_once=8
)
FULL = dataclasses.replace(
    FULL,
    coarse_step=lp_jax.Rediscretize(params="mean"),
    coarsest=lp_jax.Picard(sweeps=3),
    iterations=5,
)
NEWTON = "--solver Newton --solver.batch_axes 1"
CLIPPED = lp_jax.Newton(jacobian="diagonal", damping=lp_jax.Clip(limit=0.5), batch_axes=1)
AROUND = lp_jax.MGRIT(coarse_step=lp_jax.Picard(sweeps=3, around="trajectory"))
WITHIN = lp_jax.MGRIT(coarse_step=lp_jax.Newton(batch_axes=1))
PAIRS = {  # forward and adjoint; one where both are the same
    "--serial": lp_jax.Serial(),
    "--solver MGRIT": lp_jax.MGRIT(),
    f"{NEWTON} --solver.jacobian diagonal --solver.damping Clip --solver.damping.limit 0.5": CLIPPED,
    "--solver MGRIT --solver.coarse_step.sweeps 3 --solver.coarse_step.around trajectory": AROUND,
    "--solver MGRIT --solver.coarse_step Newton --solver.coarse_step.batch_axes 1": WITHIN,
    """--solver MGRIT --solver.levels 3 --solver.coarsening [4,2] --solver.iterations 5 --solver.rtol 1e-3
        --solver.relaxation [FCF,FCFCF] --solver.cycle W --solver.coarse_step Rediscretize --solver.coarse_step.params mean
        --solver.coarsest Picard --solver.coarsest.sweeps 3 --solver.at-once 8 --adjoint-iterations 2""": (
        FULL,
        dataclasses.replace(FULL, iterations=2, rtol=None, atol=None),
    ),
    "": _models.Dense.solvers,
    "--solver Picard --solver.sweeps 3 --adjoint_iterations 2": (
        lp_jax.Picard(sweeps=3),
        lp_jax.Picard(sweeps=2),
    ),
    "--solver Windowed --solver.windows 8 --adjoint_solver MGRIT": (
        lp_jax.Windowed(windows=8),
        lp_jax.MGRIT(),
    ),
    "--adjoint_solver Serial": (_models.Dense.solvers[0], lp_jax.Serial()),
    f"{NEWTON} --solver.iterations 7": (
        lp_jax.Newton(iterations=7, batch_axes=1),
        lp_jax.Newton(iterations=7, batch_axes=1).for_adjoint(),
    ),
}


@pytest.mark.parametrize("text", PAIRS)
def test_options_build_the_solver_that_they_name_and_the_adjoint_follows(text):
    """And the short form of solvers, as plans and pictures write it, is code."""
    found, wanted = solvers(*text.split()), PAIRS[text]
    assert found == (wanted if isinstance(wanted, tuple) else (wanted, wanted))
    assert eval(code(found), vars(lp_jax)) == found
    assert text or solvers(model=_models.GRU()) == (
        _models.CYCLES,
        _models.CYCLES,
    )  # a recurrent network's own


def test_a_solver_of_the_user_is_named_by_its_module(cli, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import dataclasses, lp_jax\nfrom lp_jax._arrays._check import register\n\n@register()\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        'class Jacobi(lp_jax.Picard):\n    """Sweeps.\n\n    Args:\n        weight: Weight of a sweep.\n    """\n\n'
        "    weight: float = 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("train", "digits", "--solver.help", "mine.Jacobi")
    assert code == 0 and "Weight of a sweep." in out
    forward, adjoint = solvers(
        "--solver", "mine.Jacobi", "--solver.weight", "0.5", "--adjoint_iterations", "1"
    )
    assert (
        type(forward).__name__ == "Jacobi"
        and forward.weight == adjoint.weight == 0.5
        and adjoint.sweeps == 1
    )


def test_another_class_of_solver_inherits_nothing_from_a_stored_one():
    args = [
        "--solver",
        "MGRIT",
        "--solver.storage",
        "all",
        "--adjoint_iterations",
        "1",
        "--devices",
        "2",
    ]
    _, stored = options(*args)
    args = ["--solver", "Picard", "--layers", "8"]
    kept = _options.overridden(stored, _options.first_look(args, "lp-jax train digits"), ())
    given, _ = options(*args, stored=kept)
    assert _options.solvers(given, _models.Dense()) == (lp_jax.Picard(), lp_jax.Picard())
    assert (given.layers, given.devices) == (8, 2)
    given, _ = options("--solver.iterations", "3", stored=stored)
    assert (
        given.solver == lp_jax.MGRIT(storage="all", iterations=3) and given.adjoint_iterations == 1
    )


def test_a_file_gives_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "layers: 8\nepochs: 3\nsolver:\n  class_path: MGRIT\n  init_args: {levels: 3}\n"
    )
    given, _ = options("--config", str(file), "--epochs", "4", "--solver.iterations", "1")
    assert (given.layers, given.epochs) == (8, 4)
    assert given.solver == lp_jax.MGRIT(levels=3, iterations=1)


LAUGHS = "\n".join(
    ["a0: &a0 []", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)
FILES = {
    "a wrong value": ("checkpoint_every: 0", "--checkpoint_every: 0 is not above 0"),
    "nothing": ("", "must hold options by name"),
    "numbered": ("3: 4", "must hold options by name"),
    "no YAML": ("a: b: c", "cannot be read as YAML or JSON"),
    "a class of number 3": ("solver: {class_path: 3}", "class_path must be a name"),
    "options in a list": (
        "solver: {class_path: MGRIT, init_args: [1]}",
        "init_args options by name",
    ),
    "nine-fold aliases": (LAUGHS, "holds 10,000 values or more"),
    "endless": ("a: &a [*a]", "cannot be read as YAML or JSON"),
    "a folder that is none": ("out: {a: 1}", "--out"),
    "a mesh of a list": ("mesh: [1, 2]", "--mesh"),
    "a flag that is none": ("mpi: 17", "mpi must be true or false; got 17"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_anything_else_is_wrong_use(cli, tmp_path, name):
    text, message = FILES[name]
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = cli(
        "train", "digits", "--config", tmp_path / "run.yaml", "--out", tmp_path / "run"
    )
    assert code == 2 and message in one_line(err)


TOO_LARGE = {
    "--width 10000000": "GiB of memory, and this machine has",
    "--layers 2000000000 --devices 1000000000": "GiB of memory, and this machine has",
    "--devices 9": "9 devices are needed and there are 8",
}


@pytest.mark.parametrize("options", TOO_LARGE)
def test_what_does_not_fit_the_machine_is_refused_at_once(cli, tmp_path, options):
    begun = time.monotonic()
    code, _, err = cli("train", "digits", "--out", tmp_path / "run", *options.split())
    assert code == 1 and TOO_LARGE[options] in err.splitlines()[-1]
    assert time.monotonic() - begun < 20


WRONG = {
    "--layers 0": "--layers must be at least 1; got 0",
    "--layers many": "--layers: Expected a whole number. Got value: many",
    "--layers 3000000000": "--layers must be at most 2147483647; got 3000000000",
    "--t1 0": "--t1 must be positive and finite; got 0.0",
    "--model transformer": "--model must be one of dense, conv; got 'transformer'",
    "--heads 2": "there is no option --heads.",
    "--solver MGRIT --solver.levels 0": "levels must be at least 1; got 0",
    "--solver MGRIT --solver.coarsest Picard --solver.coarsest.sweeps a": "--solver.coarsest.sweeps: Expected a whole number",
    "--solver MGRIT --solver.coarse_step Nobody": "--solver.coarse_step: there is no class Nobody",
    "--solver nowhere.Solver": "No module named 'nowhere'",
    "--solver Fastest": "--solver auto takes those that lp-jax plan recommends",
    "--solver auto --adjoint_iterations 2": "--solver auto chooses the adjoint solver, too",
    "--adjoint_iterations 0": "--adjoint_iterations: 0 is not above 0",
    "--layers 8 --method nested --depths [3,8]": "each a multiple of the one before",
    "--layers 8 --method nested --depths [2,4]": "end with the 8 layers of the network; got [2, 4]",
    "--method nested --controller 0.3": "--controller goes with --method direct and one-shot",
    "--depths [4,8]": "--depths goes with --method nested; got direct",
    "--method annealing": "'direct', 'one-shot', 'nested'",
    "--devices 2 --mesh layers=2": "give one of the two",
    "--mesh layers=0": "sizes of the axes layers and data",
    "--mesh data=3 --batch-size 50": "cannot be split evenly over data=3",
    "--devices 0": "--devices: invalid PositiveInt value: '0'",
    "--config nowhere.yaml": "--config: there is no file nowhere.yaml",
    "--config": "--config: expected one argument",
    "--distributed --coordinator nonsense --process 0/2": "--coordinator takes HOST:PORT",
    "--distributed --coordinator localhost:99999 --process 0/1": "with a port from 1 to 65535",
    "--distributed --coordinator localhost:1 --process 0/9999999999": "--process takes I/N",
    "--devices 65": "64 layers cannot be spread over layers=65",
    "--learnin_rate 1": "there is no option --learnin_rate; did you mean --learning_rate?",
    "--solver mgrit": "--solver: there is no class mgrit. It is MGRIT, Picard",
    "--solver.levels 3": "lp_jax.Solver is abstract. It is MGRIT, Picard",
    "--solver Picard --solver.sweep 3": "--solver: Option 'sweep' is not accepted. It is MGRIT",
    "--solver Picard --solver.rtol abc": "--solver.rtol: Expected a number. Got value: abc",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_refused_in_one_line(cli, tmp_path, options):
    code, out, err = cli("train", "digits", "--out", tmp_path / "run", *options.split())
    assert code == 2 and out == ""
    assert WRONG[options] in one_line(err)
    assert "lp-jax train digits --help" in err
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_of_the_user_stays(cli, tmp_path):
    code, _, err = cli("train", "digits", "--out", tmp_path, "--layers", 0)
    assert (
        code == 2
        and "--layers must be at least 1" in one_line(err)
        and list(tmp_path.iterdir()) == []
    )


MEANT = {
    "trian digits": "train",
    "train digit": "digits",
    "plan digit": "digits",
    "bench rank": "ranks",
}
MEANT["demo --layer 3"] = "--layers"


@pytest.mark.parametrize("line", MEANT)
def test_a_menu_guesses_what_was_meant(cli, line):
    code, out, err = cli(*line.split())
    assert code == 2 and out == "" and f"did you mean {MEANT[line]}?" in one_line(err)


def test_values_of_ones_own(cli, tmp_path, monkeypatch):
    """In units far from 1, with pictures, and planned."""
    monkeypatch.setattr(_report, "ITERATIONS", 1)
    x = np.random.default_rng(0).uniform(0, 2000, size=(300, 2))
    np.savez(tmp_path / "mine.npz", x=x, y=5000 + 3 * x[:, 0] - x[:, 1])
    data = ["--data", tmp_path / "mine.npz", "--layers", "8", "--width", "8"]
    code, _, err = cli("train", "arrays", "--out", tmp_path / "run", *data, "--model", "conv")
    assert code == 2 and "--model conv needs inputs of shape" in one_line(err)
    options = [*data, *SWEEPS, "--epochs", "20", "--learning-rate", "1e-2", "--no-compare"]
    code, out, err = cli("train", "arrays", "--out", tmp_path / "run", *options)
    assert code == 0 and "test loss" in out and "accuracy" not in out + err
    assert (
        "240 examples to train with, 60 held out; y: floating-point values; scaled to mean 0" in err
    )
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["results"]["layer-parallel"]
    assert found["test_loss"] < 0.05 and "test_accuracy" not in found
    for name in ("curves.png", "predictions.png"):
        assert (tmp_path / "run" / name).stat().st_size > 10_000
    machine(1e-5, 1e-5, at_once=(1, 8), examples=32).save(tmp_path / "machine.json")
    code, out, _ = cli(
        "plan", "arrays", *data, "--machine", tmp_path / "machine.json", "--seconds", "0.01"
    )
    assert code == 0 and "Use solver=" in out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run with all that a run leaves; the solvers that one picture compares are fewer and shorter."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    variants = lambda solver: {  # noqa: E731
        "injection": dataclasses.replace(solver, coarse_step=INJECT),
        "as it is": solver,
    }
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(_report, "ITERATIONS", 1)
        patch.setattr(viz._hierarchy, "variants", variants)
        with pytest.raises(SystemExit) as caught:
            main(["train", "digits", "--out", str(folder), *SMALL, *CYCLES])
    assert caught.value.code == 0
    return folder


def test_a_run_leaves_what_it_says(finished):
    names = {path.name for path in finished.iterdir()}
    pictures = {
        "curves.png",
        "costs.png",
        "residuals.png",
        "gradient_error.png",
        "hierarchy.png",
        "confusion.png",
    }
    assert (
        names
        == {"metrics.jsonl", "summary.json", "config.json", "checkpoints", "serial"} | pictures
    )
    assert all((finished / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary["results"]) == {"layer-parallel", "serial"}
    for name, folder in (("layer-parallel", finished), ("serial", finished / "serial")):
        steps, result = rows_of(folder), summary["results"][name]
        assert [row["step"] for row in steps] == list(range(1, STEPS + 1)) and result[
            "steps"
        ] == STEPS
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [str(STEPS)]
        assert name == "layer-parallel" or result["work"] / 200 == result["depth"] == STEPS * 3 * 8
        assert result["test_accuracy"] == rows_of(folder, "test")[-1]["accuracy"]
        assert result["time_per_step"] == np.median([row["step_time"] for row in steps])
    probe = rows_of(finished, "probe")[-1]
    assert summary["results"]["layer-parallel"]["gradient_error"] == probe["gradient_error"] < 0.5
    assert (
        probe["forward_residual_4"] < probe["forward_residual_2"] and "adjoint_residual_4" in probe
    )
    assert "gradient_error" not in summary["results"]["serial"]
    # the same seed: nearly the same network
    accuracies = [result["test_accuracy"] for result in summary["results"].values()]
    assert abs(accuracies[0] - accuracies[1]) < 0.05


def test_sweeps_to_a_tolerance_are_drawn_as_far_as_they_went(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(viz, "gradient_errors", drawn := mock.Mock(wraps=viz.gradient_errors))
    monkeypatch.setattr(_report, "ITERATIONS", 1)
    options = (
        "--solver",
        "Picard",
        "--solver.sweeps",
        "32",
        "--solver.rtol",
        "3e-1",
        "--t1",
        "1",
        *SMALL,
    )
    assert cli("train", "digits", "--out", tmp_path / "run", "--no-compare", *options)[0] == 0
    (probe, *_) = rows_of(tmp_path / "run", "probe")
    taken = sum(f"forward_residual_{n}" in probe for n in range(1, 33))
    assert 1 < taken < 8
    ((errors, *_), options), *_ = drawn.call_args_list
    assert len(errors["Picard"]) == options["run"][1] == taken
    assert errors["Picard"][-1] == pytest.approx(options["run"][2], rel=1e-3)


def test_a_controller_moves_tolerances_and_a_resumed_run_goes_on_with_them(
    cli, unmeasured, tmp_path
):
    options = ("--no-compare", "--no-pictures", "--controller", "0.3", *SMALL)
    code, _, err = cli("train", "digits", "--out", tmp_path / "no", *options, *CYCLES)
    assert code != 0 and "solver.rtol" in err and "Picard(sweeps=32, rtol=1e-2)" in err
    sweeps = ("--solver", "Picard", "--solver.sweeps", "16", "--solver.rtol", "1e-4")
    for more in ((*sweeps, "--epochs", "1"), ("--resume", "--epochs", "2")):
        assert cli("train", "digits", "--out", tmp_path / "run", *options, *more)[0] == 0
        unmeasured()
    decided = rows_of(tmp_path / "run", "control")
    assert [row["step"] for row in decided] == [1, 9]
    assert decided[0]["rtol"] == pytest.approx(4e-4) and decided[1]["rtol"] == pytest.approx(16e-4)
    assert all(row["error"] < row["allowed"] for row in decided)


METHODS = {"one-shot": "--epochs 4", "nested": "--epochs 2 --serial --devices 2 --depths [4,8]"}


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_tell_their_cost_and_go_on_to_the_same_numbers(
    cli, unmeasured, tmp_path, method
):
    given = [
        "train",
        "digits",
        "--out",
        tmp_path,
        "--method",
        method,
        *SMALL,
        *METHODS[method].split(),
    ]
    code, out, _ = cli(*given, "--no-compare", "--no-pictures", "--checkpoint-every", "3")
    assert code == 0 and method in out
    found = json.loads((tmp_path / "summary.json").read_text())["results"]
    steps = found[method]["steps"]
    rows = rows_of(tmp_path)
    if method == "one-shot":  # a sweep forward, two back and the gradient, two for each trial
        unit = planning.training_step(lp_jax.Picard(sweeps=1), lp_jax.Picard(sweeps=2), 8)
        trial = count(lp_jax.Picard(sweeps=2), 8)
        trials = sum(row["trials"] for row in rows)
        assert found[method]["work"] == 1400 * (steps * unit.work() + trials * trial.work())
        assert found[method]["depth"] == steps * unit.depth() + trials * trial.depth()
        assert found[method]["depth"] < steps * 24
    else:  # an epoch with half of the layers, one with all
        assert found[method]["work"] == 200 * steps / 2 * 24 * (1 / 2 + 1)
    saved = tmp_path / "checkpoints" / ("8-layers" if method == "nested" else "") / str(steps)
    shutil.rmtree(saved)  # as if the run had ended before
    unmeasured()
    assert cli("train", "digits", "--out", tmp_path, "--resume", "--no-pictures")[0] == 0
    again = rows_of(tmp_path)
    assert (
        saved.is_dir()
        and [row["loss"] for row in again] == [row["loss"] for row in rows]
        and len(rows) == steps
    )
    assert [again[i]["time"] == rows[i]["time"] for i in (0, -1)] == [
        True,
        False,
    ]  # only its end was trained again


def test_depths_that_are_not_given_are_parts_of_the_network():
    given, _ = options("--method", "nested", "--layers", "8")
    assert _train.depths_of(given, _problems.prepare("digits", vars(given))[0]) == [2, 4, 8]


def test_what_is_charged_is_what_was_taken():
    """By hand, of ten examples: a solver with a tolerance, and a step that a controller took serially."""
    pair = lp_jax.Picard(sweeps=16, rtol=1e-3), lp_jax.Picard(sweeps=16, rtol=1e-2)
    probe = {"kind": "probe"} | {f"adjoint_residual_{n}": 0.1 for n in (1, 2)}
    swept = {"kind": "train"} | {f"forward_residual_{n}": 0.1 for n in (1, 2, 3)}
    rows = [
        probe,
        {"kind": "depth", "layers": 4},
        swept,
        {"kind": "depth", "layers": 8},
        swept,
        {"kind": "train"},
    ]
    found = _experiment.with_costs(rows, pair, layers=8, examples=10)
    sweeps = [
        planning.training_step(lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2), n) for n in (4, 8)
    ]
    work = np.cumsum([*(each.work() for each in sweeps), 3 * 8])
    depth = np.cumsum([*(each.depth() for each in sweeps), 3 * 8])
    assert [row["work"] for row in found] == (work * 10).tolist()
    assert [row["depth"] for row in found] == depth.tolist()


def test_resuming_a_finished_run_prints_its_table(cli, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    code, out, err = cli("train", "digits", "--out", finished, "--resume", "--no-pictures")
    assert code == 0
    assert "layer-parallel: going on after step 14" in err
    assert (finished / "metrics.jsonl").read_bytes() == before
    summary = json.loads((finished / "summary.json").read_text())
    for result in summary["results"].values():
        assert f"{result['test_accuracy']:.2%}" in out and f"{result['test_loss']:.4f}" in out
    assert "exact" in out and f"{summary['results']['layer-parallel']['gradient_error']:.1e}" in out


@pytest.fixture(scope="module")
def untrained():
    return _experiment.experiment(*_problems.prepare("digits", {"layers": 8, "width": 4}))


def a_run(made, name, losses, step_time=1.0):
    """A finished training with these losses of the test set, one a step."""
    log = train.Log()
    for step, loss in enumerate(losses, 1):
        log.write(kind="train", step=step, epoch=0, loss=loss, step_time=step_time)
        log.write(kind="test", step=step, accuracy=0.5, loss=loss)
    return _experiment.Run(name, made, train.TrainState(len(losses), None, None), log, examples=10)


@pytest.mark.parametrize(
    "times, slower", [((4.0, 2.0), True), ((2.0, 2.05), False), ((2.05, 2.0), False)]
)
def test_a_slower_step_is_said_with_what_to_do(untrained, times, slower):
    runs = [
        a_run(untrained, *run)
        for run in zip(("layer-parallel", "serial"), ([2.0, 1.0],) * 2, times, strict=True)
    ]
    said = list(_report.remarks(runs))
    assert len(said) == slower
    assert all("took 2.0 times as long" in text and "lp-jax plan digits" in text for text in said)


FAILED = {
    (math.nan,): (
        "not finite",
        "its test loss is not finite. Look for very large inputs in the test set.",
    ),
    (1.0, 2.0): (
        "2.0000",
        "its test loss ended at 2, above the 1 that it began with. Lower --learning_rate",
    ),
}


@pytest.mark.parametrize("losses", FAILED)
def test_a_training_that_failed_says_so(untrained, losses):
    """A log has None for what is not finite."""
    run, (shown, remark) = a_run(untrained, "serial", losses), FAILED[losses]
    run.log.write(kind="probe", step=1, gradient_error=float("inf"), gradient_cosine=float("nan"))
    columns = [list(column.cells) for column in _report.table([run]).columns]
    assert columns[1][columns[0].index("test loss")] == shown
    (said,) = _report.remarks([run])
    assert said.startswith(f"serial has failed: {remark}")


def test_a_run_made_exact_has_no_gradient_error_of_before(cli, finished, tmp_path):
    copied = shutil.copytree(finished, tmp_path / "copied")
    more = ["--resume", "--serial", "--epochs", "3", "--no-compare", "--no-pictures"]
    code, out, _ = cli("train", "digits", "--out", copied, *more)
    assert code == 0 and "gradient error at the end" in out and "exact" in out
    (found,) = json.loads((copied / "summary.json").read_text())["results"].values()
    assert "gradient_error" not in found


def test_training_on_some_devices_goes_on_with_others(cli, unmeasured, finished, tmp_path):
    """Two devices, then two by two for layers and examples: the same run as on one all the way. The baseline is on one."""
    options = ("train", "digits", *SMALL, "--no-pictures", "--out", tmp_path, *CYCLES)
    code, _, err = cli(*options, "--epochs", 1, "--devices", 2)
    found = json.loads((tmp_path / "summary.json").read_text())["results"]
    assert code == 0 and (found["layer-parallel"]["devices"], found["serial"]["devices"]) == (2, 1)
    assert (
        "layer-parallel: compiling" in err
        and "serial: compiling" in err
        and "  residual" not in err
    )
    assert "devices: layers 2" in err
    unmeasured()
    code, _, err = cli(
        *options, "--epochs", 2, "--mesh", "layers=2,data=2", "--resume", "--no-compare"
    )
    assert code == 0 and "devices: layers 2, data 2" in err, err
    losses, wanted = ([row["loss"] for row in rows_of(folder)] for folder in (tmp_path, finished))
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)  # single precision


EVIL = {
    "a solver": ("solver", {"class_path": "evil.X"}),
    "a solver's name": ("solver", "evil.X"),
    "a solver as text": ("solver", '{"class_path": "evil.X"}'),
    "a key with a dot": ("solver.class_path", "evil.X"),
    "a coarse step": (
        "solver",
        {"class_path": "lp_jax.MGRIT", "init_args": {"coarse_step": "builtins.exec"}},
    ),
    "a function": (
        "adjoint_solver",
        {"class_path": "lp_jax.Newton", "init_args": {"jacobian_of": "evil.f"}},
    ),
    "another option": ("layers", {"class_path": "evil.X"}),
    "what a module of lp_jax imports": ("solver", {"class_path": "lp_jax.cli._launch.os.system"}),
    "a function of lp_jax": ("solver", {"class_path": "lp_jax.scan"}),
}


@pytest.mark.parametrize("name", EVIL)
def test_a_run_folder_chooses_nothing_that_is_imported(cli, tmp_path, monkeypatch, name):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    option, value = EVIL[name]
    _, stored = options(*SMALL)
    run = {
        "problem": "digits",
        "options": stored | {option: value},
        "fingerprint": {"model": "dense"},
    }
    (tmp_path / "config.json").write_text(json.dumps(run | {"solver": "", "adjoint_solver": ""}))
    code, _, err = cli("train", "digits", "--out", tmp_path, "--resume")
    assert code == 1 and re.search(
        r"config.json names '.*' for --.*, which is no class of lp_jax", one_line(err)
    )


def test_a_run_folder_may_name_what_the_command_line_names():
    _, stored = options("--solver", "MGRIT", "--solver.levels", "3")
    mine = {"class_path": "mine.Jacobi", "init_args": {"weight": 0.5, "coarse_step": "mine.f"}}
    named = ["--solver", "mine.Jacobi", "--solver.coarse_step=mine.f", "--out", "os.system"]
    look = _options.first_look(named, "lp-jax train digits")
    kept = _options.overridden(stored | {"solver": mine, "out": "/elsewhere"}, look, ())
    assert kept["solver"] == mine and "out" not in kept  # a folder cannot move itself
    again, _ = options("--solver", "lp_jax.MGRIT", stored=stored)
    assert again.solver == lp_jax.MGRIT(levels=3)  # the same class keeps its fields
    with pytest.raises(_errors.CommandError, match=r"'os.system' for --solver\.damping"):
        _options.overridden(
            stored | {"solver": mine | {"init_args": {"damping": "os.system"}}}, look, ()
        )


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"problem": "digits"}', None], ids=range(5)
)
def test_a_damaged_configuration_is_one_line(cli, tmp_path, text):
    config = tmp_path / "config.json"
    config.mkdir() if text is None else config.write_text(text)
    code, _, err = cli("train", "digits", "--out", tmp_path, "--resume")
    assert code == 1 and "is not the configuration of a run" in one_line(err)


def test_a_checkpoint_that_was_swapped_or_damaged_is_refused(cli, finished, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    config = json.loads((finished / "config.json").read_text())
    config["options"]["width"] = config["fingerprint"]["width"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copytree(finished / "checkpoints", folder / "checkpoints")
    code, _, err = cli("train", "digits", "--out", folder, "--resume")
    assert code == 1 and "of another model: width is 6 there and 7 here" in err.splitlines()[-1]
    about = folder / "checkpoints" / str(STEPS) / "_CHECKPOINT_METADATA"
    about.write_text(about.read_text().replace('"width": 6', '"width": 7'))
    code, _, err = cli("train", "digits", "--out", folder, "--resume", "--skip-damaged")
    assert (
        code == 1
        and "is damaged (its description has changed), and there is none before it"
        in err.splitlines()[-1]
    )


REFUSED = {
    "file": "cannot write to",
    "file/below": "cannot write to",
    "full": "is not empty and holds no run",
    "none --resume": "holds no run to resume",
    "run": "holds a run already; add --resume",
    "run --resume --layers 16": "of another model: layers is 8 there and 16 here",
    "run --resume --seed 1": "of another model: seed is 0 there and 1 here",
    "run --resume --model conv": "of another model: model is dense there and conv here",
}


def test_folders_of_other_things_and_of_other_runs_are_refused_and_stay_as_they_are(
    cli, finished, tmp_path
):
    (tmp_path / "run").symlink_to(finished)
    for name in ("file", "full/thesis.tex"):
        data_files.write(tmp_path / name, "mine")
    files = [path for path in (*tmp_path.rglob("*"), *finished.iterdir()) if path.is_file()]
    before = [path.read_bytes() for path in files]
    for options, wanted in REFUSED.items():
        code, out, err = cli("train", "digits", "--out", *f"{tmp_path}/{options}".split())
        assert code == 1 and out == "" and wanted in one_line(err)
        assert [path.read_bytes() for path in files] == before


def test_divergence_ends_with_advice_and_an_exit_code(cli, tmp_path):
    code, _, err = cli(
        "train", "digits", "--serial", "--out", tmp_path / "run", "--learning-rate", "1e38", *SMALL
    )
    last = err.splitlines()[-1]
    assert (
        code == 1
        and last.startswith("lp-jax: stopped at step ")
        and "Lower the learning rate" in last
    )
    assert cli("info")[0] == 0  # the process is as it was


def test_debug_shows_where_an_error_comes_from(cli, tmp_path):
    code, _, err = cli(
        "train", "digits", "--batch-size", "5000", "--debug", "--out", tmp_path / "run"
    )
    assert code == 1 and err.startswith("Traceback") and ", in steps_per_epoch\n" in err
    assert err.endswith("ValueError: --batch_size 5000 is more than the 1437 training examples.\n")
    assert not (tmp_path / "run").exists()


def test_mnist_trains_from_its_files_resumes_without_naming_them_and_says_what_is_missing(
    cli, tmp_path
):
    rng = np.random.default_rng(0)
    parts = [
        (rng.integers(256, size=(count, 5, 4)), rng.integers(10, size=count)) for count in (60, 20)
    ]
    mnist, run = data_files.mnist(tmp_path / "mnist", *parts[0], *parts[1]), tmp_path / "run"
    options = [
        "--serial",
        "--model",
        "conv",
        "--layers",
        "4",
        "--batch-size",
        "20",
        "--epochs",
        "1",
        "--no-pictures",
    ]
    code, out, _ = cli("train", "mnist", "--data", mnist, "--out", run, *options)
    assert code == 0 and "test accuracy" in out
    assert cli("train", "mnist", "--out", run, "--resume", "--no-pictures")[0] == 0
    images = mnist / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:100])
    for args, wanted, message in (
        (["digits", "--out", run, "--resume"], 1, "holds a run on mnist, not digits"),
        (["mnist", "--data", mnist, "--out", tmp_path / "other"], 1, str(images)),
        (
            ["mnist", "--data", tmp_path, "--out", tmp_path / "other"],
            1,
            "has no file train-images-idx3-ubyte",
        ),
        (["mnist"], 2, "--data"),
    ):
        code, _, err = cli("train", *args)
        assert code == wanted and message in one_line(err)


def program(*args, stdout=subprocess.PIPE, **variables):
    """Exit code and both outputs of a Python program."""
    options = {
        "cwd": Path(lp_jax.__file__).parents[1],
        "env": os.environ | variables,
        "timeout": 60,
    }
    ended = subprocess.run(
        [sys.executable, *args], stdout=stdout, stderr=subprocess.PIPE, text=True, **options
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_output_that_cannot_be_written_ends_the_command():
    """A reader that has left, as of ``| head -1``, is no error to tell; a full disk is."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    narrow = {"COLUMNS": "20", "LC_ALL": "C", "TERM": "dumb", "PYTHONUNBUFFERED": ""}
    assert program("-m", "lp_jax", "--help", stdout=writer, **narrow) == (
        128 + signal.SIGPIPE,
        None,
        "",
    )
    code, _, err = program("-m", "lp_jax", "--help", stdout=full, PYTHONUNBUFFERED="")
    assert code == 1 and "cannot write: No space left on device" in one_line(err)
    os.close(writer)
    os.close(full)


def test_a_full_disk_is_one_line(cli, tmp_path, request):
    """Files of at most 100 kB stand for it: the system refuses the rest of one in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, before))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    sizes = ("--layers", 8, "--epochs", 1, "--checkpoint-every", 10, "--serial", "--no-pictures")
    code, _, err = cli("train", "digits", *sizes, "--out", tmp_path / "run")
    said = [
        line
        for line in err.splitlines()
        if "written" in line or "Traceback" in line or "ERROR" in line
    ]
    assert code == 1 and len(said) == 1, err
    wanted = r"lp-jax: the checkpoint .*10 cannot be written \(File too large\); none was saved before\. .*"
    assert re.fullmatch(wanted, said[0])


def test_ctrl_c_counts_before_anything_is_imported(tmp_path):
    """The program sets the system's own way to stop first; the same words follow from the moment the command begins."""
    code = "import sys, lp_jax_command, signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL, 'jax' in sys.modules)"
    _, out, _ = program("-c", code)
    assert out.split() == ["True", "False"]


def test_info_tells_versions_devices_and_mpi(cli):
    code, out, _ = cli("info")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and lines["jax"] == jax.__version__ and lines["python"].startswith("3.")
    assert lines["devices"].startswith(f"{jax.device_count()} of platform cpu")
    assert {"lp_jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mpi4jax", "MPI"} <= set(lines)


@pytest.mark.parametrize("args", [[], ["train"], ["--help"], ["bench"]])
def test_help_without_a_command(cli, args):
    code, out, _ = cli(*args)
    wanted = {"bench": ("single ", "ranks ")}.get("".join(args), ("lp-jax train digits",))
    assert (
        code == 0
        and all(text in out for text in wanted)
        and not re.search("^ +worker ", out, re.MULTILINE)
    )


def test_missing_extras_are_named_and_import_is_light():
    script = """
        import sys
        import lp_jax.cli
        heavy = {"jsonargparse", "rich", "flax", "optax", "orbax", "matplotlib", "sklearn"} & set(sys.modules)
        assert not heavy, heavy
        sys.modules["jsonargparse"] = None
        lp_jax.cli.main(["train", "digits"])
    """
    code, _, err = program("-c", "\n".join(line.strip() for line in script.splitlines()))
    assert code == 1
    assert (
        one_line(err)
        == "lp-jax: jsonargparse is missing; pip install 'lp_jax[train]' installs it\n"
    )


def test_a_folder_is_for_one_run_at_a_time(cli, tmp_path):
    folder, lock = tmp_path / "run", tmp_path / "run" / "run.lock"
    folder.mkdir()
    options = ["--serial", "--no-pictures", *SMALL, "--epochs", "1"]
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on a machine")
        file.flush()
        code, _, err = cli("train", "digits", "--out", folder, *options)
        assert code == 1 and f"{folder} is in use by process 7 on a machine; wait" in one_line(err)
    code, _, err = cli(
        "train", "digits", "--out", folder, *options
    )  # that process is gone, and its file is left
    assert code == 0 and f"process 7 on a machine, which used {folder}, is gone" in err
    assert not lock.exists()
    assert (
        json.loads((folder / "config.json").read_text())["options"]["no_pictures"] is True
    )  # kept for --resume


def test_ctrl_c_saves_and_says_how_to_go_on(cli, tmp_path, monkeypatch):
    """A serial run stays one."""
    write = train.Log.write

    def write_and_stop(log, **row):
        write(log, **row)
        if row["step"] == 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train.Log, "write", write_and_stop)
        code, _, err = cli(
            "train", "digits", "--out", tmp_path, "--serial", "--no-pictures", *SMALL, "--epochs", 9
        )
    assert code == 128 + signal.SIGINT
    steps = [row["step"] for row in rows_of(tmp_path)]
    assert steps == list(range(1, steps[-1] + 1))
    assert (tmp_path / "checkpoints" / str(steps[-1])).is_dir()
    last = err.splitlines()[-1]
    assert last.startswith(f"lp-jax: SIGINT: stopped after step {steps[-1]}; saved to ")
    assert last.endswith(f"go on with: lp-jax train digits --out {tmp_path} --resume")

    epochs = steps[-1] // (STEPS // 2) + 1
    code, out, _ = cli(
        "train", "digits", "--out", tmp_path, "--resume", "--no-pictures", "--epochs", epochs
    )
    assert code == 0 and "layer-parallel" not in out
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, epochs * (STEPS // 2) + 1))
    assert json.loads((tmp_path / "config.json").read_text())["options"]["epochs"] == epochs
