"""``--mpi`` and ``--distributed``: the processes of one run, their common decisions and their common end."""

import abc
import argparse
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lp_jax import MPIComm
from lp_jax._arrays._types import PyTree
from lp_jax.cli._call import Options
from lp_jax.cli._errors import CommandError, UsageError, UserError, describe
from lp_jax.train._ranks import done_once

T = TypeVar("T")

_AXES = ("layers", "data")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # set by mpirun, mpiexec and srun

_PATIENCE = 3.0  # seconds that a process waits for the others to fail as well


class Launch(abc.ABC):
    """One process of a run, as a context of the run."""

    number = 0
    size = 1

    def __init__(self, options: Options | argparse.Namespace) -> None:
        self._args = ["--debug"] if options.debug else []

    @property
    def is_root(self) -> bool:
        """Whether this process writes files and prints."""
        return self.number == 0

    @abc.abstractmethod
    def once(self, f: Callable[[], T]) -> T:
        """Call ``f()`` in process 0, and return its value or raise its `UserError` in every process."""

    @abc.abstractmethod
    def agree(self, signal: int | None) -> int | None:
        """Return the signal that any process received."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:  # noqa: B027
        """Pass an error on."""


class SingleProcess(Launch):
    """A process on its own."""

    def once(self, f: Callable[[], T]) -> T:
        return f()

    def agree(self, signal: int | None) -> int | None:
        return signal


class SeveralProcesses(Launch):
    """One of several processes.

    If all processes fail, the first one shows the error. If only some fail, each shows its error and ends the whole job,
    because the others would wait for it.
    """

    def once(self, f: Callable[[], T]) -> T:
        return done_once(f, self.is_root, self._broadcast, UserError)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        message, code = describe(error, self._args)
        if self.is_root:
            print(message, file=sys.stderr, flush=True)
        alike = self._all_failed()
        if not alike and not self.is_root:
            print(f"process {self.number}: {message}", file=sys.stderr, flush=True)
        if not alike:
            self._abort(code)
        raise SystemExit(code)

    @abc.abstractmethod
    def _broadcast(self, value: PyTree) -> PyTree:
        """Return the first process's value."""

    @abc.abstractmethod
    def _all_failed(self) -> bool:
        """Return whether every process failed."""

    @abc.abstractmethod
    def _abort(self, code: int) -> None:
        """End the job."""


class MPILaunch(SeveralProcesses):
    """The ranks of an MPI job."""

    def __init__(self, options: Options | argparse.Namespace) -> None:
        super().__init__(options)
        self._host = MPIComm().python_comm
        self.number, self.size = self._host.rank, self._host.size
        if self.size == 1:
            raise CommandError(
                "--mpi finds a single rank; start with mpirun -n 4 lp-jax train ... --mpi, where mpirun is that of the "
                "MPI that mpi4py uses (lp-jax info says which)."
            )

    def agree(self, signal: int | None) -> int | None:
        return max(self._host.allgather(signal or 0)) or None

    def _broadcast(self, value: PyTree) -> PyTree:
        return self._host.bcast(value)

    def _all_failed(self) -> bool:
        from mpi4py import MPI

        met = MPI.COMM_WORLD.Ibarrier()  # nothing else is sent over this communicator
        end = time.monotonic() + _PATIENCE
        while not (all_came := met.Test()) and time.monotonic() < end:
            time.sleep(0.01)
        return all_came

    def _abort(self, code: int) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)


class DistributedLaunch(SeveralProcesses):
    """The processes of ``jax.distributed``."""

    def __init__(self, options: Options | argparse.Namespace) -> None:
        super().__init__(options)
        address, process = options.coordinator, options.process
        number, count = _process(process) if process is not None else (None, None)
        if (address is None) != (process is None):
            raise UsageError("--coordinator and --process belong together; under Slurm or Open MPI leave out both.")
        sizes = mesh_sizes(options)
        # SIGTERM is ours: a training finishes its step and saves
        jax.config.update("jax_enable_preemption_service", False)
        # jax knows Slurm and older versions of Open MPI by themselves
        method = "mpi4py" if number is None and "OMPI_COMM_WORLD_RANK" in os.environ else None
        try:
            jax.distributed.initialize(address, count, number, cluster_detection_method=method)
        except (ValueError, RuntimeError) as error:
            raise CommandError(
                f"the processes did not find each other ({error}); start with srun, with mpirun, or each by hand with "
                "--coordinator HOST:PORT --process I/N."
            ) from None
        if sizes:
            set_cpu_devices(max(1, math.prod(sizes.values()) // (count or _started()[1])))
        self.number, self.size = jax.process_index(), jax.process_count()

    def agree(self, signal: int | None) -> int | None:
        return int(np.max(multihost_utils.process_allgather(np.int32(signal or 0)))) or None

    def _broadcast(self, value: PyTree) -> PyTree:
        words = np.frombuffer(pickle.dumps(value), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(words))))
        padded = words if self.is_root else np.zeros(size, np.uint8)
        return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes())

    def _all_failed(self) -> bool:
        from orbax.checkpoint import multihost

        try:
            multihost.get_barrier_sync_fn()(key="lp-jax-failed", timeout_ms=round(1000 * _PATIENCE))
        except RuntimeError:
            return False
        return True

    def _abort(self, code: int) -> None:
        os._exit(code)  # leaving properly would wait for the other processes


def launch(options: Options | argparse.Namespace) -> Launch:
    if options.mpi and options.distributed:
        raise UsageError("--mpi and --distributed are two engines; give one of them.")
    if not options.distributed and (options.coordinator or options.process):
        raise UsageError("--coordinator and --process are of --distributed.")
    if options.mpi:
        return MPILaunch(options)
    if options.distributed:
        return DistributedLaunch(options)
    name, count = _started()
    if count > 1:
        raise UsageError(
            f"this is one of {count} processes ({name}), which would all train the same into one folder; "
            "add --mpi or --distributed, or start one process."
        )
    return SingleProcess(options)


def mesh_sizes(options: Options | argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the axes in ``--devices`` or ``--mesh``; empty without these options."""
    if options.mesh is not None and options.devices is not None:
        raise UsageError("--devices N is short for --mesh layers=N; give one of the two.")
    if options.mesh is None:
        return {} if options.devices is None else {"layers": options.devices}
    sizes: dict[str, int] = {}
    for part in options.mesh.split(","):
        name, _, number = part.partition("=")
        if name not in _AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise UsageError(
                f"--mesh takes sizes of the axes layers and data, like layers=2,data=2; got {options.mesh!r}."
            )
        sizes[name] = int(number)
    return sizes


def set_cpu_devices(count: int) -> None:
    """Cut this machine's processor into devices, if JAX will run on it. Call this before the first use of JAX."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def _started() -> tuple[str, int]:
    """Return how many processes mpirun, mpiexec or srun started, and the variable that says so."""
    sizes = [(name, int(os.environ[name])) for name in _SIZES if os.environ.get(name, "1") != "1"]
    return sizes[0] if sizes else ("", 1)


def _process(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UsageError(f"--process takes I/N, this one of how many, like 0/2 and 1/2; got {text!r}.")
    return int(number), int(count)
