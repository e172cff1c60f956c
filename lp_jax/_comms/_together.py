"""Ranks that end together: nobody waits for ever for one that has left."""

import atexit
import functools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_HERE, _LEFT = b"\0", b"\1"

patiences: list[float] = []  # of all communicators; when this rank ends, it waits for the shortest


def marks(
    comm: "Intracomm", mine: bytes, patience: float, *, until: bytes | None = None
) -> tuple[dict[int, bytes], list[int]]:
    """Send a mark to all other ranks; return theirs, and who sent none in time. Others than ``until`` are passed over."""
    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    # Sends do not block, because a rank that has ended would never receive.
    sent = [comm.Isend([bytearray(mine), 1], dest=rank) for rank in others]
    found: dict[int, bytes] = {}
    deadline, pause = time.monotonic() + patience, 1e-4
    while len(found) < len(others) and time.monotonic() < deadline:
        for rank in others:
            # `Iprobe` asks for a message without waiting for it.
            while rank not in found and comm.Iprobe(source=rank):
                got = bytearray(1)
                comm.Recv([got, 1], source=rank)
                if until is None or bytes(got) == until:
                    found[rank] = bytes(got)
        # Pauses grow, so that waiting takes no processor time from ranks on the same host.
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    for request in sent:
        # `Test` lets MPI free a request that is done; others are left to the end of the job.
        request.Test()
    return found, [rank for rank in others if rank not in found]


def meet(comm: "Intracomm", patience: float) -> None:
    """Wait until all ranks are here; refuse where some have left, or do not come in time."""
    # A rank that has ended sent `_LEFT`, which arrives here in the place of `_HERE`.
    found, missing = marks(comm, _HERE, patience)
    left = [rank for rank, mark in found.items() if mark == _LEFT]
    if left:
        raise RuntimeError(
            f"rank {comm.Get_rank()} needs all ranks for a solve, and ranks {left} have ended."
        )
    if missing:
        raise RuntimeError(
            f"rank {comm.Get_rank()} waited {patience:g} s for ranks {missing} to come to a solve. "
            f"Every rank must make the same "
            "solves in the same order. MPIComm(patience=...) sets the time."
        )


def end_together(comm: "Intracomm") -> None:
    """When this rank ends, let it wait for the others, and end the whole job if they do not follow."""

    def leave() -> None:
        from mpi4py import MPI

        # The user finalised MPI, and no message can be sent any more.
        if MPI.Is_finalized():
            return
        patience = min(patiences)
        # Marks of earlier meetings may still be under way, so others than `_LEFT` are passed over.
        _, missing = marks(comm, _LEFT, patience, until=_LEFT)
        if missing:
            print(
                f"rank {comm.Get_rank()} has ended, and ranks {missing} have not within "
                f"{patience:g} s: they may wait for a "
                "message from it. The job ends. MPIComm(patience=...) sets the time; after an "
                "error code it is at most 1 s.",
                file=sys.stderr,
                flush=True,
            )
            MPI.COMM_WORLD.Abort(1)

    atexit.register(leave)


class _Exit(SystemExit):
    """The exception of `sys.exit` in the main thread. If nobody catches it, Python deletes it when no caller is left."""

    def __del__(self, frame: Any = sys._getframe, patiences: list[float] = patiences) -> None:
        # Without a calling frame nobody can catch the exception any more.
        if self.code and frame().f_back is None:
            # In this second, ranks that fail for the same reason may end by themselves.
            patiences.append(1.0)


@functools.cache
def watch_exit() -> None:
    """Let `end_together` know of `sys.exit` with an error code, which Python tells nobody."""

    def leave(status: object = None, /) -> NoReturn:
        # In another thread `sys.exit` ends only that thread.
        main = threading.current_thread() is threading.main_thread()
        raise (_Exit if main else SystemExit)(status)

    sys.exit = leave
