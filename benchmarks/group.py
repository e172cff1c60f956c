"""Processes that compute together for the suites ``ranks``, ``model`` and ``tunnel``, each a `benchmarks.worker`."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Row
from lp_jax import planning

_PATIENCE = 300.0  # seconds for a group to start, to build or to run

_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Workers keep the heap (`lp_jax.cli._heap`), and only the main arena keeps all it has. Not where two devices
would wait for it: dense layers on them take 1.1 to 1.2 instead of 0.8 times as long as the scan."""


class Group:
    """Processes that compute together: one, or the ranks of an MPI job."""

    def __init__(self, kind: str, *, workers: int, threads: int):
        self.kind, self.workers, self.threads = kind, workers, threads
        key = secrets.token_bytes(16)
        devices = workers if kind == "devices" else 1
        # after the caller's own: of two that contradict each other XLA takes the last
        flags = [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={devices}",
        ]
        if kind in ("devices", "ranks"):
            flags.append("--xla_cpu_multi_thread_eigen=false")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(flags),
            "NPROC": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "LP_JAX_BENCH_KEY": key.hex(),
            **(_ONE_ARENA if kind != "devices" else {}),
            "MPI4JAX_NO_WARN_JAX_VERSION": "1",
        }
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            program = [sys.executable, "-m", "benchmarks.worker", kind, str(listener.address[1])]
            count = workers if kind == "ranks" else 1
            if kind == "ranks":
                root = (
                    ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
                )
                program = [str(launcher()), *root, "--oversubscribe", "-n", str(count), *program]
            self._process = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL)
            connections = {}
            for _ in range(count):
                connection = self._accept(listener)
                number, self.pid = self._receive(connection)
                connections[number] = connection
        self._connections = [connections[i] for i in range(count)]

    def build(
        self, name: str, row: Row, quick: bool, convolution: str
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Make a contender; the gradient of all layers, and facts."""
        answers = self._ask("build", name, row, quick, convolution)
        gradients = [
            np.concatenate(leaves) for leaves in zip(*(g for g, _ in answers), strict=True)
        ]
        return gradients, dict(answers[0][1])

    def emulate(self, name: str, *details: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Make a program of `benchmarks.emulation` on every rank; the gradient of all layers, and facts of all ranks."""
        answers = self._ask("emulate", name, *details)
        facts = dict(answers[0][1])
        counts = [each["evaluations"] for _, each in answers]
        facts["evaluations"] = {kind: sum(c[kind] for c in counts) for kind in counts[0]}
        return np.concatenate([gradient for gradient, _ in answers]), facts

    def time(self, name: str, calls: int) -> tuple[float, float]:
        """Seconds per call times calls, of the slowest process; seconds of work of all."""
        walls, works = zip(*self._ask("time", name, calls), strict=True)
        return max(walls), sum(works)

    def machine(self, **details: Any) -> planning.Machine:
        """As `benchmarks.worker.machine`, of the first of its processes."""
        return self._ask("calibrate", "", details)[0]

    def gradients(self, name: str, row: Row, devices: int) -> None:
        """Make something to time: as `benchmarks.worker.gradients`, in each of its processes."""
        self._ask("gradients", name, row, devices)

    def wires(self, **details: Any) -> dict[str, float]:
        """As `lp_jax.planning._calibrate.interconnect`, of its processes."""
        return self._ask("wires", "", details)[0]

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended already
                connection.send(None)
            connection.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, *order: Any) -> list[Any]:
        for connection in self._connections:
            connection.send(order)
        return [self._receive(connection) for connection in self._connections]

    def _receive(self, connection: Connection) -> Any:
        end = time.monotonic() + _PATIENCE
        while not connection.poll(0.5):
            self._check(end)
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError(
                f"a process of {self.kind} has ended; its message is above."
            ) from None

    def _accept(self, listener: Listener) -> Connection:
        end = time.monotonic() + _PATIENCE
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                self._check(end)

    def _check(self, end: float) -> None:
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"{self.kind} ended with exit code {code}; its message is above.")
        if time.monotonic() > end:
            self._process.kill()
            raise RuntimeError(f"{self.kind} said nothing for {_PATIENCE:.0f} s.")


def launcher() -> str | None:
    """The mpirun of this environment, or of the system."""
    return shutil.which(
        "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )


def why_no_mpi() -> str | None:
    for module in ("mpi4py", "mpi4jax"):
        if find_spec(module) is None:
            return f"no {module}; it is in the extra mpi: pip install -e '.[mpi]'"
    return None if launcher() else "no mpirun on PATH"
