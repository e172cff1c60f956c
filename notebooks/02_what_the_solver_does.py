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
# # 2. What the solver does
#
# **Question.** How can layers be evaluated at the same time, when each needs the output of the one before it?
#
# Think of a relay race with 64 runners. You guess where each group of runners starts, and let all groups run at once.
# There is a gap between the place where one group arrives and the place where the next one started. A *cycle* closes
# most of the gaps, by a cheap calculation that goes from group to group. Then all groups run again.
#
# We watch three things: the gaps get smaller, the exact states spread from the left, and the gaps shrink as fast as
# theory says.

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

import lp_jax
from lp_jax import multigrid

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)


def step(y, layer):  # one residual layer
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b)


keys = jax.random.split(jax.random.key(0), 3)
layers, width = 64, 16
params = (
    jax.random.normal(keys[0], (layers, width, width)) / 4,
    jax.random.normal(keys[1], (layers, width)) / 4,
)
y0 = jax.random.normal(keys[2], (20, width))  # 20 examples

# %% [markdown]
# ## The gaps get smaller
#
# The states that satisfy $y_{n+1} = \Phi_n(y_n)$ for every layer $n$ are the answer. The *residual* is all gaps
# $\Phi_n(y_n) - y_{n+1}$ together. `solution.stats` has its norm for every cycle.
#
# The *coarse step* is the cheap calculation that stands in for the layers of a group. The field's standard is
# injection, which takes one layer with a step four times as long. `Picard(sweeps=k)` uses all layers of the group,
# evaluated at the same time, `k` times over.

# %%
coarse_steps = {
    "injection": lp_jax.Rediscretize("inject"),
    "one Picard sweep": lp_jax.Picard(sweeps=1),
    "two Picard sweeps": lp_jax.Picard(sweeps=2),
}
fig, ax = plt.subplots()
for (name, coarse_step), marker in zip(coarse_steps.items(), "os^", strict=True):
    solver = lp_jax.MGRIT(
        levels=2, coarsening=4, iterations=8, coarse_step=coarse_step, start="guess"
    )
    norms = np.asarray(lp_jax.solve(step, params, y0, t1=4.0, solver=solver).stats.residual_norms)
    ax.semilogy(np.arange(1, len(norms) + 1), norms, marker=marker, label=name)
ax.set(xlabel="cycle", ylabel="residual norm", title="Every cycle makes the residual smaller")
ax.grid(alpha=0.3)
ax.legend(title="coarse step")
plt.show()

# %% [markdown]
# **What it shows.** The residual falls in every cycle, until the rounding of single precision stops it. It falls faster
# with a coarse step that is closer to the layers. All three end at the same answer, because the coarse step decides how
# fast a solver converges, but not to what.
#
# ## Exact states spread from the left
#
# The pieces of a cycle are public functions. `multigrid.hierarchy` builds the levels, and `multigrid.v_cycle` does one
# cycle on the states between the groups, the so-called C-points. We compare them with the exact states after each cycle.

# %%
solver = lp_jax.MGRIT(
    levels=2, coarsening=4, coarse_step=lp_jax.Rediscretize("inject"), start="guess", relaxation="F"
)
problem = lp_jax.Problem(step, params, y0, t1=4.0)
levels = multigrid.hierarchy(problem, solver)

exact = problem.solve(solver=lp_jax.MGRIT(coarsening=4, iterations=16)).trajectory
one_cycle = jax.jit(lambda states: multigrid.v_cycle(levels, states, relaxation="F")[0])
states = jnp.broadcast_to(y0, exact.shape)  # the first guess: nothing happens in any layer
errors = []
for _ in range(6):
    errors.append(jnp.linalg.norm(states - exact, axis=(1, 2)))
    states = one_cycle(states)

