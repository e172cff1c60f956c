"""Programs as users have them, for tests of what XLA makes of them; see `conftest.QUICK`."""

import collections
import os
import re

from lp_jax.planning._hlo import COLLECTIVES, Text

OPTIONS = (
    {"xla_cpu_use_fusion_emitters": True}
    if "use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    else None
)


def compiled(lowered):
    """Compile by XLA's own settings."""
    return lowered.compile(compiler_options=OPTIONS)


def collectives(compiled) -> collections.Counter:
    """Of a compiled program: (kind, shape) of every collective of one array, times the trips of the loops around it.

    A loop of unknown length, such as a worker's turn in a relay, turns once.
    """
    counts: collections.Counter = collections.Counter()
    for _, one, times in Text(compiled.as_text()).executed():
        kind = one.operation.removesuffix("-start")
        if kind in COLLECTIVES and not one.type.startswith("("):
            counts[kind, re.sub(r"\{.*", "", one.type)] += times
    return counts
