"""Training: the step, the probe, the loop, checkpoints, and what happens when things go wrong."""

import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from architectures import Restless
from flax import nnx
from networks import dense_classifier
from problems import INJECT, dense_params, dense_state, dense_step, machine

import lp_jax
from lp_jax import train
from lp_jax.train import _checkpoint
from lp_jax.train._divergence import convergence_warning

# optax's Adam raises floats to an integer step count
pytestmark = pytest.mark.usefixtures("standard_promotion")


SOLVER = lp_jax.MGRIT(coarsening=4, iterations=2, coarse_step=INJECT)
ADJOINT = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=INJECT)
WIDTH, LAYERS = 3, 16


def loss_fn(params, batch, solver, adjoint_solver):
    x, y = batch
    solution = lp_jax.solve(
        dense_step, params["trunk"], x, solver=solver, adjoint_solver=adjoint_solver
    )
    answers = solution.y1 @ params["closing"]
    loss = jnp.mean((answers - y) ** 2)
    correct = jnp.sum(jnp.abs(answers - y) < 0.1, dtype=jnp.int32)
    info = train.Info(
        jnp.int32(y.size), solution.stats, solution.result, correct, jnp.linalg.norm(solution.y1)
    )
    return loss, info


def initial_params(seed=0):
    return {
        "trunk": dense_params(LAYERS, WIDTH, seed=seed, scale=2.0),
        "closing": dense_state(WIDTH, 1, seed=seed),
    }


def batches(epoch, count=3):
    rng = np.random.default_rng([7, epoch])
    for _ in range(count):
        x = rng.normal(size=(5, WIDTH))
        yield x, x[:, :1] * x[:, 1:2]


def run(state, epochs, *, step_fn=None, batches=batches, solver=SOLVER, **kwargs):
    step_fn = STEP_FN if step_fn is None else step_fn
    kwargs = {"steps_per_epoch": 3, "adjoint_solver": ADJOINT, "log_every": 2} | kwargs
    state = jax.tree.map(jnp.copy, state)  # a step takes the arrays of its state
    return train.fit(step_fn, state, batches, epochs=epochs, solver=solver, **kwargs)


OPTIMIZER = optax.adam(1e-2)
STEP_FN = train.make_train_step(loss_fn, OPTIMIZER)


@pytest.fixture
def state():
    return train.init_state(initial_params(), OPTIMIZER)


same = functools.partial(chex.assert_trees_all_equal, strict=True)  # bit for bit


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "step_time"} for row in rows]


def test_step_is_the_textbook_update(state):
    batch = next(batches(0))
    new, metrics = STEP_FN(jax.tree.map(jnp.copy, state), batch, lp_jax.Serial(), None)

    @jax.jit
    def textbook(params):
        loss, gradient = jax.value_and_grad(lambda p: loss_fn(p, batch, lp_jax.Serial(), None)[0])(
            params
        )
        updates, _ = OPTIMIZER.update(gradient, OPTIMIZER.init(params))
        return loss, gradient, optax.apply_updates(params, updates)

    loss, gradient, wanted = textbook(state.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), new.params, wanted
    )
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradient), rtol=1e-12)
    assert int(new.step) == 1 and bool(metrics.finite)


def test_numbers_do_not_recompile_and_structure_does(state):
    batch, compiled = next(batches(0)), [STEP_FN._cache_size()]
    for sweeps, rtol in ((3, 1e-1), (3, 1e-3), (3, 1e-6), (2, 1e-6)):
        state, _ = STEP_FN(state, batch, lp_jax.Picard(sweeps=sweeps, rtol=rtol), lp_jax.Serial())
        compiled.append(STEP_FN._cache_size())
    assert np.diff(compiled).tolist() == [1, 0, 0, 1]


