"""The command line's problems, as the scripts here want them."""

from pathlib import Path
from typing import Any

from lp_jax.cli._catalog import resolved
from lp_jax.cli._settings import Settings
from lp_jax.cli._tasks import Task, task


def prepared(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> tuple[Settings, Task]:
    """Settings and data of a problem: what `lp-jax train` would take, apart from ``options``."""
    given = {"seed": seed, "name": None, "heads": 4, "buffers": 0, "dropout": 0.0, "units": 1} | options
    sizes = ("layers", "width", "stride", "t1", "epochs", "batch_size", "learning_rate")
    chosen = resolved(problem, dict.fromkeys(sizes) | {"model": model} | given)
    learned = task(problem, path, name=chosen["name"] or "", batch_size=chosen["batch_size"], seed=seed)
    layers = chosen["layers"] or learned.length
    t1 = chosen["t1"] or float(layers)
    return Settings(**chosen | {"problem": problem, "data": str(path), "layers": layers, "t1": t1}), learned
