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
# # 9. Scans that are not layers
#
# Samplers, filters and Markov chains are scans, too, because each step takes the state that the step before it left.
# `lp_jax.scan` solves all steps of such a scan at once, as it solves the layers of a network.
#
# **Question.** Which of these scans need a few iterations, and which need so many that nothing is gained?

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

plt.rcParams.update(
    {"figure.figsize": (8, 4.5), "figure.constrained_layout.use": True, "font.size": 12}
)

# %% [markdown]
# ## A sampler
#
# A diffusion model turns noise into samples, by many small steps. Every step removes a part of the noise that a network
# predicts. Here the data are eight Gaussians on a circle, for which the noise is known exactly, and DDIM takes 200
# steps. A step changes a sample little, so we take Picard sweeps, which evaluate all steps at once and add up their
# changes.

# %%
STEPS = 200
angles = jnp.arange(8) * 2 * jnp.pi / 8
centres = 2 * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
kept = jnp.concatenate(
    [jnp.ones(1), jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))]
)  # how much of the data is left
levels = kept[jnp.linspace(1000, 0, STEPS + 1).round().astype(int)]


def noise(x, level):  # for one point
    def log_density(x):
        distances = ((x - jnp.sqrt(level) * centres) ** 2).sum(axis=1)
        return jax.nn.logsumexp(-distances / 2 / (0.01 * level + 1 - level))

    return -jnp.sqrt(1 - level) * jax.grad(log_density)(x)


def ddim(x, step):
    level, next_level = step
    predicted = jax.vmap(noise, (0, None))(x, level)
    clean = (x - jnp.sqrt(1 - level) * predicted) / jnp.sqrt(level)
    return jnp.sqrt(next_level) * clean + jnp.sqrt(1 - next_level) * predicted, None


start = jax.random.normal(jax.random.key(0), (300, 2))
steps = levels[:-1], levels[1:]
exact, _ = jax.lax.scan(ddim, start, steps)