def test_fit_is_the_plain_loop(state):
    wanted, losses = jax.tree.map(jnp.copy, state), []
    for epoch in range(2):
        for batch in batches(epoch):
            wanted, metrics = STEP_FN(wanted, batch, SOLVER, ADJOINT)
            losses.append(float(metrics.loss))
    got, log = run(state, 2, log_every=4)
    same(got, wanted)
    rows = log.of("train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["loss"] for row in rows] == losses
    assert "forward_residual_1" not in rows[0] and rows[0]["forward_residual_2"] > 0
    assert all(0 <= row["accuracy"] <= 1 and row["result"] == 0 for row in rows)
    times = [row["step_time"] for row in rows]  # metrics are fetched in groups
    assert times[1] == times[2] == times[3] != times[0] and times[4] == times[5] != times[3]


def test_measures_and_checkpoints_come_when_they_are_due(state, tmp_path):
    seen = []

    def measure(state, batch):
        seen.append(int(state.step))
        return {"value": 2 * int(state.step)}

    with checkpoints(tmp_path, keep=2) as saved:
        measures = [train.Every("test", 4, measure)]
        _, log = run(state, 3, measures=measures, checkpoints=saved, checkpoint_every=4)
    assert seen == [1, 4, 8, 9]
    assert [(row["step"], row["value"]) for row in log.of("test")] == [
        (1, 2),
        (4, 8),
        (8, 16),
        (9, 18),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["8", "9"]


# --- checkpoints ----------------------------------------------------------------------------------------------------


CONFIG = {"layers": LAYERS, "seed": 0}


def checkpoints(folder, config=CONFIG, **kwargs):
    return train.Checkpoints(folder, config=config, **kwargs)


def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(state, tmp_path):
    measures = [
        train.Every("test", 2, lambda state, batch: {"size": optax.tree.norm(state.params)})
    ]
    whole, whole_log = run(state, 2, measures=measures)
    log = train.Log()
    # stops in the middle of the second epoch, at step 4
    with checkpoints(tmp_path / "checkpoints") as first, pytest.raises(train.Interrupted):
        run(
            state,
            2,
            batches=killed(at=4),
            measures=measures,
            log=log,
            checkpoints=first,
        )
    with checkpoints(tmp_path / "checkpoints") as second:
        restored = second.restore(train.init_state(initial_params(seed=1), OPTIMIZER))
        assert int(restored.step) == 4
        resumed, _ = run(restored, 2, measures=measures, log=log, checkpoints=second)
    same(resumed, whole)
    assert timeless(log.rows) == timeless(whole_log.rows)


def test_a_solve_that_did_what_was_asked_is_no_warning():
    for result, text in lp_jax.RESULTS.items():
        warning = convergence_warning("forward", (), result=result)
        if text.startswith(
            ("done", "one layer after another", "the state is not finite")
        ):  # an error
            assert warning is None
        else:
            assert text in warning


def test_a_checkpoint_of_another_model_is_refused(state, tmp_path):
    wider = train.init_state(state.params | {"closing": jnp.zeros((4, 1))}, OPTIMIZER)
    with checkpoints(tmp_path) as saved:
        saved.save(state)
    for other, template, difference in (
        (CONFIG | {"layers": 32}, state, "layers is 16 there and 32 here"),
        (CONFIG | {"norm": "layer"}, state, "norm is absent there and layer here"),
        ({"layers": LAYERS}, state, "seed is 0 there and absent here"),
        (CONFIG, wider, r"params/closing is float64\[3, 1\] there and float64\[4, 1\] here"),
    ):
        with (
            checkpoints(tmp_path, other) as saved,
            pytest.raises(train.CheckpointError, match=difference) as caught,
        ):
            saved.restore(template)
        assert "\n" not in str(caught.value)


@pytest.fixture
def two_saved(state, tmp_path):
    """A folder with the checkpoints of steps 1 and 2; the arrays of the newest, large enough for files of their own."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 800)))
    states = [
        train.init_state({"w": weights * factor, "b": weights[0]}, optax.sgd(0.1))
        for factor in (1, 2)
    ]
    states = [state._replace(step=jnp.int32(step)) for step, state in enumerate(states, 1)]
    with checkpoints(tmp_path / "c") as saved:
        for each in states:
            saved.save(each)
    return tmp_path / "c", states


def test_one_flipped_bit_never_restores_other_numbers(two_saved, tmp_path, caplog, capfd):
    """In every file of arrays, in turn, at three places: the checkpoint is refused in one line, or nothing has changed."""
    folder, (_, newest) = two_saved
    files = [
        path.relative_to(folder)
        for path in (folder / "2").rglob("*")
        if path.is_file() and "d" in path.parts
    ]
    refused = set()
    for name in files:
        for part in (0.1, 0.5, 0.9):
            damaged = tmp_path / f"{len(refused)} {part} {name.name}"
            shutil.copytree(folder, damaged)
            content = bytearray((folder / name).read_bytes())
            content[int(part * len(content))] ^= 1
            (damaged / name).write_bytes(content)
            with checkpoints(damaged) as saved:
                try:
                    same(saved.restore(newest), newest)
                except train.CheckpointError as error:
                    refused.add(name)
                    assert (
                        "damaged" in str(error)
                        and str(damaged / "2") in str(error)
                        and "\n" not in str(error)
                    )
                    assert "handler" not in str(error)  # the words of orbax
    assert refused == {
        name for name in files if name.parts[2] == "d" or (folder / name).stat().st_size > 1000
    }
    assert not caplog.records and not "".join(capfd.readouterr())


def test_reads_that_did_not_end_are_collected_in_silence(two_saved, tmp_path, monkeypatch):
    """Orbax leaves some where a file is damaged. They complain when they are collected, which is before the error is raised."""
    folder, (_, newest) = two_saved

    class Unfinished:
        def __del__(self):
            raise RuntimeError("Event loop is closed")

    def fails(self, step, template):
        unfinished = [Unfinished()]
        unfinished.append(unfinished)  # only the collector finds it
        raise ValueError("cut")

    heard = []
    monkeypatch.setattr(_checkpoint.Checkpoints, "_restored", fails)
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    with (
        checkpoints(folder) as saved,
        pytest.raises(train.CheckpointError, match=r"damaged \(cut\)"),
    ):
        saved.restore(newest)
    gc.collect()
    assert not heard


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("_CHECKPOINT_METADATA", lambda text: text.replace('"layers": 16', '"layers": 17')),
        ("_CHECKPOINT_METADATA", lambda text: text.replace("float64", "float32", 1)),
        ("_CHECKPOINT_METADATA", lambda text: ""),
        ("state/_METADATA", lambda text: ""),
        ("state/manifest.ocdbt", None),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_restored_only_if_that_is_asked_for(
    two_saved, file, change
):
    folder, (first, newest) = two_saved
    path = folder / "2" / file
    path.unlink() if change is None else path.write_text(change(path.read_text()))
    with checkpoints(folder) as saved, pytest.raises(train.CheckpointError) as caught:
        saved.restore(newest)
    text = str(caught.value)
    assert f"{folder / '2'} is damaged (" in text and "of step 1, set skip_damaged=True" in text
    assert "\n" not in text and "another model" not in text
    with checkpoints(folder, skip_damaged=True) as saved:
        same(saved.restore(newest), first)
        assert saved.latest == 1
        saved.save(newest)
        assert saved.latest == 2
    with checkpoints(folder) as saved:
        same(saved.restore(first), newest)
    for path in filter(Path.is_file, folder.rglob("*")):
        path.write_bytes(b"")
    with checkpoints(folder, skip_damaged=True) as saved:
        with pytest.raises(train.CheckpointError, match="none before it"):
            saved.restore(first)
        assert saved.latest == 1  # what is set aside may be saved again


@pytest.mark.parametrize(
    "cause",
    [KeyboardInterrupt("SIGTERM"), MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")],
)
def test_an_interruption_or_a_lack_of_memory_is_no_damage(two_saved, cause, monkeypatch):
    """Orbax wraps every exception; a sound checkpoint must not be set aside for it."""
    folder, (_, newest) = two_saved

    def load(*_):
        raise KeyError("incompatible handler") from cause

    with checkpoints(folder, skip_damaged=True) as saved, pytest.raises(type(cause)):
        monkeypatch.setattr(saved._checkpointer, "load", load)
        saved.restore(newest)
    assert (folder / "2").is_dir()


def test_a_checkpoint_that_is_damaged_for_one_process_only_is_not_set_aside(two_saved, monkeypatch):
    """The others wait in orbax for the process that failed: it ends with a message instead of waiting, too."""
    folder, (_, newest) = two_saved
    for path in filter(Path.is_file, (folder / "2" / "state").rglob("*")):
        path.write_bytes(b"")
    nobody_comes = mock.Mock(side_effect=RuntimeError("DEADLINE_EXCEEDED"))
    with checkpoints(folder, skip_damaged=True) as saved, monkeypatch.context() as patch:
        patch.setattr(_checkpoint.multihost, "get_barrier_sync_fn", lambda: nobody_comes)
        with pytest.raises(
            train.CheckpointError, match="damaged for this process and not for all others"
        ):
            saved.restore(newest)
    assert (folder / "2").is_dir()


def test_keys_and_numbers_of_two_bits_are_restored(tmp_path):
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    state = train.init_state({"w": jnp.ones(3), "few": jnp.array([1, -2, 0], jnp.int2)}, optimizer)
    with checkpoints(tmp_path) as saved:
        saved.save(state)
        restored = saved.restore(state)
    same(restored.params, state.params)
    key, wanted = (jax.random.key_data(each.opt_state[0].rng_key) for each in (restored, state))
    assert (key == wanted).all()


def test_a_checkpoint_moves_between_numbers_of_devices(tmp_path):
    """From one to two and four devices and back, bit for bit; to ranks and back in ranks_solve.py."""

    def placed(devices):
        mesh = jax.make_mesh((devices,), ("layers",), axis_types=(jax.sharding.AxisType.Auto,))
        layers, everywhere = (jax.NamedSharding(mesh, spec) for spec in (jax.P("layers"), jax.P()))
        params = initial_params(seed=devices)
        where = {"trunk": layers, "closing": everywhere} if devices > 1 else jax.devices()[0]
        return train.init_state(jax.device_put(params, where), OPTIMIZER)

    state = wanted = placed(1)
    for step, devices in enumerate((2, 4, 1), 1):
        with checkpoints(tmp_path) as saved:
            saved.save(state._replace(step=jnp.int32(step)))
            state = saved.restore(placed(devices))
        assert {x.sharding.num_devices for x in jax.tree.leaves(state)} == {
            devices
        }  # for one program
        same(state.params, wanted.params)
        same(state.opt_state, wanted.opt_state)


def test_a_kill_in_the_middle_of_a_checkpoint_loses_nothing_that_was_saved(tmp_path):
    script = """
        import os, signal, sys, threading, time
        import numpy as np, jax.numpy as jnp, optax
        from pathlib import Path
        from lp_jax import train

        folder = Path(sys.argv[1])

        def kill_while_writing():
            while True:
                if any(path.is_dir() and path.name != "1" for path in folder.iterdir()):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1e-4)

        params = {"w": jnp.asarray(np.arange(8_000_000.0, dtype=np.float32))}
        state = train.init_state(params, optax.sgd(0.1))
        with train.Checkpoints(folder, config={}) as checkpoints:
            checkpoints.save(state._replace(step=jnp.int32(1)))
            threading.Thread(target=kill_while_writing, daemon=True).start()
            checkpoints.save(state._replace(step=jnp.int32(2), params={"w": params["w"] + 1}))
    """
    folder = tmp_path / "checkpoints"
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), folder], timeout=90, capture_output=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    left = [path.name for path in folder.iterdir()]
    assert (
        "1" in left and "2" not in left and len(left) == 2
    )  # the second one was begun, not finished
    state = train.init_state({"w": jnp.zeros(8_000_000, jnp.float32)}, optax.sgd(0.1))
    with train.Checkpoints(folder, config={}) as saved:
        assert saved.latest == 1
        restored = saved.restore(state)
        np.testing.assert_array_equal(
            restored.params["w"], np.arange(8_000_000.0, dtype=np.float32)
        )
        saved.save(
            restored._replace(step=jnp.int32(2))
        )  # and what was left does not stand in the way
        assert saved.latest == 2


# --- trouble --------------------------------------------------------------------------------------------------------


def test_growing_residuals_are_reported_once_an_epoch():
    # The coarse step 1 + m z is unstable, so the first cycles make it worse.
    layers, z = 64, -0.3

    def linear_loss(params, batch, solver, adjoint_solver):
        decay = lambda y, layer: y + layer.dt * layer.params * y  # noqa: E731
        solution = lp_jax.solve(
            decay, params, batch[0], solver=solver, adjoint_solver=adjoint_solver
        )
        info = train.Info(
            jnp.int32(1), solution.stats, solution.result, scale=jnp.linalg.norm(solution.y1)
        )
        return jnp.sum(solution.y1), info

    state = train.init_state(jnp.full((layers,), z * layers), optimizer := optax.sgd(0.0))
    solver = lp_jax.MGRIT(
        coarsening=8, iterations=3, relaxation="F", start="guess", coarse_step=INJECT
    )
    options = {
        "step_fn": train.make_train_step(linear_loss, optimizer),
        "adjoint_solver": lp_jax.Serial(),
    }
    _, log = run(state, 2, solver=solver, **options)
    norms = [log.rows[0][f"forward_residual_{n}"] for n in (1, 3)]
    assert norms[-1] > norms[0]  # by the numbers themselves
    assert [row["step"] for row in log.of("warning")] == [1, 4]
    said = [row["message"] for row in log.of("warning")]
    assert "the forward residual grows over the cycles" in said[0] and 'relaxation="FCF"' in said[0]


def test_an_unmet_tolerance_is_reported_and_growth_but_not_that_of_rounding(state):
    _, log = run(state, 1, solver=lp_jax.Picard(sweeps=1, rtol=1e-14))
    (forward,) = log.of("warning")
    assert forward["solve"] == "forward"
    assert "did not come down to the tolerance" in forward["message"]
    assert "factor 3" in convergence_warning("adjoint", [1e-9, 3e-9], scale=1e-6)
    assert convergence_warning("adjoint", [1e-9, 3e-9], scale=1.0) is None


def test_a_step_that_is_not_finite_stops_the_run(state, tmp_path):
    def poisoned(epoch):
        for i, (x, y) in enumerate(batches(epoch)):
            yield (x, y * np.nan) if (epoch, i) == (1, 1) else (x, y)

    log = train.Log()
    with checkpoints(tmp_path / "c") as saved:
        words = r"5: 5 of the 5 numbers in batch\[1\] are not finite"
        with pytest.raises(train.DivergenceError, match=words) as caught:
            run(
                state,
                2,
                batches=poisoned,
                log=log,
                checkpoints=saved,
                checkpoint_every=2,
            )
        said = str(caught.value)
        assert (
            "last checkpoint is that of step 4" in said
            and "\n" not in said
            and "learning rate" not in said
        )
        assert np.isfinite(saved.restore(state).params["closing"]).all()
    assert log.rows[-1]["step"] == 5 and np.isnan(log.rows[-1]["loss"])


def test_what_is_not_finite_stops_the_run(state, classifier):
    """An update that overflows, a state, with the solvers' advice; and a label that is no class, which is blamed first."""
    optimizer = optax.sgd(1e300)
    with pytest.raises(train.DivergenceError, match=r"stopped at step [12]: the .* not finite"):
        run(
            train.init_state(initial_params(), optimizer),
            1,
            step_fn=train.make_train_step(loss_fn, optimizer),
        )
    spoilt = jax.tree.map(lambda x: x * jnp.nan, state.params)
    with pytest.raises(train.DivergenceError, match="stopped at step 1: the state is not finite"):
        run(state._replace(params=spoilt), 1)
    for words, term in (
        ("loss is nan", lambda x: x * np.nan),
        ("gradient is not finite", lambda x: jnp.sqrt(0 * x)),
    ):

        def spoiled(params, *rest, term=term):
            loss, info = loss_fn(params, *rest)
            return loss + term(jnp.sum(params["closing"])), info

        with pytest.raises(train.DivergenceError, match=f"stopped at step 1: the {words}"):
            run(state, 1, step_fn=train.make_train_step(spoiled, OPTIMIZER))
    with pytest.raises(
        train.DivergenceError, match="1 labels of its batch are none of the classes"
    ):
        fit_once(*classifier[1:], (X, np.where(np.arange(10) == 3, 10, LABELS)))


def killed(at, number=signal.SIGINT):
    """Batches in the middle of which the process gets a signal, before the given step."""

    def give(epoch):
        for i, batch in enumerate(batches(epoch), 3 * epoch + 1):
            if i == at:
                os.kill(os.getpid(), number)
            yield batch

    return give


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_and_saves(state, tmp_path, number):
    before, log = signal.getsignal(number), train.Log()
    with checkpoints(tmp_path / "c") as saved:
        with pytest.raises(train.Interrupted, match="stopped after step 2; saved to") as caught:
            run(
                state,
                4,
                batches=killed(2, number),
                log=log,
                checkpoints=saved,
            )
        assert (caught.value.signal, caught.value.step, saved.latest) == (number, 2, 2)
    assert signal.getsignal(number) is before
    assert [row["step"] for row in log.rows] == [1, 2]


def test_a_second_signal_acts_at_once(state, request):
    """By Python's own handling of SIGINT, which a process that was started in the background ignores."""
    request.addfinalizer(
        functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def impatient(epoch):
        for batch in batches(epoch):
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 10
            while (
                signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                and time.monotonic() < deadline
            ):
                time.sleep(0.001)  # two signals at once may count as one
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
            yield batch

    with pytest.raises(KeyboardInterrupt):
        run(state, 1, batches=impatient)


def test_a_second_run_appends_to_the_file_of_a_log(tmp_path):
    rows = []
    for step in (1, 2):
        log = train.Log(tmp_path / "rows", show=rows.append)
        log.write(kind="train", step=step, loss=jnp.float32(0.5))
    lines = (tmp_path / "rows").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows and len(log.rows) == 1 < len(rows)


def test_a_log_holds_plain_numbers_and_shows_each_row_as_it_is_written():
    shown = []
    log = train.Log(show=lambda row: shown.append(json.dumps(row)))
    log.write(kind="train", step=1, a=jnp.float32(0.5), b=np.int64(3), c=True, d="text", e=None)
    row = {"kind": "train", "step": 1, "a": 0.5, "b": 3, "c": True, "d": "text", "e": None}
    assert log.rows == log.of("train") == [row] and shown == [json.dumps(row)]
    log.write(kind="test", step=1)
    assert len(shown) == 2 and log.of("test") == [{"kind": "test", "step": 1}]


network = functools.partial(dense_classifier, inputs=4, width=6, dtype=jnp.float32)


@pytest.fixture(scope="module")
def classifier():
    """One loss, so that its programs are compiled once."""
    model = network(LAYERS, outputs=3)
    return model, *train.classification(model)


X, VALUES = (np.random.default_rng(n).normal(size=(10, n)).astype(np.float32) for n in (4, 2))
LABELS = np.random.default_rng(0).integers(3, size=10).astype(np.int32)


def test_classification_loss_is_cross_entropy(classifier):
    """A mean over the labels that are not negative."""
    model, loss_fn, params = classifier
    masked = np.where(np.arange(10) < 7, LABELS, -1)
    loss, info = jax.jit(loss_fn)(params, (X, masked), lp_jax.Serial(), None)
    logits = np.asarray(model.solve(X, solver=lp_jax.Serial())[0], np.float64)
    log_probability = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(loss, -log_probability[np.arange(7), LABELS[:7]].mean(), rtol=1e-5)
    right = np.sum(logits.argmax(axis=1)[:7] == LABELS[:7])
    assert (int(info.correct), int(info.total)) == (right, 7)
    parts = train.evaluate(loss_fn, params, [(X[:4], masked[:4]), (X[4:], masked[4:])])
    np.testing.assert_allclose(parts, (loss, right / 7), rtol=1e-6)


def test_a_step_replaces_running_statistics_and_trains_the_rest():
    depth = 4
    model = network(depth, Restless, outputs=3)
    (loss_fn, params), optimizer = train.classification(model), optax.adamw(1e-2, weight_decay=0.1)
    batch = X, LABELS, jax.random.key(1)
    step_fn = train.make_train_step(loss_fn, optimizer)
    state, metrics = step_fn(train.init_state(params, optimizer), batch, lp_jax.Serial(), None)
    assert metrics.info.replace is None

    def loss(layers):
        (y, stats) = model.opening(X), []
        for n in range(depth):
            layer = Restless(nnx.Rngs(0))
            nnx.update(layer, jax.tree.map(lambda x, n=n: x[n], layers))
            y = layer(y, 2 * n / depth, 2 / depth, key=jax.random.fold_in(batch[2], n))
            stats.append(nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat)))
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(model.closing(y), LABELS)
        return jnp.mean(losses), jax.tree.map(lambda *x: jnp.stack(x), *stats)

    layers = params["trunk"]["layers"]
    (wanted, stats), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(layers)
    np.testing.assert_allclose(metrics.loss, wanted, rtol=1e-5)
    new = state.params["trunk"]["layers"]
    for name in ("mean", "var"):
        np.testing.assert_allclose(new["norm"][name], stats["norm"][name], rtol=1e-4, atol=1e-6)
    moved = np.sign(
        np.asarray(new["linear"]["kernel"]) - 0.999 * np.asarray(layers["linear"]["kernel"])
    )
    descent = -np.sign(np.asarray(gradient["linear"]["kernel"]))
    assert np.mean(moved == descent) > 0.99  # Adam's first step is its learning rate


