"""Where a result comes from: versions, device, threads, commit, command."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("jax", "jaxlib", "numpy", "torch")
_VARIABLES = ("XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "JAX_DEFAULT_MATMUL_PRECISION")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jax_threads() -> int:
    return int(os.environ.get("NPROC", cores()))


def limit_jax_threads(threads: int) -> None:
    """Make JAX's pool on a CPU this large. Works only before JAX has touched a device."""
    os.environ["NPROC"] = str(threads)


def load() -> float | None:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def device_slug() -> str:
    """The kind of device, fit for the name of a folder."""
    return re.sub("[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def manifest(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """All that is needed to judge a result and to get it again."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", program, *arguments]),
        **_source(),
        "versions": {"lp_jax": _own_version(), "python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
        "device": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
        },
        "system": platform.system(),
        "processor": _processor(),
        "cores": cores(),
        "threads": {"jax": jax_threads()},
        "load_before": load(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _source() -> dict[str, Any]:
    """Commit, and whether the tree differs from it, results of benchmarks aside."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _own_version() -> str:
    """That of the tree, which is what runs, installed or not."""
    return str(tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        model = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        model = None
    return model.group(1) if model else platform.processor() or platform.machine()
