"""A hundred steps of training on real digits, as one program, wherever the layers live."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import INJECT, dense_step

import lp_jax

LAYERS, WIDTH, BATCH, STEPS = 22, 16, 25, 100
SOLVER = lp_jax.MGRIT(coarsening=4, iterations=2, coarse_step=INJECT)
ADJOINT = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=INJECT)


def digits():
    """Pixels and labels, from the file that comes with scikit-learn, whose import takes seconds of every process."""
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


def initial(run=slice(None)):
    """Opening matrix, stacked layers (those of ``run``), closing matrix; float64."""
    rng = np.random.default_rng(0)
    opening = rng.normal(size=(64, WIDTH)) / 8
    layers = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, 0.1 * rng.normal(size=(LAYERS, WIDTH))
    closing = 0.1 * rng.normal(size=(WIDTH, 10))
    return jax.tree.map(jnp.asarray, (opening, tuple(x[run] for x in layers), closing))


@functools.partial(jax.jit, static_argnames="comm")
def train(params, comm):
    """The parameters after all steps of gradient descent with momentum, and the losses on the way."""
    images, labels = digits()
    order = np.random.default_rng(1).permutation(len(labels))
    batches = np.resize(order, (STEPS, BATCH))
    images, labels = jnp.asarray(images[batches] / 16), jnp.asarray(labels[batches], jnp.int32)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(params, images, labels):
        opening, layers, closing = params
        solution = lp_jax.solve(
            dense_step, layers, jnp.tanh(images @ opening), solver=SOLVER, adjoint_solver=ADJOINT, comm=comm
        )
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(solution.y1 @ closing, labels))

    def body(carry, batch):
        params, kept = carry
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, kept = optimizer.update(gradient, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    (params, _), losses = jax.lax.scan(body, (params, optimizer.init(params)), (images, labels))
    return params, losses
