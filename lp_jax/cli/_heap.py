"""The C library's heap: memory that a step gives back is kept for the next one.

XLA takes the temporaries of a step from the C library. glibc may give them back to the system after each step, and the next
step then fetches every page anew: up to half of its time. Which programs suffer hangs on a few bytes, so a comparison of two
programs may measure nothing else.
"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_heap() -> None:
    """Ask glibc to keep what is given back; nothing where another C library is, or the user has settings of his own.

    From inside, by ``mallopt``: the variables that do the same are read before a process starts, and a command would have to
    start itself once more.
    """
    if any(name in os.environ for name in _OWN):
        return
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28), (_MMAP_MAX, 0)):
            mallopt(option, value)
