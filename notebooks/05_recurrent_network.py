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
# # 5. A recurrent network
#
# A recurrent network reads a sequence step by step and keeps a memory. Its time steps are its layers, so 64 inputs are
# 64 layers.
#
# **Question.** The state of a recurrent network moves far in every step. Can all time steps still be solved at once?
#
# The network reads the 64 pixels of a digit one after another, at each step the last eight of them. After every pixel
# it says which digit it sees. So there is a loss at every step.

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

import lp_jax
from lp_jax import data

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)
UNITS = 16

digits = data.digits(seed=0)
SEEN = 8  # pixels at a time


def sequences(images):
    """After each of the 64 pixels of an image: the last eight of them."""
    padded = np.pad(images.reshape(-1, 64), ((0, 0), (SEEN - 1, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, SEEN, axis=1)


inputs, labels = sequences(digits.train_x), digits.train_y


def unit(weights, h, x):  # a gated recurrent unit: memory h, input x
    both = jnp.concatenate([h, x], axis=1)
    r, z = jnp.split(jax.nn.sigmoid(both @ weights["gates"] + weights["bias"]), 2, axis=1)
    new = jnp.tanh(jnp.concatenate([r * h, x], axis=1) @ weights["new"])
    h = z * h + (1 - z) * new
    return h, h  # the memory goes to the next step, and out


def loss_fn(weights, x, y, solver):
    h0 = jnp.zeros((len(x), UNITS))
    _, memories = lp_jax.scan(
        lambda h, x: unit(weights, h, x), h0, jnp.swapaxes(x, 0, 1), solver=solver
    )
    scores = memories @ weights["scores"]  # at every step
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        scores, jnp.broadcast_to(y, scores.shape[:2])
    )
    return losses.mean(), scores


random = np.random.default_rng(4)
weights = {
    "gates": random.normal(0, 1 / 5, (UNITS + SEEN, 2 * UNITS)),
    "bias": np.zeros(2 * UNITS),
    "new": random.normal(0, 1 / 5, (UNITS + SEEN, UNITS)),
    "scores": random.normal(0, 1 / 4, (UNITS, 10)),
}
weights = jax.tree.map(jnp.float32, weights)

# %% [markdown]
# ## Newton's method
#
# Picard sweeps, which suit other networks, ask what each layer *adds* to the state. But here a layer may replace the
# state. Newton's method linearises every step at its present state, so a matrix for each step says how a change of the
# memory passes on. A chain of matrices can be multiplied in any grouping, two and two, then four and four, so that 64
# steps take six rounds. Then Newton's method linearises again, at better states.
#
# We train with Newton's method and, from the same start, with the ordinary scan, `Serial()`.

# %%
newton = lp_jax.Newton(
    iterations=16, relaxations=32, rtol=1e-3, batch_axes=1
)  # batch_axes=1: examples do not act on each other
optimizer = optax.adam(4e-2)


def train(solver, epochs=6):
    @jax.jit
    def train_step(weights, slots, x, y):
        (loss, _), gradient = jax.value_and_grad(loss_fn, has_aux=True)(weights, x, y, solver)
        updates, slots = optimizer.update(gradient, slots)
        return optax.apply_updates(weights, updates), slots, loss

    trained, slots, losses = weights, optimizer.init(weights), []
    for epoch in range(epochs):
        for x, y in data.batches((inputs, labels), 50, seed=0, epoch=epoch):
            trained, slots, loss = train_step(trained, slots, x, y)
            losses.append(float(loss))
    return trained, losses


exact, exact_losses = train(lp_jax.Serial())
trained, losses = train(newton)

fig, ax = plt.subplots()
ax.plot(exact_losses, linewidth=4, alpha=0.4, label="step by step")
ax.plot(losses, linewidth=1.2, color="black", label="Newton, all steps at once")
ax.set(
    xlabel="training step",
    ylabel="loss, mean over all time steps",
    title="The same network learns the same",
)
ax.grid(alpha=0.3)
ax.legend()
plt.show()

# %% [markdown]
# The loss at every step has taught the network to decide early. This is how often it is right after each pixel, on
# digits that it never saw:

# %%
test_x, test_y = sequences(digits.test_x), digits.test_y
_, scores = jax.jit(loss_fn, static_argnums=3)(trained, test_x, test_y, lp_jax.Serial())
right = (scores.argmax(axis=-1) == test_y).mean(axis=1)

fig, ax = plt.subplots()
ax.plot(np.arange(1, 65), right)
ax.set(
    xlabel="pixels seen",
    ylabel="right answers",
    title="The answer gets better while the network reads",
)
ax.set_ylim(0, 1)
ax.yaxis.set_major_formatter("{x:.0%}")
ax.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## How many iterations?
#
# Newton's method begins with 32 *relaxations*. In each of them every step starts from the state that the step before it
# last gave. So the states forget the guess, as the network forgets its past. After that the number of iterations
# depends on the network, so we gave a tolerance. On the trained network we follow the residual, which says how far the
# memories are from satisfying every step. `lp_jax.scanned` makes a problem from the arguments of a scan, and its
# solution has the residuals.

# %%
problem = lp_jax.scanned(
    lambda h, x: unit(trained, h, x), jnp.zeros((50, UNITS)), jnp.swapaxes(test_x[:50], 0, 1)
)
solvers = {
    "Newton": lp_jax.Newton(iterations=9, relaxations=32, batch_axes=1),
    "Picard sweeps": lp_jax.Picard(sweeps=9),
}
fig, ax = plt.subplots()
for (name, solver), marker in zip(solvers.items(), "os", strict=True):
    norms = problem.solve(solver=solver).stats.residual_norms
    ax.semilogy(np.arange(1, 10), norms, marker=marker, label=name)
    print(f"{name:14}", "  ".join(f"{norm:.0e}" for norm in norms))
ax.set(xlabel="iteration", ylabel="residual norm", title="Newton's method converges, sweeps do not")
ax.grid(alpha=0.3)
ax.legend()
plt.show()

# %% [markdown]
# **What it shows.** Newton's method needs some iterations to come near the solution, and then the residual falls by
# ever larger factors. Sweeps diverge. An iteration is not cheap, because its matrices have 16 times 16 numbers for each
# step and example. So Newton's method is for small states and long sequences. For larger states there are `nn.ParaGRU`
# and `nn.ParaLSTM`, whose matrices are diagonal.
