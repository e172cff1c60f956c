"""The table of transformations in docs/transformations.md, cell by cell; and every solver under JAX's own checks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from problems import relative_error
from products import layer

import lp_jax
from lp_jax import MGRIT, Newton, Picard, Serial, Windowed

RNG = np.random.default_rng(0)
PARAMS, DIRECTION = jnp.asarray(RNG.normal(size=(2, 8, 3, 3)))
Y0 = jnp.asarray(RNG.normal(size=3))

EXACT = {"Serial": Serial(), "Serial, checkpoints": Serial(checkpoint_every=3)}
FIXED = {
    "Picard": Picard(sweeps=9),
    "Newton": Newton(iterations=6, batch_axes=0),
    "Newton, shared": Newton(jacobian="shared", iterations=12, batch_axes=0),
    "MGRIT": MGRIT(coarsening=2, iterations=5),
    "MGRIT, all kept": MGRIT(coarsening=2, iterations=5, storage="all"),
}
TOLERANCE = {"MGRIT, tolerance": MGRIT(coarsening=2, iterations=20, rtol=1e-14)}
ITERATIVE = FIXED | TOLERANCE
ALL = EXACT | ITERATIVE


def loss(params, solver):
    return jnp.sum(lp_jax.solve(layer, params, Y0, t1=2.0, solver=solver).y1 ** 2)


@functools.cache
def exact(what):
    f = functools.partial(loss, solver=Serial())
    return jax.jit(
        {
            "gradient": jax.grad(f),
            "tangent": lambda p: jax.jvp(f, (p,), (DIRECTION,))[1],
            "product": lambda p: jax.jvp(jax.grad(f), (p,), (DIRECTION,))[1],
            "hessian": jax.hessian(f),
        }[what]
    )(PARAMS)


def scanned(f, params):
    """Of two solves."""
    total, _ = jax.lax.scan(
        lambda total, x: (total + f(x), None), jnp.zeros(()), jnp.stack([params, DIRECTION])
    )
    return total


def compiled_and_exported(f, params):
    """One program three ways; they give the same bits."""
    gradient = jax.jit(jax.grad(f))
    found = gradient(params)
    np.testing.assert_array_equal(gradient.lower(params).compile()(params), found)
    np.testing.assert_array_equal(export.export(gradient)(params).call(params), found)
    return found


# what is transformed, and what it must equal
CELLS = {
    "jit, AOT, export": (compiled_and_exported, "gradient"),
    "grad of jit": (lambda f, p: jax.grad(jax.jit(f))(p), "gradient"),
    "vmap of grad": (
        lambda f, p: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([DIRECTION, p]))[1],
        "gradient",
    ),
    "grad of vmap": (
        lambda f, p: jax.jit(jax.grad(lambda q: jax.vmap(f)(q).sum()))(jnp.stack([DIRECTION, p]))[
            1
        ],
        "gradient",
    ),
    "scan": (lambda f, p: jax.jit(jax.grad(functools.partial(scanned, f)))(p), "gradient"),
    "remat": (lambda f, p: jax.jit(jax.grad(jax.checkpoint(f)))(p), "gradient"),
    "jacrev": (lambda f, p: jax.jacrev(f)(p), "gradient"),
    "jvp of grad": (lambda f, p: jax.jvp(jax.grad(f), (p,), (DIRECTION,))[1], "product"),
    "hessian": (lambda f, p: jax.jit(jax.hessian(f))(p), "hessian"),
}


ODD = ["jit, AOT, export", "vmap of grad", "scan", "jacrev", "hessian"]
EVEN = ["grad of jit", "grad of vmap", "remat", "jvp of grad"]
OF_SOLVER = {  # two varieties of a solver share the cells; to some cells a tolerance is nothing new
    "Serial": ODD,
    "Serial, checkpoints": EVEN,
    "Picard": [*CELLS],
    "Newton": EVEN,
    "Newton, shared": ODD,
    "MGRIT": EVEN,
    "MGRIT, all kept": ODD,
    "MGRIT, tolerance": [
        "jit, AOT, export",
        "vmap of grad",
        "grad of vmap",
        "jacrev",
        "jvp of grad",
        "hessian",
    ],
}


@pytest.mark.parametrize(
    ("name", "cell"), [(name, cell) for name, cells in OF_SOLVER.items() for cell in cells]
)
def test_what_every_solver_can(name, cell):
    transformed, what = CELLS[cell]
    got = transformed(functools.partial(loss, solver=ALL[name]), PARAMS)
    assert relative_error(got, exact(what)) < 1e-12


def twice(f, params):
    return jax.jit(jax.grad(lambda p: jnp.vdot(jax.grad(f)(p), DIRECTION)))(params)


FORWARD = {
    "jvp": lambda f, p: jax.jvp(f, (p,), (DIRECTION,))[1],
    "linearize": lambda f, p: jax.linearize(f, p)[1](DIRECTION),
    "jacfwd": lambda f, p: jnp.vdot(jax.jacfwd(f)(p), DIRECTION),
    "jit of jvp": lambda f, p: jax.jit(lambda p: jax.jvp(f, (p,), (DIRECTION,))[1])(p),
    "jacfwd of jit": lambda f, p: jnp.vdot(jax.jacfwd(jax.jit(f))(p), DIRECTION),
}


REFUSED = zip(ITERATIVE, [*FORWARD, "jvp"], strict=True)  # one by each


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, mode) for name in EXACT for mode in FORWARD), *REFUSED]
)
def test_forward_mode(name, mode):
    f = functools.partial(loss, solver=ALL[name])
    if name in EXACT:
        assert relative_error(FORWARD[mode](f, PARAMS), exact("tangent")) < 1e-12
        return
    with pytest.raises(
        TypeError, match=r"Forward-mode .* jax\.jvp of jax\.grad, work.*solver=lp_jax\.Serial\(\)"
    ):
        FORWARD[mode](f, PARAMS)


@pytest.mark.parametrize("name", ALL)
def test_reverse_mode_twice(name):
    f = functools.partial(loss, solver=ALL[name])
    if name not in TOLERANCE:
        assert relative_error(twice(f, PARAMS), exact("product")) < 1e-12
        return
    with pytest.raises(
        ValueError, match=r"Reverse mode was applied twice .* leave rtol and atol out"
    ):
        jax.eval_shape(functools.partial(twice, f), PARAMS)


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_of_a_solution_that_has_its_pullback(name):
    """`solve_vjp` has applied reverse mode once already."""

    def f(params):
        solution, _ = lp_jax.solve_vjp(layer, params, Y0, t1=2.0, solver=ALL[name])
        return jnp.sum(solution.y1**2)

    if name not in TOLERANCE:
        assert relative_error(jax.jit(jax.grad(f))(PARAMS), exact("gradient")) < 1e-12
        return
    with pytest.raises(
        ValueError, match=r"Reverse mode was applied twice .* leave rtol and atol out"
    ):
        jax.eval_shape(jax.grad(f), PARAMS)


@pytest.mark.parametrize("name", ALL)
def test_products_with_hessians_of_a_step_with_a_rule(name):
    """Of the others, JAX says itself that it has no forward mode through the function."""

    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, cotangent: (cotangent / jnp.cosh(x) ** 2,))

    def f(params, solver):
        def step(y, layer):
            return y + layer.dt * tanh(layer.params @ y)

        return jnp.sum(lp_jax.solve(step, params, Y0, t1=2.0, solver=solver).y1 ** 2)

    def product(solver):
        gradient = jax.grad(functools.partial(f, solver=solver))
        return jax.jvp(gradient, (PARAMS,), (DIRECTION,))[1]

    if name in (*EXACT, "Newton"):
        assert relative_error(product(ALL[name]), product(Serial())) < 1e-12
        return
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        product(ALL[name])


SHARED, *DIRECTIONS = (jnp.asarray(RNG.normal(size=shape)) for shape in (3, (8, 3, 3), 3, 3))


def of_every_layer(operands, solver, comm):
    """A loss of every layer, with weights that all devices share."""

    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params + layer.shared), jnp.sum(y**3)

    params, shared, y0 = operands
    solution = lp_jax.solve(
        step, params, y0, shared=shared, t1=2.0, solver=solver, comm=comm, has_aux=True
    )
    return jnp.sum(solution.y1**2) + jnp.sum(solution.aux)


@functools.cache
def product(solver, comm=None):
    f = jax.grad(functools.partial(of_every_layer, solver=solver, comm=comm))
    return jax.jit(lambda x: jax.jvp(f, (x,), (tuple(DIRECTIONS),))[1])((PARAMS, SHARED, Y0))


@pytest.mark.parametrize("name", ["Serial", "Picard", "Newton", "MGRIT, all kept"])
def test_second_derivatives_over_a_mesh(name):
    """These differentiate through the shard_map."""
    mesh = jax.make_mesh((3,), ("layers",), devices=jax.devices()[:3])

    def twice(operands):
        f = jax.grad(functools.partial(of_every_layer, solver=ALL[name], comm=mesh))
        return jax.grad(lambda x: sum(map(jnp.vdot, f(x), DIRECTIONS)))(operands)

    assert relative_error(product(ALL[name], mesh), product(Serial())) < 1e-12
    if name in ("Picard", "Newton"):
        assert relative_error(jax.jit(twice)((PARAMS, SHARED, Y0)), product(Serial())) < 1e-12
        return
    with pytest.raises(ValueError, match=r"Reverse mode was applied twice .* over a mesh"):
        jax.eval_shape(twice, (PARAMS, SHARED, Y0))


CHECKED = [
    Serial(),
    Serial(checkpoint_every=3),
    Windowed(sweeps=3, windows=2, rtol=1e-2),
    Newton(batch_axes=0),
    MGRIT(storage="all", at_once=math.inf),
    MGRIT(coarsening=2, coarse_step=lp_jax.Rediscretize(), iterations=9, rtol=1e-3),
]


@pytest.mark.parametrize("solver", CHECKED, ids=lambda solver: type(solver).__name__)
def test_every_solver_under_the_checks_of_jax(solver):
    params = {"w": jnp.full((10, 4, 4), 0.3), "b": jnp.zeros((10, 4))}
    keys = jax.random.split(
        jax.random.key(0, impl="unsafe_rbg"), 10
    )  # one operation, not the rounds of a hash

    def step(y, layer):
        kept = jax.random.bernoulli(layer.data, 0.8, y.shape).astype(y.dtype)
        y = y + layer.dt * kept * jnp.tanh(y @ layer.params["w"] + layer.params["b"])
        return y, jnp.mean(y)

    def loss(params, y0, keys):
        solution = lp_jax.solve(step, params, y0, data=keys, solver=solver, has_aux=True)
        return jnp.sum(solution.y1) + jnp.sum(solution.aux), solution.stats

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    with jax.enable_checks(True):  # of types, while it is traced
        gradient.trace(params, jnp.ones(4), keys)
    with jax.debug_nans(True), jax.debug_key_reuse(True), jax.checking_leaks():
        jax.block_until_ready(gradient(params, jnp.ones(4), keys))


@pytest.mark.parametrize("rule", ("vjp", "jvp"))
def test_a_rule_within_the_step_may_use_values_of_the_step(rule):
    """Its code then runs wherever a solve has the step; the program of another trace would not know these values."""

    def plain(y, layer):
        return y + layer.dt * jnp.cos(layer.t) * jnp.tanh(y)

    def ruled(y, layer):
        def slope(y):
            return 1 + layer.dt * jnp.cos(layer.t) / jnp.cosh(y) ** 2

        def call(y):
            return plain(y, layer)

        if rule == "vjp":
            f = jax.custom_vjp(call)
            f.defvjp(lambda y: (call(y), y), lambda y, cotangent: (cotangent * slope(y),))
        else:
            f = jax.custom_jvp(call)
            f.defjvp(lambda y, t: (call(*y), t[0] * slope(*y)))
        return f(y)

    def gradient(step, solver):
        params = jnp.zeros(16)
        return jax.grad(lambda y: jnp.sum(lp_jax.solve(step, params, y, solver=solver).y1))(
            jnp.linspace(0.1, 1, 3)
        )

    exact, inject = gradient(plain, lp_jax.Serial()), lp_jax.Rediscretize("inject")
    cycles = lp_jax.MGRIT(iterations=8, coarse_step=inject, at_once=1)
    for solver in (cycles, lp_jax.Picard(sweeps=16, storage="states", at_once=1)):
        np.testing.assert_allclose(gradient(ruled, solver), exact, rtol=1e-10)


# JAX itself refuses such a rule in a scan within a checkpoint, so checkpoints are left out.
@pytest.mark.parametrize("solver", [None, Serial(), *ITERATIVE.values()], ids=str)
def test_a_forward_rule_may_use_values_of_the_caller_s_trace(solver):
    """As in ``lax.scan``, which is the truth; the rule has another derivative than the function, so that one sees its use."""

    def scaled(scale):
        f = jax.custom_jvp(lambda y: jnp.tanh(scale * y))
        f.defjvp(lambda y, t: (f(*y), 2 * scale * t[0]))
        return f

    def solved(params, scale):
        f = scaled(lax.stop_gradient(scale))
        found = lp_jax.solve(
            lambda y, layer: y + layer.dt * f(layer.params * y), params, Y0, solver=solver
        )
        return found.y1.sum()

    def scanned(params, scale):
        f = scaled(lax.stop_gradient(scale))
        return lax.scan(lambda y, w: (y + f(w * y) / 8, None), Y0, params)[0].sum()

    for of in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        found, wanted = (of(f)(PARAMS[:, 0], 0.1) for f in (solved, scanned))
        np.testing.assert_allclose(found, wanted, rtol=1e-10)  # of iterations to the last digits


def through_time(y, layer):
    return y + layer.dt * jnp.tanh(layer.params * y) * jnp.cos(layer.t), layer.t**2


def through_weights(y, layer):
    a, b = y
    return (a + layer.dt * jnp.sin(layer.params * a), b * jnp.cos(layer.params)), None


APART = {
    "aux": (through_time, jnp.ones(2)),
    "a leaf": (through_weights, (jnp.ones(2), jnp.ones(3))),
}


@pytest.mark.parametrize(
    ("name", "solver", "devices"),
    [
        *(("aux", solver, 1) for solver in (None, *ALL.values())),
        *(("a leaf", solver, 1) for solver in (None, Serial(), lp_jax.MGRIT(iterations=8))),
        *((name, solver, 4) for name in APART for solver in (None, lp_jax.Picard(sweeps=8))),
    ],
)
def test_what_all_examples_share_counts_once(name, solver, devices):
    """Outputs that do not depend on what is batched have one cotangent for the batch; the truth is a loop over the examples."""
    step, y0 = APART[name]
    comm = jax.make_mesh((4,), ("layers",), devices=jax.devices()[:4]) if devices == 4 else None
    scales = jnp.asarray([1.0, 0.5, 0.25])

    def one(times, params, scale):
        # only the first leaf of the state is batched
        leaves, structure = jax.tree.flatten(y0)
        start = jax.tree.unflatten(structure, [scale * leaves[0], *leaves[1:]])
        options = {"t1": times, "has_aux": True, "comm": comm, "solver": solver}
        found = lp_jax.solve(step, params, start, **options)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves((found.y1, found.aux)))

    def at_once(times, params):
        return jax.vmap(functools.partial(one, times, params))(scales).sum()

    def in_turn(times, params):
        return sum(one(times, params, scale) for scale in scales)

    operands = jnp.linspace(0.0, 1.0, 9) ** 1.5, jnp.linspace(0.2, 0.9, 8)
    found, wanted = (jax.jit(jax.grad(f, argnums=(0, 1)))(*operands) for f in (at_once, in_turn))
    for a, b in zip(found, wanted, strict=True):
        # another order of sums; iterations to a tolerance leave 1e-14
        np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_batch_of_pullbacks_says_how_each_adjoint_solve_ended(devices):
    comm = jax.make_mesh((4,), ("layers",), devices=jax.devices()[:4]) if devices == 4 else None
    times, params = jnp.linspace(0.0, 1.0, 9) ** 1.5, jnp.linspace(0.2, 0.9, 8)
    options = {"t1": times, "has_aux": True, "comm": comm, "solver": lp_jax.Picard(rtol=1e-6)}

    def one(scale, guess):
        out, pullback = lp_jax.solve_vjp(
            through_time, params, (1 + scale) * jnp.ones(2), adjoint_guess=guess, **options
        )
        return pullback(scale * out.y1, 2 * out.aux)

    scales = jnp.asarray([1.0, 1e-3, 0.0])
    guess = jnp.zeros((8, 2))
    for start in (None, guess):
        found = jax.jit(jax.vmap(lambda scale: one(scale, start)))(scales)  # noqa: B023
        each = [one(scale, start) for scale in scales]
        wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)
        # jitted and not, the compiler sums in two orders
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, wanted)


def test_what_all_examples_share_counts_once_beside_an_adjoint_guess():
    """The gradient of a solve that starts its adjoint at a guess, whose cotangent is that at which it ended."""
    times, params = jnp.linspace(0.0, 1.0, 9) ** 1.5, jnp.linspace(0.2, 0.9, 8)

    def one(times, scale):
        solver = lp_jax.Picard(sweeps=8)
        options = {"t1": times, "has_aux": True, "solver": solver}
        guess = jnp.zeros((8, 2))
        found = lp_jax.solve(
            through_time, params, scale * jnp.ones(2), adjoint_guess=guess, **options
        )
        return (found.y1**2).sum() + found.aux @ jnp.arange(8.0)

    scales = jnp.asarray([1.0, 0.5, 0.25])
    found = jax.grad(lambda t: jax.vmap(functools.partial(one, t))(scales).sum())(times)
    wanted = jax.grad(lambda t: sum(one(t, scale) for scale in scales))(times)
    # another order of sums
    np.testing.assert_allclose(found, wanted, rtol=1e-11)
