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
# # 6. Layers over devices
#
# **Question.** Four devices share a network of 64 layers. Who computes what, what do they send, and are the numbers
# the same?
#
# You need no cluster to try this. JAX can make one processor look like four devices, if you set that before anything
# else.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("lp_jax") is None:  # where this notebook is opened without it
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "lp_jax[train]"], check=True)

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import lp_jax
from lp_jax import planning, viz

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)
print(jax.devices())

# %% [markdown]
# ## One argument
#
# A *mesh* gives names to devices. `comm=mesh` spreads the layers over them, so that each device has a run of sixteen
# neighbouring layers.


# %%
def step(y, layer):
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b)


layers, width = 64, 32
keys = jax.random.split(jax.random.key(0), 3)
params = (
    jax.random.normal(keys[0], (layers, width, width)) / 6,
    jax.random.normal(keys[1], (layers, width)) / 6,
)
x = jax.random.normal(keys[2], (50, width))
injection = lp_jax.Rediscretize("inject")  # a group's coarse step: one layer, sixteen times as long
solver = lp_jax.MGRIT(
    levels=2, coarsening=16, iterations=2, coarse_step=injection
)  # a group for each device


def mesh(devices):
    return jax.make_mesh((devices,), ("layers",), devices=jax.devices()[:devices])


def gradient(comm):
    def loss(params):
        return jnp.mean(lp_jax.solve(step, params, x, t1=2.0, solver=solver, comm=comm).y1 ** 2)

    return jax.jit(jax.grad(loss))


one = gradient(None)(params)
for devices in (2, 4):
    several = gradient(mesh(devices))(params)
    difference = jnp.linalg.norm(np.asarray(several[0]) - np.asarray(one[0])) / jnp.linalg.norm(
        one[0]
    )
    print(f"{devices} devices: relative difference of the gradient {difference:.0e}")
print(
    "layers of the gradient on each device:",
    [shard.data.shape[0] for shard in several[0].addressable_shards],
)

# %% [markdown]
# The numbers are the same, up to rounding. The gradient of a layer is on the device of the layer. So nothing is
# gathered, and an optimizer updates each layer where it is.
#
# ## Who computes what
#
# `viz.schedule` draws a training step from what the solver says of itself. Time goes to the right, in evaluations of a
# layer, and every device has a row. At first all devices work on their own sixteen layers. Then the coarse steps go
# from device to device, one after another. After that each device goes over its layers once more with the corrected
# states. The grey row is serial propagation, one layer after another.

# %%
one_cycle = lp_jax.MGRIT(
    levels=2,
    coarsening=16,
    iterations=1,
    coarse_step=injection,
    relaxation="F",
    start="guess",
    storage="all",
)
viz.schedule(one_cycle, layers, workers=4)

# %% [markdown]
# **What it shows.** All four devices are busy most of the time, and only the coarse steps wait for each other. More
# devices, with shorter groups, shorten the part that they do at the same time, but the coarse part gets longer. A third
# level shortens the coarse part.
#
# ## What it costs
#
# `planning.training_step` counts what a gradient takes on the busiest device, before anything is run: all evaluations,
# the evaluations that wait for each other, and messages. A message is one state that goes from a device to its
# neighbour.

# %%
rows = {"serial": planning.training_step(lp_jax.Serial(), lp_jax.Serial(), layers)}
for workers in (2, 4, 8, 16):
    forward, adjoint = (
        lp_jax.MGRIT(
            levels=2,
            coarsening=layers // workers,
            iterations=cycles,
            coarse_step=injection,
            relaxation="F",
            storage="all",  # keep all states for the way back
        )
        for cycles in (2, 1)
    )
    rows[f"{workers} devices"] = planning.training_step(forward, adjoint, layers, workers=workers)
print(f"{'':12}in a row  messages")
for name, counted in rows.items():
    print(f"{name:12}{counted.depth():8}{counted.states:10}")

fig, ax = plt.subplots(figsize=(8, 3.6))
depths = [counted.depth() for counted in rows.values()]
ax.barh(list(rows), depths, color=["grey"] + ["tab:blue"] * 4)
ax.axvline(depths[0], color="grey", linestyle="--")
ax.invert_yaxis()
ax.set(
    xlabel="layer evaluations in a row, forward and backward",
    title="Two cycles forward, one backward: eight devices are enough",
)
plt.show()

# %% [markdown]
# **What it shows.** Evaluations in a row fall from 192 to 65 on eight devices, although all devices together do more
# work than before. On sixteen devices the coarse steps, which wait for each other, have become the longest part. The
# devices of this notebook share one processor, so nothing gets faster here. On real devices the same line of code would
# be faster, and the next notebook asks how much.
