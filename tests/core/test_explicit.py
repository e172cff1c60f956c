"""Meshes as ``jax.make_mesh`` gives them, with explicit axes: a place is part of an array's type."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from problems import relative_error

import lp_jax

RNG = np.random.default_rng(0)
Y0 = jnp.asarray(RNG.normal(size=(8, 4)))
SOLVER = lp_jax.Picard(sweeps=2)  # others: test_shard_map.py


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
        arguments = put(mesh, "layers")(params), put(mesh, "data" if "data" in mesh.axis_names else None)(Y0)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        got = gradient(*arguments, mesh)
        assert relative_error(jax.tree.leaves(got), jax.tree.leaves(wanted)) < 1e-13
        if placed == "spread":
            assert [jax.typeof(g).sharding.spec for g in got[1]] == [jax.typeof(x).sharding.spec for x in arguments]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_batch_over_the_axis_of_the_layers_is_refused(jit):
    mesh = jax.make_mesh((4,), ("layers",))

    def solve(y0):
        return lp_jax.solve(step, jnp.ones((8, 4, 4)), y0, comm=mesh, has_aux=True).y1

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"y0 and shared.*sharded over the axis 'layers'.*another axis"),
    ):
        (jax.jit(solve) if jit else solve)(put(mesh, "layers")(Y0))


def test_what_a_step_closes_over_has_no_place_either():
    mesh = jax.make_mesh((4, 2), ("layers", "data"))
    params = jnp.asarray(np.random.default_rng(1).normal(size=(13, 4, 4)))  # whichever test ran before

    def closing(scale, comm):
        def step(y, layer):
            return y + scale[None] * layer.dt * jnp.tanh(y @ layer.params)

        return jnp.sum(lp_jax.solve(step, params, Y0, solver=SOLVER, comm=comm).y1 ** 2)

    plain, gradient = jnp.linspace(0.5, 1, 4), jax.jit(jax.grad(closing), static_argnums=1)
    scale = put(mesh)(plain)
    np.testing.assert_allclose(gradient(scale, mesh), gradient(plain, None), rtol=1e-13)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"closes over float64\[4\].*shared="):
        closing(scale, mesh)


def test_outputs_have_a_place_and_the_pullback_takes_arrays_that_have_one():
    mesh = jax.make_mesh((4, 2), ("layers", "data"))
    params, y0 = put(mesh, "layers")(RNG.normal(size=(16, 4, 4))), put(mesh, "data")(Y0)

    def pulled(*arrays, comm):
        solution, pullback = lp_jax.solve_vjp(step, *arrays, comm=comm, has_aux=True)
        gradients = pullback(jnp.ones((8, 4)), {"y": jnp.ones((16, 8, 4)), "number": None})[0]
        return solution.y1, solution.aux["y"], *gradients[:2]

    wanted, got = pulled(np.asarray(params), Y0, comm=None), pulled(params, y0, comm=mesh)
    assert relative_error(jax.tree.leaves(got), jax.tree.leaves(wanted)) < 1e-13
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"solve_vjp does not work inside jax.set_mesh"):
        pulled(params, y0, comm=mesh)
    with jax.set_mesh(mesh):
        solution = lp_jax.solve(step, params, y0, comm=mesh, has_aux=True)
    assert jax.typeof(solution.y1).sharding.spec == PartitionSpec("data", None)
    assert jax.typeof(solution.aux["y"]).sharding.spec == PartitionSpec(None, "data", None)
