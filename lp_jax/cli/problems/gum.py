"""Tag the words of a treebank, GUM or the like, with their parts of speech."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from lp_jax import data as datasets
from lp_jax.cli._models import Transformer
from lp_jax.cli._problem import Problem
from lp_jax.cli._task import Predict, Task, Training, steps_per_epoch
from lp_jax.data._batches import padded
from lp_jax.data._gum import Tagging
from lp_jax.train._types import Batch

_LENGTHS = (16, 32, 64, 144)  # of sentences
_SENTENCES, _WORDS = 5, range(5, 21)  # how many are shown, and how long


def load(training: Training, data: Path) -> Task:
    """Return the sentences, batched with others of about their length."""
    tagging = datasets.gum(data, max_length=_LENGTHS[-1])

    def batches(epoch: int) -> Iterator[Batch]:
        return datasets.bucketed(tagging.train, training.batch_size, lengths=_LENGTHS, seed=training.seed, epoch=epoch)

    test = datasets.bucketed(tagging.test, len(tagging.test.x), lengths=_LENGTHS[-1:], seed=0, epoch=0, drop_last=False)
    return Task(
        batches=batches,
        steps_per_epoch=steps_per_epoch(len(tagging.train.x), training),
        test_batches=list(test),
        shape=(),
        outputs=tagging.classes,
        names=tuple(tagging.tags),
        length=_LENGTHS[-1],
        sizes=tuple(tagging.sizes),
        samples=functools.partial(tag_samples, tagging, _LENGTHS[-1]),
    )


def tag_samples(tagging: Tagging, length: int, predict: Predict) -> str:
    """Return sentences of the test set with the model's tags."""
    fit = [i for i, words in enumerate(tagging.test_words) if len(words) in _WORDS] or [0]
    shown = fit[:: -(-len(fit) // _SENTENCES)]
    answers = predict(padded([tagging.test.x[i] for i in shown], length)).argmax(axis=-1)
    lines = [
        " ".join(map(functools.partial(tagged, tagging.tags), tagging.test_words[i], row, tagging.test.y[i]))
        for i, row in zip(shown, answers, strict=True)
    ]
    return "\n\n".join(["Test sentences as word/TAG; after a wrong tag, the right one in brackets:", *lines])


def tagged(tags: Sequence[str], word: str, answer: int, right: int) -> str:
    """Return ``word/TAG``, or ``word/TAG[RIGHT]``; a negative ``right`` is unknown."""
    wanted = "?" if right < 0 else tags[right]
    return f"{word}/{tags[answer]}" + ("" if answer == right else f"[{wanted}]")


PROBLEM = Problem(
    load=load,
    models={"transformer": Transformer(width=64, t1=4.0)},
    training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
    sources={"data": "Folder of the CoNLL-U files ...-train.conllu, ...-dev.conllu and ...-test.conllu, plain or .gz."},
    examples=(("lp-jax train gum --data ~/gum", "an encoder of 64 layers"),),
)
