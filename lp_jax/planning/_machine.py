"""What a network's layers take on a machine, as numbers: measured by `calibrate`, or read from a file."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("forward", "linearise", "adjoint", "gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of a network's layers on one worker by how many are evaluated at once, and of messages between workers.

    How the time of a batch grows with the layers in it decides everything: as long as it does not, layers at once are free.

    Attributes:
        at_once: numbers of layers at once, ascending, whose times follow.
        forward: seconds of an evaluation of so many layers at once.
        linearise: seconds of one that keeps what the transpose needs.
        adjoint: seconds of the transpose for the state.
        gradient: seconds of the transpose for the parameters.
        newton: seconds of an iteration of Newton's method with full Jacobians; None if nobody measured it.
        serial: seconds of a layer in serial propagation, forward and what the gradient adds; None for those of a single
            layer above.
        relaxation: seconds of a layer within an interval of multigrid, forward, its transpose for the state, and that for the
            parameters; None for those of serial propagation.
        interval: what an interval takes beside its layers, likewise; None for nothing.
        across: of layers of different intervals at once, as relaxation evaluates them, the time in parts of that of a sweep
            over as many, likewise; None for the same.
        auto: number of layers that ``at_once="auto"`` comes to; None for all.
        fixed: seconds of a training step beside its layers.
        adding: seconds of adding a layer's gradient to another, as each further microbatch of a pipeline has to.
        update: seconds of an optimizer's update of a layer's parameters.
        latency: seconds until an empty message has arrived.
        bandwidth: bytes per second of a message.
        sum_bandwidth: bytes per second of a sum over workers, as of gradients; None for that of messages.
        state_bytes: of the state.
        layer_bytes: of a layer's parameters.
        kept_bytes: of what a layer's linearisation holds beside the state.
        examples: number of them in the state; data parallelism divides it.
        overhead: part of a layer's time that does not shrink with the examples, from 0 to 1.
        name: of the machine and the network.

    Raises:
        ValueError: for numbers that do not belong together, naming the field.

    Example:
        >>> from lp_jax import planning
        >>> machine = planning.Machine(
        ...     at_once=(1, 64), forward=(1e-5, 1e-5), linearise=(1e-5, 1e-5), adjoint=(2e-5, 2e-5), gradient=(1e-5, 1e-5)
        ... )
        >>> machine.seconds("forward", 32)
        1e-05
        >>> machine.seconds("forward", 128)  # twice what was measured: two of these
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
        _numbers("at_once", self.at_once)
        if list(self.at_once) != sorted(set(self.at_once)):
            raise ValueError(f"at_once must be ascending; got {self.at_once}.")
        for kind in self.kinds:
            _numbers(kind, getattr(self, kind))
            if len(getattr(self, kind)) != len(self.at_once):
                raise ValueError(
                    f"{kind} must have a time for each of the {len(self.at_once)} numbers in at_once; got {getattr(self, kind)}."
                )
        _numbers("bandwidth", (self.bandwidth,))
        if self.sum_bandwidth is not None:
            _numbers("sum_bandwidth", (self.sum_bandwidth,))
        for name in ("serial", "relaxation", "across"):
            if getattr(self, name) is not None:
                _numbers(name, getattr(self, name))
        if self.interval is not None and not all(isinstance(x, int | float) and x >= 0 for x in self.interval):
            raise ValueError(f"interval must be numbers of at least 0; got {self.interval!r}.")
        for name in ("fixed", "adding", "update", "latency", "state_bytes", "layer_bytes", "kept_bytes", "overhead"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")
        if self.auto is not None and (not isinstance(self.auto, int) or self.auto < 1):
            raise ValueError(f"auto must be an integer of at least 1, or None; got {self.auto!r}.")
        if not isinstance(self.examples, int) or self.examples < 1:
            raise ValueError(f"examples must be an integer of at least 1; got {self.examples!r}.")
        if self.overhead > 1:
            raise ValueError(f"overhead must be a part, at most 1; got {self.overhead!r}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of batches whose times are known."""
        return KINDS if self.newton is None else (*KINDS, "newton")

    def seconds(self, kind: str, layers: int) -> float:
        """Of a batch of so many layers: linear between what was measured, in as many of the largest batches beyond.

        Raises:
            NotImplementedError: for Newton's method where nobody measured it.
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
        """Seconds of a batch of layers of different intervals: states of a sweep are summed up besides."""
        parts = dict(zip(KINDS, (self.across[0], *self.across), strict=True)) if self.across and layers > 1 else {}
        return parts.get(kind, 1.0) * self.seconds(kind, layers)

    def in_a_row(self, kind: str) -> float:
        """Seconds of a layer that is evaluated after the one before it, as in relaxation."""
        forward, backward = self.per_layer
        if self.relaxation is None:
            part = self.adjoint[0] / (self.adjoint[0] + self.gradient[0])
            times = forward, part * backward, (1 - part) * backward
        else:
            times = self.relaxation
        return dict(zip(KINDS, (times[0], *times), strict=True))[kind]

    def row(self, kind: str) -> float:
        """Seconds that a row of such layers takes beside them."""
        times = self.interval or (0.0, 0.0, 0.0)
        return dict(zip(KINDS, (times[0], *times), strict=True))[kind]

    @property
    def per_layer(self) -> tuple[float, float]:
        """Seconds of a layer in serial propagation, forward and what the gradient adds."""
        if self.serial is not None:
            return self.serial
        return self.forward[0], self.adjoint[0] + self.gradient[0]

    def divided(self, parts: int) -> "Machine":
        """The machine with one of so many equal parts of the examples.

        n layers at once then take what n / parts took; where that is less than one layer, ``overhead`` says how much less.
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
        """Seconds until so many bytes have arrived."""
        return self.latency + size / self.bandwidth

    def save(self, path: Path | str) -> None:
        """Write a JSON file."""
        text = json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v != math.inf}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Machine":
        """Read what `save` wrote.

        Raises:
            ValueError: for a file that is none, in one line with its name.
            OSError: for one that cannot be read.
        """
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it holds no object")
            if "layers" in found:  # what the field was called once
                found["at_once"] = found.pop("layers")
            if found.pop("looped", False):  # likewise
                found["auto"] = 1
            fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            return cls(**fields)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("Machine.__init__() ")
            raise ValueError(f"{path} is no machine file: {text}") from None


def _numbers(name: str, values: Any) -> None:
    good = isinstance(values, Sequence) and len(values) > 0
    if not good or not all(isinstance(x, int | float) and x > 0 for x in values):
        raise ValueError(f"{name} must be positive numbers; got {values!r}.")
