"""A solve of examples that are spread, without a ``comm``.

Inside a user's ``jax.shard_map``, with the check of what varies between devices that is its default; and on a mesh with
explicit axes, where a place is part of an array's type.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from networks import normal
from problems import INJECT, relative_error

import lp_jax

SOLVERS = {
    "default": None,
    "serial": lp_jax.Serial(),
    "serial checkpointed": lp_jax.Serial(checkpoint_every=4),
    "windows": lp_jax.Windowed(sweeps=3, windows=2),
    "secant": lp_jax.Secant(sweeps=4, at_once=3),
    "falls back": lp_jax.Picard(sweeps=1, rtol=1e-12, fallback=True),
    "cycles": lp_jax.MGRIT(),
    "three levels": lp_jax.MGRIT(levels=3, coarsening=2, coarse_step=INJECT, storage="all", rtol=1e-6, iterations=9),
    "around": lp_jax.MGRIT(coarse_step=lp_jax.Picard(sweeps=2, around="trajectory")),
    "identity": lp_jax.MGRIT(coarse_step=lp_jax.Identity(), at_once=1),
    "Newton": lp_jax.Newton(batch_axes=1, iterations=3, relaxations=2),
    "shared": lp_jax.Newton(jacobian="shared", iterations=14),
    "diagonal": lp_jax.Newton(batch_axes=1, iterations=3, jacobian="diagonal"),
}
WEIGHTS, SHARED, Y = normal((14, 4, 4)), normal((4,), seed=2), normal((4, 4), seed=3)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_batch_over_two_devices(name):
    """Weights on both, examples on one each; a constant that the step closes over, and the gradient summed over devices.

    The same numbers on two examples at a time with explicit axes, which compile otherwise.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    everywhere, spread = PartitionSpec(), PartitionSpec("data")

    def solve(weights, shared, y):
        def step(y, layer):
            return y + layer.dt * jnp.tanh(y @ layer.params + layer.shared + scale), (jnp.sum(y**2), y)

        scale = 0.1 * jnp.mean(shared)
        solution = lp_jax.solve(step, weights, y, shared=shared[None], t1=2.0, solver=SOLVERS[name], has_aux=True)
        return solution.y1, *solution.aux

    share = functools.partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, everywhere, spread))

    @share(out_specs=(spread, everywhere, PartitionSpec(None, "data")))
    def shared_out(weights, shared, y):
        y1, sums, states = solve(weights, shared, y)
        return y1, jax.lax.psum(sums, "data"), states

    def loss(of, weights, shared, y):
        y1, sums, states = of(weights, shared, y)
        return jnp.sum(jnp.sin(y1)) + 1e-2 * jnp.sum(sums) + 1e-2 * jnp.sum(states)

    whole, half = (jax.jit(jax.value_and_grad(functools.partial(loss, of), (0, 1, 2))) for of in (shared_out, solve))
    explicit = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with jax.set_mesh(explicit):
        places = [NamedSharding(explicit, spec) for spec in (everywhere, everywhere, spread)]
        halves = [half(*map(jax.device_put, (WEIGHTS, SHARED, part), places)) for part in (Y[:2], Y[2:])]
    assert all(jax.typeof(gradient[2]).sharding.spec == PartitionSpec("data", None) for _, gradient in halves)
    (value, first), (more, second) = jax.device_get(halves)
    wanted = value + more, (first[0] + second[0], first[1] + second[1], np.concatenate([first[2], second[2]]))
    assert relative_error(whole(WEIGHTS, SHARED, Y), wanted) < 1e-13


@pytest.mark.parametrize("name", ["serial", "falls back", "identity", "Newton"])
def test_a_pullback_over_two_devices(name):
    """`solve_vjp` inside: the gradient of what both devices have is summed, that of the examples is not."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params + layer.shared), jnp.sum(y**2)

    def pulled(weights, shared, y):
        _, pullback = lp_jax.solve_vjp(
            step, weights, y, shared=shared[None], t1=2.0, solver=SOLVERS[name], has_aux=True
        )
        gradients, _ = pullback(jnp.ones(y.shape), 1e-2 * jnp.ones(14))
        return gradients.params, gradients.shared, gradients.y0

    everywhere, spread = PartitionSpec(), PartitionSpec("data")
    share = jax.shard_map(
        pulled, mesh=mesh, in_specs=(everywhere, everywhere, spread), out_specs=(everywhere, everywhere, spread)
    )
    got = jax.jit(share)(WEIGHTS, SHARED, Y)
    half = jax.jit(pulled)
    weights, shared, y = zip(*(half(WEIGHTS, SHARED, part) for part in (Y[:2], Y[2:])), strict=True)
    assert relative_error(got, (sum(weights), sum(shared), jnp.concatenate(y))) < 1e-13


def test_layers_may_be_spread_over_another_axis():
    """The copies' gradients, each of its half of the examples; with the check of `jax.shard_map` it is refused in words."""
    devices = jax.make_mesh((2, 2), ("layers", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def gradient(weights, y, comm=None):
        step = lambda y, at: y + at.dt * jnp.tanh(y @ at.params)  # noqa: E731
        solvers = {"solver": lp_jax.MGRIT(coarsening=2, iterations=2), "adjoint_solver": lp_jax.Picard(sweeps=3)}
        return jax.grad(lambda w: jnp.mean(lp_jax.solve(step, w, y, comm=comm, **solvers).y1 ** 2))(weights)

    def copies(check):
        return jax.jit(
            jax.shard_map(
                lambda weights, y: gradient(weights, y, devices)[None],
                mesh=devices,
                in_specs=(PartitionSpec(), PartitionSpec("data")),
                out_specs=PartitionSpec("data"),
                axis_names={"data"},
                check_vma=check,
            )
        )

    half = len(Y) // 2
    wanted = [jax.jit(gradient)(WEIGHTS, part) for part in (Y[:half], Y[half:])]
    np.testing.assert_allclose(copies(False)(WEIGHTS, Y), wanted, rtol=1e-12, atol=1e-15)
    with pytest.raises(
        ValueError, match=r"check_vma=True\) does not work.*each device has the gradient of its own share"
    ):
        copies(True)(WEIGHTS, Y)
