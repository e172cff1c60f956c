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
# A deep network evaluates its layers one after another: layer 40 waits for layer 39. Adding processors does not
# change that.
#
# `lp_jax` works differently. It guesses what enters each group of layers, evaluates all groups at the same time, and
# corrects the guesses. A few rounds of this give nearly what the layers give one after another, and the remaining
# error can be measured.
#
# **Question.** Does a network still learn if its gradients come from one such round?
#
# We train a network of 64 layers on handwritten digits, once layer-parallel and once exactly. You need `pip install
# 'lp_jax[train]'` and a minute.

# %%
import matplotlib.pyplot as plt
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train, viz

digits = data.digits(seed=0)
print(f"{len(digits.train_y)} images to train with, {len(digits.test_y)} to test with")

fig, axes = plt.subplots(1, 8, figsize=(9, 1.6), layout="constrained")
for ax, image, label in zip(axes, digits.train_x, digits.train_y, strict=False):
    ax.imshow(image[..., 0], cmap="gray_r")
    ax.set_title(label)
    ax.axis("off")

# %% [markdown]
# ## The network
#
# Every layer adds a little to the state $y$: $y_{n+1} = y_n + h \, \sigma(W_n y_n + b_n)$, with a small number $h$.
# Most deep networks have layers of this kind, called residual layers. `LayerParallel` stacks 64 of them. An opening
# layer turns an image into a state of 64 numbers, a closing layer turns the last state into scores for ten digits.
#
# The solver says how the 64 layers are evaluated. Left out, it is one that goes on until its result is right. Here we ask
# how little is enough, so we name one that makes a single round over groups of four layers:

# %%
solver = lp_jax.MGRIT(levels=2, coarsening=4, iterations=1)

rngs = nnx.Rngs(0)
model = nn.Classifier(
    nn.DenseOpening((8, 8, 1), 64, rngs=rngs),
    nn.LayerParallel(lambda rngs: nn.DenseResidual(64, rngs=rngs), 64, t1=2.0, solver=solver, rngs=rngs),
    nn.DenseClosing((64,), 10, rngs=rngs),
)
viz.hierarchy(solver, 64, t1=2.0)

# %% [markdown]
# The picture shows two levels. On level 0 are all 64 layers. On level 1 are 16 coarse steps, one for each group; they
# are a cheap stand-in for the groups, and they alone go one after another. They tell each group roughly which state
# enters it. Then all 16 groups are evaluated at the same time. Such a round is called a *cycle*, and the method
# multigrid-reduction-in-time (MGRIT). Notebook 2 takes it apart.
#
# ## How good is the gradient?
#
# `train.gradient_error` takes the gradient twice, with a solver and exactly, and returns the relative distance of the
# two. Here it is after one and after two cycles, before training.

# %%
loss_fn, params = train.classification(model)
batch = digits.train_x[:200], digits.train_y[:200]

for cycles in (1, 2):
    cycled = lp_jax.MGRIT(levels=2, coarsening=4, iterations=cycles)
    error = train.gradient_error(loss_fn, params, batch, cycled)
    print(f"cycles: {cycles}   relative error: {error.relative:.1e}   cosine: {error.cosine:.6f}")

# %% [markdown]
# The cosine is that of the angle between the two gradients; 1 means the same direction. One cycle is good enough to
# start with.
#
# ## Training
#
# `loss_fn` is a pure function, and `jax.grad` of it is the layer-parallel gradient, so any optax loop would do.
# `train.fit` adds a log. We train twice from the same start: with one cycle, and with `Serial()`, which evaluates one
# layer after another. Every 75 steps a probe measures how far the layer-parallel gradient is from the exact one.

# %%
optimizer = optax.adam(3e-3)
step_fn = train.make_train_step(loss_fn, optimizer)
steps_per_epoch = len(digits.train_y) // 50


def test(state, batch):
    return train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)])._asdict()


def probe(state, batch):
    return {"gradient_error": train.gradient_error(loss_fn, state.params, batch, solver).relative}


logs = {}
for name, chosen in {"exact": lp_jax.Serial(), "layer-parallel": solver}.items():
    measures = [train.Every("test", steps_per_epoch, test), train.Every("probe", 75, probe)]
    state, logs[name] = train.fit(
        step_fn,
        train.init_state(params, optimizer),
        lambda epoch: data.batches(digits, 50, seed=0, epoch=epoch),
        steps_per_epoch=steps_per_epoch,
        epochs=8,
        solver=chosen,
        measures=measures,
    )
for row in logs["layer-parallel"].of("probe"):
    print(f"step {row['step']:3}  gradient error {row['gradient_error']:.1e}")

# %%
viz.curves({name: logs[name].rows for name in ("layer-parallel", "exact")})

# %% [markdown]
# **What it shows.** Both runs learn equally well; their curves nearly lie on each other. The gradient error grows as
# the layers learn to do more. Training does not mind here. Notebook 8 shows how large an error may be.
#
# The network that was trained layer-parallel is an ordinary network. Both ways of evaluating it give
# nearly the same answers:

# %%
for name, chosen in {"one after another": lp_jax.Serial(), "layer-parallel": solver}.items():
    result = train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)], solver=chosen)
    print(f"{name:18} test accuracy {result.accuracy:.2%}")

# %% [markdown]
# **What it does not show.** Speed. One cycle evaluates every layer more than once, and a laptop's processor gains
# nothing from it. It pays on devices that a single layer leaves idle, and on several devices: notebooks 6 and 7.
