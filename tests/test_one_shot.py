"""One-shot training, beside the histories of the code that published it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lp_jax
from lp_jax import planning, train

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for what optax counts

REGULARISATION = 1e-7


def activation(x):
    """A ReLU that is smooth within 0.1 of zero."""
    return jnp.where(jnp.abs(x) < 0.1, x**2 / 0.4 + x / 2 + 0.025, jnp.maximum(x, 0))


def layer_step(y, layer):
    w, b = layer.params
    return y + layer.dt * activation(y @ w.T + b)


def loss_fn(params, batch, solver, adjoint_solver, restart=None, *, time, smooth=0.0):
    """The mean cross-entropy, as ``info.scale`` (which only the test reads), and the objective."""
    x, labels = batch
    given = {} if restart is None else restart._asdict()
    y0 = activation(x @ params["open_W"].T + params["open_b"])
    layers = params["W"], params["b"]
    solution = lp_jax.solve(layer_step, layers, y0, t1=time, solver=solver, adjoint_solver=adjoint_solver, **given)
    logits = solution.y1 @ params["class_W"].T + params["class_b"][None]
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    squares = jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(x**2), params))
    h = time / len(params["b"])
    rough = sum(jnp.sum(jnp.diff(x, axis=0) ** 2) / h**2 for x in layers)
    objective = loss + REGULARISATION / 2 * squares + smooth / 2 * jax.lax.stop_gradient(rough)
    right = jnp.sum(jnp.argmax(logits, -1) == labels, dtype=jnp.int32)
    info = train.Info(right, jnp.int32(len(x)), solution.stats, solution.result, loss, trajectory=solution.trajectory)
    return objective, info


def whole_first_step():
    """Undo what optax's L-BFGS does to its first direction, which it shortens to length 1."""

    def update(updates, count, params=None, *, grad, **_):
        longer = jnp.where(count == 0, jnp.maximum(1.0, optax.tree.norm(grad)), 1.0)
        return optax.tree.scale(longer, updates), count + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


OPTIMIZER = optax.chain(optax.scale_by_lbfgs(memory_size=20), whole_first_step(), optax.scale(-1.0))
SEARCH = train.Backtracking(trials=20, shrink=0.5, slope=1e-4)


@pytest.fixture(scope="session")
def oneshot(golden):
    folder = golden / "oneshot"
    with np.load(folder / "peaks.npz") as z:
        peaks = jnp.asarray(z["x"]), jnp.asarray(z["labels"], jnp.int32)
    starts = {}
    for name in ("regression", "n32", "n128"):
        with np.load(folder / f"start_{name}.npz") as z:
            starts[name] = {key: jnp.asarray(z[key]) for key in z.files}
    return peaks, starts, json.loads((folder / "histories.json").read_text())


def run(loss, params, batch, steps, *solvers, line_search=SEARCH):
    """Columns of a run, serially or, with solvers, in one-shot."""
    options = {"line_search": line_search}
    if solvers:
        step_fn, state = train.one_shot(
            loss, params, OPTIMIZER, batch, solver=solvers[0], adjoint_solver=solvers[1], **options
        )
    else:
        solvers = lp_jax.Serial(), lp_jax.Serial()
        step_fn, state = train.make_train_step(loss, OPTIMIZER, **options), train.init_state(params, OPTIMIZER)
    rows = []
    for _ in range(steps):
        state, metrics = step_fn(state, batch, *solvers)
        rows.append(jax.device_get((metrics.loss, metrics.info.scale, metrics.gradient_norm, metrics.trials)))
    objective, loss, gradient_norm, trials = (np.array(column) for column in zip(*rows, strict=True))
    return {"objective": objective, "loss": loss, "gradient_norm": gradient_norm, "trials": trials}


def compare(got, wanted, rtol):
    steps = len(got["loss"])
    for name in ("objective", "loss", "gradient_norm"):
        np.testing.assert_allclose(got[name], wanted[name][:steps], rtol=rtol, err_msg=name)
    failed = wanted["trials"][1 : steps + 1]  # theirs are counted in the iteration that follows
    assert (got["trials"][: len(failed)] - 1).tolist() == failed


def test_regression(oneshot):
    """Ten iterations of the published regression test."""
    (x, labels), starts, histories = oneshot
    loss = functools.partial(loss_fn, time=1.0, smooth=1e-5)
    compare(run(loss, starts["regression"], (x[:200], labels[:200]), 10), histories["regression, serial"], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 5])
def test_five_classes(oneshot, time):
    """Forty iterations on five classes; after that L-BFGS amplifies rounding."""
    batch, starts, histories = oneshot
    loss = functools.partial(loss_fn, time=float(time))
    compare(run(loss, starts["n32"], batch, 40), histories[f"N=32 T={time}, serial"], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [32, 128])
def test_one_shot_trains_as_serial_propagation_does(oneshot, layers):
    """At a tenth of its depth, and about twice its work: one sweep per gradient, two for the adjoint and for each trial."""
    batch, starts, histories = oneshot
    solver, adjoint_solver = lp_jax.Picard(sweeps=1), lp_jax.Picard(sweeps=2)
    search = train.Backtracking(trials=20, solver=adjoint_solver)
    loss = functools.partial(loss_fn, time=1.0)
    got = run(loss, starts[f"n{layers}"], batch, 130, solver, adjoint_solver, line_search=search)
    wanted = histories[f"N={layers} T=1, serial"]
    assert got["loss"][-1] < 1.02 * wanted["loss"][129]
    serial = [count(130, sum(wanted["trials"][:131]) + 130, layers, *[lp_jax.Serial()] * 3)]
    ours = count(130, int(got["trials"].sum()), layers, solver, adjoint_solver, adjoint_solver)
    (depth, work), (serial_depth, serial_work) = ours, serial[0]
    assert depth < serial_depth / 10 and work < 2.1 * serial_work


def count(gradients, trials, layers, solver, adjoint_solver, trial_solver):
    """Depth and number of layer evaluations."""
    gradient = planning.training_step(solver, adjoint_solver, layers)
    trial = planning.count(trial_solver, layers)
    kinds = "forward", "linearise", "adjoint"
    return (
        gradients * gradient.depth(*kinds) + trials * trial.depth(*kinds),
        gradients * gradient.work(*kinds) + trials * trial.work(*kinds),
    )
