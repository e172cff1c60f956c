"""Counts in a program that XLA compiled for an accelerator: what it launches, moves and multiplies, and how long that would take.

From two texts: the optimised program, which says what each kernel reads, writes and computes, and how often its loop turns
(`lp_jax.planning._hlo` reads it); and, for a GPU, the launch list that XLA dumps, which says what is launched by itself and
what in CUDA graphs.

Not counted: what stays in a cache between two kernels, kernels side by side, and what autotuning would choose. A buffer that a
kernel is given twice is read once. Of a slice only the slice is read, of an update only the update is written.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lp_jax.planning._hlo import ARRAY, COLLECTIVES, Instruction, Text, sizes

T = TypeVar("T")
Computation = dict[str, Instruction]
"""The instructions of a loop's body, a kernel, or the whole program, by name, in the order in which they run."""

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    *("while", "call", "async-start", "conditional"),  # what they run is counted
}
_SLICES = {"slice", "dynamic-slice", "gather"}


def operands(one: Instruction) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", one.rest[: _closing(one.rest)]))


def shape(one: Instruction) -> tuple[int, ...]:
    """Shape of the first array of its result."""
    first = ARRAY.search(one.type)
    return sizes(first[2]) if first else ()


def arrays(one: Instruction) -> str:
    """Its result, without layouts."""
    return re.sub(r"\{[^}]*\}", "", one.type)


def source(one: Instruction) -> str:
    """The operation of JAX that it is from; empty if the program does not say."""
    named = re.search(r'op_name="([^"]*)"', one.rest)
    return named[1] if named else ""


def root(body: Computation) -> Instruction:
    return next(one for one in body.values() if one.root)


def buffer(body: Computation, name: str) -> str:
    """The instruction whose buffer this is: what only renames is seen through."""
    while body[name].operation in ("bitcast", "opt-barrier"):
        name = operands(body[name])[0]
    return name


class Kernel(NamedTuple):
    """One launch."""

    name: str
    kind: str  # "product", "elementwise", "reduction", "copy", "slice" (copies one), "scalar", a collective's, a library's
    body: str  # where it is launched
    times: int
    nbytes: int
    flops: float
    products: tuple[tuple[int, ...], ...]  # batch, rows, columns, terms
    cycles: int  # of a TPU, by its compiler; of one launch

    def seconds(self, target: "Target") -> float:
        """Of one launch within a graph."""
        return target.graph_launch + self.nbytes / target.bandwidth + self.flops / target.flops


class Loop(NamedTuple):
    """A while loop."""

    body: str
    trips: int | None  # None: known only when it runs
    entered: int
    kernels: int  # of its body, inner loops aside


class Target(NamedTuple):
    """A device, as far as the model of time goes.

    Launch and bandwidth were fitted to 25 programs measured on an H200 (benchmarks/results/h200/program_run.md), 20 of which they
    tell to 20 %. Of a launch from the host there is no measurement.
    """

    bandwidth: float  # bytes per second
    flops: float  # per second, of small products in TF32
    graph_launch: float = 1.4e-6  # seconds of a kernel in a CUDA graph that has nothing to do
    launch: float = 2.5e-6  # of one that the host launches


class Launches(NamedTuple):
    """How kernels are launched."""

    alone: int  # one by one by the host
    graphs: int  # launches of CUDA graphs
    in_graphs: int  # kernels in these


