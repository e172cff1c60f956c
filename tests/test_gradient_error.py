"""`lp_jax.gradient_error` on losses that know nothing of it: two gradients by hand are the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from networks import F64, mesh, normal
from problems import relative_error

import lp_jax
from lp_jax import nn
from lp_jax._result import DONE, FELL_BACK, NOT_CONVERGED

ROUGH, SERIAL = lp_jax.Picard(sweeps=2), lp_jax.Serial()
WEIGHTS, Y = normal((12, 4, 4)), normal((3, 4), seed=2)


def dense(y, layer):
    return y + layer.dt * jnp.tanh(y @ layer.params)


def two_solves(params, y, solver=ROUGH):
    """One inside a jitted function, which the first call leaves in a cache."""
    second = jax.jit(lambda params, y: lp_jax.solve(dense, params, y, t1=2.0, solver=solver).y1)
    y = lp_jax.solve(dense, params["a"], y, solver=solver).y1
    return jnp.sum(jnp.sin(second(params["b"], y)))


def modules(solver=ROUGH):
    """A scan inside a module."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, param_dtype=F64, rngs=rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=10)(make)(rngs)

        def __call__(self, y):
            @nn.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, solver=solver)
            def forward(block, y):
                return y + 0.1 * nnx.tanh(block(y))

            return forward(self.blocks, y)

    graphdef, state = nnx.split(Model(nnx.Rngs(0)))
    return lambda state, y: jnp.mean(jnp.square(nnx.merge(graphdef, state)(y))), (state, Y)


