"""The default: what it chooses by the cost of a layer, what it says, and that what it chooses is right."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import dense_classifier, mesh

import lp_jax
from lp_jax import planning
from lp_jax._choice._fastest import SERIAL, SWEEPS, Layers, choose, typical
from lp_jax._choice._footprint import Footprint
from lp_jax._choice._processor import CPU, processor
from lp_jax._levels import _result
from lp_jax._programs import _results

H200 = processor("gpu", "NVIDIA H200")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def dense(width, layers, batch):
    def body(y, w):
        return y + jnp.tanh(y @ w) / layers, None

    return body, normal(1, batch, width), normal(0, layers, width, width) * width**-0.5


def attention(width, layers, batch, tokens=32):
    def body(y, p):
        q, k, v = jnp.split(y @ p[0], 3, axis=-1)
        y = y + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k), axis=-1) @ v
        return y + jax.nn.gelu(y @ p[1]) @ p[1].T, None

    weights = (
        normal(0, layers, width, 3 * width) * width**-0.5,
        normal(2, layers, width, 4 * width) * width**-0.5,
    )
    return body, normal(1, batch, tokens, width), weights


def gru(width, layers, batch):
    weights, inward = normal(0, width, 3 * width) * width**-0.5, normal(2, 8, 3 * width) * 8**-0.5

    def body(h, x):
        a, g = jnp.split(h @ weights, 3, axis=-1), jnp.split(x @ inward, 3, axis=-1)
        z, r = jax.nn.sigmoid(a[0] + g[0]), jax.nn.sigmoid(a[1] + g[1])
        h = (1 - z) * h + z * jnp.tanh(r * a[2] + g[2])
        return h, h

    return body, jnp.zeros((batch, width), jnp.float32), normal(1, layers, batch, 8)


def average(rate, layers=500, width=32, batch=4):
    def body(h, x):
        h = (1 - rate) * h + rate * jnp.tanh(x)
        return h, h

    return body, normal(3, batch, width), normal(1, layers, batch, width)


def linear(rate, layers=300, width=8):
    matrix = rate * (
        0.5 * normal(5, width, width) * width**-0.5 - jnp.eye(width, dtype=jnp.float32)
    )
    return (
        (lambda h, x: (h + h @ matrix + 0.1 * x, None)),
        normal(3, 4, width),
        normal(1, layers, 4, width),
    )


def nearly_shut(bias, layers=300, width=8):
    weights, inward = normal(0, width, 2 * width) * width**-0.5, normal(2, 8, 2 * width) * 8**-0.5

    def body(h, x):
        a, g = jnp.split(h @ weights, 2, axis=-1), jnp.split(x @ inward, 2, axis=-1)
        z = jax.nn.sigmoid(a[0] + g[0] - bias)
        h = (1 - z) * h + z * jnp.tanh(a[1] + g[1])
        return h, h

    return body, normal(4, 4, width), normal(1, layers, 4, 8)


def kalman(steps=100):
    """A filter: log-likelihood, mean and covariance in the carry, and linear systems in the step."""
    moves, seen = jnp.eye(4) + 0.1 * jnp.eye(4, k=2), jnp.eye(2, 4)

    def body(carry, y):
        likelihood, mean, covariance = carry
        mean = moves @ mean
        covariance = moves @ covariance @ moves.T + 0.01 * jnp.eye(4)
        noise = seen @ covariance @ seen.T + 0.25 * jnp.eye(2)
        gain, r = jnp.linalg.solve(noise, seen @ covariance).T, y - seen @ mean
        likelihood = likelihood - 0.5 * (
            r @ jnp.linalg.solve(noise, r) + jnp.linalg.slogdet(noise)[1]
        )
        return (likelihood, mean + gain @ r, covariance - gain @ noise @ gain.T), None

    return body, (jnp.zeros(()), jnp.zeros(4), 10 * jnp.eye(4)), jnp.zeros((steps, 2))


def chosen(network, device=CPU):
    body, init, xs = network
    with planning.assume(device):
        return planning.default(lp_jax.scanned(body, init, xs))[:2]


ORDINARY = {
    "dense": dense(96, 64, 32),
    "few layers": dense(64, 8, 16),
    "attention": attention(64, 24, 2),
    "gru": gru(24, 300, 16),
    "average": average(0.01),
    # its step is long to compile in the many copies that sweeps hold, and the first ones make covariances that no filter has
    "filter": kalman(),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_networks_are_propagated_serially_on_a_cpu(name):
    """And give the numbers of `lax.scan`, to the bit."""
    network = ORDINARY[name]
    assert chosen(network) == SERIAL
    if name in ("few layers", "average"):
        body, init, xs = network
        solution = jax.jit(lambda xs: lp_jax.scanned(body, init, xs).solve())(xs)
        assert int(solution.result) == _result.SERIAL
        wanted = jax.jit(lambda xs: jax.lax.scan(body, init, xs)[0])(xs)
        np.testing.assert_array_equal(solution.raise_if_failed().y1, wanted)


@pytest.mark.parametrize("sizes", [(8, 4096, 4), (16, 4096, 1), (32, 1024, 1)])
def test_deep_narrow_networks_are_swept_on_a_cpu(sizes):
    forward, adjoint = chosen(dense(*sizes), dataclasses.replace(CPU, row_kernel=CPU.kernel))
    assert isinstance(forward, lp_jax.Picard) and forward.fallback and adjoint.fallback
    assert (forward.rtol, adjoint.rtol) == (1e-3, 1e-2)
    fuses = dataclasses.replace(
        CPU, row_kernel=1e-8
    )  # as jax 0.12: the scan over single examples is fast
    assert (chosen(dense(*sizes), fuses) == SERIAL) == (sizes[2] == 1)


def test_an_accelerator_sweeps_and_takes_newtons_method_for_recurrent_networks():
    weights = normal(0, 64, 64) * 0.125
    assert chosen(dense(64, 1024, 64), H200) == SWEEPS
    assert chosen(attention(64, 24, 2), H200)[0].sweeps <= 32
    forward, _ = chosen(gru(16, 1024, 64), H200)
    assert isinstance(forward, lp_jax.Newton) and forward.fallback and forward.batch_axes == 1
    filling = []
    jax.eval_shape(lambda: filling.append(chosen(dense(8192, 8, 1), H200)))  # of shapes only: 2 GB
    assert filling == [SERIAL]  # a layer fills it
    assert (
        chosen(gru(64, 64, 64), H200) == SERIAL
    )  # few steps; with inputs at each of them sweeps seldom converge
    tied = (lambda h, _: (h + 0.01 * jnp.tanh(h @ weights), None)), normal(1, 64, 64), None
    with planning.assume(H200):
        assert isinstance(
            planning.default(lp_jax.scanned(*tied, length=1024)).solver,
            lp_jax.Picard | lp_jax.Newton,
        )
    mix = lambda h, x: (jnp.tanh(h - h.mean(axis=0, keepdims=True) + x), None)  # noqa: E731
    mixes = mix, gru(16, 1024, 64)[1], normal(1, 1024, 64, 16)
    assert not isinstance(chosen(mixes, H200)[0], lp_jax.Newton)  # its examples are not independent


def test_workers_relay_where_a_layer_fills_them():
    """Gradients of weights, a third of the work, are formed on all of them at once."""
    layer = Footprint(10**6, 10**6, 1e12, kernels=3)
    one = Layers(layer, 64, 1, H200, state=10**6, examples=0, numbers=10**6, recurrent=False)
    _, serial = choose(one)
    for workers in (2, 4):
        pair, seconds = choose(one._replace(workers=workers))
        share = (2 + 1 / workers) / 3
        assert pair == SERIAL and share * serial < seconds < (share + 0.03) * serial  # messages
    opaque = layer._replace(counted=False)
    assert choose(one._replace(workers=2, footprint=opaque))[0] == SERIAL
    small = Footprint(10**3, 10**3, 1e3, kernels=3, few=True)  # on a CPU, its gradient is JAX's own
    on_cpu = one._replace(footprint=small, processor=CPU, layers=4)
    messages = 2 * (CPU.latency + one.state / CPU.bandwidth)
    assert choose(on_cpu._replace(workers=2))[1] == pytest.approx(choose(on_cpu)[1] + messages)


@pytest.mark.parametrize("layers", [64, 4])  # on four devices
def test_the_default_is_right_over_workers(layers):
    body, init, xs = dense(8, layers, 4)
    wanted = jax.grad(lambda xs: jnp.sum(jax.lax.scan(body, init, xs)[0] ** 2))(xs)
    found = jax.jit(
        jax.grad(lambda xs: jnp.sum(lp_jax.scan(body, init, xs, comm=mesh(4))[0] ** 2))
    )(xs)
    assert jnp.linalg.norm(found - wanted) < 1e-2 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "gpu"])
def test_budgets_at_most_double_the_time(device):
    """Of all sizes: the sweeps that are allowed, the evaluations besides, and serial propagation after them."""
    swept = 0
    for flops in (32, 512, 4096, 1e6, 1e9):
        for layers in (4, 64, 1024, 16384):
            for few in (False, True):
                layer = Footprint(
                    int(flops) // 2, 256, flops, few=few, numbers=flops / 8, kernels=3
                )
                at = Layers(
                    layer, layers, 1, device, state=256, examples=0, numbers=64, recurrent=False
                )
                pair, seconds = choose(at)
                serial, one = sum(device.serial(layer, layers)), device.batch(layer, layers)
                assert seconds <= serial
                if pair != SERIAL:
                    swept += 1
                    assert sum(s.sweeps for s in pair) * one + 3 * one + serial <= 2 * serial
    assert swept > 2


@pytest.mark.parametrize("kind", ["stalls", "diverges late"])
def test_sweeps_that_fail_are_given_up_within_their_budget(kind, layers=256):
    """They stall just above the tolerance, or diverge late."""
    init, xs, evaluated = jnp.ones((2, 2)) / 3, jnp.arange(float(layers)), []

    def body(y, x):
        if kind == "stalls":  # a layer in the middle that sweeps approach slowly
            push = jnp.where(x == layers // 2, 40.0, 1.0)
            return y + push * jnp.tanh(y - 0.3) / layers * jnp.array([[1.0, 30.0]]), None
        return y + jnp.sin(8.0 * y) * jnp.where(x > layers // 2, 0.4, 1.0 / layers), None

    def counted(y, x):
        jax.debug.callback(lambda: evaluated.append(1))
        return body(y, x)

    budget = 12
    forward, adjoint = (lp_jax.Picard(sweeps=budget, rtol=s.rtol, fallback=True) for s in SWEEPS)
    solution, pullback = lp_jax.scanned(body, init, xs).solve_vjp(
        solver=forward, adjoint_solver=adjoint
    )
    gradients, _ = pullback(jnp.ones_like(solution.y1))
    exact, pull = lp_jax.scanned(body, init, xs).solve_vjp(solver=lp_jax.Serial())
    np.testing.assert_allclose(solution.y1, exact.y1, rtol=1e-10)
    np.testing.assert_allclose(gradients.y0, pull(jnp.ones_like(solution.y1))[0].y0, rtol=1e-2)
    assert int(solution.result) == _result.FELL_BACK and int(solution.stats.iterations) <= budget
    lp_jax.scanned(counted, init, xs).solve(solver=forward)
    jax.effects_barrier()
    # all layers at once count once: the sweeps and their last evaluation, and then layer after layer. The third of the largest
    # changes is small by chance where sweeps diverge late, so that it takes a fourth to see it
    swept = int(solution.stats.iterations)
    assert len(evaluated) <= len(xs) + swept + 1 and swept <= (4 if kind == "diverges late" else 3)


def test_sweeps_that_will_miss_their_tolerance_stop_after_two():
    """The fall of two corrections gives L T = 6, with which eight sweeps do not reach a thousandth."""
    problem = lp_jax.Problem(
        lambda y, layer: y + layer.dt * 6.0 * y, None, jnp.ones(()), data=jnp.zeros(512)
    )
    for sweeps, result in ((8, _result.FELL_BACK), (32, _result.DONE)):
        solution = problem.solve(solver=lp_jax.Picard(sweeps=sweeps, rtol=1e-3, fallback=True))
        assert int(solution.result) == result
        assert (int(solution.stats.iterations) <= 3) == (sweeps == 8)


REMEMBER = {
    **{f"average, rate {rate}": average(rate) for rate in (0.1, 0.01, 0.001)},
    "average from zero": (average(0.01)[0], jnp.zeros((4, 32), jnp.float32), average(0.01)[2]),
    "linear": linear(0.01),
    "linear, forgets": linear(0.05),
    "gate nearly shut": nearly_shut(7.0),
    "gate rather shut": nearly_shut(4.0),
}


@pytest.mark.parametrize(
    ("name", "seen", "device"),
    [
        *((name, "last", CPU) for name in REMEMBER),
        *((name, "all", CPU) for name in ("average, rate 0.01", "linear", "gate rather shut")),
        *(
            (name, "all", H200) for name in ("linear", "gate rather shut")
        ),  # the default is Newton's method there
    ],
    ids=lambda value: {CPU: "sweeps", H200: "Newton"}.get(value, value),
)
def test_chains_that_remember(name, seen, device):
    """A small residual is a large error there. The gradient of every argument by itself is right, or exact by a fallback."""
    body, *arguments = REMEMBER[name]

    def loss(init, xs, **solvers):
        last, ys = lp_jax.scan(body, init, xs, **solvers)
        return jnp.sum(jnp.cos(last)) + (0 if ys is None or seen == "last" else jnp.mean(ys**2))

    if device is CPU:
        solver, adjoint_solver = SWEEPS
        iterated = functools.partial(loss, solver=solver, adjoint_solver=adjoint_solver)
    else:
        iterated = loss
        assert isinstance(chosen(REMEMBER[name], H200)[0], lp_jax.Newton)
    with planning.assume(device):
        _, found, results = jax.jit(lp_jax.value_and_grad(iterated, argnums=(0, 1)))(*arguments)
    exact = jax.jit(jax.grad(functools.partial(loss, solver=lp_jax.Serial()), argnums=(0, 1)))(
        *arguments
    )
    assert max(map(int, results)) <= _result.FELL_BACK
    for got, wanted in zip(found, exact, strict=True):
        assert jnp.linalg.norm(got - wanted) <= 1e-2 * jnp.linalg.norm(wanted)


W, X = (normal(0, 12, 6, 6) / 4, normal(1, 3, 6))


def scaled(w, scale, solver=None, adjoint_solver=None):
    last, _ = lp_jax.scan(
        lambda y, w: (y + 0.3 * jnp.sin(y @ w), None),
        X,
        w,
        solver=solver,
        adjoint_solver=adjoint_solver,
    )
    return scale * jnp.sum(last)


@pytest.mark.parametrize(
    "pair",
    [SWEEPS, (lp_jax.MGRIT(iterations=8, rtol=1e-4, fallback=True), None)],
    ids=["sweeps", "cycles"],
)
def test_a_loss_in_any_unit(pair):
    exact = jax.grad(scaled)(W, 1.0, lp_jax.Serial())
    solved = jax.jit(lambda scale: lp_jax.value_and_grad(scaled)(W, scale, *pair)[1:])
    for scale in (1e-22, 1e-15, 1e19, 1e22):
        gradient, results = solved(jnp.float32(scale))
        assert jnp.linalg.norm(gradient / scale - exact) < 5e-3 * jnp.linalg.norm(exact)
        assert [int(x) for x in results] == [_result.DONE] * 2


@pytest.mark.parametrize(
    "solver",
    [
        lp_jax.Picard(sweeps=64, rtol=1e-6, fallback=True),
        lp_jax.Picard(sweeps=64, rtol=1e-6, fallback=True, at_once=4),
        lp_jax.MGRIT(iterations=4, rtol=1e-6, fallback=True),
        lp_jax.Newton(iterations=8, rtol=1e-6, fallback=True, batch_axes=1),
        lp_jax.Windowed(sweeps=8, windows=3, rtol=1e-6, fallback=True),
    ],
    ids=["sweeps", "some at once", "cycles", "Newton", "windows"],
)
def test_a_state_in_any_unit(solver):
    """A residual norm is that of the state in units of 1, times the unit: no sum of squares leaves the range."""

    @jax.jit
    def solved(unit):
        body = lambda y, w: (y + 0.3 * unit * jnp.sin((y / unit) @ w), None)  # noqa: E731
        solution = lp_jax.scanned(body, unit * X, W).solve(solver=solver)
        return solution.y1 / unit, jax.lax.scan(body, unit * X, W)[0] / unit, solution.stats

    *_, plain = solved(jnp.float32(1.0))
    first = int(np.argmax(np.asarray(plain.residual_norms) >= 0))
    for unit in (1e-22, 1e22):
        y1, exact, got = solved(jnp.float32(unit))
        np.testing.assert_allclose(y1, exact, rtol=1e-5)
        assert int(got.result) == int(plain.result) and int(got.iterations) == int(plain.iterations)
        if plain.residual_norms[first] > 1e-6:  # else it is rounding, after windows
            np.testing.assert_allclose(
                got.residual_norms[first] / unit, plain.residual_norms[first], rtol=1e-4
            )


def test_a_state_from_zero_in_a_unit_far_from_one_is_not_done_early():
    """No size is known before the first iteration, so squares may vanish or overflow: that meets no tolerance."""
    for unit in (1e-30, 1e30):
        body = lambda y, w, unit=unit: (y + 0.3 * unit * jnp.cos((y / unit) @ w), None)  # noqa: E731
        exact, _ = jax.lax.scan(body, 0 * X, W)
        for solver in (SWEEPS[0], lp_jax.MGRIT(iterations=2, rtol=1e-3, fallback=True)):
            solution = lp_jax.scanned(body, 0 * X, W).solve(solver=solver)
            np.testing.assert_allclose(solution.y1 / unit, exact / unit, rtol=1e-2)


TRANSITIONS = jax.nn.log_softmax(normal(0, 4, 4))
OBSERVED = jax.nn.log_softmax(normal(2, 20, 4))


def filtered(transitions, solver=None):
    """The forward algorithm in log space, from a state that is known."""

    def body(a, o):
        return jax.nn.logsumexp(a[:, None] + transitions, axis=0) + o, None

    init = jnp.array([0.0, -jnp.inf, -jnp.inf, -jnp.inf], jnp.float32)
    return jax.nn.logsumexp(lp_jax.scan(body, init, OBSERVED, solver=solver)[0])


@pytest.mark.parametrize(
    ("solver", "falls_back"),
    [
        (None, True),
        (SWEEPS[0], True),
        (lp_jax.Newton(iterations=16, batch_axes=0, rtol=1e-4, fallback=True), True),
        (lp_jax.MGRIT(iterations=8, rtol=1e-4, fallback=True), True),
        (lp_jax.Newton(iterations=16, batch_axes=0), False),
        (lp_jax.Picard(sweeps=8), False),
    ],
    ids=["default", "sweeps", "Newton", "cycles", "Newton, 16 iterations", "8 sweeps"],
)
def test_infinite_numbers_in_the_carry(solver, falls_back):
    """Their differences are no numbers: serial propagation decides; what was set back is never done."""
    value, gradient, results = lp_jax.value_and_grad(filtered)(TRANSITIONS, solver)
    exact, wanted = jax.value_and_grad(filtered)(TRANSITIONS, lp_jax.Serial())
    if falls_back:
        np.testing.assert_allclose(
            (value, *jnp.ravel(gradient)), (exact, *jnp.ravel(wanted)), rtol=1e-5, atol=1e-6
        )
        assert int(results.forward) in (_result.SERIAL, _result.FELL_BACK)
    else:
        assert int(results.forward) == _result.NON_FINITE


CYCLES = lp_jax.MGRIT(coarsening=4, iterations=3)  # knows the states after an interval only


@pytest.mark.parametrize(
    "solver", [None, lp_jax.Serial(), SWEEPS[0], lp_jax.Picard(sweeps=3), CYCLES], ids=repr
)
def test_the_first_layer_whose_output_is_not_finite_is_named(solver):
    step = lambda y, layer: (y + 0.1 / (5.0 - layer.data), y)  # noqa: E731
    solution = lp_jax.solve(
        step, None, jnp.ones(3), data=jnp.arange(12.0), solver=solver, has_aux=True
    )
    first = "interval 1 (counted from 0) of 3" if solver is CYCLES else "layer 5 (counted from 0)"
    assert int(solution.result) == _result.NON_FINITE and first in repr(solution)
    with pytest.raises(
        lp_jax.SolveError, match=rf"{re.escape(first)}.* is the first.* whose output is not finite"
    ):
        solution.raise_if_failed()


def test_an_overflow_is_the_worst_of_several_ends():
    """Its code is not the largest; of a residual that does not fall it is."""
    sweeps, start = lp_jax.Picard(sweeps=3), jnp.ones((), jnp.float32)

    def last(params, factor):
        step = lambda y, layer: y * layer.params * jnp.float32(factor)  # noqa: E731
        return lp_jax.solve(step, params, start, solver=sweeps).y1

    both = lambda params: last(params, 1e30) + last(params, 3.0)  # noqa: E731
    (_, _, results), (_, _, milder) = (
        lp_jax.value_and_grad(f)(jnp.ones(8, jnp.float32))
        for f in (both, functools.partial(last, factor=3.0))
    )
    assert int(results.forward) == _result.NON_FINITE < _result.NOT_FALLING == int(milder.forward)
    codes = jnp.asarray([_result.NOT_FALLING, _result.NON_FINITE, _result.DONE])
    with pytest.warns(UserWarning, match="the state is not finite"):
        _results.Results(codes, jnp.zeros(3, jnp.int32)).warn()
    np.testing.assert_array_equal(_result.ranked(_result.ranked(codes)), codes)


def test_all_say_that_nothing_is_faster():
    body, init, xs = dense(8, 12, 2)
    loss = lambda xs: jnp.sum(lp_jax.scan(body, init, xs)[0])  # noqa: E731
    _, gradient, results = jax.jit(lp_jax.value_and_grad(loss))(xs)
    assert [int(x) for x in results] == [_result.SERIAL] * 2
    np.testing.assert_array_equal(gradient, jax.jit(jax.grad(loss))(xs))
    errors = lp_jax.gradient_error(loss)(xs)
    assert (
        errors.relative == 0
        and "one layer after another, as nothing is predicted to be faster" in str(errors)
    )
    _, pullback = lp_jax.scanned(body, init, xs).solve_vjp()
    assert int(pullback(init)[1].result) == _result.SERIAL


def test_a_loop_hears_of_a_fallback_once():
    step = lambda y, layer: 2.0 * y  # noqa: E731
    loss = lambda y: lp_jax.solve(step, None, y, data=jnp.zeros(32), solver=SWEEPS[0]).y1  # noqa: E731
    gradient = jax.jit(lp_jax.value_and_grad(loss))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            gradient(jnp.ones(()))[2].warn()
    assert len(heard) == 2 and "propagated one after another" in str(
        heard[0].message
    )  # forward and adjoint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _results.Results(jnp.int32(_result.DONE), jnp.int32(_result.SERIAL)).warn()


NAMED = {
    "dense": dense(64, 1024, 64),
    "gru": gru(16, 1024, 64),
    "elementwise": average(0.01),
    "serial": dense(64, 8, 16),
}


def named(network, **solver):
    with planning.assume(H200):
        return planning.default(lp_jax.scanned(*network), **solver)


@pytest.mark.parametrize("name", NAMED)
def test_the_default_has_a_name(name):
    """`Fastest()` chooses what None does, without a tolerance exact methods, and with another one the same to that one."""
    pair = named(NAMED[name])
    assert named(NAMED[name], solver=lp_jax.Fastest()) == pair
    exact = named(NAMED[name], solver=lp_jax.Fastest(rtol=None))
    assert not any(each.has_tolerance for each in exact[:2])
    assert exact[:2] == (pair[:2] if name in ("elementwise", "serial") else SERIAL)
    tight = named(NAMED[name], solver=lp_jax.Fastest(rtol=1e-5))
    assert [type(each) for each in tight[:2]] == [type(each) for each in pair[:2]]
    iterated = name in ("dense", "gru")
    assert (tight.seconds > pair.seconds) == iterated
    for before, after in zip(pair[:2], tight[:2], strict=True):
        assert after.rtol is None or after.rtol == pytest.approx(before.rtol / 100, rel=1e-14)
        assert (after.rtol is not None) == iterated


def test_workers_take_exact_methods_where_no_tolerance_is_allowed():
    thin, filling = (
        Footprint(10**3, 10**3, 1e4, kernels=3),
        Footprint(10**6, 10**6, 1e12, kernels=3),
    )
    at = Layers(thin, 1024, 2, H200, state=10**3, examples=0, numbers=10, recurrent=False)
    assert choose(at)[0][0].has_tolerance
    assert choose(at, rtol=None)[0] == SERIAL
    at = at._replace(footprint=filling, layers=64)
    assert choose(at, rtol=None) == choose(at)


def test_a_tighter_tolerance_takes_more_sweeps():
    assert [typical(10.0**-digits) for digits in (2, 3, 5, 8)] == [3, 5, 7, 9]
    assert repr(lp_jax.Fastest()) == "Fastest(rtol=0.001)"
    assert repr(lp_jax.Fastest(rtol=None)) == "Fastest(rtol=None)"


def of_scan(weights, solver, comm=None):
    body, init, _ = dense(8, 1024, 4)
    return jnp.sum(lp_jax.scan(body, init, weights, solver=solver, comm=comm)[0] ** 2)


def of_parallel(weights, solver):
    body, init, _ = dense(8, 1024, 4)
    function = lambda w: jnp.sum(jax.lax.scan(body, init, w)[0] ** 2)  # noqa: E731
    return lp_jax.parallel(function, solver=solver)(weights)


def of_solve_vjp(weights, solver):
    """The gradient itself."""
    body, init, _ = dense(8, 1024, 4)
    solution, pullback = lp_jax.scanned(body, init, weights).solve_vjp(solver=solver)
    return pullback(2 * solution.y1)[0].params


def of_modules(weights, solver):
    trunk = dense_classifier(1024, t1=1.0, dtype=jnp.float32, solver=solver).trunk
    trunk.layers.inner.kernel[...] = weights[:, :5, :5]
    return jnp.sum(trunk(normal(1, 4, 5)) ** 2)


@pytest.mark.parametrize(
    "loss",
    [of_scan, of_parallel, of_solve_vjp, of_modules, functools.partial(of_scan, comm=mesh(4))],
    ids=["scan", "parallel", "solve_vjp", "LayerParallel", "mesh"],
)
def test_the_name_is_taken_wherever_none_is(loss):
    """Sweeps are chosen: a looser tolerance gives another gradient, a tighter one a closer one; without one it is exact."""
    weights = (
        normal(5, 1, 8, 8) / 2 + 0.1 * dense(8, 1024, 4)[2]
    )  # nearly the same in all layers: L T is about 2
    gradient = loss if loss is of_solve_vjp else jax.grad(loss)
    gradient = jax.jit(gradient, static_argnums=1)

    def error(solver):
        with planning.assume(H200):
            found = gradient(weights, solver)
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    exact = gradient(weights, lp_jax.Serial())
    assert error(None) == error(lp_jax.Fastest()) > 1e-5
    assert error(lp_jax.Fastest(rtol=None)) < 1e-6
    assert error(lp_jax.Fastest(rtol=1e-5)) < min(1e-4, 0.3 * error(None))


def test_the_name_within_a_jitted_function_is_structure():
    """As an argument; another tolerance is another program."""
    problem = lp_jax.scanned(*dense(8, 64, 4))
    traced = []

    @jax.jit
    def last(init, solver):
        traced.append(solver)
        return problem.replace(y0=init).solve(solver=solver).y1

    for rtol in (1e-3, 1e-3, 1e-5):
        last(problem.y0, lp_jax.Fastest(rtol=rtol))
    assert traced == [lp_jax.Fastest(), lp_jax.Fastest(rtol=1e-5)]
    assert jax.tree.leaves(lp_jax.Fastest()) == []


def test_errors_are_compared_by_the_name():
    xs = dense(8, 12, 4)[2]
    found = lp_jax.compare(of_scan, [lp_jax.Fastest(), lp_jax.Fastest(rtol=None)])
    errors = found(
        xs, lp_jax.Picard(sweeps=1)
    )  # which they replace; on this machine nothing is faster
    assert list(errors) == ["Fastest()", "Fastest(rtol=None)"]
    assert all(
        each.relative == 0 and "nothing is predicted" in str(each) for each in errors.values()
    )


def test_parallel_leaves_a_scan_by_the_name_without_a_word():
    """As by None: nothing is faster; a step with side effects; integers that follow from the state."""
    body, init, xs = dense(8, 12, 2)

    def f(xs):
        return jax.lax.scan(lambda y, x: (jax.debug.print("") or body(y, x)[0], None), init, xs)[0]

    plain = lambda xs: jax.lax.scan(body, init, xs)[0]  # noqa: E731
    fastest = lp_jax.Fastest(rtol=None)
    assert lp_jax.scans(plain, solver=fastest)(xs)[0].takes.endswith("nothing is faster")
    assert lp_jax.scans(plain, where=lambda _: fastest)(xs)[0].takes.endswith("nothing is faster")
    with planning.assume(H200):
        (swept,) = lp_jax.scans(plain, solver=lp_jax.Fastest(rtol=1e-5))(dense(8, 64, 2)[2])
    assert "rtol=1e-05" in swept.takes and swept.sweeps == [7, 6]
    for function in (plain, f):  # a warning is an error here
        np.testing.assert_array_equal(lp_jax.parallel(function, solver=fastest)(xs), plain(xs))
    counted = lambda carry, x: ((body(carry[0], x)[0], carry[1] + jnp.int32(carry[0][0, 0])), None)  # noqa: E731
    start = (init, jnp.int32(0))
    got, wanted = lp_jax.scan(counted, start, xs, solver=fastest), jax.lax.scan(counted, start, xs)
    np.testing.assert_array_equal(got[0][0], wanted[0][0])


FASTEST = lp_jax.Fastest(rtol=1e-4)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda p: p.solve(solver=lp_jax.Picard(), adjoint_solver=FASTEST),
            "the forward solver, too",
        ),
        (lambda p: p.solve(adjoint_solver=FASTEST), "the forward solver, too"),
        (
            lambda p: p.solve(solver=lp_jax.Fastest(), adjoint_solver=FASTEST),
            "the forward solver, too",
        ),
        (lambda p: lp_jax.parallel(lambda x: x, adjoint_solver=FASTEST), "the forward solver, too"),
        (lambda p: p.solve(solver=lp_jax.MGRIT(coarsest=FASTEST)), "a single method is wanted"),
        (
            lambda p: p.solve(solver=lp_jax.MGRIT(coarse_step=lp_jax.Fastest(rtol=None))),
            "a single method is wanted",
        ),
        (lambda p: lp_jax.multigrid.hierarchy(p, FASTEST), "a single method is wanted"),
        (lambda p: planning.training_step(FASTEST, FASTEST, 16), "a single method is wanted"),
        (lambda p: FASTEST.with_effort(3), "a single method is wanted"),
        (lambda p: planning.held(FASTEST, None, 16, 1), "a single method is wanted"),
        (lambda p: planning.default(p, solver=lp_jax.Picard()), "what Fastest"),
        (lambda p: lp_jax.Fastest(rtol=0.1), "a float between 0 and 0.05"),
        (lambda p: lp_jax.Fastest(rtol=jnp.float32(1e-3)), "a float between 0 and 0.05"),
    ],
)
def test_the_name_is_refused_where_one_method_is_wanted(use, said):
    with pytest.raises((TypeError, ValueError), match=said):
        use(lp_jax.scanned(*dense(8, 16, 4)))


def test_the_name_may_stand_in_both_places():
    problem = lp_jax.scanned(*dense(8, 16, 4))
    twice = problem.solve(solver=FASTEST, adjoint_solver=FASTEST)
    mixed = problem.solve(solver=FASTEST, adjoint_solver=lp_jax.Picard(sweeps=2))
    np.testing.assert_array_equal(twice.y1, mixed.y1)
    assert lp_jax.layer_slices(5, 2, FASTEST) == lp_jax.layer_slices(5, 2, lp_jax.Serial())


# kernels, operations, bytes of operands and of states, flops and numbers of a layer, as `footprint` reads them
OF_A_TPU = {
    "dense, 8 wide": (
        Footprint(296, 516, 1024.0, kernels=3, operations=6, numbers=257.0),
        8,
        "Picard",
        8,
    ),
    "dense, 64 wide": (
        Footprint(16_652, 16_644, 262_144.0, kernels=3, operations=6, numbers=8_257.0),
        32,
        "Serial",
        8,
    ),
    "dense, 512 wide": (
        Footprint(1_050_636, 1_050_628, 1.3e8, kernels=3, operations=6, numbers=5.2e5),
        256,
        "Serial",
        1,
    ),
    "pre-norm block": (
        Footprint(131_084, 98_304, 2.1e6, kernels=7, operations=28, numbers=74_144.0),
        32,
        "Picard",
        1,
    ),
    "four dense layers with norms": (
        Footprint(68_624, 24_584, 1.05e6, kernels=17, operations=97, numbers=69_832.0),
        32,
        "Picard",
        1,
    ),
}


@pytest.mark.parametrize("name", OF_A_TPU)
def test_a_tpu_unrolls_and_sweeps_where_the_compilers_cycles_say_so(name):
    """What was best by the cycles that XLA counts for a v5e; a GPU unrolls everything. On a TPU turns are not launched."""
    layer, examples, solver, unrolled = OF_A_TPU[name]
    width = int(name.split(", ")[1].split()[0]) if "," in name else 64
    v5e = processor("tpu", "TPU v5 lite")
    at = Layers(
        layer, 256, 1, v5e, state=4 * examples * width, examples=0, numbers=width, recurrent=False
    )
    pair, _ = choose(at)
    assert (type(pair[0]).__name__, v5e.serial_unroll(layer)) == (solver, unrolled)
    assert H200.serial_unroll(layer) == 8 and v5e.loop_unroll(4, lambda: None) == 1
    assert v5e.at_once(layer, 256) == H200.at_once(layer, 256) == 256


@pytest.mark.parametrize(
    ("layer", "state"),
    [
        (
            Footprint(66_060, 262_656, 8.4e6, kernels=3, operations=6, numbers=131_329.0),
            2**17,
        ),
        (
            Footprint(4_198_412, 2_101_248, 5.4e8, kernels=3, operations=6, numbers=1.05e6),
            2**20,
        ),
    ],
    ids=["dense, 128 wide", "dense, 1,024 wide"],
)
def test_a_relay_over_chips_takes_turns_and_sweeps_gain_on_it(layer, state):
    """By the cycles of eight v5e, a relay takes 1.55 and .61 of a scan on one, and sweeps to the tolerance .61 and .35.

    Of narrow layers a relay's turns cost more than the layers. A few layers are left to it, as they are not worth compiling more.
    """
    v5e, layers = processor("tpu", "TPU v5 lite"), 128
    at = Layers(layer, layers, 8, v5e, state=state, examples=0, numbers=128, recurrent=False)
    pair, _ = choose(at)
    few, _ = choose(at._replace(layers=8))
    assert (type(pair[0]).__name__, type(few[0]).__name__) == ("Picard", "Serial")
    turns = dataclasses.replace(v5e, turn_kernels=0.0, turn_passes=0.0)
    _, without = choose(at._replace(processor=turns), None)
    _, relay = choose(at, None)
    assert relay - without == pytest.approx(
        8 * 4.5 * 3 * v5e.launch + layers * 6 * state / v5e.bandwidth, rel=1e-6
    )


def test_a_mesh_of_chips_that_are_not_here_has_their_numbers():
    """The kind is that of the mesh's devices, also without `planning.assume`."""
    fields = ("platform", "device_kind", "id", "process_index")
    chip = dataclasses.make_dataclass("Chip", fields, frozen=True)
    chips = np.array([chip("tpu", "TPU v5", n, 0) for n in (0, 1)])
    mesh = jax.sharding.Mesh(chips, ("layers",), axis_types=(jax.sharding.AxisType.Auto,))
    problem = lp_jax.scanned(*dense(64, 64, 8)).replace(comm=lp_jax.MeshComm(mesh))
    with planning.assume("v5p"):
        wanted = planning.default(problem)
    with planning.assume("v5e"):
        assert planning.default(problem).seconds > wanted.seconds
    assert planning.default(problem) == wanted


