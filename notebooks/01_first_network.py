# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. A first network
#
# A deep network evaluates its layers one after another: layer 40 waits for layer 39. Adding processors does not change
# that. `lp_jax.solve` can evaluate all layers at the same time, again and again, until the result is the same as with
# one layer after another.
#
# **Question.** Does a network learn the same that way?
#
# This notebook takes a minute. Here are 64 layers and a gradient:

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("lp_jax") is None:  # where this notebook is opened without it
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "lp_jax[train]"], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jax.flatten_util import ravel_pytree

import lp_jax

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)


def step(y, layer):  # one layer: as for lax.scan, but the layer has its weights in layer.params
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b)


keys = jax.random.split(jax.random.key(0), 2)
params = (0.3 * jax.random.normal(keys[0], (64, 8, 8)), jnp.zeros((64, 8)))  # 64 layers, stacked
x = jax.random.normal(keys[1], (16, 8))


sweeps = lp_jax.Picard(
    sweeps=32, rtol=1e-3, fallback=True
)  # all layers at once, until a tolerance is met


def loss(params, solver):
    return jnp.mean(lp_jax.solve(step, params, x, t1=2.0, solver=solver).y1 ** 2)


take_gradient = jax.jit(jax.grad(loss))
gradient = take_gradient(params, sweeps)
exact = take_gradient(params, lp_jax.Serial())  # one layer after another
print(f"relative error {jnp.linalg.norm(gradient[0] - exact[0]) / jnp.linalg.norm(exact[0]):.0e}")

# %% [markdown]
# The two gradients agree, to a tolerance. `layer.dt` is 2/64 here, which is `t1` divided by the number of layers, so
# every layer adds a little to the state. Without a solver, `lp_jax.solve` takes the way that is predicted to be fastest
# on your device. On a laptop that is mostly one layer after another, so here we name the solver that we mean.
#
# ## Train it
#
# The loss is a function like any other, so training is plain optax. The network reads handwritten digits: a matrix
# turns the 64 pixels of an image into a state, the 64 layers follow, and another matrix gives scores for ten digits.

# %%
from lp_jax import data

digits = data.digits(seed=0)
images, test_images = digits.train_x.reshape(-1, 64), digits.test_x.reshape(-1, 64)
print(f"{len(images)} images to train with, {len(test_images)} to test with")

fig, axes = plt.subplots(1, 8, figsize=(9, 1.6))
for ax, image, label in zip(axes, digits.train_x, digits.train_y, strict=False):
    ax.imshow(image[..., 0], cmap="gray_r")
    ax.set_title(label)
    ax.axis("off")

# %%
WIDTH, LAYERS = 32, 64
keys = jax.random.split(jax.random.key(1), 3)
start = {
    "opening": jax.random.normal(keys[0], (64, WIDTH)) / 8,
    "layers": (
        jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        jnp.zeros((LAYERS, WIDTH)),
    ),
    "closing": jax.random.normal(keys[2], (WIDTH, 10)) / WIDTH**0.5,
}
optimizer = optax.adam(3e-3)


def scores(params, x, solver):
    return (
        lp_jax.solve(step, params["layers"], x @ params["opening"], t1=2.0, solver=solver).y1
        @ params["closing"]
    )


def loss(params, x, y, solver):
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        scores(params, x, solver), y
    ).mean()


take_gradient = jax.jit(jax.value_and_grad(loss))


@jax.jit
def update(params, state, gradient):
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state


def train(solver, epochs=3):
    params, state, losses = start, optimizer.init(start), []
    for epoch in range(epochs):
        for x, y in data.batches((images, digits.train_y), 50, seed=0, epoch=epoch):
            value, gradient = take_gradient(params, x, y, solver)
            params, state = update(params, state, gradient)
            losses.append(float(value))
    return params, losses


exact_params, exact_losses = train(lp_jax.Serial())
params, losses = train(sweeps)

fig, ax = plt.subplots()
ax.semilogy(exact_losses, linewidth=4, alpha=0.4, label="one layer after another")
ax.semilogy(losses, linewidth=1.2, color="black", label="all layers at once")
ax.set(xlabel="training step", ylabel="loss of the batch", title="The same network learns the same")
ax.grid(alpha=0.3)
ax.legend()
plt.show()

# %% [markdown]
# **What it shows.** The curves lie on each other. The network is an ordinary one, and both ways of evaluating it give
# the same answers.

# %%
for name, solver in {
    "one layer after another": lp_jax.Serial(),
    "all layers at once": sweeps,
}.items():
    right = scores(params, test_images, solver).argmax(axis=1) == digits.test_y
    print(f"{name:24} test accuracy {right.mean():.1%}")

# %% [markdown]
# ## How little is enough?
#
# A *solver* says how the layers are evaluated. `Picard` makes *sweeps*. A sweep evaluates all layers at once, each at
# the state that the sweep before gave it, and adds up their changes. Our sweeps stop at a tolerance. How good is the
# gradient after one sweep, three sweeps and six, before and after training?

# %%
batch, numbers = (images[:50], digits.train_y[:50]), (1, 3, 6)


def error(params, solver):
    found, exact = (
        ravel_pytree(take_gradient(params, *batch, each)[1])[0]
        for each in (solver, lp_jax.Serial())
    )
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


fig, ax = plt.subplots()
for name, at in {"before training": start, "after training": params}.items():
    ax.semilogy(
        numbers, [error(at, lp_jax.Picard(sweeps=number)) for number in numbers], "o-", label=name
    )
ax.set(
    xlabel="sweeps",
    ylabel="relative error of the gradient",
    title="A few sweeps replace 64 layers in a row",
)
ax.grid(alpha=0.3)
ax.legend()
plt.show()

print(f"to the tolerance, after training: relative error {error(params, sweeps):.0e}")

# %% [markdown]
# **What it shows.** A handful of sweeps is enough, but one layer after another takes 64 evaluations. The error grows as
# the layers learn to do more, but with a tolerance the solver takes the sweeps that it needs. Notebook 8 shows how
# large an error may be.
#
# **What it does not show.** It does not show speed. Sweeps evaluate every layer more than once, so for layers like
# these a laptop's processor gains little or nothing. Sweeps pay on devices that a single layer leaves idle, and on
# several devices (notebooks 6 and 7). Notebook 2 shows how a solver works inside.
#
# ## With Flax modules
#
# `lp_jax.nn` has layers, and `lp_jax.train` has the parts of a training loop. `train.classification` makes a loss and
# its parameters from a model. They work in the same optax loop, or with `train.fit`, which adds a log and checkpoints.
# Here `fit` takes six sweeps in every step.

# %%
from flax import nnx

from lp_jax import nn, train as lp_train

rngs = nnx.Rngs(0)
model = nn.Classifier(
    nn.DenseOpening((8, 8, 1), WIDTH, rngs=rngs),
    nn.LayerParallel(lambda rngs: nn.DenseResidual(WIDTH, rngs=rngs), LAYERS, t1=2.0, rngs=rngs),
    nn.DenseClosing((WIDTH,), 10, rngs=rngs),
)
loss_fn, module_params = lp_train.classification(model)
state, log = lp_train.fit(
    lp_train.make_train_step(loss_fn, optimizer),
    lp_train.init_state(module_params, optimizer),
    lambda epoch: data.batches(digits, 50, seed=0, epoch=epoch),
    steps_per_epoch=len(images) // 50,
    epochs=2,
    solver=lp_jax.Picard(sweeps=6),
)
print(lp_train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)]))
