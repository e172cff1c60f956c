r"""A bidirectional GRU over packed sequences, with resets and masks. A script to read, to copy and to change.

    python notebooks/examples/packed_gru.py --length 128 --steps 200

Short sequences stand one after another in rows of one length, so that little is padding. ``segments`` has the number of the
sequence at each place, and 0 in the padding. A recurrent network reads a whole row. It takes its first state again wherever a
sequence begins (or ends, if it reads backwards), so that no sequence sees another one, and padding changes nothing.

The model is two ``lax.scan`` loops, one of them reversed, because the task needs both directions. ``lp_jax.parallel`` solves both
for all places at once, here with Newton's method, and the code of the model does not change.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lp_jax

SYMBOLS, CLASSES = 4, 4


def sequences(number, random, longest=24):
    """Return random sequences and their labels: 1 for symbols like the first one, plus 2 for those like the last."""
    x = [random.integers(0, SYMBOLS, random.integers(3, longest + 1)) for _ in range(number)]
    return x, [(each == each[0]) + 2 * (each == each[-1]) for each in x]


def pack(x, y, length):
    """Return symbols, labels and segments as ``(rows, length)``; a sequence without room begins a new row."""
    symbols, labels, segments = (np.zeros((len(x), length), np.int32) for _ in range(3))
    row = end = 0
    for number, each in enumerate(x):
        if end + len(each) > length:
            row, end = row + 1, 0
        place = row, slice(end, end + len(each))
        symbols[place], labels[place], segments[place] = each, y[number], number + 1
        end += len(each)
    return symbols[: row + 1], labels[: row + 1], segments[: row + 1]


def init(key, hidden):
    """Return the parameters: an embedding, a GRU for each direction, and the last layer."""
    wide = 2 * hidden
    gru = {"gates": (wide, wide), "new": (wide, hidden), "first": (hidden,)}
    shapes = {"embed": (SYMBOLS, hidden), "forward": gru, "backward": gru, "last": (wide, CLASSES)}
    zeros = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return optax.tree.random_like(key, zeros, jax.nn.initializers.normal(0.25))


def gru(weights, x, fresh, real, reverse):
    """Return the states of all places, ``(time, batch, hidden)``; ``fresh`` marks where a sequence is entered."""

    def cell(h, at):
        x, fresh, real = at
        before = jnp.where(fresh[:, None], weights["first"][None], h)
        both = jnp.concatenate([before, x], axis=1)
        r, z = jnp.split(jax.nn.sigmoid(both @ weights["gates"]), 2, axis=1)
        new = jnp.tanh(jnp.concatenate([r * before, x], axis=1) @ weights["new"])
        h = jnp.where(real[:, None], z * before + (1 - z) * new, h)
        return h, h

    return jax.lax.scan(cell, jnp.zeros_like(x[0]), (x, fresh, real), reverse=reverse)[1]


def scores(params, symbols, segments):
    """Return the scores of the classes at every place of every row."""
    x, segments = params["embed"][symbols.T], segments.T  # time comes first in a scan
    begins = jnp.diff(segments, axis=0, prepend=-1) != 0
    ends = jnp.diff(segments, axis=0, append=-1) != 0
    there = gru(params["forward"], x, begins, segments > 0, reverse=False)
    back = gru(params["backward"], x, ends, segments > 0, reverse=True)
    return jnp.swapaxes(jnp.concatenate([there, back], axis=-1) @ params["last"], 0, 1)


def loss(params, batch):
    """Return the mean cross-entropy over the places that are not padding."""
    symbols, labels, segments = batch
    found = scores(params, symbols, segments)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(found, labels)
    return jnp.mean(losses, where=segments > 0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A bidirectional GRU over packed sequences.")
    for name, value in {"length": 128, "sequences": 100, "hidden": 16, "steps": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(arguments)
    random = np.random.default_rng(0)
    batch = pack(*sequences(args.sequences, random), args.length)
    params = init(jax.random.key(0), args.hidden)
    print(f"{len(batch[0])} rows of {args.length}, {(batch[2] == 0).mean():.0%} padding")

    # batch_axes=1: the rows do not act on each other. fallback: where Newton's method fails, one place after another.
    newton = lp_jax.Newton(iterations=12, relaxations=16, batch_axes=1, rtol=1e-4, fallback=True)
    print(lp_jax.scans(loss, solver=newton)(params, batch))
    gradient = jax.jit(jax.value_and_grad(lp_jax.parallel(loss, solver=newton)))
    exact, found = jax.jit(jax.grad(loss))(params, batch), gradient(params, batch)[1]
    wrong = optax.tree.norm(optax.tree.sub(found, exact)) / optax.tree.norm(exact)
    print(f"error of the gradient: {wrong:.0e}")

    optimizer = optax.adam(1e-2)
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for number in range(1, args.steps + 1):
        value, found = gradient(params, batch)
        change, state = update(found, state)
        params = optax.apply_updates(params, change)
        if number % 50 == 0 or number == args.steps:
            print(f"step {number}: loss {value:.3f}")

    symbols, labels, segments = pack(*sequences(args.sequences, random), args.length)
    right = np.asarray(jax.jit(scores)(params, symbols, segments)).argmax(-1) == labels
    print(f"right on sequences that it has not seen: {right[segments > 0].mean():.0%}")


if __name__ == "__main__":
    main()
