"""Train on MNIST, Fashion-MNIST or the like, from IDX files."""

from lp_jax import data as datasets
from lp_jax.cli._models import Conv, Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Training, task_of

PROBLEM = Problem(
    load=lambda training, data: task_of(datasets.mnist(data), training),
    models={"dense": Dense(width=64), "conv": Conv(layers=32, width=8, t1=1.0)},
    training=Training(epochs=5),
    sources={"data": "Folder of the four IDX files, plain or .gz."},
    examples=(
        ("lp-jax train mnist --data ~/mnist", "a dense network"),
        ("lp-jax train mnist --data ~/mnist --model conv", "a convolutional one"),
        ("lp-jax train mnist --resume", "go on after an interruption"),
    ),
)
