"""``--mpi`` and ``--distributed``: the processes of one run, how they decide together and how they end together."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import click
import jax
import numpy as np
from jax._src.distributed import global_state  # the number of processes before devices are made, a barrier in time

from lp_jax.cli._last_words import last_words
from lp_jax.cli._sizes import mesh_sizes, set_cpu_devices
from lp_jax.train import Ranks

T = TypeVar("T")

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # set by mpirun, mpiexec and srun

_PATIENCE = 3.0  # seconds that a process waits for the others to fail as well


class Launch:
    """One process, on its own.

    A context: what leaves it as an exception is said by one process only, if all of them fail alike; a process that
    fails alone says so and ends the whole job, as the others would wait for it.
    """

    chief = True
    number = 0
    size = 1

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.debug = options["debug"]

    def once(self, f: Callable[[], T]) -> T:
        """``f()``, done by the chief; its value, or the `click.ClickException` that it raised, in every process."""
        return f()

    def agree(self, signal: int | None) -> int | None:
        """The signal that any process received."""
        return signal

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit) or self.size == 1:
            return
        message, code = last_words(error, debug=self.debug)
        if self.chief:
            print(message, file=sys.stderr, flush=True)
        alike = self._all_failed()
        if not alike and not self.chief:
            print(f"process {self.number}: {message}", file=sys.stderr, flush=True)
        if not alike:
            self._abort(code)
        raise SystemExit(code)

    def _all_failed(self) -> bool:
        """Whether every process comes here."""
        return True

    def _abort(self, code: int) -> None:
        """End the job."""


class MPILaunch(Launch):
    """The ranks of an MPI job."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._ranks = Ranks.grid()
        self.number, self.size = self._ranks.world.rank, self._ranks.world.size
        self.chief = self.number == 0
        if self.size == 1:
            raise click.ClickException(
                "--mpi finds a single rank; start with mpirun -n 4 lp-jax train ... --mpi, where mpirun is that of the "
                "MPI that mpi4py uses (lp-jax info says which)."
            )

    def once(self, f: Callable[[], T]) -> T:
        return self._ranks.once(f)

    def agree(self, signal: int | None) -> int | None:
        return self._ranks.agree(signal)

    def _all_failed(self) -> bool:
        from mpi4py import MPI

        return _within(_PATIENCE, MPI.COMM_WORLD.Ibarrier().Test)  # nothing else is sent over this communicator

    def _abort(self, code: int) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)


class DistributedLaunch(Launch):
    """The processes of ``jax.distributed``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        address, process = options["coordinator"], options["process"]
        number, count = _process(process) if process is not None else (None, None)
        if (address is None) != (process is None):
            raise click.UsageError(
                "--coordinator and --process belong together; under Slurm or Open MPI leave out both."
            )
        sizes = mesh_sizes(options)
        # SIGTERM is ours: a training finishes its step and saves
        jax.config.update("jax_enable_preemption_service", False)
        # jax knows Slurm and older versions of Open MPI by themselves
        method = "mpi4py" if number is None and "OMPI_COMM_WORLD_RANK" in os.environ else None
        try:
            jax.distributed.initialize(address, count, number, cluster_detection_method=method)
        except (ValueError, RuntimeError) as error:
            raise click.ClickException(
                f"the processes did not find each other ({error}); start with srun, with mpirun, or each by hand with "
                "--coordinator HOST:PORT --process I/N."
            ) from None
        if sizes:
            set_cpu_devices(max(1, math.prod(sizes.values()) // global_state.num_processes))
        self.number, self.size = jax.process_index(), jax.process_count()
        self.chief = self.number == 0

    def once(self, f: Callable[[], T]) -> T:
        from jax.experimental import multihost_utils

        def tell(text: str | None) -> str:
            words = np.frombuffer((text or "").encode(), np.uint8)
            size = int(multihost_utils.broadcast_one_to_all(np.int32(len(words))))
            padded = words if self.chief else np.zeros(size, np.uint8)
            return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).decode()

        if not self.chief:
            outcome = json.loads(tell(None))
            if "message" in outcome:
                raise click.ClickException(outcome["message"])
            return outcome["value"]
        try:
            value = f()
        except click.ClickException as error:
            tell(json.dumps({"message": error.format_message()}))
            raise
        tell(json.dumps({"value": value}))
        return value

    def agree(self, signal: int | None) -> int | None:
        from jax.experimental import multihost_utils

        return int(np.max(multihost_utils.process_allgather(np.int32(signal or 0)))) or None

    def _all_failed(self) -> bool:
        client: Any = global_state.client
        try:
            client.wait_at_barrier("lp-jax-failed", round(1000 * _PATIENCE))
        except RuntimeError:
            return False
        return True

    def _abort(self, code: int) -> None:
        os._exit(code)  # leaving properly would wait for the other processes


def launch(options: Mapping[str, Any]) -> Launch:
    """Meet the other processes, if there are to be any.

    Raises:
        click.UsageError: for options that contradict each other.
        click.ClickException: where the other processes are not found.
    """
    if options["mpi"] and options["distributed"]:
        raise click.UsageError("--mpi and --distributed are two engines; give one of them.")
    if not options["distributed"] and (options["coordinator"] or options["process"]):
        raise click.UsageError("--coordinator and --process are of --distributed.")
    if options["mpi"]:
        return MPILaunch(options)
    if options["distributed"]:
        return DistributedLaunch(options)
    for name in _SIZES:
        if os.environ.get(name, "1") != "1":
            raise click.UsageError(
                f"this is one of {os.environ[name]} processes ({name}), which would all train the same into one folder; "
                "add --mpi or --distributed, or start one process."
            )
    return Launch(options)


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not (finished := done()) and time.monotonic() < end:
        time.sleep(0.01)
    return finished


def _process(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise click.UsageError(f"--process takes I/N, this one of how many, like 0/2 and 1/2; got {text!r}.")
    return int(number), int(count)
