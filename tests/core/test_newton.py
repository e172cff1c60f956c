"""The Newton family, against its own recursions written out in NumPy and against what theory says of it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import dense_params, dense_state, dense_step, relative_error, serial_loss_and_gradient

import lp_jax
from lp_jax._choice._processor import ACCELERATOR, CPU
from lp_jax._comms._workers import Local
from lp_jax._levels._result import DONE, FELL_BACK, NON_FINITE, NOT_CONVERGED
from lp_jax._solvers import _affine
from lp_jax._solvers._jacobians import Blocks, Full, Shared

N, WIDTH, T1 = 13, 4, 6.0


@jax.custom_jvp
def marked(x):
    """A sine whose derivatives can be counted in a program's text."""
    return jnp.sin(x)


@marked.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return marked(x), jax.lax.reduce_precision(jnp.cos(x) * dx, 11, 52)


def newton(iterations, **fields):
    """Newton's method on states whose first axis is that of examples."""
    return lp_jax.Newton(iterations=iterations, batch_axes=1, **fields)


def problem(n=N, scale=1.5):
    return dense_params(n, WIDTH, scale=scale), dense_state(3, WIDTH)


@functools.partial(jax.jit, static_argnames="step")
def states(step, params, y0, solver, t1=T1):
    return lp_jax.solve(step, params, y0, t1=t1, solver=solver).trajectory


def by_hand(params, y0, iterations, change=lambda jacobian: jacobian, relaxations=0):
    """Newton iterations on ``y + h tanh(y W + b)``, layer after layer; ``change`` makes its matrix from the Jacobian."""
    w, b = (np.asarray(p) for p in params)
    y0, h = np.asarray(y0), T1 / N
    u = np.repeat(y0[None], N, axis=0)
    for _ in range(relaxations):
        entries = np.concatenate([y0[None], u[:-1]])
        u = entries + h * np.tanh(entries @ w + b[:, None])
    for _ in range(iterations):
        entries = np.concatenate([y0[None], u[:-1]])
        delta, new = np.zeros_like(y0), []
        for n in range(N):
            s = np.tanh(entries[n] @ w[n] + b[n])
            jacobian = np.eye(WIDTH) + h * (1 - s**2)[:, :, None] * w[n].T  # of each example
            residual = entries[n] + h * s - u[n]
            delta = np.einsum("bij,bj->bi", change(jacobian), delta) + residual
            new.append(u[n] + delta)
        u = np.stack(new)
    return u


def _diagonal(jacobian):
    return jacobian * np.eye(WIDTH)


def _identity(jacobian):
    return np.broadcast_to(np.eye(WIDTH), jacobian.shape)


def _clipped(jacobian):
    return jacobian * np.minimum(1, 0.9 / np.abs(jacobian).sum(axis=2).max(axis=1))[:, None, None]


@pytest.mark.parametrize(
    "solver, change",
    [
        (newton(3), lambda j: j),
        (newton(3, jacobian="diagonal"), _diagonal),
        (lp_jax.Picard(sweeps=3), _identity),
        (newton(3, damping=lp_jax.Shrink(by=0.3)), lambda j: 0.7 * j),
        (newton(3, damping=lp_jax.Clip(limit=0.9)), _clipped),
        (
            newton(3, jacobian="diagonal", damping=lp_jax.Clip(limit=0.9)),
            lambda j: np.clip(_diagonal(j), -0.9, 0.9),
        ),
    ],
    ids=["full", "diagonal", "sweeps", "shrunk", "clipped", "clipped diagonal"],
)
def test_iterates(solver, change):
    params, y0 = problem()
    np.testing.assert_allclose(
        states(dense_step, params, y0, solver),
        by_hand(params, y0, 3, change),
        rtol=1e-12,
        atol=1e-12,
    )


def test_structures_of_two_classes_differ():
    """`jax.jit` finds its programs by them."""
    assert jax.tree.structure(lp_jax.Shrink(by=0.9)) != jax.tree.structure(lp_jax.Clip(limit=0.9))


