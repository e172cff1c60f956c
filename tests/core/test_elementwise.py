"""Chains whose steps act on each number by itself: the kernel, interpreted, and where the default takes it."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from networks import mesh

import lp_jax
from lp_jax import nn, planning, viz
from lp_jax._choice._processor import at_hand, processor
from lp_jax._solvers import _elementwise
from lp_jax._solvers._elementwise import Elementwise, intervals, split
from lp_jax.planning._schedule import count
from lp_jax.planning._words import code

STEPS, BATCH, UNITS = 26, 2, 4
SOLVER = Elementwise()
H200 = processor("gpu", "NVIDIA H200")


@pytest.fixture
def interpreted(monkeypatch):
    for name, value in (("INTERPRET", True), ("_BLOCK", 4), ("_UNROLL", 4)):
        monkeypatch.setattr(_elementwise, name, value)


@pytest.fixture
def two_intervals(monkeypatch):
    monkeypatch.setattr(_elementwise, "intervals", lambda steps, places: 2)


def drawn(cell, dtype=jnp.float64, steps=STEPS):
    """First state, gates and diagonals."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    gates = tuple(draw(steps, BATCH, UNITS) for _ in range(3))
    diagonals, y0 = tuple(draw(1, UNITS) for _ in range(cell.diagonals)), draw(BATCH, UNITS)
    return ((y0, draw(BATCH, UNITS)) if cell is nn.ParaLSTM else y0), gates, diagonals


def loss_of(cell, scan):
    def loss(y0, gates, diagonals):
        y1, ys = scan(lambda y, x: (cell.step(y, x, diagonals), cell.output(y)), y0, gates)
        return jnp.sum(jnp.square(ys.astype(jnp.float32))) + jnp.sum(
            cell.output(y1).astype(jnp.float32)
        ), (y1, ys)

    return loss


kernel = functools.partial(lp_jax.scan, solver=SOLVER, adjoint_solver=SOLVER)


def errors(a, b):
    pairs = [
        [np.asarray(x, np.float64) for x in pair]
        for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    ]
    return np.array([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs])


@pytest.mark.parametrize(
    "cell, dtype, count",
    [(nn.ParaGRU, jnp.float32, 1), (nn.ParaGRU, jnp.bfloat16, 2), (nn.ParaLSTM, jnp.float32, 2)],
)
def test_values_and_gradients_are_those_of_a_scan(cell, dtype, count, interpreted, monkeypatch):
    monkeypatch.setattr(_elementwise, "intervals", lambda steps, places: count)

    def run(scan, dtype):
        arguments = jax.tree.map(lambda x: x.astype(dtype), drawn(cell))
        return jax.jit(jax.value_and_grad(loss_of(cell, scan), (0, 1, 2), has_aux=True))(*arguments)

    exact, plain, mine = run(lax.scan, jnp.float64), run(lax.scan, dtype), run(kernel, dtype)
    assert np.all(errors(mine, exact) <= 2 * errors(plain, exact).max())


def scalar(scan):
    return lambda y0, gates, diagonals: loss_of(nn.ParaGRU, scan)(y0, gates, diagonals)[0]


def test_products_with_hessians_both_ways_and_a_vmap(interpreted, two_intervals):
    """Derivatives of a gradient are those of a scan."""
    y0, gates, diagonals = drawn(nn.ParaGRU, steps=8)

    def of_gradient(scan, how):
        gradient = jax.grad(lambda d: scalar(scan)(y0, gates, d))
        if how == "forward":
            return jax.jit(lambda d: jax.jvp(gradient, (d,), (jax.tree.map(jnp.ones_like, d),))[1])(
                diagonals
            )
        if how == "reverse":
            return jax.jit(jax.grad(lambda d: sum(map(jnp.sum, gradient(d)))))(diagonals)
        return jax.jit(jax.vmap(gradient))(
            jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), diagonals)
        )

    for how in ("forward", "reverse", "vmap"):
        assert np.all(errors(of_gradient(kernel, how), of_gradient(lax.scan, how)) < 1e-6), how


