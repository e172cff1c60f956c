"""The work and memory of a solve: batches of layers, messages, bytes; and functions registered by the class of a solver.

`lp_jax.planning._solvers` registers the library's own solvers. Of a solver from outside, the program is read.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lp_jax._solvers._coarse_step import CoarseStep
from lp_jax._solvers._solver import WITHOUT_TOLERANCE, Solver
from lp_jax.planning._machine import Machine

# evaluations in a batch of each kind; a Newton iteration evaluates each layer, and its derivative
EVALUATIONS = {"forward": 1, "linearise": 1, "adjoint": 1, "gradient": 1, "newton": 2}


class Uncounted(Exception):
    """Raised if no function counts the work of a solver or of a part of it. Its program is read instead."""


class Event(NamedTuple):
    """Batches or messages of one worker, without synchronisation in between."""

    phase: str  # "sweep", "relaxation", "coarse solve", ...
    kind: str  # of the batches, or "message"
    times: int  # batches, one after the other, or messages
    layers: int  # in a batch; 0 for a message
    in_turn: bool = False  # whether the workers take turns; otherwise all work at the same time


@dataclasses.dataclass
class Schedule:
    """The work of a solve, or of a training step, on the busiest worker.

    Attributes:
        events: batches, and messages that a worker waits for, in the order in which they happen.
        reductions: sums and broadcasts over all workers.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> schedule = planning.training_step(lp_jax.Picard(sweeps=3), lp_jax.Serial(), 64)
        >>> schedule.depth("forward"), schedule.work("forward"), schedule.batches["forward", 64]
        (4, 256, 4)
    """

    events: list[Event] = dataclasses.field(default_factory=list, repr=False)
    reductions: int = 0

    @property
    def batches(self) -> collections.Counter[tuple[str, int]]:
        """How often each batch of independent evaluations is made, by its kind and its number of layers.

        Kinds: "forward"; "linearise", a forward evaluation for the sake of its transpose; "adjoint", the transpose for the
        state; "gradient", that for the parameters; "newton", an iteration of Newton's method.
        """
        batches: collections.Counter[tuple[str, int]] = collections.Counter()
        for event in self.events:
            if event.kind != "message":
                batches[event.kind, event.layers] += event.times
        return batches

    @property
    def states(self) -> int:
        """Messages of one state that a worker waits for, one after the other."""
        return sum(event.times for event in self.events if event.kind == "message")

    def __add__(self, other: "Schedule") -> "Schedule":
        return Schedule(self.events + other.events, self.reductions + other.reductions)

    def work(self, *kinds: str) -> int:
        """Number of evaluations of these kinds (all by default)."""
        return sum(n * layers * EVALUATIONS[kind] for (kind, layers), n in self._of(kinds))

    def depth(self, *kinds: str) -> int:
        """Number of evaluations of these kinds (all by default) that wait for each other."""
        return sum(n * EVALUATIONS[kind] for (kind, _), n in self._of(kinds))

    def _of(self, kinds: Sequence[str]) -> list[tuple[tuple[str, int], int]]:
        return [(batch, n) for batch, n in self.batches.items() if batch[0] in (kinds or EVALUATIONS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A forward or adjoint solve of a chain, which `count_work` counts by calling the methods here."""

    layers: int  # steps of the chain, on all workers
    workers: int = 1
    at_once: float = math.inf  # layers that are evaluated at once
    kept: bool = False  # whether the forward solve leaves linearisations of all layers to the adjoint
    adjoint: bool = False  # whether this is the adjoint solve, which gives the gradient too
    step: CoarseStep | None = None  # the coarse step, if the chain is a coarse level; None for layers
    span: int = 1  # layers that a step stands for
    unit: int = 1  # steps that must live on one worker
    phase: str = "sweep"  # name of the part of the solve that is counted
    in_turn: bool = False  # whether the workers do that part one after the other
    schedule: Schedule = dataclasses.field(default_factory=Schedule)  # what has been counted so far

    @property
    def mine(self) -> int:
        """Number of steps on the busiest worker, those that only pad its last unit included."""
        return math.ceil(math.ceil(self.layers / self.unit) / self.workers) * self.unit

    @property
    def prefix(self) -> int:
        """Messages of a prefix sum over the workers, one after the other."""
        return prefix_messages(self.workers)

    def during(self, phase: str) -> "Work":
        """Return this chain with the name of the phase that is counted next; it is added to the same schedule."""
        return dataclasses.replace(self, phase=phase)

    def steps(self, count: int, at_once: int) -> None:
        """Record ``count`` steps of the chain, one after the other, each at ``at_once`` places."""
        if self.step is None:
            self.evaluate(count, at_once)
        else:
            count_steps(self.step, self, count, at_once)

    def evaluate(self, count: int, at_once: int, *, gradient: bool = False) -> None:
        """Record ``count`` batches of ``at_once`` evaluations of a layer.

        In an adjoint solve these are transposes, of layers that are linearised again unless that was kept.
        """
        if not self.adjoint:
            self.add("forward", count, at_once)
            return
        self.add("adjoint", count, at_once)
        if self.step is not None or not self.kept:  # in one loop with the transpose
            self.add("linearise", count, at_once)
        if gradient:
            self.add("gradient", count, at_once)

    def evaluate_again(self, count: int, at_once: int) -> None:
        """Record forward evaluations for states that the adjoint solve lacks."""
        if self.adjoint and not self.kept:
            self.during("states again").add("forward", count, at_once)

    def add(self, kind: str, count: int, layers: int) -> None:
        """Record ``count`` batches of one kind, cut into ``at_once`` layers."""
        most = max(1, int(min(layers, self.at_once)))
        for times, size in ((count * (layers // most), most), (count, layers % most)):
            if times and size:
                self.schedule.events.append(Event(self.phase, kind, times, size, self.in_turn))

    def sent(self, states: int) -> None:
        """Record messages of a state between neighbours, one after the other."""
        if self.workers > 1 and states:
            self.schedule.events.append(Event(self.phase, "message", states, 0, self.in_turn))

    def last_evaluation(self) -> None:
        """Record the last evaluation of a solver with a state after every layer: it linearises, or forms the gradient."""
        if self.step is not None or not (self.adjoint or self.kept):
            return
        last = self.during("final sweep")
        last.sent(1)
        if not self.adjoint:
            last.add("forward", 1, self.mine)
            return
        if not self.kept:
            last.add("linearise", 1, self.mine)
        last.add("gradient", 1, self.mine)


def prefix_messages(workers: int) -> int:
    """Messages of a prefix sum over workers, one after the other."""
    return 0 if workers == 1 else 1 + max(0, workers - 2).bit_length()


@functools.singledispatch
def count_work(solver: Solver, work: Work) -> None:
    """Record the work of a solve, including its last sweep and the gradient."""
    raise Uncounted


@functools.singledispatch
def count_steps(coarse_step: CoarseStep, work: Work, count: int, at_once: int) -> None:
    """Record ``count`` coarse steps, one after the other, each in ``at_once`` intervals of ``work.span`` layers."""
    raise Uncounted


@functools.singledispatch
def held(solver: Solver, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    """Return the bytes of a training step on one worker: kept by the forward solve for the adjoint, and temporary arrays.

    By default they are those of a sweep over all layers. Register a function for a class of solvers with
    ``@planning.held.register``.

    Example:
        >>> from lp_jax import Solver, planning
        >>> class Lean(Solver):
        ...     iterations = 3
        >>> lean = lambda solver, machine, layers, workers: (machine.state_bytes, 2 * layers // workers * machine.state_bytes)
        >>> _ = planning.held.register(Lean, lean)
        >>> times = dict.fromkeys(("at_once", "forward", "adjoint", "gradient"), (1,))
        >>> planning.held(Lean(), planning.Machine(**times, state_bytes=8), 64, 4)
        (8, 256)
    """
    mine = math.ceil(layers / workers)
    if solver.keeps_states:
        kept = mine * machine.linearised_bytes
    else:
        kept = math.ceil(mine / solver.stride(layers)) * machine.state_bytes
    return kept, _OF_A_SWEEP * mine * machine.state_bytes


_OF_A_SWEEP = 3  # arrays of all states: points, what was stepped, cotangents; increments add up on the way


@functools.singledispatch
def with_effort(solver: Any, iterations: int) -> Any:
    """Return a solver with a fixed number of iterations and no tolerance.

    Register a function for a class of solvers that have no field ``iterations`` with ``@planning.with_effort.register``.

    Raises:
        TypeError: for a solver without a field ``iterations`` whose class is not registered.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> planning.with_effort(lp_jax.Picard(sweeps=32, rtol=1e-3), 5) == lp_jax.Picard(sweeps=5)
        True
    """
    names = [field.name for field in dataclasses.fields(solver)]
    if "iterations" not in names:
        raise TypeError(
            f"{type(solver).__name__} has no field `iterations`; register a function that sets their number with "
            "lp_jax.planning.with_effort.register."
        )
    without = {name: value for name, value in WITHOUT_TOLERANCE.items() if name in names}
    return dataclasses.replace(solver, iterations=iterations, **without)


def most_at_once(solver: Solver, auto: float) -> float:
    """Return the number of layers that are evaluated at once, given the number for "auto"."""
    return auto if solver.at_once == "auto" else float(solver.at_once)
