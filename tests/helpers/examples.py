"""The scripts of notebooks/examples: as modules, and as programs that a user starts."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from launch import output

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks" / "examples"


def load(name: str) -> ModuleType:
    """A script as a module, for tests of its functions."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object, folder: Path, **environment: str) -> str:
    """Start a script in a folder, with JAX's defaults but for what saves time; what it prints. It has minutes, no more."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    kept |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
    } | environment
    return output(sys.executable, FOLDER / f"{name}.py", *arguments, cwd=folder, env=kept)