def test_residuals_are_those_of_both_solves(classifier):
    model, loss_fn, params = classifier
    solver = lp_jax.MGRIT(coarsening=LAYERS // 2, iterations=3, start="guess", coarse_step=INJECT)
    found = train.residuals(model, params, (X, LABELS), solver, solver)
    _, info = jax.jit(loss_fn)(params, (X, LABELS), solver, lp_jax.Serial())
    np.testing.assert_allclose(
        found.forward.residual_norms[:2], info.stats.residual_norms[:2], rtol=1e-4
    )
    np.testing.assert_allclose(found.forward_scale, info.scale, rtol=1e-6)
    for stats, scale in (
        (found.forward, found.forward_scale),
        (found.adjoint, found.adjoint_scale),
    ):
        # two intervals: finite termination after two cycles
        assert (
            1e-4 * scale < stats.residual_norms[0] < 10 * scale
            and stats.residual_norms[2] < 1e-6 * scale
        )


def test_a_regression_takes_the_mean_squared_error():
    """Its loss, its outputs, the cotangent that enters its adjoint solve, and its plan."""
    x, y, model = X, VALUES, network(LAYERS)
    loss_fn, params = train.regression(model)
    loss, info = jax.jit(loss_fn)(params, (x, y), lp_jax.Serial(), None)
    outputs = np.asarray(model.solve(x, solver=lp_jax.Serial())[0], np.float64)
    np.testing.assert_allclose(loss, np.mean((outputs - y) ** 2), rtol=1e-5)
    assert info.correct is None and int(info.total) == 20
    parts = train.evaluate(loss_fn, params, [(x[:7], y[:7]), (x[7:], y[7:])])
    np.testing.assert_allclose(parts.loss, loss, rtol=1e-6)
    assert parts.accuracy is None
    np.testing.assert_allclose(train.predict(model, params, x), outputs, rtol=1e-5)
    found = train.residuals(model, params, (x, y), lp_jax.Serial(), loss=train.mean_squared_error)
    last = model.trunk.solve(model.opening(x), solver=lp_jax.Serial()).y1
    cotangent = jax.jit(jax.grad(lambda u: jnp.mean((model.closing(u) - y) ** 2)))(last)
    np.testing.assert_allclose(found.adjoint_scale, np.linalg.norm(cotangent), rtol=1e-4)
    fast = machine(1e-5, 1e-5, at_once=(1, 1024), examples=10)
    plan = train.plan(
        model, params, (x, y), loss=train.mean_squared_error, machine=fast, seconds=0.1
    )
    assert plan.error == 1e-2 and plan.best.error < 1e-2
    with pytest.raises(ValueError, match=r"y must have the shape of the outputs, \(10, 2\)"):
        loss_fn(params, (x, np.zeros((10, 3), np.float32)), lp_jax.Serial(), None)
    with pytest.raises(ValueError, match=r"outputs, \(4, 1\); got \(4,\). Take y\[:, None\]."):
        train.mean_squared_error(jnp.ones((4, 1)), jnp.ones(4))


def fit_once(loss, params, batch, **more):
    step_fn = train.make_train_step(loss, OPTIMIZER)
    given = {
        "batches": lambda epoch: [batch],
        "steps_per_epoch": 1,
        "epochs": 1,
        "solver": SOLVER,
    } | more
    return train.fit(step_fn, train.init_state(params, OPTIMIZER), **given)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"batch": (X, LABELS.astype("float32"))}, TypeError, "Take labels.astype"),
        ({"batch": (X, np.eye(3)[LABELS])}, ValueError, "looks one-hot. Take jnp.argmax"),
        (
            {"batch": (X, LABELS[:4])},
            ValueError,
            r"integers of shape \(10,\).*got int32 of shape \(4,\)",
        ),
        ({"batch": X}, TypeError, "a batch must be .x, labels.*got one array"),
        ({"batch": {"x": X, "y": LABELS}}, TypeError, "got a dict of 2"),
        ({"solver": lp_jax.MGRIT}, TypeError, r"Call it: MGRIT\(\), not MGRIT"),
        ({"adjoint_solver": lp_jax.MGRIT}, TypeError, r"adjoint_solver must be a solver"),
        ({"steps_per_epoch": 4}, ValueError, r"batches\(0\) gave 1 batches; steps_per_epoch is 4"),
        ({"batches": [(X, LABELS)]}, TypeError, "batches must be a function"),
        ({"steps_per_epoch": 0}, ValueError, "steps_per_epoch must be at least 1; got 0"),
        ({"log_every": 0}, ValueError, "log_every must be at least 1"),
        (
            {"loss": lambda params, batch: 0.0},
            TypeError,
            r"called as loss_fn\(params, batch, solver, adjoint_solver\)",
        ),
        ({"loss": lambda *_: jnp.zeros(())}, TypeError, "got an array only"),
        ({"loss": lambda *_: (jnp.zeros(()), {})}, TypeError, r"got \(an array, dict\)"),
    ],
)
def test_a_run_that_cannot_be_is_refused(classifier, changed, error, message):
    _, loss, params = classifier
    with pytest.raises(error, match=message):
        fit_once(**{"loss": loss, "params": params, "batch": (X, LABELS)} | changed)
