"""A controller of tolerances: what it measures, what it decides, and that it decides the same after a break."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from products import layer

import lp_jax
from lp_jax import train
from lp_jax.train._controller import _measure

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, WIDTH, BATCH = 24, 4, 16
SOLVER = lp_jax.Picard(sweeps=LAYERS, rtol=1e-2)


def loss_fn(params, batch, solver, adjoint_solver):
    x, target, *_ = batch
    solution = lp_jax.solve(layer, params, x, t1=4.0, solver=solver, adjoint_solver=adjoint_solver)
    info = train.Info(jnp.int32(len(x)), solution.stats, solution.result)
    return jnp.mean((solution.y1 - target) ** 2), info


def batches(epoch, steps=5):
    rng = np.random.default_rng(epoch)
    for _ in range(steps):
        x = rng.normal(size=(BATCH, WIDTH))
        yield jnp.asarray(x), jnp.asarray(np.sin(x) + 0.3 * rng.normal(size=x.shape))


PARAMS = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)))
OPTIMIZER = optax.adam(1e-2)
STEP_FN = train.make_train_step(loss_fn, OPTIMIZER)


@jax.jit
def gradient(batch, solver, adjoint_solver):
    return jax.grad(lambda p: loss_fn(p, batch, solver, adjoint_solver)[0])(PARAMS)


def test_it_measures_errors_and_noise():
    batch, serial = next(batches(0)), lp_jax.Serial()
    found = _measure(loss_fn, None, PARAMS, batch, SOLVER, SOLVER)
    exact, g = gradient(batch, serial, serial), gradient(batch, SOLVER, SOLVER)
    halves = [
        gradient([x[part] for x in batch], SOLVER, SOLVER) for part in (slice(8), slice(8, 16))
    ]
    between = gradient(batch, SOLVER, serial)
    pairs = {
        "error": (g, exact),
        "forward_error": (between, exact),
        "adjoint_error": (between, g),
        "noise": halves,
    }
    for name, (a, b) in pairs.items():
        apart = np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(exact)
        np.testing.assert_allclose(found[name], apart / (2 if name == "noise" else 1), rtol=1e-10)


def test_the_noise_is_that_of_the_mean_over_the_batch():
    """Half of the distance of two half batches estimates it, over many batches, to some per cent."""
    serial = lp_jax.Serial()
    drawn = [batch for epoch in range(40) for batch in batches(epoch)]
    noise = jax.jit(lambda batch: _measure(loss_fn, None, PARAMS, batch, serial, serial)["noise"])
    gradients = np.stack([gradient(batch, serial, serial) for batch in drawn])
    deviation = np.sqrt(np.sum(np.var(gradients, axis=0, ddof=1)))
    absolute = [
        (float(noise(b)) * np.linalg.norm(g)) ** 2 for b, g in zip(drawn, gradients, strict=True)
    ]
    np.testing.assert_allclose(np.sqrt(np.mean(absolute)), deviation, rtol=0.1)


@pytest.mark.parametrize("rtol", [0.3, 1e-6])
def test_tolerances_go_down_and_up_to_what_the_bound_asks(rtol):
    """From far too large and from far too small; the error ends below the bound, and not a hundredth of it."""
    controller = train.Controller(loss_fn, bound=1e-3, of="gradient", probe_every=4)
    solver = lp_jax.Picard(sweeps=LAYERS, rtol=rtol)
    control, batch = controller.begin(solver, solver), next(batches(0))
    for _ in range(12):
        control, row = controller.probe(control, PARAMS, batch, solver, solver)
    assert not row["serial"]
    assert 1e-5 < row["error"] < row["allowed"] == 1e-3
    assert all(1e-6 < rtol < 0.3 for rtol in control.rtols.tolist())


def test_it_goes_serial_and_back():
    """A cap of one sweep holds no bound; with the cap lifted the next probe goes back. None holds a bound below rounding."""
    controller = train.Controller(loss_fn, bound=1e-3, of="gradient")
    short, batch = lp_jax.Picard(sweeps=1, rtol=1e-2), next(batches(0))
    control, row = controller.probe(controller.begin(short, short), PARAMS, batch, short, short)
    assert row["serial"] and bool(control.serial)
    assert controller.solvers(control, short, short) == (lp_jax.Serial(), lp_jax.Serial())
    control, row = controller.probe(control, PARAMS, batch, SOLVER, SOLVER)
    assert not row["serial"] and not bool(control.serial)
    controller = train.Controller(loss_fn, bound=1e-18, of="gradient")
    control, row = controller.probe(controller.begin(SOLVER, SOLVER), PARAMS, batch, SOLVER, SOLVER)
    assert row["serial"] and row["error"] > row["allowed"] == 1e-18
    assert min(control.rtols.tolist()) >= 0.99e-6 and row["gradients"] <= 20


def test_training_stays_within_the_bound_compiles_once_and_goes_on_after_a_break():
    def run(state, epochs, **options):
        options |= {
            "controller": train.Controller(loss_fn, bound=0.1, probe_every=6),
            "steps_per_epoch": 5,
        }
        return train.fit(
            STEP_FN, jax.tree.map(jnp.copy, state), batches, epochs=epochs, solver=SOLVER, **options
        )

    state = train.init_state(PARAMS, OPTIMIZER)
    before = STEP_FN._cache_size()
    whole, log = run(state, 4)
    assert STEP_FN._cache_size() <= before + 1
    rows = log.of("control")
    assert [row["step"] for row in rows] == [1, 7, 9, 13, 19]
    assert (
        all(row["error"] <= row["allowed"] for row in rows[1:])
        and len({row["rtol"] for row in rows}) > 1
    )
    half, log = run(state, 2)
    again, log = run(half, 4, log=log)
    chex.assert_trees_all_equal(whole, again)
    assert [row["step"] for row in log.of("control")] == [1, 7, 9, 13, 19]


def test_it_sets_the_tolerances_of_the_default_by_its_name():
    """Those of sweeps, as where no solver is named. Exact methods have none."""

    def run(**solvers):
        state = train.init_state(jax.tree.map(jnp.copy, PARAMS), OPTIMIZER)
        controller = train.Controller(loss_fn, bound=1e-3, of="gradient")
        options = {"steps_per_epoch": 5, "epochs": 2, "controller": controller}
        return train.fit(STEP_FN, state, batches, **options, **solvers)[1].of("control")

    fastest = lp_jax.Fastest()
    rows = run()
    assert len(rows) == 2 and rows == run(solver=fastest)
    with pytest.raises(ValueError, match=r"sets solver\.rtol, and this Fastest has none"):
        run(solver=lp_jax.Fastest(rtol=None))


def test_senseless_settings_are_refused():
    for options in (
        {"bound": 0.0},
        {"of": "nois"},
        {"least": 0.5, "most": 0.1},
        {"probe_every": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            train.Controller(loss_fn, **options)
    controller = train.Controller(loss_fn)
    with pytest.raises(ValueError, match=r"adjoint_solver.rtol.*rtol=1e-2"):
        controller.begin(SOLVER, lp_jax.MGRIT())
    one = jax.tree.map(lambda x: x[:1], next(batches(0)))
    with pytest.raises(ValueError, match="two halves of a batch; got 1"):
        controller.probe(controller.begin(SOLVER, SOLVER), PARAMS, one, SOLVER, SOLVER)
