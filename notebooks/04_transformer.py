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
# The layers of a transformer change their input a lot, and more so as they learn. That is the hard case for a solver.
#
# **Question.** How good are layer-parallel gradients of a transformer, and do they stay good while it trains?
#
# A small one reads handwritten digits: eight rows of eight pixels are the eight tokens of a sequence.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train

plt.rcParams.update({"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12})
DEPTH, WIDTH = 20, 32


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
    make = lambda rngs: nn.EncoderLayer(WIDTH, 4, depth=DEPTH, rngs=rngs)
    return nn.LayerParallel(make, layers, t1=layers, solver=solver, rngs=rngs)


rngs = nnx.Rngs(0)
model = nn.Classifier(Opening(rngs), block(DEPTH, lp_jax.MGRIT(), rngs), Closing(rngs))
loss_fn, params = train.classification(model)
digits = data.digits(seed=0)

# %% [markdown]
# ## Train it, and keep what it was on the way
#
# We train by exact gradients, so that nothing disturbs the comparison. At some steps we keep the parameters.

# %%
moments = (1, 30, 60, 120, 200)
optimizer = optax.adam(2e-3)
step_fn = train.make_train_step(loss_fn, optimizer)
state, kept = train.init_state(params, optimizer), {}
for epoch in range(8):
    for batch in data.batches(digits, 50, seed=0, epoch=epoch):
        state, metrics = step_fn(state, batch, lp_jax.Serial(), None)
        if int(state.step) in moments:
            kept[int(state.step)] = jax.device_get(state.params)
print(train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)]))

# %% [markdown]
# ## Which layers change the state most?
#
# `trunk.solve` with a solver that keeps every state gives the trajectory. We look at how far each layer moves the state, in parts of its norm.

# %%
@jax.jit
def changes(params, x):
    trained = nnx.merge(nnx.graphdef(model), params)
    y0 = trained.opening(x)
    after = trained.trunk.solve(y0, solver=lp_jax.Picard(sweeps=DEPTH)).trajectory  # as many sweeps as layers are exact
    before = jnp.concatenate([y0[None], after[:-1]])
    norm = lambda y: jnp.linalg.norm(y, axis=(2, 3)).mean(axis=1)
    return norm(after - before) / norm(before)


fig, ax = plt.subplots()
for step in (1, 30, 200):
    ax.plot(np.arange(1, DEPTH + 1), changes(kept[step], digits.test_x[:50]), "o-", label=f"step {step}")
ax.axvspan(0.5, 2.5, color="grey", alpha=0.2)
ax.axvspan(DEPTH - 1.5, DEPTH + 0.5, color="grey", alpha=0.2)
ax.set(xlabel="layer", ylabel="change of the state, relative", title="The first layers move the state most, more with training")
ax.set_xticks(range(1, DEPTH + 1))
ax.grid(alpha=0.3)
ax.legend(title="training")
plt.show()
