"""``--mpi`` and ``--distributed``: the processes of one run, their common decisions and their common end."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lp_jax import MPIComm
from lp_jax._arrays._types import PyTree
from lp_jax.cli._errors import CommandError, UsageError, UserError, describe, show
from lp_jax.train._ranks import done_once

T = TypeVar("T")

_SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)  # set by mpirun, mpiexec and srun
_MEETING = 300.0  # seconds that processes have to find each other
_PATIENCE = 3.0  # seconds that a process waits for the others to fail as well
_GO = "go"  # the answer of process 0 when all have come


def unchanged(value: T) -> T:
    """Return the value as it is: one process or device has nothing to send."""
    return value


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process of a run. The default is a process on its own."""

    number: int = 0  # of this process
    size: int = 1  # number of processes
    agree: Callable[[int | None], int | None] = unchanged  # the signal that any process received
    broadcast: Callable[[PyTree], PyTree] = unchanged  # the first process's value
    # whether every process fails within a few seconds
    all_failed: Callable[[], bool] = lambda: True
    abort: Callable[[int], object] = sys.exit  # ends the whole job with an exit code

    @property
    def is_root(self) -> bool:
        """Whether this process writes files and prints."""
        return self.number == 0

    def once(self, f: Callable[[], T]) -> T:
        """Call ``f()`` in process 0, and return its value or raise its `UserError` in every process."""
        return done_once(f, self.is_root, self.broadcast, UserError)


@contextlib.contextmanager
def launched(options: argparse.Namespace, args: Sequence[str]) -> Iterator[Launch]:
    """Join the processes of a run, yield this one, and end all together.

    If all fail, the first one shows the error. If only some fail, each shows its own and ends the job: others would wait.
    """
    launch = _launch(options)
    try:
        yield launch
    except (Exception, KeyboardInterrupt) as error:
        message, code = describe(error, [*args, "--debug"] if options.debug else args)
        if launch.is_root:
            show(message)
        if not launch.all_failed():
            show("" if launch.is_root else f"process {launch.number}: {message}")
            launch.abort(code)
        raise SystemExit(code) from None


def _launch(options: argparse.Namespace) -> Launch:
    if options.mpi and options.distributed:
        raise UsageError("--mpi and --distributed are two engines; give one of them.")
    if not options.distributed and (options.coordinator or options.process):
        raise UsageError("--coordinator and --process require --distributed.")
    if options.mpi:
        return _mpi()
    if options.distributed:
        return _distributed(options)
    name, count = _started()
    if count > 1:
        raise UsageError(
            f"this is one of {count} processes ({name}), which would all train the same into one folder; "
            "add --mpi or --distributed, or start one process."
        )
    return Launch()


def _mpi() -> Launch:
    """Return this rank of an MPI job."""
    host = MPIComm().python_comm
    if host.size == 1:
        raise CommandError(
            "--mpi finds a single rank; start with mpirun -n 4 lp-jax train ... --mpi, where mpirun is that of the "
            "MPI that mpi4py uses (lp-jax info says which)."
        )
    from mpi4py import MPI

    def all_failed() -> bool:
        met = MPI.COMM_WORLD.Ibarrier()  # nothing else is sent over this communicator
        end = time.monotonic() + _PATIENCE
        while not (all_came := met.Test()) and time.monotonic() < end:
            time.sleep(0.01)
        return all_came

    return Launch(
        host.rank,
        host.size,
        lambda signal: max(host.allgather(signal or 0)) or None,
        host.bcast,
        all_failed,
        MPI.COMM_WORLD.Abort,
    )


