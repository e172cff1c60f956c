"""The problems of ``lp-jax train`` and ``lp-jax plan``: their data, models, and the settings of a run."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lp_jax import data as datasets
from lp_jax.cli._errors import UsageError
from lp_jax.cli._models import (
    Conv,
    Dense,
    Model,
    Scaler,
    Task,
    Training,
    task_of,
)

T = TypeVar("T")


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
    "peaks": Problem(
        load=lambda training: task_of(datasets.peaks(seed=training.seed), training),
        models={"dense": Dense(width=8, t1=5.0)},
        training=Training(epochs=50, batch_size=40, learning_rate=1e-2),
        examples=(("lp-jax train peaks --layers 256", "a deep, narrow network"),),
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