class Program:
    """What a compiled program does.

    Args:
        text: the optimised program.
        launch_list: XLA's, after its last pass; None where there is none.

    A loop of unknown length counts once.
    """

    def __init__(self, text: str, launch_list: str | None = None):
        read = Text(text)
        self.computations = read.computations
        self.kernels: list[Kernel] = []
        self.loops: list[Loop] = []
        # collectives, and the kernels between their start and their end
        self.overlaps: list[tuple[str, int]] = []
        self.cycles = 0
        for where, one, times in read.executed():
            self.cycles += times * one.cycles
            if one.operation == "while":
                self.loops.append(Loop(one.attribute("body"), read.trips(one), times, 0))
            elif one.operation not in _FREE and not one.operation.endswith(("-done", "-update")):
                self.kernels.append(self._kernel(self.computations[where], one, where, times))
        launched = collections.Counter(kernel.body for kernel in self.kernels)
        self.loops = [loop._replace(kernels=launched[loop.body]) for loop in self.loops]
        for where in dict.fromkeys([read.entry, *(kernel.body for kernel in self.kernels)]):
            self._overlap(self.computations[where])
        self.launches = (
            None
            if launch_list is None
            else _launches(launch_list, [loop.trips for loop in self.loops])
        )

    @property
    def launched(self) -> int:
        """Number of kernels, loops unrolled."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def nbytes(self) -> int:
        return sum(kernel.times * kernel.nbytes for kernel in self.kernels)

    @property
    def flops(self) -> float:
        return sum(kernel.times * kernel.flops for kernel in self.kernels)

    @property
    def unknown(self) -> int:
        """Number of loops of unknown length."""
        return sum(loop.trips is None for loop in self.loops)

    def kinds(self) -> Mapping[str, int]:
        """Kernels of each kind."""
        return _counted((kernel.kind, kernel.times) for kernel in self.kernels)

    def products(self) -> Mapping[tuple[int, ...], int]:
        """How often each (batch, rows, columns, terms) is multiplied."""
        return _counted(
            (product, kernel.times) for kernel in self.kernels for product in kernel.products
        )

    def collectives(self) -> Mapping[str, int]:
        """Messages of each kind."""
        return {kind: times for kind, times in self.kinds().items() if kind in COLLECTIVES}

    def scatters(self) -> int:
        return sum(
            one.operation == "scatter"
            for body in self.computations.values()
            for one in body.values()
        )

    def seconds(self, target: Target) -> float:
        """By the model: a kernel takes its launch, its bytes and its products; one after another."""
        alone = 0 if self.launches is None else self.launches.alone
        total = sum(kernel.times * kernel.seconds(target) for kernel in self.kernels)
        return total + alone * (target.launch - target.graph_launch)

    def dearest(self, target: Target | None, count: int) -> Sequence[Kernel]:
        """The kernels that take longest, by the model; without a target, by the compiler's cycles."""

        def cost(one: Kernel) -> float:
            return one.times * (one.seconds(target) if target else one.cycles)

        return sorted(self.kernels, key=cost, reverse=True)[:count]

    def _overlap(self, body: Computation) -> None:
        names = list(body)
        for one in body.values():
            if (
                one.operation.endswith("-start")
                and one.operation.removesuffix("-start") in COLLECTIVES
            ):
                done = next((other for other in body.values() if one.name in operands(other)), one)
                between = names[names.index(one.name) + 1 : names.index(done.name)]
                self.overlaps.append(
                    (
                        one.operation.removesuffix("-start"),
                        sum(body[name].operation == "fusion" for name in between),
                    )
                )

    def _kernel(self, body: Computation, one: Instruction, where: str, times: int) -> Kernel:
        distinct = {buffer(body, operand) for operand in operands(one) if operand in body}
        read = sum(body[operand].nbytes for operand in distinct)
        kind, nbytes, flops, products = (
            one.operation.removesuffix("-start"),
            read + one.nbytes,
            0.0,
            (),
        )
        if one.operation == "fusion":
            inner = self.computations[one.attribute("calls")]
            kind, flops, products = _what(inner, one)
            nbytes = _moved(inner, [buffer(body, operand) for operand in operands(one)])
        elif one.operation == "dot":
            products = (_product(body, one),)
            kind, flops = "product", _flops(products)
        elif one.operation == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', one.rest)
            kind = target[1] if target else kind
        if one.nbytes <= 16 and kind in ("elementwise", "reduction", "copy"):
            kind = "scalar"
        return Kernel(one.name, kind, where, times, nbytes, flops, products, one.cycles)


def _counted(items: Iterable[tuple[T, int]]) -> Mapping[T, int]:
    """Sums by name, the largest first."""
    sums = collections.Counter[T]()
    for item, times in items:
        sums[item] += times
    return dict(sums.most_common())


def instructions(text: str) -> dict[str, Instruction]:
    """All instructions of a compiled program, by name."""
    computations = Text(text).computations
    return {name: one for body in computations.values() for name, one in body.items()}


