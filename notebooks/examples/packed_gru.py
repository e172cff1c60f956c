r"""A bidirectional GRU over packed sequences, with resets and masks. A script to read, to copy and to change.

    python notebooks/examples/packed_gru.py --length 128 --steps 200

Short sequences stand one after another in rows of one length, so that little is padding. Three arrays say what is where.
``segments`` has the number of the sequence at each place, and 0 in the padding. From it follow the places at which a sequence
begins and those at which it ends. A recurrent network reads a whole row. It takes its first state again wherever a sequence
begins (or ends, if it reads backwards), so that no sequence sees another one, and padding changes nothing.

The model is two ``lax.scan`` loops, one of them reversed. ``lp_jax.parallel`` solves both for all places at once, with
Newton's method here, and the code of the model does not change. The task needs both directions. It asks of every symbol
whether it is the first symbol of its sequence, the last one, both, or neither.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lp_jax

SYMBOLS, CLASSES = 4, 4


def sequences(number, random, longest=24):
    """Return random sequences and their labels: 1 for the first symbol of the sequence, plus 2 for its last one."""
    x = [random.integers(0, SYMBOLS, random.integers(3, longest + 1)) for _ in range(number)]
    return x, [(each == each[0]) + 2 * (each == each[-1]) for each in x]


def pack(x, y, length):
    """Return symbols, labels and segments as ``(rows, length)``; a sequence without room begins a new row."""
    row, end, places = 0, 0, []
    for each in x:
        if end + len(each) > length:
            row, end = row + 1, 0
        places.append((row, slice(end, end + len(each))))
        end += len(each)
    symbols, labels, segments = (np.zeros((row + 1, length), np.int32) for _ in range(3))
    for number, place in enumerate(places):
        symbols[place], labels[place], segments[place] = x[number], y[number], number + 1
    return symbols, labels, segments


def init(key, hidden):
    """Return the parameters: an embedding, a GRU for each direction, and the last layer."""
    keys = iter(jax.random.split(key, 8))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    wide = 2 * hidden
    forward, backward = (
        {"gates": draw(wide, wide), "new": draw(wide, hidden), "first": draw(hidden)}
        for _ in range(2)
    )
    ends = {"embed": draw(SYMBOLS, hidden), "last": draw(wide, CLASSES)}
    return {"forward": forward, "backward": backward, **ends}


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
    edge = jnp.ones_like(segments[:1], bool)
    changes = segments[1:] != segments[:-1]
    begins, ends = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])
    there = gru(params["forward"], x, begins, segments > 0, reverse=False)
    back = gru(params["backward"], x, ends, segments > 0, reverse=True)
    return jnp.swapaxes(jnp.concatenate([there, back], axis=-1) @ params["last"], 0, 1)


def loss(params, batch):
    """Return the mean cross-entropy over the places that are not padding."""
    symbols, labels, segments = batch
    found = scores(params, symbols, segments)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(found, labels)
    return jnp.sum(losses * (segments > 0)) / jnp.sum(segments > 0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A bidirectional GRU over packed sequences.")
    sizes = {"length": 128, "sequences": 100, "hidden": 16, "steps": 200}  # a row has this length
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(arguments)

    random = np.random.default_rng(0)
    batch = pack(*sequences(args.sequences, random), args.length)
    params = init(jax.random.key(0), args.hidden)
    print(f"{len(batch[0])} rows of {args.length}, {(batch[2] == 0).mean():.0%} padding")

    # batch_axes=1: the rows do not act on each other. fallback: where Newton's method fails, one place after another.
    newton = lp_jax.Newton(iterations=12, relaxations=16, batch_axes=1, rtol=1e-4, fallback=True)
    solved = lp_jax.parallel(loss, solver=newton)
    print(lp_jax.scans(loss, solver=newton)(params, batch))
    print(f"error of the gradient: {lp_jax.gradient_error(solved)(params, batch).relative:.0e}")

    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state):
        value, gradient = jax.value_and_grad(solved)(params, batch)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state, value

    for number in range(1, args.steps + 1):
        params, state, value = update(params, state)
        if number % 50 == 0 or number == args.steps:
            print(f"step {number}: loss {value:.3f}")

    symbols, labels, segments = pack(*sequences(args.sequences, random), args.length)
    right = np.asarray(jax.jit(scores)(params, symbols, segments)).argmax(-1) == labels
    print(f"right on sequences that it has not seen: {right[segments > 0].mean():.0%}")


if __name__ == "__main__":
    main()
