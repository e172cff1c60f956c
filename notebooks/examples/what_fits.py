"""Ways to spread a loss over accelerators that you do not have, each compiled. A script to copy and to change.

    JAX_PLATFORMS=cpu python notebooks/examples/what_fits.py v5e:2x4

compiles the gradient of one loss for a row of accelerators, spread in five ways, and prints what each device needs, sends and
does. Put your own ``loss(params, x)``, a mean over examples, and its shapes in the place of those below. Nothing is run, so
shapes are enough.

| Way | On each device |
|---|---|
| one device | all weights, all examples |
| examples | all weights, a part of the examples: data parallelism |
| weights | a part of every weight, gathered where it is used, and of the examples |
| layers | a run of layers: a pipeline, in as many microbatches as there are devices, or more |
| layers, examples | a pipeline over half of the devices, twice side by side |
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import lp_jax
from lp_jax import planning

LAYERS, WIDTH, EXAMPLES = 32, 4096, 1024


def loss(params, x):
    """Blocks of two dense layers. The last states are compared with zero."""

    def block(y, weights):
        up, down = weights
        return y + jax.nn.gelu(y @ up) @ down / LAYERS, None

    y, _ = jax.lax.scan(jax.checkpoint(block), x, params)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def shapes(mesh, stacked, examples):
    """Parameters and a batch, with the partitions of the parameters, which are stacked over the layers, and of the examples."""

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    up, down = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    return (array(stacked, *up), array(stacked, *down)), array(examples, EXAMPLES, WIDTH)


def piped(mesh, microbatches):
    """The loss as a pipeline. Where a microbatch is spread over examples, too, the compiler does it."""
    run = lp_jax.pipeline(loss, mesh, in_axes=(None, 1))
    return lambda params, x: run(params, x.reshape(-1, microbatches, WIDTH)).mean()


def ways(name):
    """Pairs of a name and what `planning.compiled` takes."""
    devices = planning.topology(name).size
    row, one = planning.topology(name, layers=devices), planning.topology(name, layers=1)
    both = planning.topology(name, layers=devices // 2, examples=2)
    yield "one device", loss, shapes(one, P(), P()), one
    yield "examples", loss, shapes(row, P(), P("layers")), row
    yield "weights", loss, shapes(row, P(None, "layers"), P("layers")), row
    yield "layers", piped(row, devices), shapes(row, P("layers"), P()), row
    yield "layers, examples", piped(both, devices), shapes(both, P("layers"), P("examples")), both


def main(name="v5e:2x4"):
    for way, f, given, mesh in ways(name):
        print(f"{way}: {planning.compiled(jax.value_and_grad(f), *given, on=mesh)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
