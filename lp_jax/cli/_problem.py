"""Problems of the command line: what one is, which there are, and what a run on one is."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lp_jax import data as datasets
from lp_jax.cli import _samples
from lp_jax.cli._commands import ABOUT
from lp_jax.cli._errors import UsageError
from lp_jax.cli._models import GRU, Conv, Dense, Model, Pooled, Transformer
from lp_jax.cli._task import Task, Training, classification, steps_per_epoch

T = TypeVar("T")

_LENGTHS = (16, 32, 64, 144)  # of sentences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem that ``lp-jax train`` and ``lp-jax plan`` know."""

    load: Callable[..., Task]  # ``load(training, **sources)`` reads the data
    models: Mapping[str, Model]  # models with their default settings, by name; the first one is the default
    training: Training
    # help of the options that say where the data is; "data" is a path
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    examples: tuple[tuple[str, str], ...]  # (call, what it does), for the help
    about: str = ""  # first line of the help

    @property
    def choices(self) -> list[str]:
        """Names for ``--model``: "resnet" stands for the first model, where that is one."""
        return [*self.models, *(["resnet"] if next(iter(self.models.values())).residual else [])]

    def kind(self, name: str | None) -> str:
        if name not in (None, *self.choices):
            raise UsageError(f"--model must be one of {', '.join(self.choices)}; got {name!r}.")
        return next(iter(self.models)) if name is None or name == "resnet" else name


def _sentences(training: Training, data: Path) -> Task:
    """Return the sentences, batched with others of about their length."""
    tagging = datasets.gum(data, max_length=_LENGTHS[-1])

    def batches(epoch: int) -> Iterator[Any]:
        return datasets.bucketed(tagging.train, training.batch_size, lengths=_LENGTHS, seed=training.seed, epoch=epoch)

    test = datasets.bucketed(tagging.test, len(tagging.test.x), lengths=_LENGTHS[-1:], seed=0, epoch=0, drop_last=False)
    return Task(
        batches=batches,
        steps_per_epoch=steps_per_epoch(len(tagging.train.x), training),
        test_batches=list(test),
        shape=(),
        classes=tagging.classes,
        names=tuple(tagging.tags),
        length=_LENGTHS[-1],
        sizes=tuple(tagging.sizes),
        samples=functools.partial(_samples.tagged, tagging, _LENGTHS[-1]),
    )


def _characters(training: Training, data: Path) -> Task:
    """Return windows of the text; every position's label is the character after it."""
    dataset = datasets.characters(data)
    return dataclasses.replace(
        classification(dataset, training),
        shape=(),
        length=dataset.shape[0],
        sizes=(dataset.classes,),
        causal=True,
        samples=functools.partial(_samples.written, dataset, training.seed),
    )


def _series(training: Training, data: Path, name: str) -> Task:
    dataset = datasets.timeseries(data, name)
    length, channels = dataset.shape
    return dataclasses.replace(classification(dataset, training), shape=(channels,), length=length)


_COARSE = "--solver MGRIT --solver.relaxation FCF --spatial 3"

