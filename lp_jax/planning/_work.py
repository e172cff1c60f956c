"""The work of a solve: batches of layers, and messages."""

import collections
import dataclasses
from typing import NamedTuple


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

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> schedule = planning.training_step(lp_jax.Picard(sweeps=3), lp_jax.Serial(), 64)
        >>> schedule.depth("forward"), schedule.work("forward"), schedule.batches["forward", 64]
        (4, 256, 4)
    """

    events: list[Event] = dataclasses.field(
        default_factory=list, repr=False
    )  # in the order in which they happen
    reductions: int = 0  # sums and broadcasts over all workers

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
        return sum(waiting * layers for waiting, layers in self._evaluations(kinds))

    def depth(self, *kinds: str) -> int:
        """Number of evaluations of these kinds (all by default) that wait for each other."""
        return sum(waiting for waiting, _ in self._evaluations(kinds))

    def _evaluations(self, kinds: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the evaluations that wait for each other, and the layers in each, for batches of these kinds."""
        # An iteration of Newton's method evaluates each layer, and its derivative.
        return [
            (2 * times if kind == "newton" else times, layers)
            for (kind, layers), times in self.batches.items()
            if not kinds or kind in kinds
        ]


def prefix_messages(workers: int) -> int:
    """Messages of a prefix sum over workers, one after the other."""
    return 0 if workers == 1 else 1 + max(0, workers - 2).bit_length()
