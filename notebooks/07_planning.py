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
# # 7. Planning before buying
#
# Layer-parallel training does more work but waits less. On some machines that pays, and on others it does not.
#
# **Question.** Would it pay for my network, here or on a GPU that I do not have yet?
#
# `lp_jax` answers by counting and measuring. A solver says which evaluations it needs and which of them wait for each
# other. A *machine* is a table that says how long one layer takes, and how long many take at once. Both together
# predict the time of a training step.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("lp_jax") is None:  # where this notebook is opened without it
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "lp_jax[train]"], check=True)

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import lp_jax
from lp_jax import planning, viz


def step(y, layer):
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b)


layers, width = 64, 32
keys = jax.random.split(jax.random.key(0), 3)
params = (
    jax.random.normal(keys[0], (layers, width, width)) / 8,
    jax.random.normal(keys[1], (layers, width)) / 8,
)
problem = lp_jax.Problem(step, params, jax.random.normal(keys[2], (32, width)), t1=2.0)

# %% [markdown]
# ## This machine
#
# `calibrate` runs the network's own layers and measures. `plan` then goes through the solvers, fastest first. It takes
# a gradient with each, and stops at the first one that is as exact as you asked for. `seconds` bounds how long it
# measures.

# %%
here = lp_jax.calibrate(problem)
found = lp_jax.plan(problem, machine=here, error=1e-2, seconds=1.0)
print(found)

# %% [markdown]
# On a laptop the answer is usually `Serial()`, one layer after another, because a single layer keeps the processor
# busy, and nothing that does more work can be faster. Is the prediction right? We time both.


# %%
def measured(solver):
    def loss(params):
        return jnp.mean(lp_jax.solve(step, params, problem.y0, t1=2.0, solver=solver).y1 ** 2)

    gradient = jax.jit(jax.grad(loss))
    jax.block_until_ready(gradient(params))  # compiles
    times = []
    for _ in range(20):
        started = time.perf_counter()
        jax.block_until_ready(gradient(params))
        times.append(time.perf_counter() - started)
    return sorted(times)[10]


for name, solver in {"serial": lp_jax.Serial(), "four sweeps": lp_jax.Picard(sweeps=4)}.items():
    predicted = planning.predict(solver, solver, layers, here).seconds
    print(
        f"{name:12} predicted {1e3 * predicted:6.2f} ms   measured {1e3 * measured(solver):6.2f} ms"
    )

# %% [markdown]
# ## A GPU that is not here
#
# `estimate` uses the device's data sheet and the compiler's count of a layer's operations. It runs nothing on that
# device, and is good to a factor of a few. The gradients' errors are measured here, because they do not depend on the
# machine.

# %%
gpu = planning.estimate(problem, device="H200")
bought = lp_jax.plan(problem, machine=gpu, error=1e-2, seconds=2.0)
print(bought)

# %%
viz.plan(bought)

# %% [markdown]
# **What it shows.** In the left picture each point is a solver. Further left is faster, and lower is more exact. The
# orange line is one layer after another. One small layer leaves a large GPU idle, so many layers at once take hardly
# longer than one. The right picture shows what more devices would give, for each thing that may be divided among them.
#
# ## Which networks gain?
#
# The wider a layer is, the more of the device it fills. This question needs only shapes, and no arrays.

# %%
widths, batch = (64, 256, 1024, 4096), 256
gains = []
for width in widths:
    shapes = (
        jax.ShapeDtypeStruct((layers, width, width), "float32"),
        jax.ShapeDtypeStruct((layers, width), "float32"),
    )
    wide = lp_jax.Problem(step, shapes, jax.ShapeDtypeStruct((batch, width), "float32"))
    machine = planning.estimate(wide, device="H200")
    sweeps = lp_jax.Picard(sweeps=4)
    serial = planning.predict(lp_jax.Serial(), lp_jax.Serial(), layers, machine).seconds
    gains.append(serial / planning.predict(sweeps, sweeps, layers, machine).seconds)

fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
ax.bar(
    [str(width) for width in widths],
    gains,
    color=["tab:blue" if gain > 1 else "tab:grey" for gain in gains],
)
ax.axhline(1, color="black", linewidth=1)
for i, gain in enumerate(gains):
    ax.text(i, gain, f"{gain:.1f}", ha="center", va="bottom", backgroundcolor="white", zorder=0)
ax.set(xlabel="width of a layer", ylabel="times as fast as one layer after another")
ax.set_title(f"One H200, {layers} layers, four sweeps, {batch} examples: predicted")
ax.margins(y=0.12)
plt.show()

# %% [markdown]
# **What it shows.** On one device, narrow deep networks gain much and wide ones gain nothing. Wide networks need
# several devices. Ask the planner about your network before you buy, or before you train. On the command line
# `lp-jax plan digits` shows a plan.
