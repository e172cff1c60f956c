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
# # A first network, trained layer-parallel
#
# 64 residual layers on scikit-learn's handwritten digits. We look at what the solver does before we trust it: how fast its
# residual falls, how far its gradient is from the exact one, and what both become while the network learns.
#
# Needs `pip install 'lp_jax[train]'`. This file is plain Python; `jupytext --to ipynb first_network.py` makes a
# notebook of it, and Jupyter with jupytext opens it as it is.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, train, viz

# %% [markdown]
# ## The network
#
# Layer $n$ is a step of an ODE over depth, $y_{n+1} = y_n + \Delta t \, \sigma(W_n y_n + b_n)$. `LayerParallel` stacks 64 of
# them and solves for all states at once. Its solver is a frozen dataclass: two levels, every fourth layer a C-point,
# one cycle, and two Picard sweeps over an interval's own layers as the coarse step.

# %%
solver = lp_jax.MGRIT(levels=2, coarsening=4, iterations=1, coarse_step=lp_jax.Picard(sweeps=2))
rngs = nnx.Rngs(0)
model = nn.Classifier(
    nn.DenseOpening((8, 8, 1), 64, rngs=rngs),
    nn.LayerParallel(lambda rngs: nn.DenseResidual(64, rngs=rngs), 64, t1=2.0, solver=solver, rngs=rngs),
    nn.DenseClosing((64,), 10, rngs=rngs),
)
digits = data.digits(seed=0)
x, labels = digits.train_x[:200], digits.train_y[:200]

viz.hierarchy(solver, 64, t1=2.0)

# %% [markdown]
# ## Is the solve any good?
#
# `solve` returns the states' residual norms, cycle by cycle. The first cycle is a cascade from the coarsest level that
# needs no guess, and has no residual. Each further cycle multiplies the residual by the same small factor.

# %%
y0 = model.opening(jnp.asarray(x))
solution = model.trunk.solve(y0, solver=lp_jax.MGRIT(coarsening=4, iterations=5, coarse_step=lp_jax.Picard(sweeps=2)))
print("residual norms", solution.stats.residual_norms)
solution.raise_if_failed()

# %% [markdown]
# What counts in training is the gradient. `train.gradient_error` compares it with the exact one, which `Serial()` gives:
# the same network, one layer after another. Injection, the field's standard coarse step, takes one layer with four
# times the step for each interval; the sweeps look at all four layers, at once.

# %%
loss_fn, params = train.classification(model)
settings = {
    "injection, 1 cycle": lp_jax.MGRIT(iterations=1, coarse_step=lp_jax.Rediscretize()),
    "injection, 3 cycles": lp_jax.MGRIT(iterations=3, coarse_step=lp_jax.Rediscretize()),
    "1 Picard sweep, 1 cycle": lp_jax.MGRIT(iterations=1, coarse_step=lp_jax.Picard(sweeps=1)),
    "2 Picard sweeps, 1 cycle": solver,
}
for name, choice in settings.items():
    error = train.gradient_error(loss_fn, params, (x, labels), choice)
    print(f"{name:26} relative error {error.relative:.1e}, cosine {error.cosine:.4f}")

# %% [markdown]
# ## Training
#
# A plain optax loop would do: `loss_fn` is a pure function of `params`, and `jax.grad` of it is the layer-parallel
# gradient. `train.fit` adds progress, a log, and measurements on the way; here the gradient's error, which the training
# may change.

# %%
optimizer = optax.adam(3e-3)
step_fn = train.make_train_step(loss_fn, optimizer)
state = train.init_state(params, optimizer)
steps_per_epoch = len(digits.train_y) // 50


def probe(state, batch):
    error = train.gradient_error(loss_fn, state.params, batch, solver)
    return {"gradient_error": error.relative, "gradient_cosine": error.cosine}


def test(state, batch):
    return train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)])._asdict()


state, log = train.fit(
    step_fn,
    state,
    lambda epoch: data.batches(digits, 50, seed=0, epoch=epoch),
    steps_per_epoch=steps_per_epoch,
    epochs=10,
    solver=solver,
    measures=[train.Every("test", steps_per_epoch, test), train.Every("probe", 3 * steps_per_epoch, probe)],
)
for row in log.of("probe"):
    print(f"step {row['step']:3}  gradient error {row['gradient_error']:.1e}  cosine {row['gradient_cosine']:.4f}")
print(f"test accuracy, evaluated serially: {log.of('test')[-1]['accuracy']:.2%}")

# %%
viz.curves({"layer-parallel": log.rows})

# %% [markdown]
# The network that was trained layer-parallel is an ordinary network. Evaluated with its solver or serially it gives the
# same answers:

# %%
for name, choice in {"serial": lp_jax.Serial(), "layer-parallel": solver}.items():
    print(name, train.evaluate(loss_fn, state.params, [(digits.test_x, digits.test_y)], solver=choice))

# %% [markdown]
# ## Many devices
#
# Where there are several devices, `comm` spreads the layers over them; nothing else changes, and neither do the numbers.
# On a CPU one can try it with `XLA_FLAGS=--xla_force_host_platform_device_count=4`.

# %%
mesh = jax.make_mesh((jax.device_count(),), ("layers",), axis_types=(jax.sharding.AxisType.Auto,))
spread = nn.LayerParallel(
    lambda rngs: nn.DenseResidual(64, rngs=rngs),
    64,
    t1=2.0,
    solver=solver,
    comm=lp_jax.MeshComm(mesh),
    rngs=nnx.Rngs(0),
)
print(f"{jax.device_count()} device(s):", spread(y0).shape)
