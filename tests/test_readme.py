"""The examples of the pages run, and say what they compute; links lead somewhere."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def code_of(page):
    """All examples of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL))


def output(code):
    """What a program prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_the_package_has_no_links_into_the_repository():
    """A package index shows this text alone."""
    text = importlib.metadata.metadata("lp_jax").get_payload()
    assert "# lp_jax" in text and "`docs/scanned.md`" in text
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", text) if ":" not in link]


def test_the_example_runs():
    code = code_of("README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    out = output(code)
    promised = float(re.findall(r"print.*# (\S+)", code)[0])
    assert promised / 1.5 < float(out) < promised * 1.5


def test_the_examples_of_architectures_run():
    output(code_of("docs/architectures.md"))


def test_the_examples_of_training_run_and_print_what_they_say():
    learns, depths, cycle, within = output(code_of("docs/training.md")).splitlines()
    assert (learns, depths, within) == ("True", "64 [16, 32, 64]", "True")
    assert (
        5.5 <= float(cycle) <= 7.5
    )  # three gradients of the deep network, three of half, two of a quarter, and trials


def test_the_examples_of_data_parallelism_run_and_print_what_they_say():
    page = "docs/data_parallel.md"
    promised = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)[0].splitlines()
    found = output(code_of(page)).splitlines()
    for (name, wanted), (way, loss) in zip(*((line.split(": ") for line in x) for x in (promised, found)), strict=True):
        assert name == way and abs(float(wanted) - float(loss)) < 0.005


def test_the_examples_of_scanned_models_run_and_change_one_line():
    first, *_ = output(code_of("docs/scanned.md")).splitlines()
    assert first == "True"
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "scanned.md").read_text(), flags=re.DOTALL)
    assert len(diffs) == 5
    assert all(len(re.findall(r"^[-+]", diff, flags=re.MULTILINE)) == 2 for diff in diffs)


def test_the_counts_of_solvers_are_those_of_their_page():
    text = (ROOT / "docs" / "solvers.md").read_text()
    *counted, serial, picard, mgrit = map(str.split, output(code_of("docs/solvers.md")).splitlines())
    assert len(counted) == 4
    for _, depth, work in counted:
        assert f"{depth} and {int(work):,}" in text
    assert all(float(seconds) > 0 for _, seconds in (serial, picard, mgrit))


def test_the_worked_examples_of_planning_run():
    text = (ROOT / "docs" / "planning.md").read_text()
    # the sweeps and Newton's method, no cycles
    out = output(code_of("docs/planning.md").replace("machine=gpu", "machine=gpu, seconds=0.1"))
    for line in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)[1].splitlines():
        assert line in out
    assert "Use solver=lp_jax.Picard(sweeps=32, rtol=0.01), adjoint_solver=lp_jax.Picard(sweeps=32, rtol=0.1)" in out


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
