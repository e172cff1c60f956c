"""Arrays that have a place: meshes with explicit axes, as ``jax.make_mesh`` gives them, and a user's ``jax.shard_map``."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from networks import normal
from problems import INJECT, relative_error

import lp_jax

RNG = np.random.default_rng(0)
Y0 = jnp.asarray(RNG.normal(size=(8, 4)))
SOLVER = lp_jax.Picard(sweeps=2)


def step(y, layer):
    y = y + layer.dt * jnp.tanh(y @ layer.params)
    return y, {"y": y, "number": layer.index}


def loss(params, y0, comm):
    solution = lp_jax.solve(step, params, y0, solver=SOLVER, comm=comm, has_aux=True)
    return jnp.sum(solution.y1**2) + jnp.sum(solution.aux["y"])


gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)

MESHES = {"layers": ((4,), ("layers",)), "layers and examples": ((4, 2), ("layers", "data"))}


def put(mesh, *spec):
    """Put arrays on the devices of a mesh."""
    return lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize(
    ("name", "placed", "set_mesh"),
    [
        ("layers", "anywhere", True),
        ("layers", "spread", False),
        ("layers and examples", "everywhere", False),
        ("layers and examples", "spread", True),
    ],
)
def test_the_numbers_and_places_are_those_of_the_arguments(name, placed, set_mesh):
    mesh = jax.make_mesh(*MESHES[name])
    params = jnp.asarray(RNG.normal(size=(16 if placed == "spread" else 13, 4, 4)))
    wanted = gradient(params, Y0, None)
    arguments = params, Y0
    if placed == "everywhere":
        arguments = tuple(map(put(mesh), arguments))
    elif placed == "spread":
        arguments = (
            put(mesh, "layers")(params),
            put(mesh, "data" if "data" in mesh.axis_names else None)(Y0),
        )
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        got = gradient(*arguments, mesh)
        assert relative_error(jax.tree.leaves(got), jax.tree.leaves(wanted)) < 1e-13
        if placed == "spread":
            assert [jax.typeof(g).sharding.spec for g in got[1]] == [
                jax.typeof(x).sharding.spec for x in arguments
            ]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_batch_over_the_axis_of_the_layers_is_refused(jit):
    mesh = jax.make_mesh((4,), ("layers",))

    def solve(y0):
        return lp_jax.solve(step, jnp.ones((8, 4, 4)), y0, comm=mesh, has_aux=True).y1

    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match=r"y0 and shared.*sharded over the axis 'layers'.*another axis"
        ),
    ):
        (jax.jit(solve) if jit else solve)(put(mesh, "layers")(Y0))


def test_what_a_step_closes_over_has_no_place_either():
    mesh = jax.make_mesh((4, 2), ("layers", "data"))
    params = jnp.asarray(
        np.random.default_rng(1).normal(size=(13, 4, 4))
    )  # whichever test ran before

    def closing(scale, comm):
        def step(y, layer):
            return y + scale[None] * layer.dt * jnp.tanh(y @ layer.params)

        return jnp.sum(lp_jax.solve(step, params, Y0, solver=SOLVER, comm=comm).y1 ** 2)

    plain, gradient = jnp.linspace(0.5, 1, 4), jax.jit(jax.grad(closing), static_argnums=1)
    scale = put(mesh)(plain)
    np.testing.assert_allclose(gradient(scale, mesh), gradient(plain, None), rtol=1e-13)
    with jax.set_mesh(mesh):  # traced, and not
        np.testing.assert_allclose(gradient(scale, mesh), gradient(plain, None), rtol=1e-13)
        np.testing.assert_allclose(closing(scale, mesh), closing(plain, None), rtol=1e-13)


def test_outputs_have_a_place_and_the_pullback_takes_arrays_that_have_one():
    mesh = jax.make_mesh((4, 2), ("layers", "data"))
    params, y0 = put(mesh, "layers")(RNG.normal(size=(16, 4, 4))), put(mesh, "data")(Y0)

    def pulled(*arrays, comm):
        solution, pullback = lp_jax.solve_vjp(step, *arrays, comm=comm, has_aux=True)
        gradients = pullback(jnp.ones((8, 4)), {"y": jnp.ones((16, 8, 4)), "number": None})[0]
        return solution.y1, solution.aux["y"], *gradients[:2]

    wanted, got = pulled(np.asarray(params), Y0, comm=None), pulled(params, y0, comm=mesh)
    assert relative_error(jax.tree.leaves(got), jax.tree.leaves(wanted)) < 1e-13
    assert jax.typeof(got[0]).sharding.spec == PartitionSpec("data", None)
    for function in (pulled, jax.jit(pulled, static_argnames="comm")):
        with jax.set_mesh(mesh):
            inside = function(params, y0, comm=mesh)
            jax.tree.map(jnp.subtract, (params, y0), inside[2:])  # their places fit
        assert relative_error(jax.tree.leaves(inside), jax.tree.leaves(wanted)) < 1e-13
        specs = [jax.typeof(x).sharding.spec for x in inside]
        assert specs[0] == specs[3] == PartitionSpec("data", None)
        assert specs[2] == PartitionSpec("layers", None, None)
    with jax.set_mesh(mesh):
        solution = lp_jax.solve(step, params, y0, comm=mesh, has_aux=True)
    assert jax.typeof(solution.y1).sharding.spec == PartitionSpec("data", None)
    assert jax.typeof(solution.aux["y"]).sharding.spec == PartitionSpec(None, "data", None)


# --- a solve of examples that are spread, without a ``comm`` -----------------------------------------------------------

SOLVERS = {
    "default": None,
    "serial": lp_jax.Serial(),
    "serial checkpointed": lp_jax.Serial(checkpoint_every=4),
    "windows": lp_jax.Windowed(sweeps=3, windows=2),
    "secant": lp_jax.Secant(sweeps=4, at_once=3),
    "falls back": lp_jax.Picard(sweeps=1, rtol=1e-12, fallback=True),
    "cycles": lp_jax.MGRIT(),
    "three levels": lp_jax.MGRIT(
        levels=3, coarsening=2, coarse_step=INJECT, storage="all", rtol=1e-6, iterations=9
    ),
    "around": lp_jax.MGRIT(coarse_step=lp_jax.Picard(sweeps=2, around="trajectory")),
    "identity": lp_jax.MGRIT(coarse_step=lp_jax.Identity(), at_once=1),
    "Newton": lp_jax.Newton(batch_axes=1, iterations=3, relaxations=2),
    "shared": lp_jax.Newton(jacobian="shared", iterations=14),
    "diagonal": lp_jax.Newton(batch_axes=1, iterations=3, jacobian="diagonal"),
}
WEIGHTS, SHARED, Y = normal((14, 4, 4)), normal((4,), seed=2), normal((4, 4), seed=3)
TWO = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
EVERYWHERE, SPREAD = PartitionSpec(), PartitionSpec("data")
SPECS = EVERYWHERE, EVERYWHERE, SPREAD


@pytest.mark.parametrize("name", SOLVERS)
def test_a_batch_over_two_devices(name):
    """Weights on both, examples on one each; a constant that the step closes over, and the gradient summed over devices.

    The same numbers on two examples at a time with explicit axes, which compile otherwise.
    """

    def solve(weights, shared, y):
        def step(y, layer):
            return y + layer.dt * jnp.tanh(y @ layer.params + layer.shared + scale), (
                jnp.sum(y**2),
                y,
            )

        scale = 0.1 * jnp.mean(shared)
        solution = lp_jax.solve(
            step, weights, y, shared=shared[None], t1=2.0, solver=SOLVERS[name], has_aux=True
        )
        return solution.y1, *solution.aux

    out_specs = SPREAD, EVERYWHERE, PartitionSpec(None, "data")

    @functools.partial(jax.shard_map, mesh=TWO, in_specs=SPECS, out_specs=out_specs)
    def shared_out(weights, shared, y):
        y1, sums, states = solve(weights, shared, y)
        return y1, jax.lax.psum(sums, "data"), states

    def loss(of, weights, shared, y):
        y1, sums, states = of(weights, shared, y)
        return jnp.sum(jnp.sin(y1)) + 1e-2 * jnp.sum(sums) + 1e-2 * jnp.sum(states)

    whole, half = (
        jax.jit(jax.value_and_grad(functools.partial(loss, of), (0, 1, 2)))
        for of in (shared_out, solve)
    )
    explicit = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with jax.set_mesh(explicit):
        places = [NamedSharding(explicit, spec) for spec in SPECS]
        halves = [
            half(*map(jax.device_put, (WEIGHTS, SHARED, part), places)) for part in (Y[:2], Y[2:])
        ]
    assert all(
        jax.typeof(gradient[2]).sharding.spec == PartitionSpec("data", None)
        for _, gradient in halves
    )
    (value, first), (more, second) = jax.device_get(halves)
    wanted = (
        value + more,
        (first[0] + second[0], first[1] + second[1], np.concatenate([first[2], second[2]])),
    )
    assert relative_error(whole(WEIGHTS, SHARED, Y), wanted) < 1e-13


@pytest.mark.parametrize("name", ["serial", "falls back", "identity", "Newton"])
def test_a_pullback_over_two_devices(name):
    """`solve_vjp` inside: the gradient of what both devices have is summed, that of the examples is not."""

    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params + layer.shared), jnp.sum(y**2)

    def pulled(weights, shared, y):
        given = {"shared": shared[None], "t1": 2.0, "solver": SOLVERS[name], "has_aux": True}
        _, pullback = lp_jax.solve_vjp(step, weights, y, **given)
        gradients, _ = pullback(jnp.ones(y.shape), 1e-2 * jnp.ones(14))
        return gradients.params, gradients.shared, gradients.y0

    got = jax.jit(jax.shard_map(pulled, mesh=TWO, in_specs=SPECS, out_specs=SPECS))(
        WEIGHTS, SHARED, Y
    )
    half = jax.jit(pulled)
    weights, shared, y = zip(*(half(WEIGHTS, SHARED, part) for part in (Y[:2], Y[2:])), strict=True)
    assert relative_error(got, (sum(weights), sum(shared), jnp.concatenate(y))) < 1e-13


def test_layers_may_be_spread_over_another_axis():
    """The copies' gradients, each of its half of the examples; with the check of `jax.shard_map` it is refused in words."""
    devices = jax.make_mesh(
        (2, 2), ("layers", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )

    def gradient(weights, y, comm=None):
        step = lambda y, at: y + at.dt * jnp.tanh(y @ at.params)  # noqa: E731
        solvers = {
            "solver": lp_jax.MGRIT(coarsening=2, iterations=2),
            "adjoint_solver": lp_jax.Picard(sweeps=3),
        }
        return jax.grad(lambda w: jnp.mean(lp_jax.solve(step, w, y, comm=comm, **solvers).y1 ** 2))(
            weights
        )

    def copies(check):
        share = lambda weights, y: gradient(weights, y, devices)[None]  # noqa: E731
        given = {
            "in_specs": SPECS[1:],
            "out_specs": SPREAD,
            "axis_names": {"data"},
            "check_vma": check,
        }
        return jax.jit(jax.shard_map(share, mesh=devices, **given))

    half = len(Y) // 2
    wanted = [jax.jit(gradient)(WEIGHTS, part) for part in (Y[:half], Y[half:])]
    np.testing.assert_allclose(copies(False)(WEIGHTS, Y), wanted, rtol=1e-12, atol=1e-15)
    refused = r"check_vma=True\) does not work.*each device has the gradient of its own share"
    with pytest.raises(ValueError, match=refused):
        copies(True)(WEIGHTS, Y)


def test_a_gradient_inside_set_mesh_is_on_its_mesh_where_the_parameters_are_on_none():
    """As JAX's own operations leave it there: an update of the parameters, with jit or without, needs one mesh."""
    mesh = jax.make_mesh((4,), ("layers",), devices=jax.devices()[:4])

    def body(y, weights):
        return y + jnp.tanh(weights * y) / 8, None

    solved = functools.partial(lp_jax.scan, solver=lp_jax.Picard(sweeps=8), comm=mesh)

    def train(params, scan):
        def loss(params):
            many = scan(body, Y0[0], params)
            one = lp_jax.scan(body, params[0], params[::-1])  # on one device
            return many[0].sum() + one[0].sum() + (params**2).sum()

        for _ in range(2):
            params = params - 0.1 * jax.grad(loss)(params)
        return params

    params = jnp.linspace(0.1, 0.9, 32).reshape(8, 4)
    wanted = train(params, jax.lax.scan)
    for train_by in (train, jax.jit(train, static_argnums=1)):
        with jax.set_mesh(mesh):
            found = train_by(params, solved)
            assert jax.typeof(found).sharding.mesh == mesh.abstract_mesh
        # jitted or not, the compiler sums in two orders
        np.testing.assert_allclose(found, wanted, rtol=1e-13)
