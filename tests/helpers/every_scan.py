"""A plug-in for pytest that sends every ``jax.lax.scan`` through `lp_jax.parallel`, to run the tests of other libraries.

In a checkout of theirs: ``SOLVER=sweeps PYTHONPATH=path/to/lp_jax/tests/helpers python -m pytest -p every_scan tests``.
``SOLVER`` is "serial", "sweeps" or "default". At the end it prints how many scans were solved, and why others were not.
"""

import collections
import os

import jax

import lp_jax
from lp_jax import _parallel

SOLVERS = {"serial": lp_jax.Serial(), "default": None, "sweeps": lp_jax.Picard(sweeps=64, rtol=1e-6, fallback=True)}
SOLVER = SOLVERS[os.environ.get("SOLVER", "serial")]
COUNTS: collections.Counter = collections.Counter()

plain, solve, decide = jax.lax.scan, _parallel.scan, _parallel._Rules._decide
inside = []


def counted(*args, **kwargs):
    out = solve(*args, **kwargs)
    COUNTS["solved"] += 1
    return out


def watched(self, eqn, parts):
    about, solvers = decide(self, eqn, parts)
    if solvers is None:
        COUNTS[about.takes] += 1
    return about, solvers


def scan(f, init, xs=None, length=None, reverse=False, unroll=1, _split_transpose=False):
    options = {"length": length, "reverse": reverse, "unroll": unroll, "_split_transpose": _split_transpose}
    if inside or isinstance(length, jax.core.Tracer):
        return plain(f, init, xs, **options)
    inside.append(1)
    try:
        return lp_jax.parallel(lambda init, xs: plain(f, init, xs, **options), solver=SOLVER)(init, xs)
    finally:
        inside.pop()


_parallel.scan, _parallel._Rules._decide, jax.lax.scan = counted, watched, scan


def pytest_sessionfinish(session, exitstatus):
    print("\nscans:", COUNTS.most_common())