fig, axes = plt.subplots(1, 3, figsize=(9, 3.4), sharex=True, sharey=True)
for ax, sweeps in zip(axes, (1, 4, 8), strict=True):
    samples, _ = lp_jax.scan(ddim, start, steps, solver=lp_jax.Picard(sweeps=sweeps))
    ax.scatter(*exact.T, s=36, color="lightgrey", label="the scan")
    ax.scatter(*samples.T, s=5, color="C0", label="sweeps")
    ax.set(title=f"{sweeps} sweep{'s' * (sweeps > 1)}", xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
    print(f"after sweep {sweeps}: largest error {jnp.abs(samples - exact).max():.0e}")
axes[0].legend(loc="upper left", fontsize=9)
fig.suptitle(f"{STEPS} steps of a sampler, solved by a few sweeps")
plt.show()

# %% [markdown]
# How many sweeps are enough? A solve with a tolerance finds out. `lp_jax.scanned` makes a problem from the arguments of
# the scan, and its solution says how many sweeps it took.

# %%
problem = lp_jax.scanned(ddim, start, steps)
print(problem.solve(solver=lp_jax.Picard(sweeps=50, rtol=1e-3)).stats)

# %% [markdown]
# ## A filter
#
# A Kalman filter follows a moving body by noisy observations of its position. Its state is a mean and a covariance. A
# step replaces both, so sweeps would diverge. Newton's method linearises all steps at once. The filter forgets what it
# knew long ago, so a few iterations are enough.

# %%
moves = jnp.array([[1.0, 0.1], [0.0, 1.0]])  # position and velocity
drift = jnp.array([[0.0003, 0.005], [0.005, 0.1]])


def kalman(carry, seen):
    mean, covariance = carry
    mean, covariance = moves @ mean, moves @ covariance @ moves.T + drift
    gain = covariance[:, 0] / (covariance[0, 0] + 0.3)
    mean = mean + gain * (seen - mean[0])
    covariance = covariance - jnp.outer(gain, covariance[0])
    return (mean, covariance), mean[0]


time = jnp.arange(400) * 0.1
path = 5 * jnp.sin(0.4 * time) + 0.1 * time
seen = path + 0.55 * jax.random.normal(jax.random.key(1), path.shape)
nothing_known = jnp.zeros(2), 10 * jnp.eye(2)
_, filtered = jax.lax.scan(kalman, nothing_known, seen)

fig, ax = plt.subplots()
ax.plot(time, seen, ".", color="lightgrey", label="observed")
ax.plot(time, filtered, color="black", linewidth=4, alpha=0.3, label="the scan")
for iterations in (1, 4):
    newton = lp_jax.Newton(iterations=iterations, batch_axes=0)  # batch_axes=0: no examples
    _, found = lp_jax.scan(kalman, nothing_known, seen, solver=newton)
    ax.plot(time, found, linewidth=1.2, label=f"iteration {iterations}")
    print(f"after iteration {iterations}: largest error {jnp.abs(found - filtered).max():.0e}")
ax.set(
    xlabel="time", ylabel="position", title="A Kalman filter, all 400 steps at once", ylim=(-8, 12)
)
ax.legend(ncols=2)
plt.show()

# %% [markdown]
# ## Markov chains, and where it ends
#
# A Metropolis-adjusted Langevin chain (MALA) draws from a density by small steps uphill with noise, and refuses some of
# them. If the noise is drawn beforehand, the chain is a scan. Two chains with the same noise meet if the density has
# one round top. They do not meet if the density is bent like a banana, because there a small difference grows.

# %%
SIZE = 0.1


def chain_of(log_density):
    gradient = jax.grad(log_density)

    def to_from(to, at):
        return -jnp.sum((to - at - SIZE / 2 * gradient(at)) ** 2) / (2 * SIZE)

    def mala(x, drawn):
        normal, uniform = drawn
        new = x + SIZE / 2 * gradient(x) + jnp.sqrt(SIZE) * normal
        log_ratio = log_density(new) - log_density(x) + to_from(x, new) - to_from(new, x)
        x = jnp.where(jnp.log(uniform) < log_ratio, new, x)
        return x, x

    return mala


def round_top(x):
    return -jnp.sum(jnp.cosh(x))


def banana(x):
    return -((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2) / 20


keys = jax.random.split(jax.random.key(2))
drawn = jax.random.normal(keys[0], (500, 2)), jax.random.uniform(keys[1], (500,))

fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
for log_density, colour in ((round_top, "C0"), (banana, "C1")):
    mala, name = chain_of(log_density), log_density.__name__.replace("_", " ")
    problem = lp_jax.scanned(mala, jnp.ones(2), drawn)
    solution = problem.solve(solver=lp_jax.Newton(iterations=500, rtol=1e-5, batch_axes=0))
    taken = int(solution.stats.iterations)
    norms = np.minimum(solution.stats.residual_norms[:taken], 1e12)  # some overflow on the way
    left.semilogy(np.arange(1, taken + 1), norms, color=colour, label=name)
    right.plot(*solution.aux.T, ".", markersize=4, color=colour, alpha=0.6, label=name)
    print(f"{name}: {taken} iterations for 500 steps")
left.set(
    xlabel="iteration",
    ylabel="residual norm",
    title="Soon, or after many iterations",
    ylim=(1e-6, 2e12),
)
right.set(title="The chains", xlabel="first number", ylabel="second number")
left.grid(alpha=0.3)
left.legend()
right.legend()
plt.show()

# %% [markdown]
# **What it shows.** A scan whose steps change little takes a few sweeps, and one that forgets its past takes a few
# Newton iterations, however many steps it has. A scan that enlarges small differences needs more iterations the longer
# it is, so there `jax.lax.scan` is the right call. Iterations are not seconds. Each iteration evaluates all steps, so a
# few iterations save time only if a device can evaluate all steps at once.
