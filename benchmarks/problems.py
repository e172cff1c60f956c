"""The command line's problems, as the scripts here want them."""

from pathlib import Path
from typing import Any

from lp_jax.cli._problem import Settings, prepare
from lp_jax.cli._task import Task


def prepared(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> tuple[Settings, Task]:
    """Settings and data of a problem: what `lp-jax train` would take, apart from ``options``."""
    return prepare(problem, {"model": model, "data": path, "seed": seed} | options)
