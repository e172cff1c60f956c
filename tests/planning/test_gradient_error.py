"""`lp_jax.gradient_error` on losses that know nothing of it: two gradients by hand are the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from networks import F64, mesh, normal
from problems import relative_error
from products import layer as dense

import lp_jax
from lp_jax import train
from lp_jax._levels import _result
from lp_jax._levels._result import DONE, FELL_BACK, NOT_CONVERGED

ROUGH, SERIAL = lp_jax.Picard(sweeps=2), lp_jax.Serial()
WEIGHTS, Y = normal((12, 4, 4)), normal((3, 4), seed=2)


def two_solves(params, y, solver=ROUGH):
    """One inside a jitted function, which the first call leaves in a cache."""
    second = jax.jit(lambda params, y: lp_jax.solve(dense, params, y, t1=2.0, solver=solver).y1)
    y = lp_jax.solve(dense, params["a"], y, solver=solver).y1
    return jnp.sum(jnp.sin(second(params["b"], y)))


def a_scan(params, y, solver=ROUGH):
    def loss(params, y):
        return jnp.mean(
            jax.lax.scan(lambda y, w: (y + 0.1 * jnp.tanh(y @ w), None), y, params)[0] ** 2
        )

    return lp_jax.parallel(loss, solver=solver)(params, y)


def under_shard_map(params, y, solver=ROUGH):
    devices = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def share(params, y):
        return lp_jax.solve(dense, params, y, solver=solver).y1

    whole, parts = PartitionSpec(), PartitionSpec("data")
    shared = jax.shard_map(share, mesh=devices, in_specs=(whole, parts), out_specs=parts)
    return jnp.sum(jnp.sin(shared(params, y)))


def half(params, y, solver=ROUGH):
    return jnp.sum(
        lp_jax.solve(lambda y, layer: dense(y, layer).astype(y.dtype), params, y, solver=solver).y1
    )


def over_a_mesh(params, y, solver=ROUGH):
    return jnp.sum(lp_jax.solve(dense, params, y, solver=solver, comm=mesh(4)).y1)


LOSSES = {
    "two solves": (two_solves, ({"a": WEIGHTS, "b": WEIGHTS[:8]}, Y)),
    "a scan": (a_scan, (WEIGHTS, Y)),
    "under shard_map": (under_shard_map, (WEIGHTS, normal((4, 4), seed=2))),
    "over a mesh": (over_a_mesh, (WEIGHTS, Y)),
    "float16": (half, (WEIGHTS.astype("float16"), Y.astype("float16"))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_error_is_that_of_two_gradients_by_hand(name):
    """Neither takes the other's program from jit's caches."""
    loss, args = LOSSES[name]
    gradient = jax.jit(jax.grad(loss))
    gradient(*args)
    with jax.numpy_dtype_promotion("standard" if name == "float16" else "strict"):
        errors = lp_jax.gradient_error(loss)(*args)
        got = gradient(*args) if name != "two solves" else jax.jit(jax.grad(loss))(*args)
    exact = functools.partial(loss, solver=SERIAL)
    wide = functools.partial(jax.tree.map, lambda x: x.astype(F64))
    wanted = relative_error(wide(got), wide(jax.jit(jax.grad(exact))(*args)))
    np.testing.assert_allclose(errors.relative, wanted, rtol=1e-6)
    assert 1e-4 < errors.relative < 0.2 and 0.99 < errors.cosine <= 1 + 1e-12
    assert {s.direction for s in errors.solves} == {"forward", "adjoint"}
    assert all(s.iterations == 2 and 0 < s.residual < 1 and s.result == DONE for s in errors.solves)
    assert (
        errors.seconds > 0 and errors.exact_seconds > 0 and f"{errors.relative:.1e}" in str(errors)
    )
    if name == "two solves":
        rows = [(s.direction, s.layers, s.solves) for s in errors.solves]
        assert rows == [
            ("forward", 8, 1),
            ("forward", 12, 1),
            ("adjoint", 8, 1),
            ("adjoint", 12, 1),
        ]
    assert set(errors.leaves) == {
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(args[0])
    }


def test_solves_under_vmap_are_all_reported():
    """The arguments are those of `jax.grad`."""

    def loss(weights, ys):
        y1 = jax.vmap(lambda y: lp_jax.solve(dense, weights, y, solver=ROUGH).y1)(ys)
        return jnp.sum(y1), y1

    errors = lp_jax.gradient_error(loss, argnums=(0, 1), has_aux=True)(WEIGHTS, Y)
    assert [s.solves for s in errors.solves] == [3, 3] and list(errors.leaves) == ["[0]", "[1]"]


def test_an_adjoint_that_misses_its_tolerance_is_reported():
    def loss(weights, y, adjoint_solver):
        solver = lp_jax.Picard(sweeps=32, rtol=1e-6)
        return jnp.sum(
            lp_jax.solve(dense, weights, y, t1=8.0, solver=solver, adjoint_solver=adjoint_solver).y1
        )

    missed = lp_jax.Picard(sweeps=2, rtol=1e-6)
    errors = lp_jax.gradient_error(loss)(WEIGHTS, Y, missed)
    assert [s.result for s in errors.solves] == [
        DONE,
        NOT_CONVERGED,
    ] and "did not come down" in str(errors)
    errors = lp_jax.gradient_error(loss)(
        WEIGHTS, Y, lp_jax.Picard(sweeps=2, rtol=1e-6, fallback=True)
    )
    assert errors.solves[1].result == FELL_BACK and errors.relative < 1e-5


MISSES = lp_jax.Picard(sweeps=1, rtol=1e-6)


def missing(w, y, solver=MISSES):
    return jnp.sum(lp_jax.solve(dense, w, y, solver=solver).y1)


jitted = jax.jit(missing)
WATCHED = {
    "under jit": lambda w, y: jitted(w, y) + jitted(w, 2 * y),
    "under vmap": lambda w, y: jnp.sum(jax.vmap(missing, (None, 0))(w, jnp.stack([y, 2 * y]))),
    "in a scan": lambda w, y: jax.lax.scan(
        lambda c, _: (c + missing(w, y), None), 0.0 * y[0, 0], length=3
    )[0],
    "recomputed": jax.checkpoint(missing),
    "one of two": lambda w, y: missing(w, y) + missing(w, y, SERIAL),
    "over a mesh": lambda w, y: jnp.sum(lp_jax.solve(dense, w, y, solver=MISSES, comm=mesh(2)).y1),
    "under shard_map": lambda w, y: under_shard_map(w, jnp.concatenate([y, y[:1]]), MISSES),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_gradient_says_how_its_solves_ended(name):
    loss = WATCHED[name]
    wanted = jax.jit(jax.value_and_grad(loss, (0, 1)))(WEIGHTS, Y)
    *found, results = jax.jit(lp_jax.value_and_grad(loss, (0, 1)))(WEIGHTS, Y)
    assert [int(x) for x in results] == [NOT_CONVERGED, NOT_CONVERGED]
    jax.tree.map(np.testing.assert_array_equal, tuple(found), wanted)


def test_results_under_vmap_by_default_and_of_solves_nobody_differentiates():
    both = jax.jit(jax.vmap(lp_jax.value_and_grad(WATCHED["over a mesh"]), (None, 0)))
    assert both(WEIGHTS, jnp.stack([Y, Y]))[2].adjoint.tolist() == [NOT_CONVERGED] * 2
    default = lp_jax.value_and_grad(lambda y: missing(WEIGHTS, y, None))
    frozen = lp_jax.value_and_grad(
        lambda y: jnp.sum(y**2) + jax.lax.stop_gradient(missing(WEIGHTS, y))
    )
    taken, none = jax.jit(lambda y: (default(y)[2], frozen(y)[2]))(Y)
    assert [int(x) for x in taken] == [_result.SERIAL] * 2  # nothing is faster for twelve layers
    assert [int(x) for x in none] == [DONE, DONE]


def test_results_are_outputs_of_the_program():
    """No callback: the program can be exported and cached."""
    exported = jax.export.export(jax.jit(lp_jax.value_and_grad(missing)))(WEIGHTS, Y)
    assert int(exported.call(WEIGHTS, Y)[2].adjoint) == NOT_CONVERGED
    assert "callback" not in exported.mlir_module()


@pytest.mark.parametrize("watch", [True, False])
def test_a_training_step_says_how_the_adjoint_ended(watch):
    def loss(params, batch, solver, adjoint_solver):
        solution = lp_jax.solve(dense, params, batch, solver=solver, adjoint_solver=adjoint_solver)
        info = train.Info(jnp.int32(3), solution.stats, solution.result)
        return jnp.sum(solution.y1**2), info

    optimizer = optax.sgd(1e-3)
    step, state = (
        train.make_train_step(loss, optimizer, watch=watch),
        train.init_state(WEIGHTS, optimizer),
    )
    solvers = {"solver": lp_jax.Picard(sweeps=12), "adjoint_solver": MISSES}
    _, log = train.fit(step, state, lambda epoch: [Y], steps_per_epoch=1, epochs=1, **solvers)
    (row,), warnings = log.of("train"), log.of("warning")
    assert ("adjoint_result" in row) == bool(warnings) == watch
    if watch:
        assert (row["result"], row["adjoint_result"], warnings[0]["solve"]) == (
            DONE,
            NOT_CONVERGED,
            "adjoint",
        )
        assert "did not come down to the tolerance" in warnings[0]["message"]


def test_a_table_of_solvers():
    def loss(weights, y):
        return jnp.sum(
            jnp.cos(
                lp_jax.solve(
                    dense, weights, y, t1=2.0, solver=lp_jax.Picard(sweeps=32, rtol=1e-3)
                ).y1
            )
        )

    solvers = {
        "own": None,
        "rough": ROUGH,
        "pair": (lp_jax.Picard(sweeps=6), ROUGH),
        "exact": SERIAL,
    }
    table = lp_jax.compare(loss, solvers)(WEIGHTS, Y)
    assert list(table) == list(solvers)
    assert table["exact"].relative == 0 < table["own"].relative < 1e-3 < table["rough"].relative
    assert not table["exact"].solves and "this gradient is exact" in str(table["exact"])
    assert [s.iterations for s in table["pair"].solves] == [6, 2]
    table = lp_jax.compare(jnp.sum, [ROUGH, (ROUGH, lp_jax.Serial()), None])(WEIGHTS)
    assert list(table) == ["Picard(sweeps=2)", "(Picard(sweeps=2), Serial())", "None"]


def test_other_losses_and_solvers_are_refused():
    with pytest.raises(TypeError, match=r"loss must be a function.*got 3"):
        lp_jax.gradient_error(3)
    with pytest.raises(TypeError, match=r"solver must be a solver.*Call it"):
        lp_jax.compare(two_solves, {"a class": lp_jax.Picard})