def test_convergence_is_quadratic():
    solve = jax.jit(lambda p, y: lp_jax.solve(dense_step, p, y, t1=T1, solver=newton(7)).stats)
    norms = np.asarray(solve(*problem(n=64)).residual_norms)
    falling = norms[1:5]  # before rounding
    orders = np.log(falling[2:] / falling[1:-1]) / np.log(falling[1:-1] / falling[:-2])
    assert norms[-1] < 1e-13
    assert orders.min() > 1.7


@pytest.mark.parametrize("jacobian, change", [("full", lambda j: j), ("diagonal", _diagonal)])
def test_relaxations_start_from_what_each_layer_makes_of_the_guess(jacobian, change):
    """They and the iterations together leave as many states exact as there are of both. No more are made than layers."""
    params, y0 = problem(scale=4.0)
    exact = by_hand(params, y0, 0, relaxations=N)  # each makes one more of them exact
    got = states(dense_step, params, y0, newton(2, jacobian=jacobian, relaxations=5))
    np.testing.assert_allclose(
        got, by_hand(params, y0, 2, change, relaxations=5), rtol=1e-12, atol=1e-12
    )
    error = np.abs(got - exact).max(axis=(1, 2))
    assert error[:7].max() < 1e-12 < error[8]
    many = states(dense_step, params, y0, newton(2, jacobian=jacobian, relaxations=1000))
    np.testing.assert_allclose(many, exact, rtol=1e-12, atol=1e-12)


def test_one_iteration_solves_the_adjoint():
    """As any chain of linear layers."""
    params, y0 = problem()
    _, (g_params, g_y0, _) = serial_loss_and_gradient(
        dense_step, params, y0, lambda y: jnp.sum(y**2), t1=T1
    )

    def gradient(params, y0):
        solution, pullback = lp_jax.solve_vjp(dense_step, params, y0, t1=T1, solver=newton(9))
        return pullback(2 * solution.y1)

    gradients, stats = jax.jit(gradient)(params, y0)
    assert stats.iterations == 1 and stats.residual_norms.shape == (1,)
    assert relative_error((gradients.params, gradients.y0), (g_params, g_y0)) < 1e-12


@pytest.mark.parametrize("jacobian", ["full", "diagonal"])
def test_states_of_several_leaves(jacobian):
    """Coupled leaves of different shapes, examples in front; vmap over examples is the same as ``batch_axes``."""
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.normal(size=(N, 2, 3)))
    y0 = {"a": jnp.asarray(rng.normal(size=(5, 3))), "b": jnp.asarray(rng.normal(size=5))}

    def step(y, layer):
        mixed = y["a"] * layer.params[:1] + y["b"][..., None] * layer.params[1:]
        return {
            "a": y["a"] + layer.dt * jnp.tanh(mixed),
            "b": y["b"] - layer.dt * jnp.sum(jnp.sin(y["a"]), axis=-1),
        }

    def single(y, layer):
        return jax.tree.map(lambda x: x[0], step(jax.tree.map(lambda x: x[None], y), layer))

    batched = states(step, w, y0, newton(3, jacobian=jacobian))
    one = lp_jax.Newton(jacobian=jacobian, iterations=3)
    mapped = jax.jit(jax.vmap(lambda y: states(single, w, y, one), out_axes=1))(y0)
    chex.assert_trees_all_close(batched, mapped, rtol=1e-11, atol=1e-12)


def test_overflow_is_told_and_damping_prevents_it():
    """A chaotic network: products of its Jacobians overflow, though its states stay near 1."""
    n = 120
    params = 12 * np.asarray(dense_params(n, WIDTH)[0], np.float32)
    y0 = np.asarray(dense_state(3, WIDTH), np.float32)
    step = lambda y, layer: jnp.tanh(y @ layer.params)  # noqa: E731

    def solve(damping, iterations=20):
        solver = newton(iterations, damping=damping, atol=1e-4)
        return jax.jit(lambda p, y: lp_jax.solve(step, p, y, solver=solver))(params, y0)

    with pytest.raises(lp_jax.SolveError, match=r"not finite|did not come down"):
        solve(None).raise_if_failed()
    damped = solve(lp_jax.Clip(limit=1.0), iterations=n)
    assert damped.result == 0
    for w in params:
        y0 = np.tanh(y0 @ w)
    np.testing.assert_allclose(damped.y1, y0, atol=1e-3)


