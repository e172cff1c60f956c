"""The README's example runs, and says what it computes."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


QUICK = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""For pages that compile much and compute little."""


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    promised = float(re.findall(r"print.*# (\S+)", code)[0])
    assert promised / 1.5 < float(out) < promised * 1.5


def test_the_examples_of_architectures_run():
    text = (Path(__file__).parents[1] / "docs" / "architectures.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200, check=True, env=QUICK)


def test_the_counts_of_solvers_are_those_of_their_page():
    text = (Path(__file__).parents[1] / "docs" / "solvers.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    *counted, serial, picard, mgrit = map(str.split, out.splitlines())
    assert len(counted) == 4
    for _, depth, work in counted:
        assert f"{depth} and {int(work):,}" in text
    assert all(float(seconds) > 0 for _, seconds in (serial, picard, mgrit))


def test_the_worked_examples_of_planning_run():
    text = (Path(__file__).parents[1] / "docs" / "planning.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    code = code.replace("machine=gpu", "machine=gpu, seconds=0.1")  # the sweeps and Newton's method, no cycles
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    for line in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)[1].splitlines():
        assert line in done.stdout
    assert (
        "Use solver=lp_jax.Picard(sweeps=32, rtol=0.01), adjoint_solver=lp_jax.Picard(sweeps=32, rtol=0.1)"
        in done.stdout
    )


def test_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
