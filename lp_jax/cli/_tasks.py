"""From the name of a problem to batches."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_jax import data
from lp_jax.cli._samples import Predict, tagged, written

_EVALUATION_BATCH = 500
_LENGTHS = (16, 32, 64, 144)  # of sentences


class Task(NamedTuple):
    """What is learned, as batches ``(x, labels)``.

    Attributes:
        batches: of training, by epoch.
        steps_per_epoch: number of them.
        test_batches: the test set.
        shape: of one input, without the batch: of an image, a point, or one time of a sequence.
        classes: number of classes.
        names: of the classes; empty where they are numbers.
        length: most positions of a sequence; 0 for inputs that are none.
        sizes: number of values of each of the numbers that describe a token; empty for inputs that are no tokens.
        causal: whether a position may see itself and those before it only.
        samples: some answers, to read.
    """

    batches: Callable[[int], Iterable[Any]]
    steps_per_epoch: int
    test_batches: list[Any]
    shape: tuple[int, ...]
    classes: int
    names: tuple[str, ...] = ()
    length: int = 0
    sizes: tuple[int, ...] = ()
    causal: bool = False
    samples: Callable[[Predict], str] | None = None


def task(problem: str, path: Path, *, name: str, batch_size: int, seed: int) -> Task:
    """Load the data of a problem.

    Args:
        problem: one of the catalog.
        path: of its files, where it has any.
        name: of the data set in that folder, where there are several.
        batch_size: examples per step of training.
        seed: of the split and of the order of the batches.

    Raises:
        lp_jax.data.DataError: for files that are missing or damaged.
        ValueError: for a batch that is larger than the training set.
    """
    if problem == "gum":
        return _tagging(data.gum(path, max_length=_LENGTHS[-1]), batch_size, seed)
    if problem == "text":
        dataset = data.characters(path)
        (length,) = dataset.shape
        return _dataset(dataset, batch_size, seed)._replace(
            shape=(),
            length=length,
            sizes=(dataset.classes,),
            causal=True,
            samples=functools.partial(written, dataset, seed),
        )
    if problem == "timeseries":
        dataset = data.timeseries(path, name)
        length, channels = dataset.shape
        return _dataset(dataset, batch_size, seed)._replace(shape=(channels,), length=length)
    loaders: dict[str, Callable[[], data.Dataset]] = {
        "digits": lambda: data.digits(seed=seed),
        "mnist": lambda: data.mnist(path),
        "peaks": lambda: data.peaks(seed=seed),
        "indianpines": lambda: data.indian_pines(path, seed=seed),
        "modelnet": lambda: data.modelnet(path),
        "tinyimagenet": lambda: data.tiny_imagenet(path),
    }
    return _dataset(loaders[problem](), batch_size, seed)


def _dataset(dataset: data.Dataset, batch_size: int, seed: int) -> Task:
    count = len(dataset.train_y)
    _enough(batch_size, count)

    def cut(x: Any, start: int) -> Any:
        part = slice(start, start + _EVALUATION_BATCH)
        return tuple(leaf[part] for leaf in x) if isinstance(x, tuple) else _scaled(x[part])

    def batches(epoch: int) -> Iterator[Any]:
        for x, y in data.batches(dataset, batch_size, seed=seed, epoch=epoch):
            yield _scaled(x), y

    test = [
        (cut(dataset.test_x, i), dataset.test_y[i : i + _EVALUATION_BATCH])
        for i in range(0, len(dataset.test_y), _EVALUATION_BATCH)
    ]
    return Task(batches, count // batch_size, test, dataset.shape, dataset.classes, dataset.names)


def _tagging(tagging: data.Tagging, batch_size: int, seed: int) -> Task:
    count = len(tagging.train.x)
    _enough(batch_size, count)

    def batches(epoch: int) -> Iterator[Any]:
        return data.bucketed(tagging.train, batch_size, lengths=_LENGTHS, seed=seed, epoch=epoch)

    test = list(
        data.bucketed(tagging.test, len(tagging.test.x), lengths=_LENGTHS[-1:], seed=0, epoch=0, drop_last=False)
    )
    return Task(
        batches,
        count // batch_size,
        test,
        (),
        tagging.classes,
        tuple(tagging.tags),
        length=_LENGTHS[-1],
        sizes=tuple(tagging.sizes),
        samples=functools.partial(tagged, tagging, _LENGTHS[-1]),
    )


def _scaled(x: Any) -> Any:
    """Bytes as numbers in [0, 1]."""
    return x.astype(np.float32) / np.float32(255) if getattr(x, "dtype", None) == np.uint8 else x


def _enough(batch_size: int, count: int) -> None:
    if count < batch_size:
        raise ValueError(f"--batch-size {batch_size} is more than the {count} training examples.")