def test_refusals():
    refused = {
        r"batch_axes=1.*batch_axes=0": {},
        "agree in their first 3 axes": {"batch_axes": 3},
        "Did you mean 'diagonal'": {"jacobian": "diagonals"},
        "batch_axes must be at least 0": {"batch_axes": -1},
        "iterations must be at least 1": {"iterations": 0},
        "relaxations must be at least 0; got -1": {"relaxations": -1},
    }
    for message, fields in refused.items():
        with pytest.raises(ValueError, match=message):
            states(dense_step, *problem(), lp_jax.Newton(**fields))
    with pytest.raises(
        TypeError, match="jacobian_of must be a function of the form of the step; got 'full'"
    ):
        lp_jax.Newton(jacobian_of="full")
    # An inner solver evaluates the layers of an interval only.
    inner = lp_jax.Newton(iterations=1, jacobian_of=dense_step)
    for name in ("coarse_step", "coarsest"):
        with pytest.raises(ValueError, match=f"{name}=.* Leave jacobian_of out"):
            states(dense_step, *problem(), lp_jax.MGRIT(**{name: inner}))


IN_TURN = dataclasses.replace(CPU, chain_flops=0.0)


@pytest.mark.parametrize(
    "n, reverse, processor",  # one group, groups of groups that identities fill up, one after another
    [(1, False, ACCELERATOR), (34, True, ACCELERATOR), (13, True, IN_TURN)],
    ids=lambda v: {ACCELERATOR: "products", IN_TURN: "in turn"}.get(v),
)
def test_chains_of_affine_maps(n, reverse, processor):
    """Of whole matrices, of blocks, and of diagonals, in turn and in groups."""
    rng = np.random.default_rng(0)
    matrices, vectors = (
        rng.normal(size=(n, 2, 3, 3)) / 2,
        rng.normal(size=(n, 2, 3)),
    )  # of two examples
    diagonals, workers = (
        np.einsum("nbii->nbi", matrices),
        Local(layers=n, held=(n,), processor=processor),
    )

    def by_hand(matrices):
        d, found = np.zeros((2, 3)), np.zeros_like(vectors)
        for i in range(n)[:: -1 if reverse else 1]:
            d = found[i] = np.einsum("bij,bj->bi", matrices[i], d) + vectors[i]
        return found

    whole, shared, diagonal = map(
        by_hand, (matrices, matrices[:, :1].repeat(2, 1), diagonals[..., None] * np.eye(3))
    )
    last, one = functools.partial(np.moveaxis, source=1, destination=-1), jnp.zeros((2, 3))
    chains = {
        "full": (Full(one, 1), matrices, vectors, whole),
        "shared": (Shared(one, 1), matrices[:, 0].swapaxes(1, 2), vectors, shared),
        "blocks": (Blocks([jnp.zeros(2)] * 3, 1), last(matrices), last(vectors), last(whole)),
        "diagonal": (Blocks(one, 1), diagonals[:, None, None], vectors[:, None], diagonal[:, None]),
    }
    for name, (kind, matrix, vector, wanted) in chains.items():
        solve = jax.jit(
            lambda *maps, kind=kind: _affine.solve(
                workers, _affine.Maps(*maps), kind, reverse=reverse
            )
        )
        np.testing.assert_allclose(
            solve(matrix, vector), wanted, rtol=1e-11, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize("processor", [ACCELERATOR, IN_TURN], ids=["products", "in turn"])
def test_what_overflows_behind_stays_there(processor):
    maps = _affine.Maps(np.where(np.arange(40) == 20, np.inf, 1.0)[:, None, None], np.ones((40, 1)))
    workers = Local(layers=40, held=(40,), processor=processor)
    got = jax.jit(
        lambda maps: _affine.solve(workers, maps, Full(jnp.zeros(1), None), reverse=False)
    )(maps)
    np.testing.assert_array_equal(got[:20, 0], np.arange(1.0, 21.0))


@jax.custom_vjp
def tanh_by_its_pullback(x):
    return jnp.tanh(x)


tanh_by_its_pullback.defvjp(
    lambda x: (jnp.tanh(x),) * 2, lambda t, cotangent: ((1 - t**2) * cotangent,)
)


@pytest.mark.parametrize(
    "jacobian, mixing", [("full", True), ("diagonal", True), ("diagonal", False)]
)
def test_steps_with_a_pullback_of_their_own(jacobian, mixing):
    """Forward mode refuses these; the Jacobians are those of the function nevertheless."""
    (w, _), y0 = problem()

    def trajectory(tanh):
        inner = lambda y, p: y @ p if mixing else y * p[:1]  # noqa: E731
        step = lambda y, layer: y + layer.dt * tanh(inner(y, layer.params))  # noqa: E731
        return states(step, w, y0, newton(2, jacobian=jacobian))

    np.testing.assert_allclose(
        trajectory(tanh_by_its_pullback), trajectory(jnp.tanh), rtol=1e-13, atol=1e-15
    )


def test_units_are_not_taken_for_examples():
    """The way of Equinox, where vmap has taken the examples' axis away."""
    (weights, _), ys = dense_params(12, 8), dense_state(3, 8)

    def loss(weights, solver, step):
        return jnp.sum(jax.vmap(lambda y: lp_jax.solve(step, weights, y, solver=solver).y1)(ys))

    def mixing(y, layer):
        return y + layer.dt * jnp.tanh(layer.params @ y)

    def alone(y, layer):
        return y + layer.dt * jnp.tanh(layer.params[0] * y)

    def rolling(y, layer):
        return y + layer.dt * jnp.tanh(layer.params[0] * jnp.roll(y, 1))

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    for step in (mixing, rolling):
        with pytest.raises(
            ValueError, match=r"combines.*shapes \[\(8,\)\].*Say batch_axes=0.*Inside jax.vmap"
        ):
            gradient(weights, lp_jax.Newton(batch_axes=1), step)
    for step, axes in ((mixing, 0), (alone, 1)):
        got = gradient(weights, lp_jax.Newton(iterations=12, batch_axes=axes), step)
        assert relative_error(got, gradient(weights, lp_jax.Serial(), step)) < 1e-12


@pytest.mark.parametrize(
    "how, leaves", [("mean", 1), ("norm", 2), ("product", 1), ("attention", 2)]
)
def test_a_step_that_combines_examples_is_solved_without_an_axis_of_them_only(how, leaves):
    """With one, an iteration of the adjoint would not be exact."""
    mix, exact = dense_state(4, 4, seed=2), lp_jax.Serial()

    def step(y, layer):
        combined = {
            "mean": lambda y: y - jnp.mean(y, axis=0, keepdims=True),
            "norm": lambda y: y / jnp.sqrt(jnp.var(y, axis=0, keepdims=True) + 1),
            "product": lambda y: mix @ y,
            "attention": lambda y: jax.nn.softmax(y @ y.T) @ y,
        }[how](y[0])
        return tuple(y + layer.dt * jnp.tanh(layer.params * combined + y) for y in y)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    @functools.partial(jax.grad, argnums=2)
    def gradient(forward, adjoint, weights):
        solvers = {"solver": forward, "adjoint_solver": adjoint}
        return sum(
            jnp.sum(y**2)
            for y in lp_jax.solve(step, weights, (dense_state(4, 3),) * leaves, **solvers).y1
        )

    weights = jnp.linspace(-1, 1, 8)
    for solvers in ((newton(3), exact), (exact, newton(1)), (newton(3, jacobian="shared"), exact)):
        with pytest.raises(
            ValueError, match=r"batch_axes=1\).*combines entries along the first axes.*batch_axes=0"
        ):
            gradient(*solvers, weights)
    if how == "attention":
        whole = lp_jax.Newton(iterations=8, batch_axes=0)
        assert (
            relative_error(gradient(whole, whole, weights), gradient(exact, exact, weights)) < 1e-12
        )


def test_a_step_that_treats_examples_alone_is_taken():
    """Norms, attention over other axes, transposes and loops: nothing here meets another example."""
    mix = dense_state(3, 3, seed=2)

    def step(y, layer):
        z = (y - jnp.mean(y, axis=1, keepdims=True)) @ mix
        z = jnp.swapaxes(jnp.swapaxes(z, 0, 2) * 2, 0, 2).reshape(-1, 6).reshape(y.shape)
        z = z + jnp.tanh(jnp.einsum("bij,bkj,bkl->bil", z, z, z))
        z = jnp.concatenate([z[:, 1:], z[:, :1]], axis=1)
        z = jax.lax.fori_loop(0, 2, lambda _, z: z + 0.1 * jnp.sin(z), z)
        return y + layer.dt * layer.params * z

    y0 = dense_state(8, 3).reshape(4, 2, 3)

    def loss(weights, solver):
        return jnp.sum(lp_jax.solve(step, weights, y0, solver=solver).y1 ** 2)

    weights, gradient = jnp.linspace(-1, 1, 6), jax.jit(jax.grad(loss))
    got, exact = (
        gradient(weights, s) for s in (lp_jax.Newton(iterations=6, batch_axes=1), lp_jax.Serial())
    )
    assert relative_error(got, exact) < 1e-12


@pytest.mark.parametrize("copies", [1, 2])
def test_equal_trees_are_paired(copies):
    """Parameters of two shapes and their moments: as many evaluations as there are trees, and exact."""
    rng = np.random.default_rng(0)
    y0 = [
        {"w": jnp.asarray(rng.normal(size=(3, 4))), "b": jnp.asarray(rng.normal(size=4))}
        for _ in range(copies)
    ]

    def step(trees, layer):
        total = jax.tree.map(lambda *leaves: marked(sum(leaves)), *trees)
        return [
            jax.tree.map(lambda a, b, i=i: a + layer.dt * (0.5 - i) * b, tree, total)
            for i, tree in enumerate(trees)
        ]

    def loss(data, solver):
        y1 = lp_jax.solve(step, None, y0, data=data, t1=4.0, solver=solver).y1
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(y1))

    value, value_and_gradient, data = jax.jit(loss), jax.jit(jax.value_and_grad(loss)), np.ones(12)

    def solver(jacobian, iterations):
        return lp_jax.Newton(jacobian=jacobian, iterations=iterations, batch_axes=0)

    assert (
        relative_error(value(data, solver("diagonal", 3)), value(data, solver("full", 3))) < 1e-12
    )
    exact = value_and_gradient(data, lp_jax.Serial())
    assert relative_error(value_and_gradient(data, solver("diagonal", 12)), exact) < 1e-12
    text = value.lower(data, solver("diagonal", 3)).as_text()
    assert text.count("reduce_precision") == 2 * copies  # of two leaves each