fig, ax = plt.subplots()
image = ax.imshow(
    np.log10(np.maximum(errors, 1e-6)),
    cmap="viridis_r",
    aspect="auto",
    extent=(0.5, 16.5, 5.5, -0.5),
)
ax.set(
    xlabel="group of four layers", ylabel="cycles done", title="Error of the state after each group"
)
ax.set_xticks(range(1, 17))
fig.colorbar(image, label="error, power of ten")
plt.show()

# %% [markdown]
# **What it shows.** After one cycle the first group is exact, after two cycles the second, and so on. After 16 cycles
# all groups would be exact, whatever the layers are. But you need not wait for that. All groups become good much
# earlier, because the coarse step carries corrections through the whole network in every cycle.
#
# ## As fast as theory says
#
# If the state is one number and every layer multiplies it by $a = 1 + z$, the factor of a cycle is known. With groups
# of $m$ layers, $N_c$ groups and the coarse step $b = 1 + m z$ (injection), a cycle multiplies the largest error by at
# most
#
# $$ |a^m - b| \; \frac{1 - |b|^{N_c - 1}}{1 - |b|} $$
#
# with F-relaxation, which evaluates every group once. With FCF-relaxation, which evaluates every group twice, the bound
# is $|a|^m$ times this, with $N_c - 2$ in the place of $N_c - 1$ (Dobrev, Kolev, Petersson, Schroder, 2017).
#
# We measure the factor. With $y_0 = 0$ the answer is zero, so any guess is its own error. A cycle on each unit vector
# gives the matrix that maps the error before a cycle to the error after it. The norm of this matrix is the factor.

# %%
m, groups = 4, 32


def multiply(y, layer):
    return (1 + layer.dt * layer.params) * y


def measured(z, relaxation):
    solver = lp_jax.MGRIT(
        levels=2,
        coarsening=m,
        relaxation=relaxation,
        coarse_step=lp_jax.Rediscretize("inject"),
        start="guess",
    )
    scalar = lp_jax.Problem(
        multiply, jnp.full(m * groups, z), jnp.zeros(()), t1=float(m * groups)
    )  # dt = 1
    levels = multigrid.hierarchy(scalar, solver)
    after = jax.vmap(lambda before: solver.improve(levels, before)[0])(jnp.eye(groups))
    return jnp.abs(after).sum(axis=0).max()


def theory(z, relaxation):
    a, b = 1 + z, 1 + m * z
    twice = relaxation == "FCF"
    return (
        np.abs(a) ** (m * twice)
        * np.abs(a**m - b)
        * (1 - np.abs(b) ** (groups - 1 - twice))
        / (1 - np.abs(b))
    )


fig, ax = plt.subplots()
curve, points = np.linspace(-0.499, -0.003, 400), np.linspace(-0.48, -0.02, 12)
for relaxation, colour in (("F", "tab:blue"), ("FCF", "tab:red")):
    found = jax.jit(jax.vmap(lambda z, r=relaxation: measured(z, r)))(points)
    ax.plot(
        curve, theory(curve, relaxation), color=colour, label=f"theory, {relaxation}-relaxation"
    )
    ax.plot(points, found, "o", color=colour, label=f"measured, {relaxation}-relaxation")
    print(
        f"{relaxation:3} largest difference {np.abs(found - theory(points, relaxation)).max():.1e}"
    )
ax.axhline(1, color="grey", linewidth=1)
ax.set(
    xlabel="z: what a layer changes",
    ylabel="factor of one cycle",
    title="Measured factors lie on the curve of theory",
)
ax.set_ylim(0, 1.6)
ax.grid(alpha=0.3)
ax.legend()
plt.show()

# %% [markdown]
# **What it shows.** The points lie on the curves. If layers change their input little (z near 0), cycles converge fast.
# If layers change it much, cycles converge slowly, and with F-relaxation the factor may be above 1, so that at first
# the error grows. A second relaxation, shorter groups or a better coarse step than injection help.
#
# This is the rule to remember: **layer-parallel solvers like layers that change their input little.** Most deep
# residual networks have such layers, because many layers share one task. Notebooks 4 and 5 show what to do if layers
# change their input much.
