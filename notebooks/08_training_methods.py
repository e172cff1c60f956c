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
# # 8. Training methods
#
# A gradient is a means to an end: a low loss. There are ways to spend less on the same loss.
#
# **Question.** How do they compare, in work and in waiting?
#
# * **Exact**: one layer after another. The yardstick.
# * **Sweeps**: all layers at once, as many sweeps as a tolerance takes.
# * **Controller**: the same, with a tolerance that follows the noise of the gradient.
# * **One-shot**: one or two sweeps per step, which begin where those of the step before ended.
# * **Nested**: train a shallow network first, then split its layers and go on.
#
# *Work* is the number of layer evaluations, *depth* the number of those that wait for each other. One device does the work; many devices
# share it, and what is left is the depth.

# %%
import matplotlib.pyplot as plt
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, planning, train, viz

LAYERS, EPOCHS = 32, 200
points = data.peaks(samples=400, seed=0)
batch = points.train_x, points.train_y  # the same examples in every step


def network(layers):
    rngs = nnx.Rngs(0)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), layers, t1=2.0, rngs=rngs)
    return nn.Classifier(nn.DenseOpening((2,), 8, rngs=rngs), trunk, nn.DenseClosing((8,), points.classes, rngs=rngs))


fig, ax = plt.subplots(figsize=(4.6, 4), layout="constrained")
ax.scatter(*points.train_x.T, c=points.train_y, cmap="tab10", s=12)
ax.set(title="Which of five classes is a point in?", xlabel="x", ylabel="y")
plt.show()
