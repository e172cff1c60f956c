"""The problems of ``lp-jax train`` and ``lp-jax plan``: their data, models, and the settings of a run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lp_jax import data as datasets
from lp_jax.cli._errors import UsageError
from lp_jax.cli._models import (
    GRU,
    Conv,
    Dense,
    Model,
    Predict,
    Task,
    Training,
    Transformer,
    steps_per_epoch,
    task_of,
)
from lp_jax.data import contrib
from lp_jax.data._batches import padded
from lp_jax.data._dataset import Scaler
from lp_jax.data._gum import Tagging

T = TypeVar("T")

_LENGTHS = (16, 32, 64, 144)  # of sentences
_SENTENCES, _WORDS = 5, range(5, 21)  # how many are shown, and how long
_PROMPT = 32  # characters of the text that is continued
_WRITTEN = 200  # characters of the continuation
_TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of the command line; `lp_jax.cli._menu.PROBLEMS` has its help."""

    load: Callable[..., Task]  # ``load(training, **sources)`` reads the data
    models: Mapping[
        str, Model
    ]  # models with their default settings, by name; the first one is the default
    training: Training = Training()
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # help of options for data; "data" is a path
    examples: tuple[tuple[str, str], ...]  # (call, what it does), for the help

    def kind(self, name: str | None) -> str:
        """Return the name of a model, by default the first one."""
        if name not in (None, *self.models):
            raise UsageError(f"--model must be one of {', '.join(self.models)}; got {name!r}.")
        return name or next(iter(self.models))


def arrays(training: Training, data: Path) -> Task:
    """Return the task of a file: classes or values, by the type of y."""
    dataset = datasets.arrays(data, seed=training.seed)
    x = np.asarray(dataset.train_x)
    test_x = np.asarray(dataset.test_x)
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


def timeseries(training: Training, data: Path, name: str) -> Task:
    """Return the task of a data set of series."""
    dataset = datasets.timeseries(data, name)
    length, channels = dataset.shape
    return dataclasses.replace(task_of(dataset, training), shape=(channels,), length=length)


def gum(training: Training, data: Path) -> Task:
    """Return the task of a treebank: sentences, batched with others of about their length."""
    tagging = datasets.gum(data, max_length=_LENGTHS[-1])

    test = datasets.bucketed(
        tagging.test, len(tagging.test.x), lengths=_LENGTHS[-1:], seed=0, epoch=0, drop_last=False
    )
    return Task(
        batches=lambda epoch: datasets.bucketed(
            tagging.train, training.batch_size, lengths=_LENGTHS, seed=training.seed, epoch=epoch
        ),
        steps_per_epoch=steps_per_epoch(len(tagging.train.x), training),
        test_batches=list(test),
        shape=(),
        outputs=tagging.classes,
        names=tagging.tags,
        length=_LENGTHS[-1],
        sizes=tagging.sizes,
        samples=functools.partial(tag_samples, tagging),
    )


