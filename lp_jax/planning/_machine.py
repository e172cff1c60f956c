"""Times of a network's layers on a machine: measured by `calibrate`, estimated by `estimate`, or read from a file."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lp_jax._arrays import _check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of a network's layers on one worker by how many are evaluated at once, and of messages between workers.

    Attributes:
        at_once: numbers of layers at once, ascending; the times below are for these. The last one is what ``at_once="auto"``
            evaluates at once. With ``(1,)`` layers run one after another.
        forward: seconds of an evaluation of a batch of layers. A single layer takes what it takes in serial propagation.
        adjoint: seconds of the transpose for the state.
        gradient: seconds of the transpose for the parameters.
        newton: seconds of an iteration of Newton's method with full Jacobians; None if it was not measured.
        relaxation: time in relaxation relative to a sweep over as many layers, which also sums the states.
        latency: seconds until an empty message has arrived.
        bandwidth: bytes per second of a message, and of a sum over workers.
        state_bytes: bytes of the state.
        layer_bytes: bytes of a layer's parameters.
        kept_bytes: bytes of a layer's linearisation, without the state.
        examples: number of examples in the state; data parallelism divides it.
        overhead: part of a layer's time that does not shrink with the examples, from 0 to 1.
        name: name of the machine and the network.

    Example:
        >>> from lp_jax import planning
        >>> machine = planning.Machine(at_once=(1, 64), forward=(1e-5, 1e-5), adjoint=(2e-5, 2e-5), gradient=(1e-5, 1e-5))
        >>> machine.seconds("forward", 32), machine.seconds("forward", 128)  # a batch; two of the largest size measured
        (1e-05, 2e-05)
    """

    at_once: tuple[int, ...]
    forward: tuple[float, ...]
    adjoint: tuple[float, ...]
    gradient: tuple[float, ...]
    newton: tuple[float, ...] | None = None
    relaxation: float = 1.0
    latency: float = 0.0
    bandwidth: float = math.inf
    state_bytes: int = 0
    layer_bytes: int = 0
    kept_bytes: int = 0
    examples: int = 1
    overhead: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("at_once", *self.kinds):
            numbers = getattr(self, name)
            if not (
                isinstance(numbers, tuple)
                and numbers
                and all(_within(x, math.inf) and x > 0 for x in numbers)
            ):
                raise ValueError(f"{name} must be positive numbers; got {numbers!r}.")
            if len(numbers) != len(self.at_once):
                raise ValueError(
                    f"{name} needs a time for each number in at_once, {self.at_once}; got "
                    f"{numbers}."
                )
        if list(self.at_once) != sorted(set(self.at_once)):
            raise ValueError(f"at_once must be ascending; got {self.at_once}.")
        _check.integer("examples", self.examples, least=1)
        for name in (
            "relaxation",
            "overhead",
            "latency",
            "bandwidth",
            "state_bytes",
            "layer_bytes",
            "kept_bytes",
        ):
            value = getattr(self, name)
            most = 1.0 if name in ("relaxation", "overhead") else math.inf
            if not _within(value, most) or (name == "bandwidth" and value == 0):
                raise ValueError(f"{name} must be a number from 0 to {most:g}; got {value!r}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the fields with a time for each number in ``at_once``."""
        kinds = ("forward", "adjoint", "gradient")
        return kinds if self.newton is None else (*kinds, "newton")

    def seconds(self, kind: str, layers: int) -> float:
        """Return the seconds of a batch of layers: interpolated linearly, and above the largest size in batches of this size."""
        times = getattr(self, "forward" if kind == "linearise" else kind)
        sizes = self.at_once
        if times is None:
            raise NotImplementedError(
                f"{self.name or 'the machine'} has no times of Newton's method: "
                f"calibrate(newton=True)."
            )
        # `np.interp` is constant beyond the last size, and the factor makes it grow in proportion there.
        return float(np.interp(layers, sizes, times) * max(1.0, layers / sizes[-1]))

    @property
    def per_layer(self) -> tuple[float, float]:
        """Seconds of a layer in serial propagation: forward, and the further seconds of the gradient."""
        return self.forward[0], self.adjoint[0] + self.gradient[0]

    @property
    def linearised_bytes(self) -> int:
        """Bytes of the state that enters a layer, and of the layer's linearisation."""
        return self.state_bytes + self.kept_bytes

    def divided(self, parts: int) -> "Machine":
        """Return the machine with a part of the examples: n layers take as long as n / parts did, within ``overhead``."""
        if parts == 1:
            return self
        # A part of the time does not depend on the number of examples; the rest is in proportion to it.
        factor = self.overhead + (1 - self.overhead) / parts
        batches = () if self.at_once == (1,) else self.at_once  # layers one after another stay so
        times = {kind: getattr(self, kind) for kind in self.kinds}
        divided: dict[str, Any] = {
            kind: (t[0] * factor, *(t if batches else ())) for kind, t in times.items()
        }
        return dataclasses.replace(
            self,
            **divided,
            at_once=(1, *(size * parts for size in batches)),
            state_bytes=math.ceil(self.state_bytes / parts),
            kept_bytes=math.ceil(self.kept_bytes / parts),
            examples=math.ceil(self.examples / parts),
            overhead=self.overhead / factor,
        )

    def message(self, size: float) -> float:
        """Return the seconds until a message of ``size`` bytes has arrived."""
        return self.latency + size / self.bandwidth

    def save(self, path: Path | str) -> None:
        """Write a JSON file."""
        # JSON has no infinity, so an infinite bandwidth, the default, is left out.
        text = json.dumps(
            {k: v for k, v in dataclasses.asdict(self).items() if v != math.inf}, indent=1
        )
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Machine":
        """Read what `save` wrote. Any other file raises a `ValueError` with its name."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("it holds no object")
            fields: dict[str, Any] = {
                n: tuple(x) if isinstance(x, list) else x for n, x in stored.items()
            }
            return cls(**fields)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("Machine.__init__() ")
            raise ValueError(f"{path} is no machine file: {text}") from None


def _within(x: object, most: float) -> bool:
    return isinstance(x, int | float) and 0 <= x <= most
