"""Classes or values of your own: x and y in a file of NumPy's."""

import dataclasses
from pathlib import Path

import numpy as np

from lp_jax import data as datasets
from lp_jax.cli._models import Conv, Dense
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Task, Training, task_of
from lp_jax.data._dataset import Scaler


def load(training: Training, data: Path) -> Task:
    """Return the task of a file: classes or values, by the type of y."""
    dataset = datasets.arrays(data, seed=training.seed)
    x, test_x = np.asarray(dataset.train_x), np.asarray(dataset.test_x)
    if x.dtype != np.uint8:  # bytes are pixels
        scale = Scaler(x)
        dataset = dataset._replace(train_x=scale(x), test_x=scale(test_x))
    task = task_of(dataset, training)
    y = f"{task.outputs} classes"
    if task.unscaled is not None:
        y = "floating-point values" + (f", {task.outputs} for each" if task.outputs > 1 else "")
        y += "; scaled to mean 0 and standard deviation 1, their mean squared error is the loss"
    held = f"{len(dataset.train_y):,} examples to train with, {len(dataset.test_y):,} held out"
    return dataclasses.replace(task, about=f"{held}; y: {y}")


PROBLEM = Problem(
    load=load,
    models={"dense": Dense(width=64), "conv": Conv(width=8)},
    training=Training(epochs=30),
    sources={"data": 'File of numpy.savez("mine.npz", x=x, y=y): inputs (samples, ...), a class or values for each.'},
    examples=(
        ("lp-jax train arrays --data mine.npz", "any inputs, flattened and scaled; a fifth is held out"),
        ("lp-jax train arrays --data mine.npz --model conv", "images (samples, height, width, channels)"),
    ),
)
