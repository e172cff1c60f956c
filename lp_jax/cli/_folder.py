"""The folder that a run writes into."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

_CONFIG = "config.json"


def prepare(folder: Path, *, resume: bool) -> dict[str, Any] | None:
    """Make sure that the folder can be written to, and holds a run if and only if it is to be resumed.

    Returns:
        The configuration of the run that it holds, or None.

    Raises:
        click.ClickException: in one line, if not.
    """
    config = folder / _CONFIG
    held = config.exists()
    if held and not resume:
        raise click.ClickException(
            f"{folder} holds a run already; add --resume to go on with it, or choose another --out."
        )
    if resume and not held:
        raise click.ClickException(f"{folder} holds no run to resume; leave out --resume to start one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.ClickException(f"cannot write to {folder}: {error.strerror}; choose another --out.") from None
    if not held and any(folder.iterdir()):
        raise click.ClickException(f"{folder} is not empty and holds no run; choose another --out.")
    if not held:
        return None
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        return {name: stored[name] for name in ("problem", "options", "solver", "adjoint_solver")}
    except (ValueError, TypeError, KeyError):
        raise click.ClickException(f"{config} is not the configuration of a run; it cannot be resumed.") from None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file of JSON for people to read, all at once."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write what the run was started with."""
    write_json(folder / _CONFIG, values)
