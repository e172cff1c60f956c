"""Commands keep the C library's heap: what a step frees is not fetched from the system again."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
from launch import output

import lp_jax

HEAP = Path(lp_jax.__file__).parent / "cli" / "_heap.py"  # by its path: nothing else is imported

PROGRAM = """
import ctypes, json, resource, runpy, sys
if sys.argv[1] == "kept":
    runpy.run_path(sys.argv[2])["keep_heap"]()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(2**26)  # 16,384 pages, or 32 large ones
    library.memset(block, 1, 2**26)
    library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([faults() for _ in range(5)]))
"""


def faults(how, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    return json.loads(output(sys.executable, "-c", PROGRAM, how, HEAP, env=environment))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
def test_pages_are_fetched_once_unless_the_user_has_settings():
    assert min(faults("as it is")) >= 32
    assert max(faults("kept")[1:]) <= 2
    assert min(faults("kept", MALLOC_MMAP_THRESHOLD_="65536")) >= 32