def lorenz(y):
    a, b, c = y
    return jnp.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])


@pytest.mark.parametrize("jacobian", ["full", "diagonal"])
def test_states_that_overflow_are_set_back(jacobian):
    """Lorenz' system, in float32: iterations overflow, and as many as there are steps are exact all the same."""

    def step(y, layer):
        return y + layer.dt * lorenz(y + 0.5 * layer.dt * lorenz(y))

    @jax.jit
    def solve(t1, solver):
        return lp_jax.solve(
            step, None, jnp.ones(3, "float32"), data=jnp.zeros(64), t1=t1, solver=solver
        )

    exact, newton = lp_jax.Serial(), lp_jax.Newton(jacobian=jacobian, iterations=64)
    solution = solve(3.2, newton)
    norms = solution.stats.residual_norms
    assert not np.isfinite(norms).all() and norms[-1] == 0
    np.testing.assert_array_equal(solution.y1, solve(3.2, exact).y1)
    assert solution.result == DONE
    tolerant = solve(
        3.2, dataclasses.replace(newton, rtol=1e-6)
    )  # outlasts norms that are no numbers
    assert tolerant.result == DONE and relative_error(tolerant.y1, solution.y1) < 1e-5
    assert not np.isfinite(solve(6.4, exact).y1).all()  # the network's own states overflow
    assert solve(6.4, newton).result == NON_FINITE


