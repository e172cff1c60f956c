"""Suite 7: whether the short loops within intervals of multigrid should be unrolled.

Training steps of `single`, two levels with coarsening factors 4 and 8, intervals looped and batched, as they are and with the
loop over an interval's layers written out.
"""

import argparse
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from jax import lax

import lp_jax
from benchmarks import report, single
from benchmarks.command import Field, Row, Suite, network_row, run, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import jax_threads

FACTORS = (4, 8)
_loop = lax.fori_loop


def _unrolled(lower: Any, upper: Any, body: Callable[..., Any], init: Any, **options: Any) -> Any:
    """`lax.fori_loop`, written out where it is as short as an interval."""
    short = isinstance(lower, int) and isinstance(upper, int) and upper - lower <= max(FACTORS)
    return _loop(lower, upper, body, init, **(options | {"unroll": True} if short else options))


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    """The baseline first: a scan."""
    network, *sizes = row
    train, _ = single.NETWORKS[network](*sizes)
    tell("compiling lax.scan")
    scanned = train(None)
    exact, facts = scanned.gradient, {"family": "scan", "threads": jax_threads(), "gradient_error": 0.0}
    contenders = [Contender(name="lax.scan", call=scanned, facts=facts | scanned.facts)]
    coarse_step = lp_jax.Rediscretize() if network == "gru" else lp_jax.Picard(sweeps=1)  # sweeps diverge there
    for factor, how, unrolled in itertools.product(FACTORS, ("loop", "vmap"), (False, True)):
        name = f"factor {factor}, {'looped' if how == 'loop' else 'batched'}{', unrolled' if unrolled else ''}"
        if not wanted(name, options):
            continue
        tell(f"compiling {name}")
        forward, adjoint = (
            lp_jax.MGRIT(coarsening=factor, iterations=k, coarse_step=coarse_step, storage="all", interval_map=how)
            for k in (2, 1)
        )
        with mock.patch.object(lax, "fori_loop", _unrolled) if unrolled else contextlib.nullcontext():
            steps = train((forward, adjoint))
        error = relative_error(steps.gradient, exact)
        facts = {"family": "ranks" if unrolled else "iterated", "threads": jax_threads(), "gradient_error": error}
        contenders.append(Contender(name=name, call=steps, facts=facts | steps.facts))
    return Field(contenders, [])


SUITE = Suite(
    name="unroll",
    title="Loops within intervals, as they are and unrolled",
    about=__doc__ or "",
    examples=[("", "all rows"), ("--quick", "tiny rows, to see that all works"), ("--rows dense,64,256,32", "one row")],
    sizes=("network", "width", "layers", "batch"),
    rows=[
        ("dense", 16, 256, 32),
        ("dense", 64, 256, 32),
        ("conv", 8, 64, 8),
        ("encoder", 64, 64, 4),
        ("gru", 16, 256, 16),
    ],
    quick_rows=[("dense", 4, 32, 4)],
    field=field,
    draw=functools.partial(report.panels, x="ms per step, × lax.scan, gradient error"),
    row=network_row(single.NETWORKS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