def test_a_convolution_is_a_product_on_a_tpu_only():
    """Its products take as long as the numbers of other operations do elsewhere; on a TPU there are its results."""
    layer = Footprint(0, 0, 0.0, numbers=1e9, convolved=9e8)
    v5e, cpu = processor("tpu", "TPU v5 lite"), processor("cpu")
    assert cpu.one(layer, steps=1) == cpu.one(layer._replace(convolved=0.0), steps=1)
    assert v5e.one(layer, steps=1) == v5e.one(Footprint(0, 0, 0.0, numbers=1e8), steps=1)
    compute = layer._replace(convolved=9e8, numbers=9e8)
    assert v5e.one(compute, steps=1) == 2 * 9e8 / v5e.flops


def test_a_scan_that_the_default_leaves_exact_is_still_solved_on_a_tpu():
    """`parallel` leaves it on a CPU; elsewhere serial propagation may be unrolled."""
    body, init, xs = dense(64, 128, 4)
    f = lambda xs: jax.lax.scan(body, init, xs)[0]  # noqa: E731
    with planning.assume("v5e"):
        assert lp_jax.scans(f)(xs)[0].takes.startswith("Serial")
        np.testing.assert_allclose(lp_jax.parallel(f)(xs), f(xs), rtol=1e-6)
    assert lp_jax.scans(f)(xs)[0].takes.endswith("nothing is faster")
