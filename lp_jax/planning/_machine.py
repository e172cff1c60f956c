"""Times of a network's layers on a machine, measured by `calibrate` or read from a file."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lp_jax.planning._work import KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of a network's layers on one worker by how many are evaluated at once, and of messages between workers.

    The time of a batch, as a function of the number of layers in it, decides which solver is fast. While it stays the same,
    further layers at once are free.

    Attributes:
        at_once: numbers of layers at once, ascending; the times below are for these.
        forward: seconds of an evaluation of a batch of layers.
        linearise: seconds of an evaluation that keeps what the transpose needs.
        adjoint: seconds of the transpose for the state.
        gradient: seconds of the transpose for the parameters.
        newton: seconds of an iteration of Newton's method with full Jacobians; None if it was not measured.
        serial: seconds of a layer in serial propagation: forward, and the further seconds of the gradient. None takes the times
            of a single layer above.
        relaxation: seconds of a layer within an interval of multigrid (forward, adjoint, gradient); None takes the times of
            serial propagation.
        interval: overhead per interval (forward, adjoint, gradient), in seconds; None for no overhead.
        across: time of layers of different intervals at once, as in relaxation, relative to a sweep over as many layers
            (forward, adjoint, gradient); None for equal times.
        auto: number of layers that ``at_once="auto"`` evaluates at once; None for all.
        fixed: seconds of a training step outside its layers.
        adding: seconds of adding a layer's gradient to another, for each further microbatch of a pipeline.
        update: seconds of an optimizer's update of a layer's parameters.
        latency: seconds until an empty message has arrived.
        bandwidth: bytes per second of a message.
        sum_bandwidth: bytes per second of a sum over workers, as of gradients; None takes ``bandwidth``.
        state_bytes: bytes of the state.
        layer_bytes: bytes of a layer's parameters.
        kept_bytes: bytes of a layer's linearisation, without the state.
        examples: number of examples in the state; data parallelism divides it.
        overhead: part of a layer's time that does not shrink with the examples, from 0 to 1.
        name: name of the machine and the network.

    Raises:
        ValueError: for numbers that contradict each other. The message names the field.

    Example:
        >>> from lp_jax import planning
        >>> machine = planning.Machine(
        ...     at_once=(1, 64), forward=(1e-5, 1e-5), linearise=(1e-5, 1e-5), adjoint=(2e-5, 2e-5), gradient=(1e-5, 1e-5)
        ... )
        >>> machine.seconds("forward", 32)
        1e-05
        >>> machine.seconds("forward", 128)  # two batches of the largest size measured
        2e-05
    """

    at_once: tuple[int, ...]
    forward: tuple[float, ...]
    linearise: tuple[float, ...]
    adjoint: tuple[float, ...]
    gradient: tuple[float, ...]
    newton: tuple[float, ...] | None = None
    serial: tuple[float, float] | None = None
    relaxation: tuple[float, float, float] | None = None
    interval: tuple[float, float, float] | None = None
    across: tuple[float, float, float] | None = None
    auto: int | None = None
    fixed: float = 0.0
    adding: float = 0.0
    update: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    sum_bandwidth: float | None = None
    state_bytes: int = 0
    layer_bytes: int = 0
    kept_bytes: int = 0
    examples: int = 1
    overhead: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        of_layers = ("at_once", *self.kinds, "serial", "relaxation", "across")
        self._require(lambda x: x > 0, "positive numbers", *of_layers, "bandwidth", "sum_bandwidth")
        sizes = ("state_bytes", "layer_bytes", "kept_bytes")
        others = ("interval", "fixed", "adding", "update", "latency", "overhead")
        self._require(lambda x: x >= 0, "numbers of at least 0", *others, *sizes)
        self._require(lambda x: x <= 1, "a part, at most 1", "overhead")
        self._require(lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1", "auto", "examples")
        if list(self.at_once) != sorted(set(self.at_once)):
            raise ValueError(f"at_once must be ascending; got {self.at_once}.")
        for kind in self.kinds:
            if len(getattr(self, kind)) != len(self.at_once):
                raise ValueError(
                    f"{kind} must have a time for each of the {len(self.at_once)} numbers in at_once; got {getattr(self, kind)}."
                )

    def _require(self, good: Callable[[float], bool], wanted: str, *names: str) -> None:
        """Refuse fields whose numbers are not ``wanted``; None is accepted where it is the default."""
        for name in names:
            value = getattr(self, name)
            numbers = (value,) if name not in _SEQUENCES else value if isinstance(value, Sequence) else ()
            if value is None and getattr(Machine, name, 0) is None:
                continue
            if not numbers or not all(isinstance(x, int | float) and good(x) for x in numbers):
                raise ValueError(f"{name} must be {wanted}; got {value!r}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of batches with known times."""
        return KINDS if self.newton is None else (*KINDS, "newton")

    def seconds(self, kind: str, layers: int) -> float:
        """Return the seconds of a batch of layers: interpolated linearly, and above the largest size in batches of this size.

        Raises:
            NotImplementedError: for Newton's method, if it was not measured.
        """
        times, sizes = getattr(self, kind), self.at_once
        if times is None:
            raise NotImplementedError(
                f"{self.name or 'the machine'} has no times of Newton's method: calibrate(newton=True)."
            )
        if layers <= sizes[0]:
            return times[0]
        if layers >= sizes[-1]:
            return times[-1] * layers / sizes[-1]
        above = next(i for i, size in enumerate(sizes) if size >= layers)
        part = (layers - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times[above - 1] + part * (times[above] - times[above - 1])

    def seconds_across(self, kind: str, layers: int) -> float:
        """Return the seconds of a batch of layers of different intervals. Unlike a sweep, it sums no states."""
        part = _of_kind(self.across, kind) if self.across and layers > 1 and kind in KINDS else 1.0
        return part * self.seconds(kind, layers)

    def in_a_row(self, kind: str) -> float:
        """Return the seconds of a layer in a row of layers one after another, as in relaxation."""
        forward, backward = self.per_layer
        part = self.adjoint[0] / (self.adjoint[0] + self.gradient[0])
        return _of_kind(self.relaxation or (forward, part * backward, (1 - part) * backward), kind)

    def row(self, kind: str) -> float:
        """Return the overhead of such a row of layers, in seconds."""
        return _of_kind(self.interval or (0.0, 0.0, 0.0), kind)

    @property
    def per_layer(self) -> tuple[float, float]:
        """Seconds of a layer in serial propagation: forward, and the further seconds of the gradient."""
        if self.serial is not None:
            return self.serial
        return self.forward[0], self.adjoint[0] + self.gradient[0]

    def divided(self, parts: int) -> "Machine":
        """Return the machine with one of ``parts`` equal parts of the examples.

        n layers at once then take as long as n / parts layers did. Below one layer, ``overhead`` limits how short this is.
        """
        if parts == 1:
            return self
        factor = self.overhead + (1 - self.overhead) / parts
        scaled: dict[str, Any] = {"examples": math.ceil(self.examples / parts), "overhead": self.overhead / factor}
        if self.auto == 1:
            scaled |= {kind: tuple(x * factor for x in getattr(self, kind)) for kind in self.kinds}
        else:
            scaled |= {"at_once": (1, *(n * parts for n in self.at_once))}
            scaled |= {} if self.auto is None else {"auto": self.auto * parts}
            scaled |= {kind: (getattr(self, kind)[0] * factor, *getattr(self, kind)) for kind in self.kinds}
        for name in ("serial", "relaxation", "interval"):
            if getattr(self, name) is not None:
                scaled[name] = tuple(x * factor for x in getattr(self, name))
        scaled |= {name: math.ceil(getattr(self, name) / parts) for name in ("state_bytes", "kept_bytes")}
        return dataclasses.replace(self, **scaled)

    def message(self, size: float) -> float:
        """Return the seconds until a message of ``size`` bytes has arrived."""
        return self.latency + size / self.bandwidth

    def save(self, path: Path | str) -> None:
        """Write a JSON file."""
        text = json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v != math.inf}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Machine":
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is not a machine file, in one line with its name.
            OSError: if the file cannot be read.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("it holds no object")
            fields: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in stored.items()}
            return cls(**fields)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("Machine.__init__() ")
            raise ValueError(f"{path} is no machine file: {text}") from None


_SEQUENCES = {"at_once", *KINDS, "newton", "serial", "relaxation", "interval", "across"}


def _of_kind(times: Sequence[float], kind: str) -> float:
    """Return one of the times (forward, adjoint, gradient); a linearisation takes that of a forward evaluation."""
    return times[max(0, KINDS.index(kind) - 1)]
