"""One-shot training, beside the histories of the code that published it."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import mesh

import lp_jax
from lp_jax import planning, train
from lp_jax.planning import _schedule

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
    solution = lp_jax.solve(
        layer_step, layers, y0, t1=time, solver=solver, adjoint_solver=adjoint_solver, **given
    )
    logits = solution.y1 @ params["class_W"].T + params["class_b"][None]
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    squares = jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(x**2), params))
    h = time / len(params["b"])
    rough = sum(jnp.sum(jnp.diff(x, axis=0) ** 2) / h**2 for x in layers)
    objective = loss + REGULARISATION / 2 * squares + smooth / 2 * jax.lax.stop_gradient(rough)
    about = {"scale": loss, "trajectory": solution.trajectory}
    return objective, train.Info(jnp.int32(len(x)), solution.stats, solution.result, **about)


def whole_first_step():
    """Undo what optax's L-BFGS does to its first direction, which it shortens to length 1."""

    def update(updates, count, params=None, *, grad, **_):
        longer = jnp.where(count == 0, jnp.maximum(1.0, optax.tree.norm(grad)), 1.0)
        return optax.tree.scale(longer, updates), count + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


OPTIMIZER = optax.chain(optax.scale_by_lbfgs(memory_size=20), whole_first_step(), optax.scale(-1.0))
SEARCH = train.Backtracking(trials=20)


@pytest.fixture(scope="session")
def oneshot(golden):
    folder = golden / "oneshot"
    with np.load(folder / "peaks.npz") as z:
        peaks = jnp.asarray(z["x"]), jnp.asarray(z["labels"], jnp.int32)
    starts = {}
    for name in ("regression", "n32"):
        with np.load(folder / f"start_{name}.npz") as z:
            starts[name] = {key: jnp.asarray(z[key]) for key in z.files}
    return peaks, starts, json.loads((folder / "histories.json").read_text())


def run(step_fn, state, batch, steps, solver, adjoint_solver):
    """Columns of a run."""
    rows = []
    for _ in range(steps):
        state, metrics = step_fn(state, batch, solver, adjoint_solver)
        rows.append(
            jax.device_get(
                (metrics.loss, metrics.info.scale, metrics.gradient_norm, metrics.trials)
            )
        )
    objective, loss, gradient_norm, trials = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return {"objective": objective, "loss": loss, "gradient_norm": gradient_norm, "trials": trials}


@pytest.mark.parametrize(
    ("start", "steps", "examples", "options", "rtol"),
    [
        ("regression", 10, 200, {"smooth": 1e-5}, 1e-10),
        # more than L-BFGS remembers; after 40 it amplifies rounding
        pytest.param("n32", 25, None, {}, 1e-8, marks=pytest.mark.slow),
    ],
)
def test_iterations_are_those_that_were_published(oneshot, start, steps, examples, options, rtol):
    (x, labels), starts, histories = oneshot
    loss = functools.partial(loss_fn, time=1.0, **options)
    wanted = histories["regression, serial" if start == "regression" else "N=32 T=1, serial"]
    step_fn = train.make_train_step(loss, OPTIMIZER, line_search=SEARCH)
    state = train.init_state(starts[start], OPTIMIZER)
    got = run(
        step_fn, state, (x[:examples], labels[:examples]), steps, lp_jax.Serial(), lp_jax.Serial()
    )
    for name in ("objective", "loss", "gradient_norm"):
        np.testing.assert_allclose(got[name], wanted[name][:steps], rtol=rtol, err_msg=name)
    failed = wanted["trials"][1 : steps + 1]  # theirs are counted in the iteration that follows
    assert (got["trials"][: len(failed)] - 1).tolist() == failed


@pytest.mark.usefixtures("optimised")
def test_one_shot_trains_as_serial_propagation_does(oneshot):
    """At a tenth of its depth, and about twice its work: one sweep per gradient, two for the adjoint and for each trial."""
    layers, steps, (batch, starts, histories) = 32, 15, oneshot
    solver, adjoint_solver = lp_jax.Picard(sweeps=1), lp_jax.Picard(sweeps=2)
    options = {
        "line_search": train.Backtracking(trials=20, solver=adjoint_solver),
        "adjoint_solver": adjoint_solver,
    }
    loss, params = functools.partial(loss_fn, time=1.0), starts[f"n{layers}"]
    begun = train.one_shot(loss, params, OPTIMIZER, batch, solver=solver, **options)
    got = run(*begun, batch, steps, solver, adjoint_solver)
    wanted = histories[f"N={layers} T=1, serial"]
    assert (
        got["loss"][-1] < (1 + 1e-5) * wanted["loss"][steps - 1]
    )  # 1.7e-5 above without the guesses

    def cost(trials, solver, adjoint_solver):
        """Depth and number of layer evaluations."""
        gradient = planning.training_step(solver, adjoint_solver, layers)
        trial, kinds = _schedule.count(adjoint_solver, layers), ("forward", "linearise", "adjoint")
        depth = steps * gradient.depth(*kinds) + trials * trial.depth(*kinds)
        return depth, steps * gradient.work(*kinds) + trials * trial.work(*kinds)

    serial_depth, serial_work = cost(
        sum(wanted["trials"][: steps + 1]) + steps, lp_jax.Serial(), lp_jax.Serial()
    )
    depth, work = cost(int(got["trials"].sum()), solver, adjoint_solver)
    assert depth < serial_depth / 10 and work < 2.1 * serial_work


