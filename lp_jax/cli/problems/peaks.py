"""Train on 5,000 points of the plane in five level sets of the peaks function."""

from lp_jax import data
from lp_jax.cli._models import Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of

PROBLEM = Problem(
    load=lambda training: task_of(data.peaks(seed=training.seed), training),
    models={"dense": Dense(width=8, t1=5.0)},
    training=Training(epochs=50, batch_size=40, learning_rate=1e-2),
    examples=(("lp-jax train peaks --layers 256", "a deep, narrow network"),),
)
