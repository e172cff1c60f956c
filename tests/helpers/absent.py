"""Compile programs for accelerators that are not here, and print what was read of them as JSON.

Tests start this as a process of its own, ``python absent.py PART TOPOLOGY``: libtpu holds a lock until its process ends.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import lp_jax
from lp_jax import planning

LAYERS, WIDTH, EXAMPLES, MICROBATCHES = 16, 8, 16, 4


def step(y, layer):
    return y + layer.dt * jnp.tanh(y @ layer.params)


def methods(mesh):
    """Value and gradient by every method, of layers over the mesh."""
    comm, picard = lp_jax.MeshComm(mesh), lp_jax.Picard(sweeps=3)
    mgrit = lp_jax.MGRIT(coarsening=2, iterations=2)
    newton = lp_jax.Newton(iterations=2, batch_axes=1)
    solvers = {
        "default": None,
        "MGRIT": mgrit,
        "Newton": newton,
        "sweeps": picard,
        "relay": lp_jax.Serial(),
    }

    def solved(solver, comm=comm):
        def loss(params, y0):
            return jnp.mean(lp_jax.solve(step, params, y0, solver=solver, comm=comm).y1 ** 2)

        return loss

    piped = lp_jax.pipeline(solved(None, None), mesh, in_axes=(None, 0))
    losses = {name: solved(solver) for name, solver in solvers.items()}
    losses["pipeline"] = lambda params, y0: piped(
        params, y0.reshape(MICROBATCHES, -1, WIDTH)
    ).mean()
    params = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("layers"))
    )
    y0 = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)
    return {
        name: planning.compiled(jax.value_and_grad(loss), params, y0, on=mesh)
        for name, loss in losses.items()
    }


def sized(mesh, gigabytes):
    """Three programs that take about so many gigabytes: of arguments, of what a gradient keeps, and of all in a training step."""
    words, width = int(gigabytes * 1e9 / 4), 4096
    # Numbers of four bytes that are alive at once, for each of a state that is kept and for each weight: a TPU keeps operands of
    # products in bfloat16, too.
    states, weights = {"tpu": (2.53, 3.42), "gpu": (3.03, 3.01)}[mesh.devices.flat[0].platform]

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def kept(weights, y):
        """All states stay for the gradient; that of one weight for all layers is small."""

        def layer(y, _):
            return jnp.tanh(y @ weights), None

        return jnp.sum(lax.scan(layer, y, None, length=64)[0])

    def loss(weights, y):
        return jnp.sum(lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, weights)[0])

    def train(weights, momentum, y):
        momentum = jax.tree.map(lambda m, g: m + g, momentum, jax.grad(loss)(weights, y))
        return jax.tree.map(lambda w, m: w - m, weights, momentum), momentum

    layers = round(words / (weights * width**2))
    stacked = array(layers, width, width)
    programs = {
        "arguments": (jnp.sum, array(words // 1024, 1024)),
        "gradient": (
            jax.grad(kept, argnums=(0, 1)),
            array(width, width),
            array(round(words / (states * 64 * width)), width),
        ),
        "training step": (
            jax.jit(train, donate_argnums=(0, 1)),
            stacked,
            stacked,
            array(8, width),
        ),
    }
    return {name: planning.compiled(f, *shapes, on=mesh) for name, (f, *shapes) in programs.items()}


def main(part, topology, *numbers):
    mesh = planning.topology(topology)
    if part == "hold":  # until the one who started this is done
        print("held", flush=True)
        sys.stdin.read()
        return
    if part == "methods":
        found = {"": methods(mesh)}
    else:
        one = planning.topology(topology, layers=1)
        found = {number: sized(one, float(number)) for number in numbers}
    facts = {
        key: {
            name: {**dataclasses.asdict(one), "fits": one.fits, "text": str(one)}
            for name, one in programs.items()
        }
        for key, programs in found.items()
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