def growth(target, comm=None, layers=8):
    """Parameters of a growing state, a batch, and the loss of what it ends at."""

    def loss_fn(params, batch, solver, adjoint_solver, restart=None):
        options = {"solver": solver, "adjoint_solver": adjoint_solver, "comm": comm}
        options |= {} if restart is None else restart._asdict()
        solution = lp_jax.solve(
            lambda y, layer: y + layer.dt * layer.params * y, params, batch, **options
        )
        info = train.Info(
            jnp.int32(3), solution.stats, solution.result, trajectory=solution.trajectory
        )
        return jnp.mean((solution.y1 - target) ** 2), info

    return jnp.full((layers, 1, 2), 0.5), jnp.ones((3, 2)), loss_fn


def test_a_run_goes_on_after_a_break_with_the_same_numbers(tmp_path):
    """The checkpoint holds where the solves ended, on each device its part."""
    params, batch, loss_fn = growth(np.array([[2.5, 0.1]]), mesh(3), layers=10)
    solver = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=lp_jax.Rediscretize())
    step_fn, start = train.one_shot(
        loss_fn, params, OPTIMIZER, batch, solver=solver, line_search=SEARCH
    )

    def run(steps, checkpoints=None, restore=False):
        state = jax.tree.map(jnp.copy, start)  # a step takes the arrays of its state
        state = checkpoints.restore(state) if restore else state
        options = {
            "steps_per_epoch": 1,
            "epochs": steps,
            "solver": solver,
            "checkpoints": checkpoints,
        }
        return train.fit(step_fn, state, lambda epoch: [batch], **options)

    whole, log = run(6)
    assert log.rows[-1]["loss"] < 0.9 * log.rows[0]["loss"] and log.rows[-1]["trials"] >= 1
    with train.Checkpoints(tmp_path, config={}) as checkpoints:
        run(3, checkpoints)
        again, _ = run(6, checkpoints, restore=True)
    chex.assert_trees_all_equal(again, whole)


def test_a_line_search_that_fails_keeps_the_step_before_and_says_so():
    """Ascent: no step length lowers the loss."""
    params, batch, loss_fn = growth(0.0)
    ascent, search = optax.scale(1.0), train.Backtracking(trials=5)
    step_fn, state = (
        train.make_train_step(loss_fn, ascent, line_search=search),
        train.init_state(params, ascent),
    )
    state, log = train.fit(
        step_fn, state, lambda epoch: [batch], steps_per_epoch=1, epochs=2, solver=lp_jax.Serial()
    )
    np.testing.assert_array_equal(state.params, params)
    (warning, *_) = log.of("warning")
    assert "tried 5 step lengths" in warning["message"] and warning["solve"] == "line search"
    with pytest.raises(ValueError, match="trials must be at least 1; got 0"):
        train.Backtracking(trials=0)


def test_line_searches_of_optax_work_too_and_a_loss_without_a_trajectory_is_refused():
    (params, batch, loss_fn), optimizer = growth(2.5), optax.lbfgs()
    step_fn, state = train.make_train_step(loss_fn, optimizer), train.init_state(params, optimizer)
    for _ in range(8):
        state, metrics = step_fn(state, batch, lp_jax.Serial(), None)
    assert metrics.loss < 1e-8

    def forgetful(*args):
        loss, info = loss_fn(*args)
        return loss, info._replace(trajectory=None)

    with pytest.raises(ValueError, match=r"trajectory=solution.trajectory"):
        train.one_shot(forgetful, params, optax.sgd(0.1), batch, solver=lp_jax.Picard())


def test_lbfgs_of_spread_parameters_goes_the_way_of_optax():
    """Two halves of each vector, of which only inner products are put together, beside whole vectors."""
    target = np.random.default_rng(0).normal(size=(6, 2))
    gradient = lambda x: np.sinh(x - target) * np.arange(1.0, 7)[:, None]  # noqa: E731
    halved = lambda x: {"a": x[:3], "b": x[3:]}  # noqa: E731
    joined = lambda parts: np.concatenate([parts["a"], parts["b"]])  # noqa: E731
    whole, halves = optax.scale_by_lbfgs(memory_size=3), train.scale_by_lbfgs(3)
    x = y = np.zeros((6, 2))
    memory, memories = whole.init(x), halves.init(halved(y))
    of_whole, of_halves = jax.jit(whole.update), jax.jit(halves.update)
    for count in range(12):
        length = 0.0 if count == 5 else 0.7  # a line search that fails, once
        wanted, memory = of_whole(gradient(x), memory, x)
        got, memories = of_halves(halved(gradient(y)), memories, halved(y))
        np.testing.assert_allclose(joined(got), wanted, rtol=1e-9, atol=1e-13)
        x, y = x - length * np.asarray(wanted), y - length * joined(got)
    with pytest.raises(ValueError, match="memory_size must be"):
        train.scale_by_lbfgs(0)
    # the memory is spread as a step returns it, so that the second step does not compile again
    spread = jax.NamedSharding(
        jax.make_mesh((2,), ("layers",), devices=jax.devices()[:2]), jax.P("layers")
    )
    params = jax.device_put(np.ones((4, 3)), spread)
    memory = train.init_state(params, train.scale_by_lbfgs(5)).opt_state.steps
    assert memory.shape == (4, 3, 5) and memory.sharding.is_equivalent_to(spread, 3)
