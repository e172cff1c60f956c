"""The notebooks run from top to bottom as notebooks, and each shows a picture."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from conftest import QUICK

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
COMPUTE = {"05_recurrent_network"}  # more than they compile


def test_the_notebooks_are_numbered_without_gaps():
    assert [path.name[:2] for path in SOURCES] == [f"{number:02}" for number in range(1, len(SOURCES) + 1)]
    assert len(SOURCES) >= 8


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    """The kernel has JAX's defaults, but for what saves time."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    if path.stem not in COMPUTE:
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setattr(sys, "argv", ["execute.py", str(tmp_path), path.stem])
    runpy.run_path(str(FOLDER / "execute.py"), run_name="__main__")
    cells = json.loads((tmp_path / f"{path.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
