"""Classify the pixels of the Indian Pines scene by their spectra."""

from lp_jax.cli._models import Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of
from lp_jax.data import contrib

PROBLEM = Problem(
    load=lambda training, data: task_of(contrib.indian_pines(data, seed=training.seed), training),
    models={"dense": Dense(width=128)},
    training=Training(epochs=30),
    sources={"data": "Folder of Indian_pines_corrected.mat and Indian_pines_gt.mat."},
    examples=(("lp-jax train indianpines --data ~/pines", "a dense network"),),
)
