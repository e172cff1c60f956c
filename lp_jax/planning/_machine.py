"""Times of a network's layers on a machine, measured by `calibrate` or read from a file."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of a network's layers on one worker by how many are evaluated at once, and of messages between workers.

    The time of a batch, as a function of the number of layers in it, decides which solver is fast. While it stays the same,
    further layers at once are free.

    Attributes:
        at_once: numbers of layers at once, ascending; the times below are for these.
        forward: seconds of an evaluation of a batch of layers, also of one that keeps what the transpose needs.
        adjoint: seconds of the transpose for the state.
        gradient: seconds of the transpose for the parameters.
        newton: seconds of an iteration of Newton's method with full Jacobians; None if it was not measured.
        serial: seconds of a layer in serial propagation: forward, and the further seconds of the gradient. None takes the times
            of a single layer above.
        relaxation: seconds of a layer within an interval of multigrid (forward, adjoint, gradient); None takes the times of
            serial propagation.
        interval: overhead per interval (forward, adjoint, gradient), in seconds.
        across: time of layers of different intervals at once, as in relaxation, relative to a sweep over as many layers
            (forward, adjoint, gradient).
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
        >>> machine = planning.Machine(at_once=(1, 64), forward=(1e-5, 1e-5), adjoint=(2e-5, 2e-5), gradient=(1e-5, 1e-5))
        >>> machine.seconds("forward", 32)
        1e-05
        >>> machine.seconds("forward", 128)  # two batches of the largest size measured
        2e-05
    """

    at_once: tuple[int, ...]
    forward: tuple[float, ...]
    adjoint: tuple[float, ...]
    gradient: tuple[float, ...]
    newton: tuple[float, ...] | None = None
    serial: tuple[float, float] | None = None
    relaxation: tuple[float, float, float] | None = None
    interval: tuple[float, float, float] = (0.0, 0.0, 0.0)
    across: tuple[float, float, float] = (1.0, 1.0, 1.0)
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            wanted, good = _WANTED.get(field.name, _NOT_NEGATIVE)
            sequence = field.name in _SEQUENCES
            numbers = value if sequence and isinstance(value, tuple) else () if sequence else (value,)
            if not numbers or not all(isinstance(x, int | float) and good(x) for x in numbers):
                raise ValueError(f"{field.name} must be {wanted}; got {value!r}.")
        if list(self.at_once) != sorted(set(self.at_once)):
            raise ValueError(f"at_once must be ascending; got {self.at_once}.")
        for kind in self.kinds:
            if len(getattr(self, kind)) != len(self.at_once):
                raise ValueError(
                    f"{kind} must have a time for each of the {len(self.at_once)} numbers in at_once; got {getattr(self, kind)}."
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the fields with a time for each number in ``at_once``."""
        return _KINDS if self.newton is None else (*_KINDS, "newton")

    def seconds(self, kind: str, layers: int) -> float:
        """Return the seconds of a batch of layers: interpolated linearly, and above the largest size in batches of this size.

        Raises:
            NotImplementedError: for Newton's method, if it was not measured.
        """
        times, sizes = getattr(self, _field(kind)), self.at_once
        if times is None:
            raise NotImplementedError(
                f"{self.name or 'the machine'} has no times of Newton's method: calibrate(newton=True)."
            )
        return float(np.interp(layers, sizes, times) * max(1.0, layers / sizes[-1]))

    def seconds_across(self, kind: str, layers: int) -> float:
        """Return the seconds of a batch of layers of different intervals. Unlike a sweep, it sums no states."""
        part = self.across[_KINDS.index(_field(kind))] if layers > 1 and kind != "newton" else 1.0
        return part * self.seconds(kind, layers)

    def in_a_row(self, kind: str) -> float:
        """Return the seconds of a layer in a row of layers one after another, as in relaxation."""
        forward, backward = self.per_layer
        part = self.adjoint[0] / (self.adjoint[0] + self.gradient[0])
        times = self.relaxation or (forward, part * backward, (1 - part) * backward)
        return times[_KINDS.index(_field(kind))]

    def row(self, kind: str) -> float:
        """Return the overhead of such a row of layers, in seconds."""
        return self.interval[_KINDS.index(_field(kind))]

    @property
    def per_layer(self) -> tuple[float, float]:
        """Seconds of a layer in serial propagation: forward, and the further seconds of the gradient."""
        return self.serial or (self.forward[0], self.adjoint[0] + self.gradient[0])

    @property
    def linearised_bytes(self) -> int:
        """Bytes of the state that enters a layer, and of the layer's linearisation."""
        return self.state_bytes + self.kept_bytes

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


_KINDS = ("forward", "adjoint", "gradient")
_SEQUENCES = {"at_once", *_KINDS, "newton", "serial", "relaxation", "interval", "across"}

_Rule = tuple[str, Callable[[float], bool]]
_POSITIVE: _Rule = ("positive numbers", lambda x: x > 0)
_NOT_NEGATIVE: _Rule = ("numbers of at least 0", lambda x: x >= 0)
_COUNT: _Rule = ("an integer of at least 1", lambda x: isinstance(x, int) and x >= 1)
_WANTED: dict[str, _Rule] = {
    **dict.fromkeys(_SEQUENCES - {"interval"} | {"bandwidth", "sum_bandwidth"}, _POSITIVE),
    "auto": _COUNT,
    "examples": _COUNT,
    "overhead": ("a part, from 0 to 1", lambda x: 0 <= x <= 1),
}


def _field(kind: str) -> str:
    """Return the field with the times of a kind: an evaluation takes as long where it linearises."""
    return "forward" if kind == "linearise" else kind
