"""Starts the programs that tests run on several processes, and ends them in time."""

import atexit
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import QUICK

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent

_SCRATCH = tempfile.mkdtemp(prefix="lp")
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


class Ended(NamedTuple):
    code: int
    output: str  # of both streams, all processes


def output(*command: object, **options: object) -> str:
    """Run a program of one process and return its standard output; fail where its exit code is not 0."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=400, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def start(command: list, **environment: str) -> subprocess.Popen:
    """A program in a session of its own."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "XLA_", "JAX_"))
    }
    env |= {
        "PYTHONPATH": os.pathsep.join(
            map(str, (HERE.parents[1], *HERE.parent.glob("[!_]*/")))
        ),  # of conftest.py, and the tests
        "TMPDIR": tempfile.mkdtemp(
            dir=_SCRATCH
        ),  # MPI jobs that share one clear up each other's files there
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false {QUICK}".strip(),
        "MPI4JAX_NO_WARN_JAX_VERSION": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the cores to those that compile
    } | environment
    return subprocess.Popen(
        list(map(str, command)),
        cwd=HERE,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen, *, timeout: float) -> Ended:
    """Wait for a program; kill it, with all that it started, when the time is over."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # not SIGTERM, which jax.distributed ignores
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end within {timeout} s; its output so far:\n{output}")
    return Ended(process.returncode, output)


def together(commands: list[list], *, timeout: float, **environment: str) -> list[Ended]:
    """Programs side by side, to their ends; none is left over when one hangs."""
    started = [start(command, **environment) for command in commands]
    try:
        return [end(process, timeout=timeout) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def mpirun(ranks: int, *program: object, timeout: float = 240, **environment: str) -> Ended:
    """A Python program on so many ranks, to its end; skips where MPI is not installed."""
    return end(start_ranks(ranks, *program, **environment), timeout=timeout)


def start_ranks(ranks: int, *program: object, **environment: str) -> subprocess.Popen:
    """A Python program on so many ranks; skips where MPI is not installed."""
    for module in ("mpi4py", "mpi4jax"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(
                f"no {module}: the extra lp_jax[mpi] is not installed; `make test` installs it"
            )
    launcher = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        pytest.skip("no mpirun on PATH")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return start(
        [launcher, *root, "--oversubscribe", "-n", ranks, sys.executable, *program], **environment
    )
