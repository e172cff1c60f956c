"""Read the text of a program that XLA compiled (HLO): its instructions, and how often each one runs.

All readers of compiled programs start here: `compiled`, the counts of the benchmarks, and those of the tests. What compilers for
CPUs, GPUs and TPUs write behind an operation differs, so it is looked up by name.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
"""The bits of a number, which the name of its dtype says, and the sizes of an array."""
NAME = re.compile(r"%([\w.\-]+)")
_LINE = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\w+\[[\d,]*\](?:\{[^}]*\})?) ([\w\-]+)\((.*)$"
)


class Instruction(NamedTuple):
    """A line of the program."""

    root: str | None
    name: str
    type: str
    operation: str
    rest: str
    """The rest of the line: operands, a closing bracket and attributes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the instruction's result."""
        return sum(
            int(bits or 8) * math.prod(sizes(shape)) // 8
            for bits, shape in ARRAY.findall(self.type)
        )

    @property
    def cycles(self) -> int:
        """Cycles that a TPU's compiler estimates for it; 0 from other compilers, which estimate none."""
        return self.number(r'"estimated_cycles":"(\d+)"') or 0

    def number(self, pattern: str) -> int | None:
        """Return the number that a pattern finds in ``rest``; None if it finds none."""
        found = re.search(pattern, self.rest)
        return int(found[1]) if found else None

    def attribute(self, name: str) -> str:
        """Return the value of the attribute ``name``: the list within its braces, or the name after its percent sign."""
        match = re.search(rf"\b{name}=(?:\{{([\d,]*)\}}|%([\w.\-]+))", self.rest)
        return (match[1] or match[2] or "") if match else ""


def sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of a list, such as the sizes of an array."""
    return tuple(int(size) for size in text.split(",") if size)


class Text:
    """A compiled program: the instructions of each computation, by name, and the name of the one that is entered first."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                body = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            # XLA numbers the parts of long tuples in comments, which the pattern of a type does not know.
            elif match := _LINE.match(re.sub(r"/\*index=\d+\*/", "", line)):
                body[match[2]] = Instruction(*match.groups())

    def executed(
        self, name: str = "", times: int = 1, turns: Callable[[Instruction], int] = lambda loop: 1
    ) -> Iterator[tuple[str, Instruction, int]]:
        """Yield (computation, instruction, how often it runs), without the insides of kernels.

        A loop of unknown length makes as many turns as ``turns`` says. Of a conditional all branches are taken.
        """
        name = name or self.entry
        for one in self.computations[name].values():
            yield name, one, times
            if one.operation == "while":
                trips = self.trips(one)
                often = times * (turns(one) if trips is None else trips)
                yield from self.executed(one.attribute("body"), often, turns)
            elif one.operation in ("call", "async-start", "conditional"):
                for inner in NAME.findall(one.rest):
                    if inner in self.computations:
                        yield from self.executed(inner, times, turns)

    def trips(self, loop: Instruction) -> int | None:
        """Return how often a loop turns. XLA says it, or the index is compared with a constant; None if neither is found."""
        known = loop.number(r'known_trip_count":\{"n":"(\d+)"')
        condition = self.computations[loop.attribute("condition")]
        *_, test = condition.values()
        # Where XLA has not noted the number of turns, the condition may compare the index with a constant.
        if known is None and test.operation == "compare":
            for name in NAME.findall(test.rest):
                if name in condition and condition[name].operation == "constant":
                    known = condition[name].number(r"^(\d+)\)")
        return known
