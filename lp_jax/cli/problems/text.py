"""Model a text character by character; a tenth is held out."""

import dataclasses
import functools
from pathlib import Path

import numpy as np

from lp_jax import data as datasets
from lp_jax.cli._models import Transformer
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Predict, Task, Training, task_of

_PROMPT, _WRITTEN, _TEMPERATURE = 32, 200, 0.7


def load(training: Training, data: Path) -> Task:
    """Return windows of the text; the label of a position is the next character."""
    dataset = datasets.characters(data)
    return dataclasses.replace(
        task_of(dataset, training),
        shape=(),
        length=dataset.shape[0],
        sizes=(dataset.classes,),
        causal=True,
        samples=functools.partial(written, dataset, training.seed),
    )


def written(dataset: datasets.Dataset, seed: int, predict: Predict) -> str:
    """Return the beginning of the held-out text and the model's continuation, character by character."""
    (length,) = dataset.shape
    random = np.random.default_rng(seed)
    prompt = dataset.test_x[0][: min(_PROMPT, length)]
    text = [int(number) for number in prompt]
    for _ in range(_WRITTEN):
        window = np.zeros((1, length), np.int32)
        last = text[-length:]
        window[0, : len(last)] = last
        logits = predict(window)[0, len(last) - 1] / _TEMPERATURE
        logits[0] = -np.inf  # padding
        chances = np.exp(logits - logits.max(), dtype=np.float64)
        text.append(int(random.choice(len(chances), p=chances / chances.sum())))
    spelled = functools.partial(
        map, lambda number: "\N{REPLACEMENT CHARACTER}" if number == 1 else dataset.names[number]
    )
    prompted, continued = ("".join(spelled(part)) for part in (text[: len(prompt)], text[len(prompt) :]))
    return f"The model goes on after the bar (temperature {_TEMPERATURE}):\n\n{prompted}|{continued}"


PROBLEM = Problem(
    load=load,
    models={"transformer": Transformer(layers=16, width=64, t1=None)},
    training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
    sources={"data": "A text file, or a treebank (.conllu)."},
    examples=(("lp-jax train text --data book.txt --buffers 2", "two serial layers at either end"),),
)
