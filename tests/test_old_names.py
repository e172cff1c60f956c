"""Old public names of this release's packages work, with a warning that says the new one."""

import importlib
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import lp_jax
from lp_jax import planning, train
from lp_jax._comms._comm import OneDevice
from lp_jax.train import contrib

MOVED = {
    "lp_jax.train.Batch": "typing.Any",
    "lp_jax.train.flat": "lp_jax.train._log.flat",
    "lp_jax.train.measured": "lp_jax.train._log.measured",
    "lp_jax.train.read_rows": "lp_jax.train._log.read_rows",
    "lp_jax.train.unflat": "lp_jax.train._log.unflat",
    "lp_jax.data.Mesh": "lp_jax.data.contrib.Mesh",
    "lp_jax.data.indian_pines": "lp_jax.data.contrib.indian_pines",
    "lp_jax.data.modelnet": "lp_jax.data.contrib.modelnet",
    "lp_jax.data.read_off": "lp_jax.data.contrib.read_off",
    "lp_jax.data.tiny_imagenet": "lp_jax.data.contrib.tiny_imagenet",
    "lp_jax.data.voxelize": "lp_jax.data.contrib.voxelize",
    "lp_jax.train.Doubling": "lp_jax.train.contrib.Doubling",
    "lp_jax.train.bfloat16": "lp_jax.train.contrib.bfloat16",
    "lp_jax.train.eight_bits": "lp_jax.train.contrib.eight_bits",
    "lp_jax.train.mgopt": "lp_jax.train.contrib.mgopt",
    "lp_jax.train.top_k": "lp_jax.train.contrib.top_k",
}


def looked_up(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("old", MOVED)
def test_a_name_that_moved(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is called {MOVED[old]} now"):
        found = looked_up(old)
    assert found is looked_up(MOVED[old])


@pytest.mark.parametrize(("old", "new"), [("host", "python_comm"), ("device", "compiled_comm")])
def test_a_communicator_of_ranks(old, new):
    comm = types.SimpleNamespace(**{new: object()})  # MPI is not started here
    with pytest.warns(DeprecationWarning, match=f"MPIComm.{old} is called MPIComm.{new} now"):
        found = vars(lp_jax.MPIComm)[old].fget(comm)
    assert found is getattr(comm, new)


def test_the_time_of_a_plan_on_one_worker():
    times = dict.fromkeys(("forward", "linearise", "adjoint", "gradient"), (1e-5, 1e-5))
    plan = planning.choose(64, planning.Machine(at_once=(1, 64), **times))
    with pytest.warns(DeprecationWarning, match="Plan.alone is called Plan.serial_seconds now"):
        assert plan.alone == plan.serial_seconds


def test_workers_that_run_a_body():
    """An engine from outside that has `run` works; so does a call of `run`."""
    with pytest.warns(DeprecationWarning, match=r"Twice.run\(body, stacked, common\) is called map\(body\)"):

        class Twice(type(OneDevice().place(4, (), None, None))):
            def run(self, body, stacked, common):
                return super().run(body, 2 * stacked, common)

    with pytest.warns(DeprecationWarning, match="Workers.run"):  # of the base class
        assert Twice(layers=4, held=(4,)).map(lambda stacked, common: (stacked, common))(1, 3) == (2, 3)
    with pytest.warns(DeprecationWarning, match=r"Workers.run\(body, stacked, common\) is called Workers.map"):
        out = OneDevice().place(4, (), None, None).run(lambda stacked, common: (common, stacked), 1, 3)
    assert out == (3, 1)


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match=r"module 'lp_jax\.train' has no attribute 'sgd'"):
        train.sgd  # noqa: B018


def test_average_gradients_with_a_codec():
    with pytest.warns(DeprecationWarning, match="contrib.average_compressed"):
        link = train.average_gradients("data", lambda x, axis: (x, x))
    assert isinstance(link, optax.GradientTransformation)
    mean, state = link.update(1.0, link.init(jnp.ones(())))
    assert (float(mean), float(state.unsent)) == (1.0, 0.0)


def loss_fn(params, batch, solver, adjoint_solver, *restart):
    given = restart[0]._asdict() if restart else {}
    step = lambda y, layer: y + layer.dt * layer.params * y  # noqa: E731
    solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver, **given)
    return jnp.mean(solution.y1), train.Info(len(batch), solution.stats, solution.result)


def test_info_that_begins_with_correct():
    new = train.Info(4, lp_jax.solve(lambda y, _: y, jnp.ones(2), 1.0).stats, 0, 3, 2.0)
    with pytest.warns(DeprecationWarning, match=r"Info\(total, stats, result, correct=correct\)"):
        old = train.Info(3, 4, new.stats, 0, 2.0)
    assert old == new and new.correct == 3 and train.Info(4, new.stats, 0).correct is None
    assert jax.tree.map(lambda x: x, new) == new and isinstance(jax.tree.map(lambda x: x, new), train.Info)


def doubled(sums):
    """The sums over two ranks that hold the same."""
    return jax.tree.map(lambda x: 2 * x, sums)


def test_global_sums():
    """Ranks are passed whole, not a method of theirs."""
    params, batch, solver = jnp.full(4, 0.5), jnp.ones(2), lp_jax.Picard(sweeps=2, rtol=1e-2)
    sgd = optax.sgd(0.0)

    def norm(**options):
        step_fn = train.make_train_step(loss_fn, sgd, **options)
        return step_fn(train.init_state(params, sgd), batch, solver, None)[1].gradient_norm

    with pytest.warns(DeprecationWarning, match="called ranks=ranks now") as seen:
        two = norm(global_sums=doubled)
    assert jnp.allclose(two, 2**0.5 * norm()) and [warning.filename for warning in seen] == [__file__]
    with pytest.warns(DeprecationWarning, match="called ranks=ranks now"):
        controller = train.Controller(loss_fn, global_sums=doubled)
    assert controller.ranks.sums(1) == 2 and train.Controller(loss_fn).ranks is None
    for old in (train.scale_by_lbfgs, lambda **given: train.gradient_error(loss_fn, params, batch, solver, **given)):
        with pytest.warns(DeprecationWarning, match="called ranks=ranks now"):
            old(global_sums=doubled)
    with pytest.warns(DeprecationWarning, match="called ranks=ranks now"), pytest.raises(AttributeError):
        contrib.mgopt(None, sgd, global_sums=doubled)