PROBLEMS = {
    "digits": Problem(
        load=lambda training: classification(datasets.digits(seed=training.seed), training),
        models={"dense": Dense(width=64), "conv": Conv(width=8)},
        training=Training(epochs=30),
        examples=(
            ("lp-jax train digits", "the demo: layer-parallel, then serial"),
            ("lp-jax train digits --serial --out runs/exact", "only the exact baseline"),
            ("lp-jax train digits --model conv --layers 32 --epochs 10", "a convolutional network"),
            ("lp-jax train digits --solver MGRIT --solver.levels 3 --solver.cycle F", "multigrid, three levels"),
            ("lp-jax train digits --solver MGRIT --adjoint_iterations 1", "fewer cycles for the gradient"),
            (
                "lp-jax train digits --solver MGRIT --solver.coarse_step Rediscretize",
                "the field's standard coarse step",
            ),
            ("lp-jax train digits --solver Picard --solver.sweeps 3", "fixed-point sweeps, no coarse level"),
            ("lp-jax train digits --solver mymodule.MySolver", "a solver of your own, a subclass of lp_jax.Solver"),
            ("lp-jax train digits --solver.help MGRIT", "the options of a solver"),
            ("lp-jax train digits --devices 4", "the layers over four devices"),
            ("lp-jax train digits --mesh layers=2,data=2", "layers and examples over four devices"),
            ("mpirun -n 4 lp-jax train digits --mpi", "the layers over four MPI ranks"),
            ("lp-jax train digits --resume", "go on after an interruption"),
        ),
    ),
    "gum": Problem(
        load=_sentences,
        models={"transformer": Transformer(width=64, t1=4.0)},
        training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
        sources={
            "data": "Folder of the CoNLL-U files ...-train.conllu, ...-dev.conllu and ...-test.conllu, plain or .gz."
        },
        examples=(("lp-jax train gum --data ~/gum", "an encoder of 64 layers"),),
    ),
    "indianpines": Problem(
        load=lambda training, data: classification(datasets.indian_pines(data, seed=training.seed), training),
        models={"dense": Dense(width=128)},
        training=Training(epochs=30),
        sources={"data": "Folder of Indian_pines_corrected.mat and Indian_pines_gt.mat."},
        examples=(("lp-jax train indianpines --data ~/pines", "a dense network"),),
    ),
    "mnist": Problem(
        load=lambda training, data: classification(datasets.mnist(data), training),
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
        load=lambda training, data: classification(datasets.modelnet(data), training),
        models={"conv": Conv(width=4, stride=2)},
        training=Training(epochs=3, batch_size=16),
        sources={
            "data": "Folder of CLASS/train/*.off and CLASS/test/*.off, or of voxels_train.npz and voxels_test.npz."
        },
        examples=(
            ("lp-jax train modelnet --data ~/ModelNet10", "three-dimensional convolutions"),
            (f"lp-jax train modelnet --data ~/ModelNet10 {_COARSE}", "coarser in space on the coarse level"),
        ),
    ),
    "peaks": Problem(
        load=lambda training: classification(datasets.peaks(seed=training.seed), training),
        models={"dense": Dense(width=8, t1=5.0)},
        training=Training(epochs=50, batch_size=40, learning_rate=1e-2),
        examples=(("lp-jax train peaks --layers 256", "a deep, narrow network"),),
    ),
    "text": Problem(
        load=_characters,
        models={"transformer": Transformer(layers=16, width=64, t1=None)},
        training=Training(epochs=5, batch_size=32, learning_rate=1e-3),
        sources={"data": "A text file, or a treebank (.conllu)."},
        examples=(("lp-jax train text --data book.txt --buffers 2", "two serial layers at either end"),),
    ),
    "timeseries": Problem(
        load=_series,
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
    ),
    "tinyimagenet": Problem(
        load=lambda training, data: classification(datasets.tiny_imagenet(data), training),
        models={"pooled": Pooled(layers=32, width=16, t1=1.0)},
        training=Training(epochs=5),
        sources={"data": "The unpacked folder, with train/ and val/."},
        examples=(("lp-jax train tinyimagenet --data ~/tiny-imagenet-200", "four blocks of layers"),),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes a run what it is, the solvers apart. Two runs of equal settings take the same batches."""

    problem: str
    kind: str
    model: Model
    training: Training
    sources: Mapping[str, Any]
    layers: int  # number of layers, or of steps of the sequence
    t1: float  # time at which the last layer ends

    def fingerprint(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in; the length of a run and its learning rate may change on the way."""
        free = ("data", "epochs", "learning_rate")
        return {name: value for name, value in self.flat().items() if name not in free}

    def flat(self) -> dict[str, Any]:
        """Return all settings by name, for JSON."""
        sources = {name: str(value) for name, value in self.sources.items()}
        fixed = {"problem": self.problem, "model": self.kind, **sources}
        sizes = {**dataclasses.asdict(self.model), "layers": self.layers, "t1": self.t1}
        return fixed | sizes | dataclasses.asdict(self.training)

    def describe(self, count: int) -> str:
        """Return one line on what is trained, a network of ``count`` parameters."""
        return (
            f"{self.sources.get('name', self.problem)}: {self.kind}, {self.layers} {self.model.layer_name}, "
            f"{self.model.width} wide, {count:,} parameters, t1 = {self.t1:g} ({self.model.about()})"
        )


def find(name: str) -> Problem:
    return dataclasses.replace(PROBLEMS[name], about=ABOUT[name])


def model_and_training(problem: Problem, options: Mapping[str, Any]) -> tuple[Model, Training]:
    """Return the settings that the options give, or the problem's own; the message of an error begins with its name."""
    return _updated(problem.models[problem.kind(options.get("model"))], options), _updated(problem.training, options)


def prepare(name: str, options: Mapping[str, Any]) -> tuple[Settings, Task]:
    """Return what the options ask for, with the data that they name."""
    problem = find(name)
    model, training = model_and_training(problem, options)
    sources = {source: options[source] for source in problem.sources}
    if "data" in sources:
        sources["data"] = Path(sources["data"])
    task = problem.load(training, **sources)
    layers = model.layers or task.length
    if layers == 0:
        raise UsageError(f"--layers must be a number; got null, and the inputs of {name} are no sequences.")
    settings = Settings(
        problem=name,
        kind=problem.kind(options.get("model")),
        model=model,
        training=training,
        sources=sources,
        layers=layers,
        t1=model.t1 or float(layers),
    )
    return settings, task


def _updated(settings: T, options: Mapping[str, Any]) -> T:
    names = [field.name for field in dataclasses.fields(settings)]  # type: ignore[arg-type]
    return dataclasses.replace(settings, **{name: options[name] for name in names if name in options})  # type: ignore[type-var]
