"""Manners: solvers among the pytrees of others, what is kept between calls, and names that others replace."""

import contextlib
import gc
import tracemalloc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from problems import relative_error

import lp_jax

N, WIDTH = 8, 3
W = 0.3 * np.random.default_rng(0).normal(size=(N, WIDTH, WIDTH))
X = np.random.default_rng(1).normal(size=(2, WIDTH))
PICARD = lp_jax.Picard(sweeps=3)
SOLVERS = {
    "serial": lp_jax.Serial(),
    "checkpoints": lp_jax.Serial(checkpoint_every=2),
    "picard": lp_jax.Picard(sweeps=4, rtol=1e-3, fallback=True),
    "chunks": lp_jax.Picard(sweeps=4, at_once=3),
    "windowed": lp_jax.Windowed(rtol=1e-3),
    "secant": lp_jax.Secant(rtol=1e-3),
    "mgrit": lp_jax.MGRIT(coarsening=2, rtol=1e-3, c_weight=0.9),
    "newton": lp_jax.Newton(rtol=1e-2, batch_axes=1, damping=lp_jax.Clip(limit=1.0)),
    "diagonal": lp_jax.Newton(jacobian="diagonal", damping=lp_jax.Shrink(by=0.5)),
}


def step(y, layer):
    return y + 0.1 * jnp.tanh(y @ layer.params)


class Model(eqx.Module):
    weights: jax.Array
    solver: lp_jax.Solver

    def __call__(self, x):
        return jnp.sum(lp_jax.solve(step, self.weights, x, solver=self.solver).y1 ** 2)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("new", [False, None, "label", -1.0, object()])
def test_anything_may_stand_in_the_places_of_leaves(solver, new):
    """Masks, labels, tangents: what other libraries put into a tree, and take out of it again."""
    leaves, structure = jax.tree.flatten(solver)
    other = jax.tree.unflatten(structure, [new] * len(leaves))
    repr(other)
    again = jax.tree.unflatten(structure, leaves)
    assert again == solver and hash(again) == hash(solver)
    assert jax.tree.map(lambda x: new, solver, is_leaf=lambda x: x is None) is not None


@pytest.mark.parametrize("name", ["picard", "mgrit", "newton"])
def test_a_solver_in_a_module_of_equinox(name):
    model = Model(jnp.asarray(W), SOLVERS[name])
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    assert eqx.combine(arrays, static).solver == model.solver
    gradient = eqx.filter_grad(lambda model: model(X))(model)
    wanted = jax.grad(lambda weights: Model(weights, SOLVERS[name])(X))(jnp.asarray(W))
    np.testing.assert_allclose(gradient.weights, wanted, rtol=1e-12)
    updated = eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradient))
    assert updated.solver == model.solver


def test_a_solver_in_parameters_of_optax():
    tree = {"model": jax.tree.map(jnp.asarray, Model(W, SOLVERS["picard"]))}  # its rtol, too
    labels = jax.tree.map(lambda x: "train" if x.ndim > 1 else "keep", tree)
    rules = {"train": optax.sgd(0.1), "keep": optax.set_to_zero()}
    masked = optax.masked(optax.sgd(0.1), jax.tree.map(lambda x: x.ndim > 1, tree))
    gradient = jax.grad(lambda tree: tree["model"](X))(tree)
    wanted = tree["model"].weights - 0.1 * gradient["model"].weights
    for rule in (optax.multi_transform(rules, labels), masked):
        updates, _ = rule.update(gradient, rule.init(tree), tree)
        new = optax.apply_updates(tree, updates)["model"]
        np.testing.assert_allclose(new.weights, wanted)
        assert new.solver.rtol == tree["model"].solver.rtol


def test_a_solver_in_a_module_of_nnx():
    class Network(nnx.Module):
        def __init__(self):
            self.weights, self.solver = nnx.Param(jnp.asarray(W)), SOLVERS["picard"]

    def loss(network):
        return Model(network.weights[...], network.solver)(X)

    gradient = nnx.grad(loss)(Network())
    np.testing.assert_allclose(
        gradient["weights"][...], jax.grad(lambda w: Model(w, PICARD)(X))(W), rtol=1e-2
    )
    assert jax.tree.map(lambda x: None, Network()).solver.sweeps == 4


