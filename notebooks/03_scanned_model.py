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
# # 3. A scanned model, unchanged
#
# Many JAX models stack the parameters of equal layers and loop over them with a scan. You need not rewrite such a
# model, because `lp_jax.parallel` takes its loss and solves the scans inside.
#
# **Question.** Does a model that I already have still learn the same?
#
# ## Plain JAX: one line

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
import numpy as np
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)


def network(stack, x):
    def body(x, w):
        x = x + 0.1 * jnp.tanh(x @ w)
        return x, jnp.mean(x)  # what goes to the next layer, and an output of this layer

    return jax.lax.scan(body, x, stack)


x = jnp.ones((4, 8))
stack = jax.random.normal(jax.random.key(0), (32, 8, 8)) / 3
print(lp_jax.scans(network)(stack, x))

# %% [markdown]
# `lp_jax.scans` lists the scans and what `lp_jax.parallel` does with each. Without a solver, it takes the way that is
# predicted to be fastest on your device, which is mostly the scan itself on a laptop. We name a solver, so that all
# layers are solved at once.

# %%
sweeps = lp_jax.Picard(sweeps=32, rtol=1e-3, fallback=True)
last, means = network(stack, x)
last_too, means_too = lp_jax.parallel(network, solver=sweeps)(stack, x)  # the change
print(
    f"largest difference {jnp.abs(last - last_too).max():.0e}, of the outputs {jnp.abs(means - means_too).max():.0e}"
)

# %% [markdown]
# ## A Flax model: one line
#
# Here is a model as Flax users write it: 64 blocks with layer norm and a hidden layer, stacked by `nnx.vmap` and applied
# by `nnx.scan`. Its loss is wrapped in `lp_jax.nn.parallel`, which also updates what a model changes in itself, such as
# batch statistics.

# %%
DEPTH, WIDTH = 64, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, scale):
        return x + scale * self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.opening = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = create(rngs)
        self.closing = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return block(x, 0.1)

        return self.closing(forward(self.blocks, self.opening(x)))


digits = data.digits(seed=0)
images, labels = digits.train_x.reshape(-1, 64), digits.train_y


def loss_fn(model, x, y):
    return optax.losses.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


# %% [markdown]
# We train the model twice from the same start, once with the scan and once with sweeps.


# %%
def train(loss_fn, epochs=2):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, gradient = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, gradient)
        return loss

    losses = []
    for epoch in range(epochs):
        for x, y in data.batches((images, labels), 50, seed=0, epoch=epoch):
            losses.append(train_step(model, optimizer, x, y))
    return model, np.array(losses)


exact_model, exact_losses = train(loss_fn)
model, losses = train(nn.parallel(loss_fn, solver=sweeps))  # the change

fig, ax = plt.subplots()
ax.semilogy(exact_losses, linewidth=4, alpha=0.4, label="loss_fn")
ax.semilogy(losses, linewidth=1.2, color="black", label="lp_jax.nn.parallel(loss_fn)")
ax.set(xlabel="training step", ylabel="loss of the batch", title="The same model learns the same")
ax.grid(alpha=0.3)
ax.legend()
plt.show()

# %% [markdown]
# **What it shows.** The two curves follow each other, within the tolerance of the solver. The model's class, its
# parameters and its checkpoints are what they were.
#
# ## When does it work well?
#
# A solver likes layers that change their input little. In this model `scale` says how much a block adds. We vary
# `scale`, and look at the residual after each cycle, which is the gap between the output of a block and the input of
# the next one. Each entry of `lp_jax.scans` has a problem, and its solution says how far a solver has come.

# %%
graphdef, weights = nnx.split(exact_model.blocks)


@jax.jit
def residuals(scale):
    def blocks(weights, x):
        return jax.lax.scan(lambda x, w: (nnx.merge(graphdef, w)(x, scale), None), x, weights)[0]

    (found,) = lp_jax.scans(blocks)(weights, exact_model.opening(images[:100]))
    solver = lp_jax.MGRIT(iterations=6, start="guess")
    return found.problem.solve(solver=solver).stats.residual_norms


fig, ax = plt.subplots()
for scale, marker in ((0.03, "o"), (0.1, "s"), (0.3, "^"), (1.0, "D")):
    norms = residuals(scale)
    ax.semilogy(np.arange(1, 7), norms / norms[0], marker=marker, label=f"{scale:g}")
ax.set(
    xlabel="cycle",
    ylabel="residual norm, first = 1",
    title="Blocks that add little are solved in a few cycles",
)
ax.grid(alpha=0.3)
ax.legend(title="scale of a block")
plt.show()

# %% [markdown]
# **What it shows.** The more a block adds, the more cycles it takes. Models with many layers often have a small factor
# in front of each block, or start with small projections. Both help.
#
# For Linen, Equinox and Haliax the line is `lp_jax.parallel`. It takes `solver=`, `adjoint_solver=`, `comm=` and
# `where=`, which chooses among several scans.