def under_shard_map(params, y, solver=ROUGH):
    """A batch over two devices, by the user's own hand."""
    devices = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(
        jax.shard_map,
        mesh=devices,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    def share(params, y):
        return lp_jax.solve(dense, params, y, solver=solver).y1

    return jnp.sum(jnp.sin(share(params, y)))


def half(params, y, solver=ROUGH):
    return jnp.sum(lp_jax.solve(lambda y, layer: dense(y, layer).astype(y.dtype), params, y, solver=solver).y1)


def stochastic(params, y, key, solver=ROUGH):
    def step(y, layer):
        keep = jax.random.bernoulli(layer.data, 0.7, y.shape).astype(y.dtype)
        return y + layer.dt * keep * jnp.tanh(y @ layer.params)

    keys = jax.random.split(key, 12)
    return jnp.sum(lp_jax.solve(step, params, y, data=keys, t1=2.0, solver=solver).y1)


SCANNED, STATE = modules()
HALF = WEIGHTS.astype("float16"), Y.astype("float16")
LOSSES = {
    "two solves": (two_solves, ({"a": WEIGHTS, "b": WEIGHTS[:8]}, Y)),
    "a scan inside a module": (SCANNED, STATE),
    "under shard_map": (under_shard_map, (WEIGHTS, normal((4, 4), seed=2))),
    "float16": (half, HALF),
    "a stochastic step": (stochastic, (WEIGHTS, Y, jax.random.key(3))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_five_losses_nobody_prepared(name):
    loss, args = LOSSES[name]
    jax.jit(jax.grad(loss))(*args)  # what is in jit's caches must not be taken for the exact gradient
    with jax.numpy_dtype_promotion("standard" if name == "float16" else "strict"):
        errors = lp_jax.gradient_error(loss)(*args)
        got = jax.jit(jax.grad(loss))(*args)
    exact = modules(SERIAL)[0] if loss is SCANNED else functools.partial(loss, solver=SERIAL)
    wide = functools.partial(jax.tree.map, lambda x: x.astype(F64))
    wanted = relative_error(wide(got), wide(jax.jit(jax.grad(exact))(*args)))
    np.testing.assert_allclose(errors.relative, wanted, rtol=1e-6)
    assert 1e-4 < errors.relative < 0.2 and 0.99 < errors.cosine <= 1 + 1e-12
    assert {s.direction for s in errors.solves} == {"forward", "adjoint"}
    assert all(s.iterations == 2 and 0 < s.residual < 1 and s.result == DONE for s in errors.solves)
    assert errors.seconds > 0 and errors.exact_seconds > 0 and f"{errors.relative:.1e}" in str(errors)
    assert set(errors.leaves) == {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(args[0])}


def test_two_solves_are_told_apart():
    loss, args = LOSSES["two solves"]
    rows = [(s.direction, s.layers, s.solves) for s in lp_jax.gradient_error(loss)(*args).solves]
    assert rows == [("forward", 8, 1), ("forward", 12, 1), ("adjoint", 8, 1), ("adjoint", 12, 1)]


def test_solves_under_vmap_are_all_reported():
    def loss(weights, ys):
        return jnp.sum(jax.vmap(lambda y: lp_jax.solve(dense, weights, y, solver=ROUGH).y1)(ys))

    assert [s.solves for s in lp_jax.gradient_error(loss)(WEIGHTS, Y).solves] == [3, 3]


def test_layers_over_a_mesh():
    def loss(weights, y):
        return jnp.sum(lp_jax.solve(dense, weights, y, solver=ROUGH, comm=mesh(4)).y1)

    alone = lp_jax.gradient_error(lambda w, y: jnp.sum(lp_jax.solve(dense, w, y, solver=ROUGH).y1))(WEIGHTS, Y)
    np.testing.assert_allclose(lp_jax.gradient_error(loss)(WEIGHTS, Y).relative, alone.relative, rtol=1e-9)


def test_an_adjoint_that_misses_its_tolerance_is_seen():
    def loss(weights, y, adjoint_solver):
        solver = lp_jax.Picard(sweeps=32, rtol=1e-6)
        return jnp.sum(lp_jax.solve(dense, weights, y, t1=8.0, solver=solver, adjoint_solver=adjoint_solver).y1)

    missed = lp_jax.Picard(sweeps=2, rtol=1e-6)
    errors = lp_jax.gradient_error(loss)(WEIGHTS, Y, missed)
    assert [s.result for s in errors.solves] == [DONE, NOT_CONVERGED] and "did not come down" in str(errors)
    errors = lp_jax.gradient_error(loss)(WEIGHTS, Y, lp_jax.Picard(sweeps=2, rtol=1e-6, fallback=True))
    assert errors.solves[1].result == FELL_BACK and errors.relative < 1e-5


def test_a_gradient_that_is_exact():
    errors = lp_jax.gradient_error(lambda w, y: jnp.sum(lp_jax.solve(dense, w, y, solver=SERIAL).y1))(WEIGHTS, Y)
    assert errors.relative == 0 and not errors.solves and "this gradient is exact" in str(errors)


def test_arguments_of_grad():
    def loss(weights, y):
        y1 = lp_jax.solve(dense, weights, y, solver=ROUGH).y1
        return jnp.sum(y1), y1

    errors = lp_jax.gradient_error(loss, argnums=(0, 1), has_aux=True)(WEIGHTS, Y)
    assert list(errors.leaves) == ["[0]", "[1]"]


def test_a_table_of_solvers():
    def loss(weights, y):
        return jnp.sum(jnp.cos(lp_jax.solve(dense, weights, y, t1=2.0).y1))

    solvers = {"own": None, "rough": ROUGH, "pair": (lp_jax.Picard(sweeps=6), ROUGH), "exact": SERIAL}
    table = lp_jax.compare(loss, solvers)(WEIGHTS, Y)
    assert list(table) == list(solvers)
    assert table["exact"].relative == 0 < table["own"].relative < 1e-3 < table["rough"].relative
    assert [s.iterations for s in table["pair"].solves] == [6, 2]
    assert list(lp_jax.compare(loss, [ROUGH])(WEIGHTS, Y)) == [repr(ROUGH)]


def test_what_cannot_be_compared():
    with pytest.raises(TypeError, match=r"loss must be a function.*got 3"):
        lp_jax.gradient_error(3)
    with pytest.raises(TypeError, match=r"solver must be a solver.*Call it"):
        lp_jax.compare(two_solves, {"a class": lp_jax.Picard})
