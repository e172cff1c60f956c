"""Ways to spread a network over accelerators that you do not have, each compiled. A script to copy and to change.

    JAX_PLATFORMS=cpu python notebooks/examples/what_fits.py v5e:2x4

compiles a loss of the network and its gradient for a row of accelerators, spread in seven ways, and prints what each device
needs, sends and does. Put your own ``block(y, layer)`` and its shapes in the place of those below. Nothing is run, so shapes
are enough.

| Way | On each device |
|---|---|
| one device | all weights, all examples |
| examples | all weights, a part of the examples: data parallelism |
| weights | a part of every weight, gathered where it is used, and of the examples |
| layers: pipeline over 8 | a run of layers, in as many microbatches as there are devices |
| layers: pipeline over 4 | the same over half of the devices, twice side by side, each with half of the examples |
| layers: Fastest(), Serial() | a run of layers: the default, and one device after the other |

For a loss of your own kind, spread in your own way, take ``planning.compiled(loss, *shapes, on="v5e:2x4")``.
"""

import sys

import jax
import jax.numpy as jnp

import lp_jax

LAYERS, WIDTH, EXAMPLES = 32, 4096, 1024


@jax.checkpoint
def block(y, layer):
    """Two dense layers. What is between them is computed again for the gradient."""
    up, down = layer.params
    return y + jax.nn.gelu(y @ up) @ down / LAYERS


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def main(name="v5e:2x4"):
    params = shape(LAYERS, WIDTH, 4 * WIDTH), shape(LAYERS, 4 * WIDTH, WIDTH)
    problem = lp_jax.Problem(block, params, shape(EXAMPLES, WIDTH))
    print(lp_jax.plan(problem, topology=name))


if __name__ == "__main__":
    main(*sys.argv[1:])