def _distributed(options: argparse.Namespace) -> Launch:
    """Start ``jax.distributed``, and return this process of it."""
    address = options.coordinator
    process = options.process
    number = None
    count = None
    if (address is None) != (process is None):
        raise UsageError(
            "--coordinator and --process belong together; under Slurm or Open MPI leave out both."
        )
    if address is not None:
        parts = re.fullmatch(r"(\d{1,10})/(\d{1,10})", process)
        number, count = map(int, parts.groups()) if parts else (0, 0)
        if not number < count < 2**31:
            raise UsageError(
                f"--process takes I/N, this one of how many, like 0/2 and 1/2; got {process!r}."
            )
        _meet(address, number, count)
    sizes = mesh_sizes(options)
    # SIGTERM is ours: a training finishes its step and saves
    jax.config.update("jax_enable_preemption_service", False)
    # jax knows Slurm and older versions of Open MPI by themselves
    method = "mpi4py" if number is None and "OMPI_COMM_WORLD_RANK" in os.environ else None
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            cluster_detection_method=method,
            coordinator_bind_address=address,
        )
    except (ValueError, RuntimeError) as error:
        raise CommandError(
            f"the processes did not find each other ({error}); start with srun, with mpirun, or each by hand with "
            "--coordinator HOST:PORT --process I/N."
        ) from None
    if sizes:
        set_cpu_devices(max(1, math.prod(sizes.values()) // (count or _started()[1])))

    return Launch(
        jax.process_index(),
        jax.process_count(),
        lambda signal: int(multihost_utils.process_allgather(np.int32(signal or 0)).max()) or None,
        _broadcast,
        _all_failed,
        os._exit,  # leaving properly would wait for the other processes
    )


def _meet(address: str, number: int, count: int) -> None:
    """Wait for all processes at an address. Without it jax ends with a trace of its C++ where one does not come."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(
            f"--coordinator takes HOST:PORT, with a port from 1 to 65535; got {address!r}."
        )
    show(
        f"process {number} of {count} waits for the others at {address}, for {_MEETING:g} s at most"
    )
    try:
        family, *_, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        end = time.monotonic() + _MEETING
        answer = (
            _receive(family, where, count, end)
            if number == 0
            else _come(where, f"{number}/{count}", end)
        )
    except (OSError, UnicodeError) as error:
        raise CommandError(f"--coordinator {address} cannot be used: {error}.") from None
    if answer != _GO:
        raise CommandError(f"the processes did not find each other at {address}: {answer}.")


def _receive(family: int, where: Any, count: int, end: float) -> str:
    """Return "go" when all other processes have come, and tell them."""
    missing = {f"{i}/{count}" for i in range(1, count)}
    come = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(where, family=family, backlog=count))
        while missing:
            server.settimeout(max(0.1, end - time.monotonic()))
            try:
                other = stack.enter_context(server.accept()[0])
            except TimeoutError:
                return f"{', '.join(sorted(missing))} did not come"
            other.settimeout(5.0)
            with contextlib.suppress(OSError):  # a stranger, or one that has left
                name = other.recv(64).decode(errors="replace")
                if name in missing:
                    missing.remove(name)
                    come.append(other)
                else:
                    other.sendall(
                        f"{name} is there already, or is none of {count} processes".encode()
                    )
        for other in come:
            other.sendall(_GO.encode())
    return _GO


def _come(where: Any, name: str, end: float) -> str:
    """Return what process 0 answers."""
    while True:
        try:
            with socket.create_connection(
                where[:2], timeout=max(0.1, end - time.monotonic())
            ) as first:
                first.sendall(name.encode())
                return (
                    first.recv(200).decode(errors="replace")
                    or "process 0 has ended, or has begun without this one"
                )
        except OSError as error:
            if time.monotonic() > end:
                return f"process 0 did not come ({error})"
            time.sleep(0.1)


def _broadcast(outcome: tuple[Any, UserError | None]) -> tuple[Any, UserError | None]:
    """The first process's value and error, as JSON: what comes from another process is data, and runs nothing."""
    value, error = outcome
    text = json.dumps(
        [value, None if error is None else [isinstance(error, UsageError), str(error)]]
    )
    words = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(words))))
    padded = words if jax.process_index() == 0 else np.zeros(size, np.uint8)
    value, error = json.loads(
        np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()
    )
    return value, None if error is None else (UsageError if error[0] else CommandError)(error[1])


def _all_failed() -> bool:
    from orbax.checkpoint import multihost

    try:
        multihost.get_barrier_sync_fn()(key="lp-jax-failed", timeout_ms=round(1000 * _PATIENCE))
    except RuntimeError:
        return False
    return True


def check_memory(what: str, needed: float) -> None:
    """Refuse what needs more bytes than this machine has."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise CommandError(
            f"{what}: this takes at least {needed / 2**30:,.0f} GiB of memory, and this machine has {there / 2**30:,.1f}."
        )


def mesh_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the axes in ``--devices`` or ``--mesh``; empty without these options."""
    if options.mesh is not None and options.devices is not None:
        raise UsageError("--devices N is short for --mesh layers=N; give one of the two.")
    if options.mesh is None:
        return {} if options.devices is None else {"layers": options.devices}
    if not re.fullmatch(
        r"(layers|data)=0*[1-9]\d*(,(?!\1)(layers|data)=0*[1-9]\d*)?", options.mesh
    ):
        raise UsageError(
            f"--mesh takes sizes of the axes layers and data, like layers=2,data=2; got {options.mesh!r}."
        )
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", options.mesh)}


def set_cpu_devices(count: int) -> None:
    """Cut this machine's processor into devices, if JAX will run on it. Call this before the first use of JAX."""
    check_memory(
        f"{count:,} devices", count * 2**17
    )  # a device of a CPU takes as much, with its thread
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def _started() -> tuple[str, int]:
    """Return how many processes mpirun, mpiexec or srun started, and the variable that says so."""
    for name in _SIZES:
        if (count := os.environ.get(name, "")).isdecimal() and int(count) > 1:
            return name, int(count)
    return "", 1
