"""The folder that a run writes into."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lp_jax.cli._errors import CommandError

CONFIG = "config.json"
"""File of what a run was started with."""


def new_run(folder: Path) -> None:
    """Make sure that a new run can write into the folder."""
    if (folder / CONFIG).exists():
        raise CommandError(f"{folder} holds a run already; add --resume to go on with it, or choose another --out.")
    _require_writable(folder)
    if any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty and holds no run; choose another --out.")


def stored_run(folder: Path, problem: str) -> dict[str, Any]:
    """Return what the run in the folder was started with."""
    config = folder / CONFIG
    if not config.exists():
        raise CommandError(f"{folder} holds no run to resume; leave out --resume to start one.")
    _require_writable(folder)
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        found = {name: stored[name] for name in ("problem", "options", "fingerprint", "solver", "adjoint_solver")}
    except (ValueError, TypeError, KeyError):
        raise CommandError(f"{config} is not the configuration of a run; it cannot be resumed.") from None
    if found["problem"] != problem:
        raise CommandError(f"{folder} holds a run on {found['problem']}, not {problem}; choose another --out.")
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file of JSON for people to read, all at once."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}; choose another --out.") from None