@pytest.mark.parametrize("jacobian", ["full", "diagonal", "shared"])
def test_infinite_derivatives_do_not_stop_it(jacobian):
    """The root of zero has one: as many iterations as layers are exact all the same."""

    def body(y, x):
        y = jnp.sqrt(y) + x
        return y, y

    xs = jnp.asarray([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None, None]
    problem = lp_jax.scanned(body, jnp.zeros((1, 1)), xs)
    exact = jax.lax.scan(body, jnp.zeros((1, 1)), xs)[1]
    solver = lp_jax.Newton(jacobian=jacobian, iterations=8, batch_axes=1)
    np.testing.assert_allclose(problem.solve(solver=solver).aux, exact, rtol=1e-14)


def test_a_tolerance_below_bfloat16_is_met_by_rounding():
    """From a state of zeros, which has no rounding errors of its own: without the states' no solve would ever be done."""
    rng = np.random.default_rng(0)
    gates = jnp.asarray(rng.normal(size=(256, 4, 3)), jnp.bfloat16)

    def body(h, x):
        rate = jax.nn.sigmoid(x + 0.5 * h)
        return (1 - rate) * h + rate * jnp.tanh(x - h), None

    problem = lp_jax.scanned(body, jnp.zeros((4, 3), jnp.bfloat16), gates)
    solver = lp_jax.Newton(
        jacobian="diagonal", batch_axes=1, iterations=10, rtol=1e-3, fallback=True
    )
    solution = problem.solve(solver=solver)
    assert solution.result == 0 and solution.stats.iterations < 6
    wanted = jax.lax.scan(body, jnp.zeros((4, 3)), gates.astype(float))[0]
    np.testing.assert_allclose(solution.y1.astype(float), wanted, atol=0.02)  # 2.5 eps


def test_an_adjoint_that_decays_is_solved_to_the_rounding_of_bfloat16():
    """Its cotangents are large at the last steps only; the rounding of states as large everywhere would hide the rest."""
    rng = np.random.default_rng(0)
    w, gates = rng.normal(size=(16, 48)) / 4, rng.normal(size=(512, 4, 48))

    def body(h, x, w):
        (hr, hz, hn), (xr, xz, xn) = jnp.split(h @ w, 3, -1), jnp.split(x, 3, -1)
        z = jax.nn.sigmoid(hz + xz)
        return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(hr + xr) * hn) + z * h, None

    def gradient(adjoint_solver, dtype):
        def loss(w):
            start, xs = jnp.zeros((4, 16), dtype), jnp.asarray(gates, dtype)
            solvers = {"solver": lp_jax.Serial(), "adjoint_solver": adjoint_solver}
            return jnp.sum(
                lp_jax.scan(lambda h, x: body(h, x, w), start, xs, **solvers)[0].astype(jnp.float32)
                ** 2
            )

        return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(w, dtype)), np.float64)

    exact = gradient(lp_jax.Serial(), jnp.float64)
    newton = lp_jax.Newton(jacobian="shared", iterations=16, rtol=1e-2)
    serial, iterated = (gradient(each, jnp.bfloat16) for each in (lp_jax.Serial(), newton))
    error = [np.linalg.norm(found - exact) / np.linalg.norm(exact) for found in (serial, iterated)]
    assert error[1] < 1.5 * error[0] < 3e-2