@pytest.mark.parametrize("reported, count", [(0, 1), (2, 2)])
def test_iterations_over_intervals_are_reported(reported, count, interpreted, monkeypatch):
    monkeypatch.setattr(_elementwise, "intervals", lambda steps, places: count)
    body = lambda y, x: (jnp.tanh(0.5 * y + x), None)  # noqa: E731
    problem = lp_jax.scanned(body, jnp.ones((3,)), jnp.ones((8, 3)))
    solution = problem.solve(solver=SOLVER)
    np.testing.assert_allclose(solution.y1, problem.solve(solver=lp_jax.Serial()).y1, rtol=1e-14)
    assert int(solution.stats.iterations) == reported


def test_intervals_are_for_long_chains_that_do_not_fill_the_card():
    assert [intervals(steps, 1024) for steps in (1024, 4095, 8192, 65536, 10_000, 8191)] == [
        1,
        1,
        128,
        128,
        125,
        1,
    ]
    assert intervals(8192, 256 * 64) == 1


def test_a_step_is_split_at_its_state():
    y, x, w = jnp.ones((2, 4)), jnp.ones((2, 3)), jnp.ones((3, 4))
    early, late, each, _ = split(lambda y, x, w: jnp.tanh(y + x @ w), y, x, w)
    assert [e.primitive.name for e in early.eqns] == ["dot_general"] and each == 1
    assert [e.primitive.name for e in late.eqns] == ["add", "tanh"]
    _, late, each, _ = split(
        lambda y, x, w: y + x[0, 0] * jnp.sin(y), y, x, w
    )  # one number a step stays one
    assert [v.aval.size for v in late.invars] == [8, 1] and each == 1
    constant = np.arange(8.0).reshape(2, 4)
    assert not isinstance(split(lambda y, x, w: y * constant, y, x, w), str)
    for step, why in (
        (lambda y, x, w: jnp.tanh(y[:, ::-1] + x @ w), "rev"),
        (lambda y, x, w: y + jnp.sum(y), "reduce_sum"),
        (lambda y, x, w: y.astype(complex).real, "real of numbers"),
    ):
        assert why in split(step, y, x, w)
    assert "several shapes" in split(lambda u, x, w: u, (y, x), x, w)
    assert "not real" in split(lambda u, x, w: u, y.astype(complex), x, w)


def test_refusals():
    solve = functools.partial(lp_jax.scan, xs=jnp.ones((8, 4)), solver=SOLVER)
    coupled = lambda y, x: (jnp.cumsum(y) + x, None)  # noqa: E731
    with pytest.raises(
        TypeError,
        match=r"each number of the state by itself; this one has cumsum.*lp_jax\.Serial\(\)",
    ):
        solve(coupled, jnp.ones(4))
    serial_forward = functools.partial(
        lp_jax.scan, xs=jnp.ones((8, 4)), solver=lp_jax.Serial(), adjoint_solver=SOLVER
    )
    with pytest.raises(TypeError, match="cumsum"):
        jax.grad(lambda y: jnp.sum(serial_forward(coupled, y)[0]))(jnp.ones(4))
    alone = lambda y, x: (jnp.tanh(y + x), None)  # noqa: E731
    with pytest.raises(ValueError, match=r"one device.*got 2 worker\(s\)"):
        solve(alone, jnp.ones(4), comm=mesh(2))
    everywhere = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    spread = jax.shard_map(
        lambda y: solve(alone, y)[0], mesh=jax.make_mesh((2,), ("a",)), **everywhere
    )
    with pytest.raises(ValueError, match=r"outside of shard_map"):
        jax.jit(spread)(jnp.ones(4))


def test_it_is_a_scan_elsewhere(monkeypatch):
    """On a CPU, and where Pallas has no such backend."""
    y0, gates, diagonals = drawn(nn.ParaGRU, steps=4)
    wanted = jax.grad(scalar(lax.scan))(y0, gates, diagonals)
    assert np.all(errors(jax.grad(scalar(kernel))(y0, gates, diagonals), wanted) < 1e-7)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    assert _elementwise.launch() is None
    again = functools.partial(scalar(kernel), 2 * y0)
    assert np.all(
        errors(again(gates, diagonals), scalar(lax.scan)(2 * y0, gates, diagonals)) < 1e-7
    )
    assert not isinstance(chosen(H200), Elementwise)