def test_levels_and_solutions_take_anything():
    problem = lp_jax.Problem(step, W, X)
    solver = SOLVERS["mgrit"]
    for tree in (*lp_jax.multigrid.hierarchy(problem, solver), problem.solve(solver=solver)):
        for new in (False, None, "label"):
            jax.tree.map(lambda x, new=new: new, tree)


@contextlib.contextmanager
def compiled():
    """The number of programs that are compiled inside, in a list."""
    found = []

    def listen(name, *args, **kwargs):
        found.extend(["compiled"] * name.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def by_solve(solver, big):
    f = lambda y, layer: y + 0.1 * jnp.tanh(y @ layer.params) * big[0]  # noqa: E731
    return f, lambda w: jnp.sum(lp_jax.solve(f, w, X, solver=solver).y1 ** 2)


def by_scan(solver, big):
    f = lambda y, w: (y + 0.1 * jnp.tanh(y @ w) * big[0], None)  # noqa: E731
    return f, lambda w: jnp.sum(lp_jax.scan(f, X, w, solver=solver)[0] ** 2)


def by_method(solver, big):
    class Network:
        def step(self, y, layer):
            return y + 0.1 * jnp.tanh(y @ layer.params) * big[0]

    network = Network()
    return network, lambda w: jnp.sum(lp_jax.solve(network.step, w, X, solver=solver).y1 ** 2)


@pytest.mark.parametrize("make", [by_solve, by_scan])
@pytest.mark.parametrize("name", ["serial", "picard", "newton"])
def test_what_is_compiled_goes_with_its_step(make, name):
    """And with the arrays that the step closes over, at once; but it is there for the next call."""
    gc.collect()
    gc.disable()  # nothing waits for it
    try:
        big = jnp.ones(3)
        f, loss = make(SOLVERS[name], big)
        first, array = jax.grad(loss)(jnp.asarray(W)), weakref.ref(big)
        with compiled() as found:
            second = jax.grad(loss)(jnp.asarray(W))
        assert not found
        np.testing.assert_array_equal(first, second)
        alive = weakref.ref(f)
        del f, loss, big, first, second
        assert alive() is None and array() is None
    finally:
        gc.enable()


def test_a_step_lives_as_long_as_what_may_call_it():
    """Rules of derivatives are called later, when nothing else holds the step."""

    def loss(w):
        return by_solve(PICARD, jnp.ones(3))[1](w)

    w = jnp.asarray(W)
    jitted = jax.jit(loss)
    jitted(w)
    _, pull = jax.vjp(loss, w)
    other = lambda y, layer: step(y, layer)  # noqa: E731
    solution, pullback = lp_jax.solve_vjp(other, w, X, solver=PICARD)
    del other
    gc.collect()
    wanted = jax.grad(jitted)(w)
    np.testing.assert_allclose(pull(jnp.ones(()))[0], wanted, rtol=1e-12)
    gradients, _ = pullback(2 * solution.y1)
    np.testing.assert_allclose(gradients.params, wanted, rtol=1e-12)


@pytest.mark.parametrize("jit", [False, True])
def test_value_and_grad_finds_what_it_compiled(jit):
    """Outside of jit, for another loss of the same step too; a loss that is jitted itself has the same results."""

    def loss(w):
        return jnp.sum(lp_jax.solve(step, w, X, solver=lp_jax.Picard(sweeps=1, rtol=1e-9)).y1)

    f = jax.jit(loss) if jit else loss
    first = lp_jax.value_and_grad(f)(W)
    with compiled() as found:
        second = lp_jax.value_and_grad(f)(W)
    assert jit or not found
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert second[2].forward == second[2].adjoint != 0


@pytest.mark.parametrize("name", SOLVERS)
def test_whoever_replaces_a_loop_of_jax_sees_none_of_ours(name, monkeypatch):
    """Such as a progress bar, which counts the user's scans."""
    seen = []

    def spy(old):
        return lambda *args, **kwargs: (seen.append(old), old(*args, **kwargs))[1]

    for loop in ("scan", "fori_loop", "while_loop", "map"):
        monkeypatch.setattr(lax, loop, spy(getattr(lax, loop)))

    def loss(w):
        carry, ys = lp_jax.scan(lambda y, w: (y + jnp.tanh(y * w), y), X, w, solver=SOLVERS[name])
        return jnp.sum(carry) + jnp.sum(ys)

    jax.jit(jax.value_and_grad(loss)).trace(W[:, :1])
    assert not seen

    def scanned(w):
        return jnp.sum(lax.scan(lambda y, w: (y + jnp.tanh(y * w), None), X, w)[0])

    jax.jit(jax.value_and_grad(lp_jax.parallel(scanned, solver=SOLVERS[name]))).trace(W[:, :1])
    assert len(seen) == 1


def test_a_solution_that_is_not_finite_is_shown_without_a_copy():
    solution = lp_jax.solve(
        lambda y, layer: y / layer.params, jnp.ones(64).at[40].set(0), jnp.ones(10_000)
    )
    size = solution.trajectory.nbytes
    tracemalloc.start()
    try:
        assert "layer 40" in repr(solution)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()


KEYS = {
    "of the layer": lambda key, own, n: own,
    "split": lambda key, own, n: jax.random.split(own, 3)[1],
    "of the network": lambda key, own, n: jax.random.fold_in(key, n),
    "made inside": lambda key, own, n: jax.random.key(n, impl=jax.random.key_impl(key)),
    "raw": lambda key, own, n: jax.random.wrap_key_data(
        jax.random.key_data(own), impl=jax.random.key_impl(key)
    ),
}


def dropped(impl, of):
    """A scan with dropout in a program within the step, and its operands."""
    key = jax.random.key(1, impl=impl)

    def body(y, x):
        w, own, n = x
        draw = lambda: jax.random.bernoulli(KEYS[of](key, own, n), 0.5, y.shape)  # noqa: E731
        drop = jax.checkpoint(lambda y: jnp.where(draw(), y, 0))
        return y + drop(jnp.tanh(y @ w)), None

    return body, (jax.random.split(key, N), jnp.arange(N))


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *((of, "exact") for of in KEYS),
        *(("split", s) for s in ("chunks", "mgrit", "newton", "mesh")),
    ],
)
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_draw_what_they_draw_in_one_layer_after_another(impl, of, name):
    """Under a vmap over layers JAX draws numbers for all keys from the first one, where they are none of threefry's."""
    solvers = {
        "exact": lp_jax.Picard(sweeps=N),
        "chunks": lp_jax.Picard(sweeps=N, at_once=3),
        "mgrit": lp_jax.MGRIT(coarsening=2, iterations=N),
        "newton": lp_jax.Newton(iterations=N, batch_axes=1),
        "mesh": lp_jax.Picard(sweeps=N),
    }
    body, (keys, numbers) = dropped(impl, of)

    def gradient(scan, **options):
        loss = lambda w, x: jnp.sum(scan(body, x, (w, keys, numbers), **options)[0] ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X)

    wanted, comm = gradient(lax.scan), jax.make_mesh((2,), ("layers",)) if name == "mesh" else None
    assert relative_error(gradient(lp_jax.scan, solver=solvers[name], comm=comm), wanted) < 1e-10
    if name == "exact":
        once = lp_jax.Picard(sweeps=1)
        assert relative_error(gradient(lp_jax.scan, solver=once), wanted) > 1e-2


def test_keys_of_examples_draw_what_a_scan_of_them_draws():
    """`vmap` of ``lax.scan`` has the numbers of the first key for all examples, and so has `vmap` of a solve."""
    body, (keys, numbers) = dropped("unsafe_rbg", "of the layer")
    each = jax.random.split(keys[0], (2, N))
    f = lambda keys: lp_jax.scan(body, X, (W, keys, numbers), solver=lp_jax.Picard(sweeps=N))[0]  # noqa: E731
    scan = lambda keys: lax.scan(body, X, (W, keys, numbers))[0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(f)(each), jax.vmap(scan)(each), rtol=1e-12)
    same = jax.vmap(f, axis_size=2, in_axes=None)(keys)
    np.testing.assert_allclose(same, [scan(keys)] * 2, rtol=1e-12)
