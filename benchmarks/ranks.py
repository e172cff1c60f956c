"""Suite 3: two workers against one, on the processor: host devices of one process, MPI ranks, and serial propagation.

Convolutional rows are training steps of suite 1, dense rows loss and gradient of suite 2, rows of gru training steps of two
implicit gated recurrent units on top of each other, whose time steps are the layers. Serial propagation, on one
thread and on all, PyTorch and the workers live in processes of their own, one thread per worker; they are built
one after the other, wait without spinning, and are timed in turn, with memory kept from step to step. A time of several
ranks is that of the slowest.
"""

import argparse
import contextlib
import functools
import itertools
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
from matplotlib.figure import Figure

from benchmarks import report, resnet
from benchmarks.command import Field, Row, Suite, network_row, positive, run, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import cores
from benchmarks.settings import SETTINGS, counted_ratio
from lp_jax import planning

_PATIENCE = 300.0  # seconds for a group to start, to build or to run

_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
"""For the C library, in all processes: memory that a step gives back is kept for the next one. Otherwise a sixth of the time
goes into getting pages from the system, on all threads."""

_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""As only the main arena keeps all it has. Not where two devices would wait for it: dense layers on them take 1.1 to 1.2 instead
of 0.8 times as long as the scan."""


class Group:
    """Processes that compute together: one, or the ranks of an MPI job.

    Args:
        kind: as for `benchmarks.worker`.
        workers: number of devices or ranks.
        threads: of XLA's pool.
        keep_memory: whether the C library keeps what a step gives back.
    """

    def __init__(self, kind: str, *, workers: int, threads: int, keep_memory: bool = True):
        self.kind, self.workers, self.threads = kind, workers, threads
        key = secrets.token_bytes(16)
        devices = workers if kind == "devices" else 1
        flags = [f"--xla_force_host_platform_device_count={devices}"]
        if kind in ("devices", "ranks"):
            flags.append("--xla_cpu_multi_thread_eigen=false")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(flags),
            "NPROC": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "LP_JAX_BENCH_KEY": key.hex(),
            **(_KEEP_MEMORY if keep_memory else {}),
            **(_ONE_ARENA if keep_memory and kind != "devices" else {}),
            "MPI4JAX_NO_WARN_JAX_VERSION": "1",
        }
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            program = [sys.executable, "-m", "benchmarks.worker", kind, str(listener.address[1])]
            count = workers if kind == "ranks" else 1
            if kind == "ranks":
                root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
                program = [str(launcher()), *root, "--oversubscribe", "-n", str(count), *program]
            self._process = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL)
            connections = {}
            for _ in range(count):
                connection = self._accept(listener)
                number, self.pid = self._receive(connection)
                connections[number] = connection
        self._connections = [connections[i] for i in range(count)]

    def build(self, name: str, row: Row, quick: bool, convolution: str) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Make a contender; the gradient of all layers, and facts."""
        answers = self._ask("build", name, row, quick, convolution)
        gradients = [np.concatenate(leaves) for leaves in zip(*(g for g, _ in answers), strict=True)]
        return gradients, dict(answers[0][1])

    def time(self, name: str, calls: int) -> tuple[float, float]:
        """Seconds per call times calls, of the slowest process; seconds of work of all."""
        walls, works = zip(*self._ask("time", name, calls), strict=True)
        return max(walls), sum(works)

    def machine(self, **details: Any) -> planning.Machine:
        """As `benchmarks.calibration.machine`, of the first of its processes."""
        return self._ask("calibrate", "", details)[0]  # type: ignore[no-any-return]

    def gradients(self, name: str, row: Row, devices: int) -> None:
        """Make something to time: as `benchmarks.calibration.gradients`, in each of its processes."""
        self._ask("gradients", name, row, devices)

    def wires(self) -> planning.Interconnect:
        """What a message takes between its workers."""
        return self._ask("wires", "")[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the processes."""
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
            raise RuntimeError(f"a process of {self.kind} has ended; its message is above.") from None

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
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    """The baseline first: a scan on one thread."""
    network, _, layers, _ = row
    workers, left_out = options.workers, []
    entries = [("lax.scan, 1 thread", "scan", "jax", 1)]
    if cores() > 1:
        entries.append((f"lax.scan, {cores()} threads", "other scan", "jax", cores()))
    if network == "gru":
        entries += [("Serial, 1 thread", "exact", "jax", 1)]
    for name, (family, kind, label) in itertools.product(
        SETTINGS, (("iterated", "devices", "devices"), ("ranks", "ranks", "ranks"))
    ):
        entries.append((f"{name}, {workers} {label}", family, kind, 1 if kind == "ranks" else workers))
    if reason := why_no_mpi():
        left_out.append(("MPI ranks", reason))
        entries = [entry for entry in entries if entry[2] != "ranks"]
    if network != "dense":
        if reason := resnet.why_no_torch():
            left_out.append(("PyTorch", reason))
        else:
            entries += [(f"PyTorch, {n} thread{'s' * (n > 1)}", "torch", "torch", n) for n in (1, 2)]
    if find_spec("torchbraid") is None:
        left_out.append(("TorchBraid", "it is not installed; its measured times are in benchmarks/README.md"))
    groups: dict[tuple[str, int], Group] = {}
    contenders: list[Contender] = []
    exact = None

    def close() -> None:
        for group in groups.values():
            group.close()

    try:
        for name, family, kind, threads in entries:
            if exact is not None and not wanted(name, options):
                continue
            key = (kind, threads if kind == "jax" else 0)
            if key not in groups:
                tell(f"starting processes: {kind}")
                groups[key] = Group(kind, workers=workers, threads=cores() if kind == "torch" else threads)
            tell(f"building {name}")
            group, setting = groups[key], name.rsplit(", ", 1)[0]
            label = setting if setting in SETTINGS else name
            gradient, facts = group.build(label, row, options.quick, options.conv)
            exact = gradient if exact is None else exact
            facts |= {"family": family, "threads": threads, "gradient_error": relative_error(gradient, exact)}
            facts.setdefault("residual_norm", float("nan"))
            if setting in SETTINGS:
                facts["counted_ratio"] = counted_ratio(setting, layers, workers)

            def elsewhere(calls: int, group: Group = group, label: str = label) -> tuple[float, float]:
                return group.time(label, calls)

            contenders.append(Contender(name=name, elsewhere=elsewhere, facts=facts))
    except BaseException:
        close()
        raise
    return Field(contenders, left_out, close)


def why_no_mpi() -> str | None:
    """Why there are no ranks here, or None."""
    for module in ("mpi4py", "mpi4jax"):
        if find_spec(module) is None:
            return f"no {module}; it is in the extra mpi: pip install -e '.[mpi]'"
    return None if launcher() else "no mpirun on PATH"


_UNITS = {"conv": ("channels", "layers"), "dense": ("wide", "layers"), "gru": ("wide", "steps")}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=positive, metavar="N", default=2, help="devices, and ranks (default: 2)")
    parser.add_argument(
        "--conv",
        choices=resnet.FORMULATIONS,
        default="auto",
        help="formulation of the convolution (default: auto)",
    )


def draw(result: report.Result) -> Figure:
    """A panel of bars per row, one line of panels per network."""
    lines = [[row for row in result["rows"] if row["network"] == kind] for kind in _UNITS]
    lines = [sorted(rows, key=lambda row: (row["layers"], row["width"])) for rows in lines if rows]
    columns, most = max(map(len, lines)), [max(len(row["contenders"]) for row in rows) for rows in lines]
    fig = report.figure(result, width=4.2 + 4.6 * columns, height=1.4 + sum(1.0 + 0.5 * n for n in most))
    grid = fig.subplots(len(lines), columns, squeeze=False, height_ratios=most)
    for axes, rows in zip(grid, lines, strict=True):
        names = [c["name"] for c in rows[0]["contenders"]]
        for i, ax in enumerate(axes):
            if i >= len(rows):
                ax.set_visible(False)
                continue
            report.bars(ax, rows[i]["contenders"])
            network = rows[i]["network"]
            width, length = _UNITS[network]
            title = f"{network}, {rows[i]['width']} {width}, {rows[i]['layers']} {length}, batch {rows[i]['batch']}"
            report.dress(ax, title=title, x="ms per step, × lax.scan, gradient error", grid="x")
            ax.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), color=report.INK)
    return fig


SUITE = Suite(
    name="ranks",
    title="Layers on two workers of one processor",
    about=__doc__ or "",
    examples=[
        ("", "all rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows conv,4,256,50 gru,64,128,50 --rounds 30", "two rows, with more rounds"),
        ("--only identity thread", "the identity coarse step, and what is serial"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows=[
        ("conv", 3, 32, 50),
        ("conv", 8, 64, 50),
        ("conv", 4, 256, 50),
        ("dense", 64, 256, 32),
        ("dense", 128, 256, 32),
        ("dense", 64, 1024, 32),
        ("gru", 64, 128, 50),
        ("gru", 100, 128, 100),
        ("gru", 64, 1024, 50),
        ("gru", 100, 1024, 100),
    ],
    quick_rows=[("conv", 2, 32, 4), ("dense", 4, 32, 4), ("gru", 4, 32, 4)],
    field=field,
    draw=draw,
    add_options=_add_options,
    row=network_row(_UNITS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
