"""Classify time series of the UCR and UEA archives, from .ts files."""

import dataclasses
from pathlib import Path

from lp_jax import data as datasets
from lp_jax.cli._models import GRU
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Task, Training, task_of


def load(training: Training, data: Path, name: str) -> Task:
    """Return the series of a data set."""
    dataset = datasets.timeseries(data, name)
    length, channels = dataset.shape
    return dataclasses.replace(task_of(dataset, training), shape=(channels,), length=length)


PROBLEM = Problem(
    load=load,
    models={"gru": GRU(layers=None, t1=None)},
    training=Training(epochs=60, batch_size=10),
    sources={
        "data": "Folder of NAME_TRAIN.ts and NAME_TEST.ts, plain or .gz.",
        "name": "Name of the data set in the folder, like BasicMotions.",
    },
    examples=(
        ("lp-jax train timeseries --data ~/ucr --name BasicMotions", "six channels, 100 steps"),
        ("lp-jax train timeseries --data ~/ucr --name JapaneseVowels --epochs 30", "series of different lengths"),
    ),
)