@pytest.mark.parametrize("how", ["gather", "sort", "cumsum"])
def test_an_adjoint_is_measured_where_a_program_does_not_show_that_examples_stay_apart(how):
    """With a tolerance it falls back; without one it is refused, as is a step whose program shows that it combines them."""

    def step(y, layer):
        mixed = {
            "gather": lambda y: y[jnp.array([1, 0, 3, 2])],
            "sort": lambda y: jnp.sort(y, axis=0),
            "cumsum": lambda y: jnp.cumsum(y, axis=0) / 3,
        }[how](y)
        return 0.5 * jnp.tanh(y @ layer.params) + 0.4 * mixed

    weights, y0 = dense_params(16, 3)[0], dense_state(4, 3)

    @functools.partial(jax.jit, static_argnums=1)
    def run(weights, solver):
        def loss(weights):
            return jnp.mean(lp_jax.solve(step, weights, y0, solver=solver).y1[0] ** 2)

        return lp_jax.value_and_grad(loss)(weights)

    fixed = lp_jax.Newton(iterations=16, batch_axes=1)
    with pytest.raises(ValueError, match="batch_axes=0"):
        run(weights, fixed)
    solver = dataclasses.replace(fixed, rtol=1e-5, fallback=True)
    if how == "cumsum":
        with pytest.raises(ValueError, match="combines entries"):
            run(weights, solver)
        return
    exact, (_, gradient, results) = run(weights, lp_jax.Serial())[1], run(weights, solver)
    assert int(results.adjoint) == FELL_BACK
    assert relative_error(gradient, exact) < 1e-4
    told = run(weights, dataclasses.replace(solver, fallback=False))[2]
    assert int(told.adjoint) == NOT_CONVERGED


