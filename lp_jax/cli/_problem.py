"""A problem of the command line, and the settings of a run on it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lp_jax.cli._errors import UsageError
from lp_jax.cli._models import Model
from lp_jax.cli._task import Task, Training

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of ``lp-jax train`` and ``lp-jax plan``: a module of `lp_jax.cli.problems` with the name of the problem.

    The first line of that module's docstring is its help.
    """

    load: Callable[..., Task]  # ``load(training, **sources)`` reads the data
    models: Mapping[str, Model]  # models with their default settings, by name; the first one is the default
    training: Training
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # help of options for data; "data" is a path
    examples: tuple[tuple[str, str], ...]  # (call, what it does), for the help
    about: str = ""  # first line of the help

    def kind(self, name: str | None) -> str:
        """Return the name of a model, by default the first one."""
        if name not in (None, *self.models):
            raise UsageError(f"--model must be one of {', '.join(self.models)}; got {name!r}.")
        return name or next(iter(self.models))


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    def describe(self, count: int) -> str:
        """Return one line on the network, which has ``count`` parameters."""
        return (
            f"{self.sources.get('name', self.problem)}: {self.kind}, {self.layers} {self.model.layer_name}, "
            f"{self.model.width} wide, {count:,} parameters, t1 = {self.t1:g} ({self.model.about()})"
        )


def model_and_training(problem: Problem, options: Mapping[str, Any]) -> tuple[Model, Training]:
    """Return the settings of the options, by default the problem's own. The message of an error begins with a setting's name."""
    return _updated(problem.models[problem.kind(options.get("model"))], options), _updated(problem.training, options)


def _updated(settings: T, options: Mapping[str, Any]) -> T:
    names = [field.name for field in dataclasses.fields(settings)]  # type: ignore[arg-type]
    return dataclasses.replace(settings, **{name: options[name] for name in names if name in options})  # type: ignore[type-var]
