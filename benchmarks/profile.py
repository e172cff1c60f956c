"""Where the time of a training step goes: the operations of one compiled program, most expensive first.

For a contender of suite `single`. JAX's profiler says when each operation ran; of one that contains others (a loop, a call)
the time of those is taken off. The compiled program says what an operation is, what it makes, and where in the
library's code it comes from.
"""

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import report, single
from benchmarks.command import Progress, add_numbers, add_only, bare_parser, network_row, wanted
from benchmarks.hlo import arrays, instructions, source
from benchmarks.manifest import cores, limit_jax_threads
from benchmarks.networks import NETWORKS
from benchmarks.training import trainer


class Event(NamedTuple):
    """That something ran: in nanoseconds, from any moment on."""

    name: str
    start: float
    end: float


class Cost(NamedTuple):
    """An operation's own time and how often it ran."""

    name: str
    seconds: float
    times: float


def own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Name and nanoseconds of each event of one thread, without the events inside it."""
    running: list[tuple[Event, float]] = []

    def over(until: float) -> Iterator[tuple[str, float]]:
        while running and running[-1][0].end <= until:
            event, inside = running.pop()
            length = event.end - event.start
            yield event.name, length - inside
            if running:
                running[-1] = running[-1][0], running[-1][1] + length

    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        yield from over(event.start)
        running.append((event, 0.0))
    yield from over(float("inf"))


def costs(threads: Iterable[Iterable[Event]], calls: int) -> list[Cost]:
    """Per call, most expensive first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for events in threads:
        for name, length in own_times(events):
            spent[name].append(length)
    operations = [
        Cost(name, sum(lengths) / calls / 1e9, len(lengths) / calls)
        for name, lengths in spent.items()
    ]
    return sorted(operations, key=lambda cost: -cost.seconds)


def by_kind(operations: Iterable[Cost]) -> list[Cost]:
    """Operations whose names differ in their number only, taken together."""
    kinds: dict[str, list[Cost]] = defaultdict(list)
    for cost in operations:
        kinds[re.sub(r"(\.\d+)+$", "", cost.name)].append(cost)
    summed = [
        Cost(kind, sum(c.seconds for c in some), sum(c.times for c in some))
        for kind, some in kinds.items()
    ]
    return sorted(summed, key=lambda cost: -cost.seconds)


def traced(call: Callable[[], Any], calls: int) -> list[list[Event]]:
    """The operations that ran in so many calls, by thread or stream."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    return [
        [
            Event(event.name, event.start_ns, event.start_ns + event.duration_ns)
            for event in line.events
            if any(name == "hlo_op" for name, _ in event.stats)
        ]
        for plane in data.planes
        for line in plane.lines
    ]


def table(operations: Sequence[Cost], program: str, most: int) -> str:
    """The most expensive operations; the rest as a sum."""
    known = instructions(program)
    total = sum(cost.seconds for cost in operations)
    cells = [["operation", "ms", "share", "times", "makes", "from"]]
    for cost in operations[:most]:
        makes, origin = (
            (arrays(known[cost.name]), source(known[cost.name])) if cost.name in known else ("", "")
        )
        numbers = f"{1e3 * cost.seconds:.3g}", f"{cost.seconds / total:.0%}", f"{cost.times:,.0f}"
        cells.append([cost.name, *numbers, makes[:60], _shorter(origin)])
    rest = total - sum(cost.seconds for cost in operations[:most])
    cells.append(
        [
            f"{max(0, len(operations) - most)} others",
            f"{1e3 * rest:.3g}",
            f"{rest / total:.0%}",
            "",
            "",
            "",
        ]
    )
    cells.append(["all threads together", f"{1e3 * total:.3g}", "", "", "", ""])
    return report.pipes(cells)


def _shorter(source: str) -> str:
    parts = [part for part in source.split("/") if part not in ("closed_call", "body", "jit(step)")]
    return "/".join(parts[-5:])


EXAMPLES = [
    ("", "a dense network"),
    ("--row gru,16,256,16 --kinds", "a recurrent one, by kinds of operations"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bare_parser("profile", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--row",
        type=network_row(NETWORKS),
        default=("dense", 64, 1024, 32),
        metavar="network,width,layers,batch",
        help="Sizes, as in suite single (default: dense,64,1024,32).",
    )
    about = (
        "Contenders with one of these in their names (default: lax.scan and sweeps to a tolerance)."
    )
    add_only(parser, about, ["lax.scan", "Picard to"])
    add_numbers(
        parser,
        ("--calls", 10, "Number of training steps (default: 10)."),
        ("--most", 12, "Number of operations shown (default: 12)."),
        ("--threads", cores(), "Threads of JAX on a CPU (default: all)."),
    )
    parser.add_argument("--kinds", action="store_true", help="Take operations of a kind together.")
    parser.add_argument(
        "--quick", action="store_true", help="Take two steps of a tiny row, to see that all works."
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.row, options.calls = ("dense", 8, 16, 4), 2
    limit_jax_threads(options.threads)
    network, width, layers, batch = options.row
    drawn = NETWORKS[network](width, layers, batch)
    entries = {"lax.scan": None, **single.pairs(network, layers)}
    chosen = {name: p for name, p in entries.items() if wanted(name, options)}
    if not chosen:
        parser.error(
            f"no contender has {' or '.join(options.only)} in its name; there are {', '.join(entries)}."
        )
    progress = Progress()
    for name, pair in chosen.items():
        progress(f"{name}: compiling")
        step = trainer(drawn, pair)
        progress(f"{name}: {options.calls} training steps")
        jax.block_until_ready(step())
        operations = costs(traced(step, options.calls), options.calls)
        operations = by_kind(operations) if options.kinds else operations
        progress.clear()
        print(
            f"\n{name}: {network}, width {width}, {layers} layers, batch {batch}; per training step\n"
        )
        print(table(operations, step.program, options.most), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