def tag_samples(tagging: Tagging, predict: Predict) -> str:
    """Return sentences of the test set with the model's tags."""
    fit = [i for i, words in enumerate(tagging.test_words) if len(words) in _WORDS] or [0]
    shown = fit[:: -(-len(fit) // _SENTENCES)]
    answers = predict(padded([tagging.test.x[i] for i in shown], _LENGTHS[-1])).argmax(axis=-1)
    lines = [
        " ".join(
            map(
                functools.partial(tagged, tagging.tags),
                tagging.test_words[i],
                row,
                tagging.test.y[i],
            )
        )
        for i, row in zip(shown, answers, strict=True)
    ]
    return "\n\n".join(
        ["Test sentences as word/TAG; after a wrong tag, the right one in brackets:", *lines]
    )


def tagged(tags: Sequence[str], word: str, answer: int, right: int) -> str:
    """Return ``word/TAG``, or ``word/TAG[RIGHT]``; a negative ``right`` is unknown."""
    wanted = "?" if right < 0 else tags[right]
    return f"{word}/{tags[answer]}" + ("" if answer == right else f"[{wanted}]")


def text(training: Training, data: Path) -> Task:
    """Return the task of a text: windows of it; the label of a position is the next character."""
    dataset = datasets.characters(data)
    samples = functools.partial(written, dataset, training.seed)
    sizes = (dataset.classes,)
    task = dataclasses.replace(
        task_of(dataset, training), shape=(), length=dataset.shape[0], sizes=sizes
    )
    return dataclasses.replace(task, causal=True, samples=samples)


def written(dataset: datasets.Dataset, seed: int, predict: Predict) -> str:
    """Return the beginning of the held-out text and the model's continuation, character by character."""
    (length,) = dataset.shape
    random = np.random.default_rng(seed)
    prompt = dataset.test_x[0][: min(_PROMPT, length)]
    numbers = [int(number) for number in prompt]
    for _ in range(_WRITTEN):
        window = np.zeros((1, length), np.int32)
        last = numbers[-length:]
        window[0, : len(last)] = last
        logits = predict(window)[0, len(last) - 1] / _TEMPERATURE
        logits[0] = -np.inf  # padding
        chances = np.exp(logits - logits.max(), dtype=np.float64)
        numbers.append(int(random.choice(len(chances), p=chances / chances.sum())))
    spelled = [
        "\N{REPLACEMENT CHARACTER}" if number == 1 else dataset.names[number] for number in numbers
    ]
    prompted, continued = (
        "".join(part) for part in (spelled[: len(prompt)], spelled[len(prompt) :])
    )
    return (
        f"The model goes on after the bar (temperature {_TEMPERATURE}):\n\n{prompted}|{continued}"
    )


PROBLEMS = {
    "arrays": Problem(
        load=arrays,
        models={"dense": Dense(width=64), "conv": Conv(width=8)},
        sources={
            "data": 'File of numpy.savez("mine.npz", x=x, y=y): inputs (samples, ...), a class or values each.'
        },
        examples=(
            (
                "lp-jax train arrays --data mine.npz",
                "any inputs, flattened and scaled; a fifth is held out",
            ),
            (
                "lp-jax train arrays --data mine.npz --model conv",
                "images (samples, height, width, channels)",
            ),
        ),
    ),
    "digits": Problem(
        load=lambda training: task_of(datasets.digits(seed=training.seed), training),
        models={"dense": Dense(width=64), "conv": Conv(width=8)},
        examples=(
            ("lp-jax train digits", "layer-parallel, then serially to compare"),
            ("lp-jax train digits --model conv --layers 32 --epochs 10", "a convolutional network"),
            (
                "lp-jax train digits --solver MGRIT --solver.levels 3 --solver.cycle F",
                "multigrid, three levels",
            ),
            (
                "lp-jax train digits --solver MGRIT --solver.coarse_step Rediscretize",
                "the usual coarse step",
            ),
            (
                "lp-jax train digits --solver mymodule.MySolver",
                "a solver of your own, a subclass of lp_jax.Solver",
            ),
            ("lp-jax train digits --solver.help MGRIT", "the options of a solver"),
            ("lp-jax train digits --devices 4", "the layers over four devices"),
            ("lp-jax train digits --mesh layers=2,data=2", "layers and examples over four devices"),
            ("mpirun -n 4 lp-jax train digits --mpi", "the layers over four MPI ranks"),
            ("lp-jax train digits --resume", "go on after an interruption"),
        ),
    ),
    "gum": Problem(
        load=gum,
        models={"transformer": Transformer(width=64, t1=4.0)},
        training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
        sources={
            "data": "Folder of CoNLL-U files ...-train.conllu, ...-dev.conllu, ...-test.conllu, plain or .gz."
        },
        examples=(("lp-jax train gum --data ~/gum", "an encoder of 64 layers"),),
    ),
    "mnist": Problem(
        load=lambda training, data: task_of(datasets.mnist(data), training),
        models={"dense": Dense(width=64), "conv": Conv(layers=32, width=8, t1=1.0)},
        training=Training(epochs=5),
        sources={"data": "Folder of the four IDX files, plain or .gz."},
        examples=(
            ("lp-jax train mnist --data ~/mnist", "a dense network"),
            ("lp-jax train mnist --data ~/mnist --model conv", "a convolutional one"),
            ("lp-jax train mnist --resume", "go on after an interruption"),
        ),
    ),
    "modelnet": Problem(
        load=lambda training, data: task_of(contrib.modelnet(data), training),
        models={"conv": Conv(width=4, stride=2)},
        training=Training(epochs=3, batch_size=16),
        sources={
            "data": "Folder of CLASS/train/*.off and CLASS/test/*.off, or voxels_train.npz and voxels_test.npz."
        },
        examples=(("lp-jax train modelnet --data ~/ModelNet10", "three-dimensional convolutions"),),
    ),
    "peaks": Problem(
        load=lambda training: task_of(datasets.peaks(seed=training.seed), training),
        models={"dense": Dense(width=8, t1=5.0)},
        training=Training(epochs=50, batch_size=40, learning_rate=1e-2),
        examples=(("lp-jax train peaks --layers 256", "a deep, narrow network"),),
    ),
    "text": Problem(
        load=text,
        models={"transformer": Transformer(layers=16, width=64, t1=None)},
        training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
        sources={"data": "A text file, or a treebank (.conllu)."},
        examples=(
            ("lp-jax train text --data book.txt --buffers 2", "two serial layers at either end"),
        ),
    ),
    "timeseries": Problem(
        load=timeseries,
        models={"gru": GRU(layers=None, t1=None)},
        training=Training(epochs=60, batch_size=10),
        sources={
            "data": "Folder of NAME_TRAIN.ts and NAME_TEST.ts, plain or .gz.",
            "name": "Name of the data set in the folder, like BasicMotions.",
        },
        examples=(
            ("lp-jax train timeseries --data ~/ucr --name BasicMotions", "six channels, 100 steps"),
            (
                "lp-jax train timeseries --data ~/ucr --name JapaneseVowels --epochs 30",
                "series of different lengths",
            ),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run, apart from its solvers. Two runs of equal settings take the same batches."""

    problem: str
    kind: str
    model: Model
    training: Training
    sources: Mapping[str, object]
    layers: int  # number of layers, or of steps of the sequence
    t1: float  # time at which the last layer ends

    def fingerprint(self) -> dict[str, object]:
        """Return the settings in which a checkpoint must agree; the length of a run and its learning rate may change."""
        free = ("data", "epochs", "learning_rate")
        return {name: value for name, value in self.flat().items() if name not in free}

    def flat(self) -> dict[str, object]:
        """Return all settings by name, for JSON."""
        sources = {name: str(value) for name, value in self.sources.items()}
        fixed = {"problem": self.problem, "model": self.kind, **sources}
        sizes = {**dataclasses.asdict(self.model), "layers": self.layers, "t1": self.t1}
        return fixed | sizes | dataclasses.asdict(self.training)


def prepare(name: str, options: Mapping[str, Any]) -> tuple[Settings, Task]:
    """Return the settings and the task of the options, with its data."""
    problem = PROBLEMS[name]
    model, training = model_and_training(problem, options)
    sources = {
        key: Path(options[key]) if key == "data" else options[key] for key in problem.sources
    }
    task = problem.load(training, **sources)
    layers = model.layers or task.length
    if layers == 0:
        raise UsageError(
            f"--layers must be a number; got null, and the inputs of {name} are no sequences."
        )
    kind = problem.kind(options.get("model"))
    t1 = model.t1 or float(layers)
    return Settings(name, kind, model, training, sources, layers, t1), task


def model_and_training(problem: Problem, options: Mapping[str, Any]) -> tuple[Model, Training]:
    """Return the settings of the options, by default the problem's own."""

    def updated(settings: T) -> T:
        chosen = {name: options[name] for name in vars(settings) if name in options}
        return dataclasses.replace(settings, **chosen)  # type: ignore[type-var]

    try:
        return updated(problem.models[problem.kind(options.get("model"))]), updated(
            problem.training
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"--{error}") from None
