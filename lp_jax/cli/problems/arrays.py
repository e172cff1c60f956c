"""Classify inputs of your own: x and y in a file of NumPy's."""

from lp_jax import data as datasets
from lp_jax.cli._models import Conv, Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, classification

PROBLEM = Problem(
    load=lambda training, data: classification(datasets.arrays(data, seed=training.seed), training),
    models={"dense": Dense(width=64), "conv": Conv(width=8)},
    training=Training(epochs=30),
    sources={"data": 'File of numpy.savez("mine.npz", x=x, y=y): inputs (samples, ...), a class for each.'},
    examples=(
        ("lp-jax train arrays --data mine.npz", "any inputs, flattened; a fifth is held out"),
        ("lp-jax train arrays --data mine.npz --model conv", "images (samples, height, width, channels)"),
    ),
)
