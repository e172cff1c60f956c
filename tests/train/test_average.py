"""Copies of a network that average their gradients: nothing is lost, only late, and no more is sent than is said."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from problems import INJECT, dense_params, dense_state, dense_step, relative_error

import lp_jax
from lp_jax.train import contrib

SENDS = {
    "whole": None,
    "bfloat16": contrib.bfloat16,
    "eight bits": contrib.eight_bits,
    "top k": contrib.top_k(0.1),
}


MEAN = optax.stateless(lambda gradient, _: jax.lax.pmean(gradient, "data"))


def grid(layers, data):
    devices = jax.devices()[: layers * data]
    return jax.make_mesh((layers, data), ("layers", "data"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def over_data(f, mesh):
    """Unchecked, as the gradients of copies are to stay apart; checked, that of what all hold would be their sum."""
    spec = PartitionSpec("data")
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False))


def averaged(send, mesh):
    """Updates of all copies, and what they have not sent, from their gradients; leading axis: the copies."""
    link = contrib.average_compressed("data", send) if send else MEAN

    def update(state, gradient):
        mean, state = link.update(*jax.tree.map(lambda x: x[0], (gradient, state)))
        return jax.tree.map(lambda x: x[None], (mean, state))

    return link, over_data(update, mesh)


def stacked(state, copies=2):
    return jax.tree.map(lambda x: np.stack([x] * copies), state)


@pytest.mark.parametrize("name", SENDS)
def test_what_is_not_sent_is_sent_later(name):
    """After any number of steps the updates of all steps, and what is left over, are the mean gradients."""
    copies, rng = 4, np.random.default_rng(0)
    gradients = [{"w": rng.normal(size=(copies, 3, 8)), "b": rng.normal(size=(copies, 7))}] * 5
    link, update = averaged(SENDS[name], grid(1, copies))
    state = stacked(link.init(jax.tree.map(lambda x: x[0], gradients[0])), copies)
    sums = jax.tree.map(np.zeros_like, gradients[0])
    for gradient in gradients:
        mean, state = update(state, gradient)
        sums = jax.tree.map(np.add, sums, mean)
        assert all(np.array_equal(x[0], x[i]) for x in jax.tree.leaves(mean) for i in range(copies))
    for leaf, total in sums.items():
        left = np.mean(state.unsent[leaf], axis=0) if SENDS[name] else 0
        np.testing.assert_allclose(total[0] + left, 5 * np.mean(gradients[0][leaf], axis=0), rtol=1e-12)
    np.testing.assert_array_equal(
        update(jax.tree.map(np.zeros_like, state), jax.tree.map(np.zeros_like, gradient))[0]["w"], 0
    )
    if SENDS[name]:
        assert max(np.abs(x).max() for x in state.unsent.values()) > 0


def test_layers_may_be_spread_over_another_axis():
    """The copies' gradients, each of its half of the examples, and their mean."""
    params, x = dense_params(16, 4), dense_state(6, 4)
    solvers = {
        "solver": lp_jax.MGRIT(coarsening=4, coarse_step=INJECT, iterations=2),
        "adjoint_solver": lp_jax.Picard(sweeps=3),
    }

    def gradient(params, x, comm=None):
        def loss(params):
            return jnp.mean(lp_jax.solve(dense_step, params, x, comm=comm, **solvers).y1 ** 2)

        return jax.grad(loss)(params)

    mesh = grid(4, 2)
    link = MEAN

    def both(x):
        own = gradient(params, x, lp_jax.MeshComm(mesh))
        mean, _ = link.update(own, link.init(own))
        return jax.tree.map(lambda x: x[None], (own, mean))

    own, mean = over_data(both, mesh)(x)
    second, whole = jax.jit(lambda x: (gradient(params, x[3:]), gradient(params, x)))(x)
    own, mean = jax.tree.map(np.asarray, (own, mean))
    assert relative_error(jax.tree.map(lambda x: x[1], own), second) < 1e-14
    assert relative_error(jax.tree.map(lambda x: x[0], mean), whole) < 1e-14


def received(program):
    """Bytes that a device gets by collectives, once through a program."""
    bits = {"f32": 32, "u16": 16, "s8": 8, "s32": 32}
    total = 0
    for result in re.findall(r"= (.*?) (?:all-reduce|all-gather)\(", program):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            total += int(np.prod([int(n) for n in shape.split(",") if n])) * bits[dtype] // 8
    return total


@pytest.mark.usefixtures("optimised")
def test_bytes_are_those_that_are_told():
    copies, layers, width = 4, 8, 32
    weights = np.zeros((copies, layers, width, width), np.float32)
    number = layers * width**2
    wanted = {
        "whole": 4 * number,
        "bfloat16": copies * 2 * number,
        "eight bits": copies * (number + 4 * layers),
        "top k": copies * 8 * layers * round(0.1 * width**2),
    }
    found = {}
    for name, send in SENDS.items():
        link, update = averaged(send, grid(1, copies))
        state = stacked(link.init(weights[0]), copies)
        found[name] = received(update.lower(state, weights).compile().as_text())
    assert found == wanted


@pytest.mark.parametrize("fraction", [0, 1.5, -0.1])
def test_a_fraction_is_one(fraction):
    with pytest.raises(ValueError, match=rf"fraction must lie in \(0, 1\]; got {fraction}"):
        contrib.top_k(fraction)
