r"""A language model in Flax NNX with its layers and its batch over a 2 x 2 mesh. A script to read, to copy and to change.

    python notebooks/examples/lm_nnx.py --steps 200 --out runs/lm

trains a decoder of 24 blocks to predict the next character of ``--text FILE``, or of Python's own help. It has what a larger
training has: dropout, blocks that are computed again for the gradient (``nnx.remat``), products in bfloat16, clipped gradients,
gradients accumulated over several batches, and checkpoints with the places of all arrays. Run the same line again after an
interruption, or with more steps: it goes on from the last checkpoint, and its numbers are those of a run without a break.

One line makes it a pipeline: ``nn.pipeline(loss, mesh, ...)``. Each of two groups of devices holds 12 of the blocks, and the
microbatches of a batch follow each other through them. The other axis of the mesh divides the examples, and the compiler sums
their gradients. The numbers are those of one device, to the rounding of bfloat16.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from lp_jax import nn

SIZES = {"layers": 24, "width": 64, "heads": 4, "length": 64, "microbatches": 4, "examples": 4}
RUN = {"accumulate": 2, "steps": 200, "save-every": 50}


class Block(nnx.Module):
    """One layer. Its parameters and the state are float32, and its products bfloat16."""

    def __init__(self, width, heads, rngs):
        half = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.before, self.between = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **half)
        self.up = nnx.Linear(width, 4 * width, **half)
        self.down = nnx.Linear(4 * width, width, **half)
        self.dropout = nnx.Dropout(0.1)  # without keys, which come with each call

    def __call__(self, x, key):
        keys = jax.random.split(key)
        y = self.attention(self.before(x), mask=nnx.make_causal_mask(x[..., 0]))
        x = x + self.dropout(y.astype(x.dtype), rngs=keys[0])
        y = self.down(nnx.gelu(self.up(self.between(x))))
        return x + self.dropout(y.astype(x.dtype), rngs=keys[1])


class Model(nnx.Module):
    """A decoder. The arrays of its blocks have a first axis for the layers, which `nnx.scan` runs through."""

    def __init__(self, symbols, args, rngs):
        width = args.width
        self.embed, self.places = (nnx.Embed(n, width, rngs=rngs) for n in (symbols, args.length))
        blocks = nnx.vmap(lambda key: Block(width, args.heads, nnx.Rngs(key)))
        self.blocks = blocks(jax.random.split(rngs.params(), args.layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.last = nnx.Linear(width, symbols, rngs=rngs)
        self.layers = args.layers

    def __call__(self, tokens, key):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[-1]))[None]
        block = nnx.remat(Block.__call__)
        forward = nnx.scan(block, in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(self.norm(forward(self.blocks, x, jax.random.split(key, self.layers))))


def loss(model, tokens, key):
    """Return the mean cross-entropy of the next characters of ``tokens``, ``(examples, length + 1)``."""
    scores = model(tokens[:, :-1], key)
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def place(mesh, modules):
    """Put the arrays of blocks, an optimizer's too, on the devices of their layers, and all others on every device."""

    def put(path, x):
        axes = P("layers") if "blocks" in jax.tree_util.keystr(path) else P()
        return jax.device_put(x, NamedSharding(mesh, axes))

    nnx.update(modules, jax.tree.map_with_path(put, nnx.state(modules)))


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A language model over a mesh.")
    for name, value in (SIZES | RUN).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--text", type=Path, help="a file in UTF-8")
    parser.add_argument("--out", default="runs/lm", help="checkpoints of this text and size")
    args = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 4)  # on a machine without accelerators
    mesh = jax.make_mesh((2, 2), ("data", "layers"), axis_types=(AxisType.Auto,) * 2)

    text = "\n".join(topics.values()) if args.text is None else args.text.read_text("utf-8")
    symbols, text = np.unique(list(text), return_inverse=True)
    text, held_out = np.split(text.astype(np.int32), [-len(text) // 20])
    if len(held_out) <= args.length:
        raise SystemExit(f"The text needs more than {20 * args.length} characters.")

    model = Model(len(symbols), args, nnx.Rngs(0))
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 1000)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(chain, args.accumulate), wrt=nnx.Param)
    both = {"model": model, "optimizer": optimizer}
    place(mesh, both)
    piped = nn.pipeline(loss, mesh, in_axes=(None, 0, 0))

    def mean(model, tokens, key):
        return piped(model, tokens, jax.random.split(key, len(tokens))).mean()

    @nnx.jit
    def update(model, optimizer, tokens, key):
        value, gradient = nnx.value_and_grad(mean)(model, tokens, key)
        optimizer.update(model, gradient)
        return value

    def batch(text, step):
        """Return examples that depend on the step only, so that a run that goes on sees those of one without a break."""
        shape = args.microbatches, args.examples, 1
        starts = np.random.default_rng(step).integers(len(text) - args.length, size=shape)
        tokens = text[starts + np.arange(args.length + 1)]
        return jax.device_put(tokens, NamedSharding(mesh, P(None, "data")))

    with ocp.training.Checkpointer(Path(args.out).resolve()) as checkpoints:
        last = 0
        if checkpoints.latest is not None:
            last = checkpoints.latest.step
            nnx.update(both, checkpoints.load(last, nnx.to_pure_dict(nnx.state(both))))
            print(f"goes on after step {last}")
        for step in range(last + 1, args.steps + 1):
            value = update(model, optimizer, batch(text, step), jax.random.key(step))
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}: loss {value:.5f}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                checkpoints.save(step, nnx.to_pure_dict(nnx.state(both)), force=True)

    kernel = model.blocks.up.kernel[...]
    print(f"weights on one device: {kernel.addressable_shards[0].data.shape} of {kernel.shape}")
    model.eval()  # no dropout
    value = nnx.jit(mean)(model, batch(held_out, 0), jax.random.key(0))
    print(f"held out: loss {value:.5f}")


if __name__ == "__main__":
    main()
