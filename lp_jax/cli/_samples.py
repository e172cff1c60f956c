"""A few answers of a trained model, to read."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lp_jax import data
from lp_jax.cli._task import Predict

_SENTENCES, _WORDS = 5, range(5, 21)  # how many are shown, and how long
_WIDTH = 100  # of a line
_PROMPT, _WRITTEN, _TEMPERATURE = 32, 200, 0.7


def tagged(tagging: data.Tagging, length: int, predict: Predict) -> str:
    """Sentences of the test set with the tags that the model gives their words, and the right ones below the wrong."""
    fit = [i for i, words in enumerate(tagging.test_words) if len(words) in _WORDS] or [0]
    shown = fit[:: -(-len(fit) // _SENTENCES)]
    answers = predict(data.padded([tagging.test.x[i] for i in shown], length)).argmax(axis=-1)
    blocks: list[str] = []
    for i, row in zip(shown, answers, strict=True):
        given = [tagging.tags[number] for number in row[: len(tagging.test_words[i])]]
        right = [tagging.tags[number] if number >= 0 else "?" for number in tagging.test.y[i]]
        blocks += interlinear(tagging.test_words[i], given, right)
    return "Test sentences, their tags as given, and the right ones below wrong ones:\n\n" + "\n\n".join(blocks)


def interlinear(words: Sequence[str], given: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    """Words above tags, in blocks of lines that are not too long."""
    columns = [
        (word, tag, "" if tag == wanted else wanted) for word, tag, wanted in zip(words, given, right, strict=True)
    ]
    widths = [max(map(len, column)) + 2 for column in columns]
    starts = [0, *itertools.accumulate(widths)]
    block: list[int] = []
    for i, end in enumerate(starts[1:]):
        if block and end - starts[block[0]] > _WIDTH:
            yield _lines([columns[j] for j in block], [widths[j] for j in block])
            block = []
        block.append(i)
    yield _lines([columns[j] for j in block], [widths[j] for j in block])


def _lines(columns: Sequence[tuple[str, str, str]], widths: Sequence[int]) -> str:
    lines = [
        "".join(part.ljust(n) for part, n in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join(line for line in lines if line)


def written(dataset: data.Dataset, seed: int, predict: Predict) -> str:
    """The beginning of the text held out, and how the model goes on, character by character."""
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