def _closing(text: str) -> int:
    """Where the bracket ends that is open at the start."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i
    return len(text)


def _product(body: Computation, dot: Instruction) -> tuple[int, ...]:
    """Batch, rows, columns and terms of a product."""
    left, right = (shape(body[operand]) for operand in operands(dot)[:2])
    batches, terms = (sizes(dot.attribute(f"lhs_{kind}_dims")) for kind in ("batch", "contracting"))
    batch, summed = (math.prod(left[i] for i in axes) for axes in (batches, terms))
    rows, columns = math.prod(left) // (batch * summed), math.prod(right) // (batch * summed)
    return batch, rows, columns, summed


def _flops(products: Sequence[tuple[int, ...]]) -> float:
    return 2.0 * sum(math.prod(product) for product in products)


def _what(
    inner: Computation, fusion: Instruction
) -> tuple[str, float, tuple[tuple[int, ...], ...]]:
    """Kind, flops and products of a fused kernel."""
    products = tuple(_product(inner, one) for one in inner.values() if one.operation == "dot")
    operations = {one.operation for one in inner.values()} - _FREE
    moves = _SLICES | {"copy", "transpose", "reshape", "broadcast", "pad", "concatenate"}
    moves |= (
        {"compare", "add", "select", "subtract", "clamp", "convert"}
        if "dynamic-slice" in operations
        else set()
    )
    if products:
        kind = "product"
    elif operations <= moves and operations & _SLICES and "dynamic-update-slice" not in operations:
        kind = "slice"
    elif operations <= {"copy", "transpose", "broadcast"}:
        kind = "copy"
    else:
        kind = "reduction" if operations & {"reduce", "reduce-window"} else "elementwise"
    return kind, _flops(products), products


def _moved(inner: Computation, buffers: Sequence[str]) -> int:
    """Bytes that a fused kernel reads and writes.

    Numbers are computed where they are asked for: of what is sliced later, only the slices.
    """
    asked: dict[str, float] = collections.defaultdict(float)  # numbers of each instruction's result
    written = 0
    for one in _results(inner, root(inner)):
        updates = one.operation == "dynamic-update-slice"
        written += inner[operands(one)[1]].nbytes if updates else one.nbytes
        for name in operands(one)[1:] if updates else [one.name]:
            asked[name] = math.inf
    read: dict[str, float] = collections.defaultdict(float)
    for one in reversed(inner.values()):
        size = math.prod(shape(one))
        wanted = min(asked[one.name], size)
        if one.operation == "parameter":
            number = int(one.rest.partition(")")[0])
            buffer = buffers[number] if number < len(buffers) else one.name
            read[buffer] = max(read[buffer], wanted * one.nbytes / max(size, 1))
        for name in operands(one) if wanted else ():
            if name in inner:
                asked[name] += _asks(one, math.prod(shape(inner[name])), wanted / size)
    return round(sum(read.values())) + written


def _results(inner: Computation, one: Instruction) -> list[Instruction]:
    if one.operation == "tuple":
        return [result for operand in operands(one) for result in _results(inner, inner[operand])]
    return [inner[buffer(inner, one.name)]]


def _asks(one: Instruction, size: int, part: float) -> float:
    """How many of an operand's numbers a part of an instruction's result needs."""
    return part * (math.prod(shape(one)) if one.operation in _SLICES else size)


_NO_LAUNCH = {
    "AsyncStart",
    "AsyncDone",
    "PartitionId",
    "ReplicaId",
}  # what is started is in a line of its own


def _launches(text: str, trips: Sequence[int | None]) -> Launches:
    """From the launch list: indented lines are the bodies of loops and the kernels of graphs."""
    counts, turns = iter(trips), collections.Counter[str]()
    loops: list[tuple[int, int]] = []  # indentation and trips of the loops that we are in
    graph: tuple[int, int] | None = None
    condition: int | None = None
    previous = ("", 0)
    for line in text.splitlines():
        indent, words = len(line) - len(line.lstrip()), line.strip()
        if words in ("condition:", "body:"):
            condition = indent if words == "condition:" else None
            continue
        match = re.match(r"\d+: k(\w+)", words)
        if not match:
            continue
        kind = match[1]
        if kind in _NO_LAUNCH:
            continue
        while loops and indent <= loops[-1][0]:
            loops.pop()
        times = math.prod(turn for _, turn in loops)
        if condition is not None and indent > condition:
            continue  # the host knows how often the loop turns
        if graph is not None and indent > graph[0]:
            if not (kind == "Copy" and previous == ("DynamicSliceFusion", indent - 1)):
                turns["in_graphs"] += graph[1]
        elif kind == "While":
            graph = None
            loops.append((indent, next(counts, None) or 1))
        elif kind == "CommandBuffer":
            turns["graphs"] += times
            graph = (indent, times)
        elif not (kind == "Copy" and previous[0] == "DynamicSliceFusion" and indent > previous[1]):
            graph = None
            turns["alone"] += times
        previous = (kind, indent)
    return Launches(turns["alone"], turns["graphs"], turns["in_graphs"])
