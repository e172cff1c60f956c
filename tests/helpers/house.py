"""Sizes of the package: ``python tests/helpers/house.py`` prints them, and test_structure.py holds some as ceilings."""

import importlib
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("_arrays", "_comms", "_levels", "_solvers", "_programs", ".")
"""Folders of the core; "." is the modules directly in lp_jax."""
PACKAGES = ("", "multigrid", "data", "nn", "planning", "train", "viz")


def lines(*patterns: str) -> int:
    return sum(len(path.read_text().splitlines()) for pattern in patterns for path in ROOT.glob(pattern))


def words(*patterns: str) -> int:
    return sum(len(path.read_text().split()) for pattern in patterns for path in ROOT.glob(pattern))


def public_names() -> dict[str, int]:
    """Names that a user can import from each package, without those of modules."""
    found = {}
    for name in PACKAGES:
        module = importlib.import_module(f"lp_jax.{name}".rstrip("."))
        public = (v for k, v in vars(module).items() if not k.startswith("_"))
        found[module.__name__] = sum(not isinstance(v, types.ModuleType) for v in public)
    return found


def sizes() -> dict[str, int]:
    return {
        "lines of lp_jax": lines("lp_jax/**/*.py"),
        "lines of the core": lines(*(f"lp_jax/{folder}/*.py" for folder in CORE)),
        "lines of tests": lines("tests/**/*.py"),
        "words of README and docs": words("README.md", "docs/*.md"),
        "public names": sum(public_names().values()),
        "public names of lp_jax": public_names()["lp_jax"],
    }


if __name__ == "__main__":
    for what, number in sizes().items():
        print(f"{number:7,} {what}")
