"""The notebooks run from top to bottom as notebooks, and each shows a picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def test_the_notebooks_are_numbered_without_gaps():
    assert [path.name[:2] for path in SOURCES] == [f"{number:02}" for number in range(1, len(SOURCES) + 1)]
    assert len(SOURCES) >= 8


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    """In a process of its own: a kernel ends with the process that started it."""
    command = [sys.executable, FOLDER / "execute.py", tmp_path, path.stem]
    defaults = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"XLA_FLAGS": QUICK}
    done = subprocess.run(command, cwd=tmp_path, env=defaults, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / f"{path.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
