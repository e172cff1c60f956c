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
# * **Exact** training evaluates one layer after another. The other methods are compared with it.
# * **Sweeps** evaluate all layers at once, as often as a tolerance needs.
# * **Controller** means sweeps with a tolerance that follows the noise of the gradient.
# * **One-shot** training takes two or three sweeps per step, which begin where those of the step before ended.
# * **Nested** training starts with a shallow network, then splits its layers and goes on.
#
# *Work* is the number of layer evaluations, and *depth* is the number of those that wait for each other. One device has
# to do all the work. Many devices share the work, so that only the depth is left.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("lp_jax") is None:  # where this notebook is opened without it
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "lp_jax[train]"], check=True)

# %%
import matplotlib.pyplot as plt
import optax
from flax import nnx

import lp_jax
from lp_jax import data, nn, planning, train

LAYERS, EPOCHS = 32, 120
points = data.peaks(samples=250, seed=0)
batch = points.train_x, points.train_y  # the same examples in every step


def network(layers):
    rngs = nnx.Rngs(0)
    trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), layers, t1=1.0, rngs=rngs)
    return nn.Classifier(
        nn.DenseOpening((2,), 8, rngs=rngs), trunk, nn.DenseClosing((8,), points.classes, rngs=rngs)
    )


fig, ax = plt.subplots(figsize=(4.6, 4), layout="constrained")
ax.scatter(*points.train_x.T, c=points.train_y, cmap="tab10", s=12)
ax.set(
    title="Which of five classes is a point in?",
    xlabel="x",
    ylabel="y",
    xticks=(-1, 0, 1),
    yticks=(-1, 0, 1),
)
plt.show()

# %% [markdown]
# ## Run them
#
# All methods begin at the same weights, see the same 200 points in every step, and use the same optimizer. `train.fit`
# writes a log.

# %%
optimizer = optax.adam(1e-2)
exact = lp_jax.Serial()
to_tolerance = lp_jax.Picard(sweeps=LAYERS, rtol=1e-3)
two, three = lp_jax.Picard(sweeps=2), lp_jax.Picard(sweeps=3)

loss_fn, params = train.classification(network(LAYERS))
step_fn = train.make_train_step(loss_fn, optimizer)


def fit(solver, adjoint_solver=None, controller=None):
    state = train.init_state(params, optimizer)
    given = {"steps_per_epoch": 1, "epochs": EPOCHS, "controller": controller}
    return train.fit(
        step_fn, state, lambda epoch: [batch], solver=solver, adjoint_solver=adjoint_solver, **given
    )[1]


logs = {
    "exact": fit(exact),
    "sweeps": fit(to_tolerance),
    "controller": fit(to_tolerance, controller=train.Controller(loss_fn, probe_every=50)),
}

# %% [markdown]
# One-shot training has a step function of its own, because its state includes the states at which the solves ended.
# Nested iteration trains two networks, and the second starts from what the first has learnt.

# %%
one_shot_step, state = train.one_shot(
    loss_fn, params, optimizer, batch, solver=two, adjoint_solver=three
)
logs["one-shot"] = train.fit(
    one_shot_step,
    state,
    lambda epoch: [batch],
    steps_per_epoch=1,
    epochs=EPOCHS,
    solver=two,
    adjoint_solver=three,
)[1]

depths = [train.Depth(8, epochs=EPOCHS * 2 // 3), train.Depth(LAYERS, epochs=EPOCHS // 3)]
logs["nested"] = train.nested(
    network(8), optimizer, lambda epoch: [batch], depths, steps_per_epoch=1
)[2]

# %% [markdown]
# ## What they cost
#
# `planning.training_step` counts the evaluations of a step. Solvers with a tolerance took as many sweeps as there are
# residuals in the row of the log. We count as many sweeps for the adjoint as for the forward solve.


# %%
def costs(log, solver=None, adjoint_solver=None):
    work = depth = 0
    layers, rows = LAYERS, []
    for row in log.rows:
        if row["kind"] == "depth":  # nested iteration tells where a depth begins
            layers = row["layers"]
        if row["kind"] == "train":
            sweeps = sum(name.startswith("forward_residual_") for name in row)
            chosen = solver or (lp_jax.Picard(sweeps=sweeps) if sweeps else exact)
            counted = planning.training_step(chosen, adjoint_solver or chosen, layers)
            work, depth = work + counted.work() * len(batch[1]), depth + counted.depth()
            rows.append({**row, "work": work, "depth": depth})
    return rows


runs = {
    "exact": costs(logs["exact"], exact),
    "sweeps": costs(logs["sweeps"]),
    "controller": costs(logs["controller"]),
    "one-shot": costs(logs["one-shot"], two, three),
    "nested": costs(logs["nested"], exact),
}
fig, (by_work, by_depth) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for name, rows in runs.items():
    losses = [row["loss"] for row in rows]
    by_work.loglog([row["work"] for row in rows], losses, label=name)
    by_depth.loglog([row["depth"] for row in rows], losses, label=name)
by_work.set(
    title="Work: all evaluations", xlabel="layers x examples evaluated", ylabel="training loss"
)
by_depth.set(
    title="Depth: those that wait for each other", xlabel="layers evaluated one after the other"
)
by_work.legend()
plt.show()

# %%
print(f"{'':12}{'loss':>8}{'work':>8}{'depth':>8}   (exact training = 1)")
for name, rows in runs.items():
    work, depth = (rows[-1][column] / runs["exact"][-1][column] for column in ("work", "depth"))
    print(f"{name:12}{rows[-1]['loss']:8.3f}{work:8.2f}{depth:8.2f}")
for row in logs["controller"].of("control"):
    print(
        f"controller at step {row['step']:3}: noise {row['noise']:.2f}, error {row['error']:.0e}, rtol {row['rtol']:.0e}"
    )

# %% [markdown]
# **What it shows.** No method wins everywhere.
#
# * On **one device that a layer fills**, work counts. Nested iteration halves it. All other methods do more work than
#   exact training.
# * On **many devices**, depth counts. Sweeps, the controller and one-shot training need a small part of the exact
#   depth.
# * The **controller** loosens its tolerance as soon as the noise of the gradient allows it, and so saves sweeps. It
#   measures the noise with two halves of the batch.
# * **One-shot** training needs the same examples in every step, so it is for full batches. Nested iteration needs
#   layers that can be split, such as those of a residual network.
#
# One-shot training has the least depth for the same loss. But its gradients lag, so it falls behind in a longer
# training of 200 steps. This is a small problem with one seed. The documentation has tables over several problems and
# many seeds.
