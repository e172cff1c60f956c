"""The notebooks run from top to bottom, each shows a picture, and the program that executes them writes both."""

import ast
import json
import os
import re
import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from conftest import QUICK, jax_defaults

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
EXAMPLES = sorted(
    FOLDER.glob("examples/*.py")
)  # scripts to copy; the tests of what they show run them
COMPUTE = {"05_recurrent_network"}  # more than they compile
EXECUTED = "06_layers_over_devices"  # makes devices, so it needs a process of its own


def test_the_notebooks_are_numbered_without_gaps():
    assert [path.name[:2] for path in SOURCES] == [
        f"{number:02}" for number in range(1, len(SOURCES) + 1)
    ]
    assert len(SOURCES) >= 8


PACKAGES = {"flax", "jax", "lp_jax", "matplotlib", "numpy", "optax"}
COPIED = PACKAGES | {
    "PIL",
    "conllu",
    "orbax",
    "rich",
    "sklearn",
    "trimesh",
}  # each in the scripts that say so


def roots(text):
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(text)))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in named}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_public_names_only(path):
    """It can be copied to any place where the library is installed."""
    text = path.read_text(encoding="utf-8")
    assert roots(text) - sys.stdlib_module_names <= COPIED
    assert not re.search(r"lp_jax\.(\w+\.)*_|from lp_jax[.\w]* import .*\b_", text)
    assert f"python {path.relative_to(FOLDER.parent)}" in ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_needs_nothing_of_the_repository(path):
    """Its first cell installs the library where it is not installed yet."""
    text = path.read_text(encoding="utf-8")
    first = next(cell for cell in text.split("\n# %%")[1:] if not cell.startswith(" [markdown]"))
    assert 'find_spec("lp_jax") is None' in first and "lp_jax[train]" in first
    assert roots(text) - sys.stdlib_module_names <= PACKAGES
    assert not re.search(r"\bopen\(|Path\(", text)


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.stem != EXECUTED], ids=lambda path: path.stem
)
def test_runs(path, capsys, request):
    """In this process, which has everything imported. Cells are plain Python, as a linter and mypy see them."""
    if path.stem in COMPUTE:
        request.getfixturevalue("optimised")
    names, pictures = {"__name__": "__main__"}, 0
    with jax_defaults(), plt.rc_context():
        for cell in re.split(r"^(?=# %%)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            exec(compile(cell, path, "exec"), names)
            for number in plt.get_fignums():  # a notebook shows them at the end of a cell
                plt.figure(number).canvas.draw()
                plt.close(number)
                pictures += 1
    said = re.sub(r"(?m)^(plan|calibrate|diagnose): at most .*\n", "", capsys.readouterr().err)
    assert pictures and not said


def test_a_notebook_is_executed_and_written(tmp_path, monkeypatch):
    """The kernel has JAX's defaults, but for what saves time."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setattr(sys, "argv", ["execute.py", str(tmp_path), EXECUTED])
    runpy.run_path(str(FOLDER / "execute.py"), run_name="__main__")
    cells = json.loads((tmp_path / f"{EXECUTED}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [
        output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
