"""Solvers, adjoint solvers, storage and layers at once, under jit, grad, vmap and scan, against a hand-written scan."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import INJECT, relative_error, serial_loss_and_gradient

import lp_jax

N, WIDTH = 22, 4


def step(y, layer):
    """A pytree state, shared parameters, float and key data, times and indices: whatever a layer can see."""
    a, b = y["a"], y["b"]
    gate = jnp.tanh(a @ layer.params["w"] + layer.shared["bias"][None] + layer.data["x"][None])
    # bits of the key itself: a generator in every step would be most of what is compiled here
    bits = jax.random.key_data(layer.data["key"])[-1] >> jnp.arange(WIDTH, dtype=jnp.uint32)
    mask = (bits & jnp.uint32(1)).astype(gate.dtype)[None]
    decay = layer.shared["rate"] * jnp.cos(layer.t) + 0.01 * layer.index.astype(gate.dtype)
    return {
        "a": a + layer.dt * gate * mask,
        "b": b + layer.dt * (jnp.sum(a**2) * layer.params["s"] - decay * b),
    }


def operands(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    params = {"w": normal(N, WIDTH, WIDTH), "s": normal(N)}
    y0 = {"a": normal(3, WIDTH), "b": normal()}
    shared = {"bias": normal(WIDTH), "rate": normal()}
    data = {"x": normal(N, WIDTH), "key": jax.random.split(jax.random.key(seed), N)}
    return params, y0, shared, data


def loss_of(y):
    return jnp.sum(jnp.sin(y["a"])) + y["b"] ** 2


EXACT = {"iterations": N, "atol": 1e-15}
LAST = lp_jax.Rediscretize(params=lambda p: jax.tree.map(lambda x: x[-1], p))
WITHIN = lp_jax.MGRIT(levels=2, coarsening=2, iterations=1, coarse_step=INJECT)
AROUND = lp_jax.Picard(sweeps=2, around="trajectory")
SOLVERS = {
    "serial": lp_jax.Serial(),
    "serial-checkpointed": lp_jax.Serial(checkpoint_every=5),
    "picard": lp_jax.Picard(sweeps=N),
    "picard-secant": lp_jax.Secant(sweeps=N),
    "picard-c-points": lp_jax.Picard(sweeps=N, storage="states"),
    # a window of k layers is exact after k sweeps; the last one goes over all of them
    "windows": lp_jax.Windowed(sweeps=7, windows=4),
    "windows-c-points": lp_jax.Windowed(sweeps=7, windows=4, storage="states"),
    "newton": lp_jax.Newton(iterations=N, atol=1e-15, batch_axes=0),
    # without an axis of examples the mean is the state itself; means are tested in test_shared_jacobian.py
    "newton-shared": lp_jax.Newton(jacobian="shared", iterations=N, atol=1e-15, batch_axes=0),
    "mgrit-1": lp_jax.MGRIT(levels=1),
    "mgrit-last": lp_jax.MGRIT(levels=3, coarsening=(4, 2), coarse_step=LAST, **EXACT),
    "mgrit-mgrit": lp_jax.MGRIT(coarsening=4, coarse_step=WITHIN, **EXACT),
    "mgrit-mean": lp_jax.MGRIT(
        levels=2, coarsening=5, coarse_step=lp_jax.Rediscretize(params="mean"), **EXACT
    ),
    "mgrit-W": lp_jax.MGRIT(
        levels=3,
        coarsening=(3, 2),
        cycle="W",
        relaxation="F",
        coarse_step=INJECT,
        storage="all",
        **EXACT,
    ),
    "mgrit-picard": lp_jax.MGRIT(
        coarsening=4, coarse_step=lp_jax.Picard(sweeps=1), storage="all", **EXACT
    ),
    "mgrit-trajectory": lp_jax.MGRIT(coarsening=4, coarse_step=AROUND, **EXACT),
    "mgrit-trajectory-all": lp_jax.MGRIT(coarsening=4, coarse_step=AROUND, storage="all", **EXACT),
    "mgrit-identity": lp_jax.MGRIT(
        coarsening=4, coarse_step=lp_jax.Identity(), start="guess", **EXACT
    ),
    "mgrit-coarsest": lp_jax.MGRIT(
        coarsening=4, coarse_step=INJECT, coarsest=lp_jax.Picard(sweeps=6), **EXACT
    ),
}


@pytest.fixture(scope="module")
def oracle():
    params, y0, shared, data = operands()

    def fed(y, layer):
        """The data that are differentiated come as parameters."""
        params, x = layer.params
        return step(y, layer._replace(params=params, data=layer.data | {"x": x}))

    value, ((of_params, of_x), *others) = serial_loss_and_gradient(
        fed, (params, data["x"]), y0, loss_of, t1=2.0, shared=shared, data={"key": data["key"]}
    )
    return value, (of_params, *others, of_x)


CASES = [  # solver, adjoint solver, layers at once; what is stored is a field of the solver
    ("serial", "serial", "auto"),
    ("serial", "picard", "auto"),
    ("serial-checkpointed", "serial-checkpointed", "auto"),
    ("serial-checkpointed", "picard", "auto"),
    ("picard", "picard", 3),
    ("picard", "serial", math.inf),
    ("picard-secant", "picard-secant", math.inf),
    ("picard-c-points", "picard-c-points", 1),
    ("picard-c-points", "mgrit-identity", 3),
    ("newton", "newton", 3),
    ("newton", "picard", math.inf),
    ("newton-shared", "newton-shared", math.inf),
    ("mgrit-1", "mgrit-1", "auto"),
    ("mgrit-1", "picard", "auto"),
    ("windows", "windows-c-points", 3),
    ("windows-c-points", "windows", "auto"),
    ("mgrit-last", "mgrit-mgrit", 1),
    ("mgrit-mgrit", "mgrit-last", 1),
    ("mgrit-mean", "mgrit-mean", 3),
    ("mgrit-W", "mgrit-W", math.inf),
    ("mgrit-picard", "mgrit-picard", 1),
    ("mgrit-trajectory", "mgrit-trajectory", 3),
    ("mgrit-trajectory-all", "mgrit-trajectory-all", 3),  # the coarse step reads what is stored
    ("mgrit-trajectory", "serial", math.inf),
    ("mgrit-identity", "mgrit-identity", math.inf),
    ("mgrit-identity", "newton", 1),
    ("mgrit-coarsest", "mgrit-coarsest", 1),
]


@pytest.mark.parametrize("forward, adjoint, at_once", CASES)
def test_value_and_gradient(oracle, forward, adjoint, at_once):
    params, y0, shared, data = operands()
    names = forward, adjoint
    solver, adjoint_solver = (
        SOLVERS[name]
        if at_once == "auto" or name == "serial"
        else dataclasses.replace(SOLVERS[name], at_once=at_once)
        for name in names
    )

    @jax.jit
    def value_and_gradient(params, y0, shared, x):
        def loss(params, y0, shared, x):
            given = {"shared": shared, "data": data | {"x": x}, "t1": 2.0}
            return loss_of(
                lp_jax.solve(
                    step, params, y0, solver=solver, adjoint_solver=adjoint_solver, **given
                ).y1
            )

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(params, y0, shared, x)

    value, gradient = value_and_gradient(params, y0, shared, data["x"])
    assert abs(value - oracle[0]) < 1e-12 * abs(oracle[0])
    assert relative_error(gradient, oracle[1]) < 1e-12


@functools.cache
def of_closed_over_and_end(name, grid):
    """A loss of two values that the step closes over and of the last time, and its gradient."""
    params, y0, shared, data = operands()

    def loss(scale, offset, end):
        def closing(y, layer):
            out = step(y, layer)
            return {"a": out["a"] * scale, "b": out["b"] + offset["o"] * layer.dt}

        t1 = end if grid == "scalar" else end * jnp.linspace(0.0, 1.0, N + 1) ** 2
        given = {"shared": shared, "data": data, "t1": t1, "solver": SOLVERS[name]}
        return loss_of(lp_jax.solve(closing, params, y0, **given).y1)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


CLOSED_OVER = jnp.asarray(0.99), {"o": jnp.asarray(0.3)}


@pytest.mark.parametrize("grid", ["scalar", "array"])
def test_times_are_differentiated(grid, eps=1e-6):
    run = of_closed_over_and_end("serial", grid)
    (above, _), (below, _) = (run(*CLOSED_OVER, 1.5 + e) for e in (eps, -eps))
    np.testing.assert_allclose(run(*CLOSED_OVER, 1.5)[1][2], (above - below) / (2 * eps), rtol=1e-7)


@pytest.mark.parametrize(
    "name, grid", [("picard", "array"), ("mgrit-mean", "scalar"), ("mgrit-trajectory", "array")]
)
def test_closed_over_values_and_times_are_differentiated(name, grid):
    got, wanted = (
        of_closed_over_and_end(solver, grid)(*CLOSED_OVER, 1.5) for solver in (name, "serial")
    )
    assert relative_error(got[1][:2], wanted[1][:2]) < 1e-12
    np.testing.assert_allclose(got[1][2], wanted[1][2], rtol=1e-12)


@pytest.mark.parametrize("name", ["picard", "mgrit-identity"])
def test_aux_comes_from_the_final_states(name):
    params, y0, shared, data = operands()

    def with_aux(y, layer):
        return step(y, layer), {"mean": jnp.mean(y["a"]), "index": layer.index}

    def aux(solver):
        return lp_jax.solve(
            with_aux, params, y0, shared=shared, data=data, solver=solver, has_aux=True
        ).aux

    found, exact = jax.jit(lambda: (aux(SOLVERS[name]), aux(lp_jax.Serial())))()
    assert found["index"].tolist() == list(range(N))
    np.testing.assert_allclose(found["mean"], exact["mean"], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex128"])
def test_dtypes(dtype):
    """Times come in the state's real dtype and nothing is promoted on the way."""
    params = jnp.linspace(0.1, 0.2, 16).astype(dtype)
    y0 = jnp.ones(3, dtype) if dtype != "complex128" else jnp.asarray([1.0 + 1j, 2.0, -1j])

    def linear(y, layer):
        assert layer.dt.dtype == jnp.finfo(dtype).dtype
        return y + layer.dt.astype(dtype) * layer.params * y

    def loss(p, solver):
        return jnp.sum(jnp.abs(lp_jax.solve(linear, p, y0, solver=solver).y1) ** 2)

    gradient = jax.jit(jax.grad(loss))
    got, wanted = (gradient(params, s) for s in (lp_jax.MGRIT(iterations=4), lp_jax.Serial()))
    assert got.dtype == params.dtype
    tolerance = {"bfloat16": 2e-2, "float32": 1e-6, "complex128": 1e-14}[dtype]
    np.testing.assert_allclose(
        got.astype("complex128"), wanted.astype("complex128"), rtol=tolerance
    )
