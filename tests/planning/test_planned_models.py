"""Plans for models: Flax modules, classifiers, the command line."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import one_line, run
from flax import nnx
from matplotlib.image import imread
from networks import dense_classifier, mesh
from problems import machine, relative_error

import lp_jax
from lp_jax import nn, planning, train, viz
from lp_jax.planning._result import Probed

pytestmark = pytest.mark.usefixtures("standard_promotion")


UNFILLED = machine(1e-5, 1e-5, at_once=(1, 1024), examples=8)


def random(shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_the_problem_of_a_trunk_is_what_it_solves():
    make = lambda rngs: nn.DenseResidual(4, rngs=rngs, param_dtype=jnp.float64)  # noqa: E731
    layers, y = nn.LayerParallel(make, 16, rngs=nnx.Rngs(0), t1=3.0), jnp.ones((2, 4))
    problem = layers.problem(y)
    np.testing.assert_array_equal(problem.solve().y1, layers(y))
    found = lp_jax.plan(problem, machine=UNFILLED, error=1e-5, seconds=60.0)
    got, exact = (
        np.asarray(layers.solve(y, solver=solver).y1) for solver in (found.solver, lp_jax.Serial())
    )
    assert isinstance(found.solver, lp_jax.Picard) and np.abs(got - exact).max() < 1e-5


def test_the_problem_of_a_recurrent_network_is_what_it_solves():
    gru = nn.GRU(3, 5, rngs=nnx.Rngs(0))
    x = random((2, 12, 3))
    serial = lp_jax.Serial()
    np.testing.assert_array_equal(
        gru.problem(x).solve(solver=serial).y1[0], gru.solve(x, solver=serial).y1[0]
    )
    assert lp_jax.calibrate(gru.problem(x)).layer_bytes == 0
    with pytest.raises(ValueError, match="calibrate got a problem with a comm"):
        lp_jax.calibrate(gru.problem(x).replace(comm=mesh(1)))


def classifier(kind):
    make = functools.partial(
        dense_classifier, inputs=4, width=6, outputs=3, dtype=jnp.float32, t1=1.0
    )
    model = make(16)
    if kind == "gru":
        model = nn.Classifier(lambda x: x, nn.GRU(4, 6, rngs=nnx.Rngs(0)), model.closing)
    if kind == "network":
        first, last = (make(2, solver=lp_jax.Serial()).trunk for _ in range(2))
        model.trunk = nn.Network(first, model.trunk, last)
    return model


@pytest.mark.parametrize("kind", ["dense", "network"])
def test_the_layers_of_a_classifier_are_planned_with_its_loss(kind):
    """The error is that of the whole model's gradient with respect to the longest block's parameters."""
    model = classifier(kind)
    loss_fn, params = train.classification(model)
    batch = random((12, 4)), np.arange(12, dtype="int32") % 3
    found = train.plan(
        model,
        params,
        batch,
        machine=dataclasses.replace(UNFILLED, examples=12),
        error=1e-4,
        seconds=60.0,
    )
    assert found.layers == 16 and isinstance(found.solver, lp_jax.Picard)

    def gradient(*solvers):
        found = jax.jit(jax.grad(lambda p: loss_fn(p, batch, *solvers)[0]))(params)["trunk"]
        return found if kind == "dense" else found["parts"][1]

    g, e = gradient(found.solver, found.adjoint_solver), gradient(lp_jax.Serial(), lp_jax.Serial())
    assert relative_error(g, e) == pytest.approx(
        found.best.error, rel=0.1
    )  # the loss sees another last state


def test_a_recurrent_classifier_is_planned(monkeypatch):
    """Iterations are not run for their time: each solver is a program."""
    monkeypatch.setattr(planning._measure, "sweep", lambda problem, at_once: [1e-6, 2e-6, 4e-6])
    monkeypatch.setattr(planning._measure, "iteration", lambda problem, solver: 1e-5)
    model = classifier("gru")

    class Last(nnx.Module):
        def __init__(self):
            self.linear = nn.DenseClosing((6,), 3, rngs=nnx.Rngs(1))

        def __call__(self, states):
            return self.linear(states[-1])

    model.closing = Last()
    _, params = train.classification(model)
    batch = random((12, 8, 4)), np.zeros(12, "int32")
    found = train.plan(model, params, batch, seconds=1e-3)
    assert found.layers == 8 and found.machine.examples == 12 and found.machine.kept_bytes > 0
    assert found.best.error <= 1e-2


@pytest.mark.parametrize(
    ("workers", "probed", "title"),
    [
        (
            1,
            Probed(1e-3, 1, 1),
            r"16 layers on 1 worker: Picard\(.*\)\nPredicted \d+ times as fast as serial",
        ),
        (8, Probed(1e-3, 9, 9), r"16 layers on 8 workers: MGRIT\((.|\n)*\)\nPredicted"),
        (1, Probed(1.0, 3, 2), r"16 layers on 1 worker: Serial\(\)\n\d+ solvers predicted faster"),
    ],
)
def test_a_plan_is_a_picture(tmp_path, workers, probed, title):
    found = planning.choose(16, UNFILLED, workers=workers, probe=lambda *pair: probed)
    figure = viz.plan(found)
    figure.savefig(tmp_path / "plan.png")
    assert imread(tmp_path / "plan.png").std() > 0.05 and re.match(title, figure.get_suptitle())


SMALL = ["--layers", 4, "--width", 6, "--batch-size", 100]


def test_the_command_plans_and_keeps_what_it_measured(capsys, tmp_path):
    file = tmp_path / "machine.json"
    code, out, _ = run(
        capsys, "plan", "digits", *SMALL, "--seconds", 0.01, "--save", file, "--out", tmp_path
    )
    assert code == 0 and "Use solver=lp_jax." in out and (tmp_path / "plan.png").exists()
    kept = planning.Machine.load(file)
    assert kept.examples == 100 and "digits" in kept.name
    code, again, _ = run(capsys, "plan", "machine", file, "--layers", 4)
    serial = [
        next(line for line in text.splitlines() if "Serial()" in line) for text in (out, again)
    ]
    assert code == 0 and serial[0] == serial[1]  # it takes what it took
    code, alone, _ = run(capsys, "plan", "machine", file, "--layers", 8, "--workers", 4)
    assert code == 0 and re.search(r"\? .*(MGRIT|Picard)", alone)


WRONG = {
    "plan digits --workers 65 --layers 64": "--workers must be from 1 to the 64 layers; got 65",
    "plan digits --layers 0": "--layers: a whole number above 0 is wanted",
    "plan digits --error 0": "error must be",
    "plan digits --width wide": "--width",
    "plan digits --machine nowhere.json": "nowhere.json",
    "plan machine nowhere.json --layers 4": "nowhere.json",
    "plan machine README.md --layers 4": "README.md is no machine file",
    "plan machine README.md": "--layers",
}


@pytest.mark.parametrize("line", WRONG)
def test_nonsense_gets_one_line(capsys, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# no JSON")
    code, out, err = run(capsys, *line.split())
    assert code != 0 and WRONG[line] in one_line(err) and not out
