"""The notebooks run from top to bottom; their sources are plain Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment = keep | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["XLA_FLAGS"] = QUICK
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "test accuracy, evaluated serially: 9" in done.stdout, done.stdout
