"""The C library's heap: memory that a step frees is kept for the next one.

XLA takes the temporaries of a step from the C library. glibc may return them to the system after each step. The next step
then fetches every page anew, which takes up to half of its time. A few bytes decide whether a program suffers, so comparing
two programs may measure nothing else.
"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_heap() -> None:
    """Ask glibc to keep freed memory. Does nothing with another C library, or if the user has settings of their own.

    It calls ``mallopt``, because environment variables are read before a process starts: a command would have to start itself
    again.
    """
    if any(name in os.environ for name in _OWN):
        return
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28), (_MMAP_MAX, 0)):
            mallopt(option, value)
