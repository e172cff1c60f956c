"""Problems by name, with the data of a command line."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lp_jax.cli._errors import UsageError
from lp_jax.cli._problem import Problem, Settings, model_and_training
from lp_jax.cli._task import Task


def find(name: str) -> Problem:
    module = importlib.import_module(f"lp_jax.cli.problems.{name}")
    return dataclasses.replace(module.PROBLEM, about=(module.__doc__ or "").partition("\n")[0])


def prepare(name: str, options: Mapping[str, Any]) -> tuple[Settings, Task]:
    """Return the settings and the task of the options, with its data."""
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
