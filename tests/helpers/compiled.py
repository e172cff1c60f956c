"""Programs as users have them, for tests of what XLA makes of them; see `conftest.QUICK`."""

import collections
import os
import re

OPTIONS = (
    {"xla_cpu_use_fusion_emitters": True}
    if "use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    else None
)


def compiled(lowered):
    """Compile by XLA's own settings."""
    return lowered.compile(compiler_options=OPTIONS)


COLLECTIVES = ("collective-permute", "all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def collectives(compiled) -> collections.Counter:
    """Of a compiled program: (kind, shape) of every collective, times the trips of the loops around it."""
    text = compiled.as_text()
    computations = {
        m[1]: m[2]
        for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }
    counts: collections.Counter = collections.Counter()

    def visit(name, times):
        for row in computations[name].splitlines():
            if m := re.search(r"= (\S+) (" + "|".join(COLLECTIVES) + r")(?:-start)?\(", row):
                counts[m[2], re.sub(r"\{.*", "", m[1])] += times
            if m := re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", row):
                trips = re.search(
                    r'known_trip_count":\{"n":"(\d+)"', row
                )  # without: a worker's turn in a relay
                visit(m[2], times * (int(trips[1]) if trips else 1))
            elif m := re.search(
                r"(?:to_apply|calls|branch_computations=\{|true_computation|false_computation)=?%?(.*)",
                row,
            ):
                for other in re.findall(r"%([\w.\-]+)", m[0]):
                    if other in computations and " fusion(" not in row:
                        visit(other, times)

    visit(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1], 1)
    return counts