def chosen(device, cell=nn.ParaGRU, steps=1024):
    zeros = jax.ShapeDtypeStruct((steps, BATCH, UNITS), jnp.float32)
    diagonals = tuple(jnp.ones((1, UNITS), jnp.float32) for _ in range(cell.diagonals))
    y0 = jnp.zeros((BATCH, UNITS), jnp.float32)
    y0 = (y0, y0) if cell is nn.ParaLSTM else y0
    step = lambda y, layer: cell.step(y, layer.data, layer.shared)  # noqa: E731
    problem = lp_jax.Problem(step, None, y0, shared=diagonals, data=(zeros,) * 3)
    with planning.assume(device):
        return planning.default(problem).solver


def test_where_the_default_takes_it():
    for cell in (nn.ParaGRU, nn.ParaLSTM):
        assert (
            chosen(H200, cell) == chosen(processor("gpu", "NVIDIA H100 80GB HBM3"), cell) == SOLVER
        )
        for device in (
            processor("cpu"),
            processor("gpu", "Tesla V100"),
            processor("gpu"),
            processor("tpu", "TPU v4"),
        ):
            assert chosen(device, cell) != SOLVER
    assert chosen(H200, steps=8) != SOLVER
    with jax.set_mesh(jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))):
        assert chosen(H200) != SOLVER
    without_weights = lp_jax.Problem(
        lambda y, x: jnp.tanh(0.5 * y + x.data), None, jnp.ones(8), data=jnp.ones((256, 8))
    )
    fields = {"shared": jnp.ones((4, 4)), "data": jnp.ones(512)}
    mixing = lp_jax.Problem(
        lambda y, layer: jnp.tanh(y @ layer.shared), None, jnp.ones((2, 4)), **fields
    )
    with planning.assume(H200):
        assert planning.default(without_weights).solver == SOLVER != planning.default(mixing).solver


def test_a_node_of_several_devices_is_none_of_one(monkeypatch):
    device = type("Device", (), {"device_kind": "NVIDIA H200"})
    for number, there in ((1, True), (8, False)):
        monkeypatch.setattr(jax, "devices", lambda platform, number=number: [device] * number)
        assert bool(at_hand("gpu").kernel_step) == there


def test_it_is_planned_and_described():
    assert SOLVER.summary == "serial, in one kernel" and code(SOLVER) == "Elementwise()"
    assert count(SOLVER, 64).depth() == count(lp_jax.Serial(), 64).depth() == 64
    assert SOLVER.with_effort(3) == SOLVER
    assert viz.describe(SOLVER, 64).title.startswith("64 layers one after another")
    machine = planning.Machine(
        **dict.fromkeys(("at_once", "forward", "adjoint", "gradient"), (1,)), state_bytes=8
    )
    assert planning.predict(SOLVER, SOLVER, 64, machine).working >= 64 * 8


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_all_operations_lower_for_a_gpu(two_intervals):
    """Forward and back, through intervals: with their derivatives."""
    names = "abs ceil cos cosh exp exp2 expm1 floor log log1p logistic neg rsqrt sign sin sinh sqrt square tan tanh"

    def step(y, x, d):
        z = nn.ParaGRU.step(y, x, d)
        for name in names.split():
            z += getattr(lax, name)(1 + z * z)
        z = jnp.where(
            (z >= 0) ^ (z != 1) & ~(z > 2) | (z <= 3),
            z**3 / lax.pow(2 + z * z, y),
            jnp.maximum(z, jnp.clip(y, 0, 1)),
        )
        return lax.select(z < 1, z, lax.min(y, z)) - (z == 2).astype(z.dtype)

    def loss(y0, gates, diagonals):
        return jnp.sum(kernel(lambda y, x: (step(y, x, diagonals), None), y0, gates)[0])

    try:
        traced = jax.jit(jax.grad(loss)).trace(*drawn(nn.ParaGRU, jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:
        if "AbstractDevice" not in str(error):
            raise
        pytest.skip("jax 0.12 lowers a kernel only where there is a GPU")
    assert text.count("triton") >= 6
