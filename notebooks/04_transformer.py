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
# # 4. A transformer, its buffers and its drift
#
# The layers of a transformer change their input much, and more so as they learn. That is the hard case for a solver.
#
# **Question.** How good are layer-parallel gradients of a transformer, and do they stay good while it trains?
#
# Our small transformer reads handwritten digits. The eight rows of an image, with eight pixels each, are the tokens of
# a sequence.

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
from lp_jax import data, nn, train

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)
DEPTH, WIDTH = 16, 32


class Opening(nnx.Module):
    """A row of pixels becomes a token, and gets the embedding of its position."""

    def __init__(self, rngs):
        self.rows = nnx.Linear(8, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(8, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.rows(x[..., 0]) + self.positions.embedding[None]


class Closing(nnx.Module):
    """The mean over all tokens becomes scores of the ten digits."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.scores = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, y):
        return self.scores(self.norm(y).mean(axis=1))


def block(layers, solver, rngs):  # t1 = layers: steps of length 1, as in any transformer
    def make(rngs):
        return nn.EncoderLayer(WIDTH, 4, hidden=2 * WIDTH, depth=DEPTH, rngs=rngs)

    return nn.LayerParallel(make, layers, t1=layers, solver=solver, rngs=rngs)


rngs = nnx.Rngs(0)
model = nn.Classifier(Opening(rngs), block(DEPTH, lp_jax.Picard(sweeps=4), rngs), Closing(rngs))
loss_fn, params = train.classification(model)
digits = data.digits(seed=0)

# %% [markdown]
# ## Train it, and keep what it was on the way
#
# We train by exact gradients, so that nothing disturbs the comparison. At some steps we keep the parameters.

# %%
moments = (1, 20, 40, 56)
optimizer = optax.adam(2e-3)
step_fn = train.make_train_step(loss_fn, optimizer)
state, kept = train.init_state(params, optimizer), {}
for epoch in range(2):
    for batch in data.batches(digits, 50, seed=0, epoch=epoch):
        state, metrics = step_fn(state, batch, lp_jax.Serial(), None)
        if int(state.step) in moments:
            kept[int(state.step)] = jax.device_get(state.params)
print(train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)]))

# %% [markdown]
# ## Which layers change the state most?
#
# `trunk.solve` with a solver that keeps every state gives the trajectory. We look at how far each layer moves the
# state, relative to the norm of the state.


# %%
@jax.jit
def changes(params, x):
    trained = nnx.merge(nnx.graphdef(model), params)
    y0 = trained.opening(x)
    after = trained.trunk.solve(
        y0, solver=lp_jax.Picard(sweeps=DEPTH)
    ).trajectory  # as many sweeps as layers are exact
    before = jnp.concatenate([y0[None], after[:-1]])
    moved, size = (jnp.linalg.norm(y, axis=(2, 3)).mean(axis=1) for y in (after - before, before))
    return moved / size


fig, ax = plt.subplots()
for step in (1, 20, 56):
    ax.plot(
        np.arange(1, DEPTH + 1), changes(kept[step], digits.test_x[:50]), "o-", label=f"step {step}"
    )
ax.axvspan(0.5, 4.5, color="grey", alpha=0.2)
ax.set(
    xlabel="layer",
    ylabel="change of the state, relative",
    title="The first layers move the state most, and more with training",
)
ax.set_xticks(range(1, DEPTH + 1))
ax.grid(alpha=0.3)
ax.legend(title="training")
plt.show()

# %% [markdown]
# **What it shows.** The first four layers move the state most, and even more so after training. The layers behind them
# become gentler.
#
# ## Buffers
#
# So a parallel solver does not suit the first four layers, but it suits the other twelve. A *buffer* is a block with
# `solver=Serial()`, so that its layers run one after another. `nn.Network` puts blocks in a row. The network is the
# same and is only evaluated in another way, so we can hand over the trained parameters: those of the first four layers
# to one block, and the others to the second block.

# %%
BUFFER = 4


def buffered_model():
    rngs = nnx.Rngs(0)
    trunk = nn.Network(
        block(BUFFER, lp_jax.Serial(), rngs), block(DEPTH - BUFFER, lp_jax.Picard(sweeps=4), rngs)
    )
    return nn.Classifier(Opening(rngs), trunk, Closing(rngs))


shapes = nnx.eval_shape(buffered_model)  # its parameters come from the other network
buffered_loss_fn, _ = train.classification(shapes)


def hand_over(params):
    first = jax.tree.map(lambda w: w[:BUFFER], params["trunk"])
    others = jax.tree.map(lambda w: w[BUFFER:], params["trunk"])
    return params | {"trunk": {"parts": {0: first, 1: others}}}


# %% [markdown]
# ## The drift
#
# The solver is the simplest one. A Picard *sweep* evaluates all layers at the same time, each at the state that the
# sweep before gave it, and adds up their changes. We compare three ways to the gradient, at the parameters that we
# kept:
#
# * four sweeps over all layers;
# * four sweeps over the layers behind the buffer;
# * as many sweeps over all layers as are needed until a sweep changes the states by a hundredth.

# %%
four, many = lp_jax.Picard(sweeps=4), lp_jax.Picard(sweeps=DEPTH, rtol=1e-2)
ways = {
    "four sweeps": (loss_fn, lambda params: params, four),
    "four sweeps behind four buffer layers": (buffered_loss_fn, hand_over, four),
    "sweeps to a tolerance": (loss_fn, lambda params: params, many),
}
batch = digits.train_x[:50], digits.train_y[:50]

fig, ax = plt.subplots()
for (name, (loss, prepare, solver)), marker in zip(ways.items(), "os^", strict=True):
    gradient, errors = jax.jit(jax.grad(loss, has_aux=True)), []
    for step in moments:
        (g, _), (exact, _) = (
            gradient(prepare(kept[step]), batch, each, None) for each in (solver, lp_jax.Serial())
        )
        errors.append(float(optax.tree.norm(optax.tree.sub(g, exact)) / optax.tree.norm(exact)))
    ax.semilogy(moments, errors, marker=marker, label=name)
    print(f"{name:37}", "  ".join(f"{error:.1e}" for error in errors))
ax.set(
    xlabel="training step",
    ylabel="relative error of the gradient",
    title="Four sweeps drift; buffers or a tolerance hold the error",
)
ax.set_ylim(top=20)
ax.grid(alpha=0.3)
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# **What it shows.** Four sweeps have a small error at the start. It grows as the network learns, because the first
# layers move the state more and more. So a number of sweeps that was enough in the beginning is not enough later. Two
# things help:
#
# * **Buffers** take the difficult layers away from the solver. They cost a few layers that wait for each other.
# * **A tolerance** lets the solver take as many sweeps as it needs, so it follows the drift.
#
# Whatever you choose, measure the error now and then while you train. `lp_jax.gradient_error` costs two gradients.
# `train.Controller`, in notebook 8, measures it for you.
