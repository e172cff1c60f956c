"""Loss and gradient of a dense ResNet, and what compiling them takes in time and memory.

N layers ``y + h tanh(y W + b)`` with h = 1/N, batch 32, random weights as at initialisation, loss 0.5 |y - target|^2;
intervals one after another, or as a batch.
"""

import argparse
import functools
import math
import sys
from typing import Any

import lp_jax
from benchmarks import networks, one_device
from benchmarks.command import Field, Row, Suite, run
from benchmarks.harness import Tell
from benchmarks.networks import SERIAL, Pair, two_one
from benchmarks.one_device import Entry

BATCH = 32

_SETTINGS: dict[str, dict[str, Any]] = {
    "2 levels, m = 4, Picard 1": {
        "levels": 2,
        "coarsening": 4,
        "coarse_step": lp_jax.Picard(sweeps=1),
    },
    "2 levels, m = 16, Picard 1": {
        "levels": 2,
        "coarsening": 16,
        "coarse_step": lp_jax.Picard(sweeps=1),
    },
    "3 levels, m = 4, injection": {
        "levels": 3,
        "coarsening": 4,
        "coarse_step": lp_jax.Rediscretize(),
    },
}

PAIRS: dict[str, Pair] = {
    "Serial": SERIAL,
    "MGRIT 1 level": (lp_jax.MGRIT(levels=1), lp_jax.MGRIT(levels=1)),
    **{
        f"{name}, {how}": two_one(**settings, at_once=at_once)
        for name, settings in _SETTINGS.items()
        for how, at_once in {"one at a time": 1, "all at once": math.inf}.items()
    },
}


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    layers, width = row
    network = networks.dense(width, layers, BATCH)
    entries = [
        Entry("lax.scan", network),
        *(Entry(name, network, pair) for name, pair in PAIRS.items()),
    ]
    return one_device.field(entries, options, tell, updates=False)


SUITE = Suite(
    name="dense",
    title="Loss and gradient of a dense ResNet, batch 32",
    about=__doc__ or "",
    examples=[
        ("", "all eight rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows 1024,64 4096,64 --rounds 30", "two rows, with more rounds"),
        ("--only Serial '1 level'", "what the library costs over a scan"),
    ],
    sizes=("layers", "width"),
    rows="64,16 256,16 1024,16 4096,16 64,64 256,64 1024,64 4096,64",
    quick_rows="32,4",
    field=field,
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