@pytest.mark.usefixtures("as_users_run_it")
def test_a_packed_gru_that_overflows_is_not_done():
    """Large recurrent weights and resets: iterations leave states of 1e14 and more, which look like no change."""
    units, keys = 16, jax.random.split(jax.random.key(0), 4)
    weights = (
        jax.random.normal(keys[0], (units, 3 * units)) / 4,
        jax.random.normal(keys[1], (units, 3 * units)) / 4,
    )
    data = (
        jax.random.normal(keys[2], (4096, 4, units))[:512],
        jax.random.bernoulli(keys[3], 0.005, (4096, 4))[:512],
    )

    def body(weights, h, at):
        x, starts = at
        a, b = x @ weights[0], jnp.where(starts[:, None], 0.0, h) @ weights[1]
        r, z, _ = jnp.split(jax.nn.sigmoid(a + b), 3, axis=-1)
        candidate = jnp.tanh(a[..., 2 * units :] + r * b[..., 2 * units :])
        h = (1 - z) * candidate + z * jnp.where(starts[:, None], 0.0, h)
        return h, h

    def loss(weights, scan):
        start = jnp.zeros((4, units))
        return jnp.mean(scan(functools.partial(body, weights), start, data)[1] ** 2)

    solver = lp_jax.Newton(iterations=10, relaxations=16, batch_axes=1, rtol=1e-3, fallback=True)
    solved = jax.jit(lambda w: loss(w, functools.partial(lp_jax.scan, solver=solver)))
    exact = jax.jit(lambda w: loss(w, jax.lax.scan))
    for gain in np.linspace(4, 8, 17):
        scaled = weights[0], gain * weights[1]
        np.testing.assert_allclose(solved(scaled), exact(scaled), rtol=5e-2)


@pytest.mark.parametrize("jacobian", ["full", "diagonal"])
def test_complex_beside_real_leaves(jacobian):
    """Their Jacobian is complex, and the real leaves take the real part."""

    def step(y, layer):
        turned = y["c"] * jax.lax.complex(jnp.ones(()), layer.dt * y["a"])
        return {"a": y["a"] + layer.dt * jnp.sin(layer.params * y["a"]), "c": turned}

    y0 = {"a": jnp.ones(()), "c": jnp.asarray(1 + 1j)}
    solver = lp_jax.Newton(jacobian=jacobian, iterations=6)
    got, wanted = (
        lp_jax.solve(step, jnp.ones(6), y0, solver=s).y1 for s in (solver, lp_jax.Serial())
    )
    for name in y0:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6)
