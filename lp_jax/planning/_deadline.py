"""The time after which no measurement starts."""

import math
import time


class Deadline:
    """An end of measurements, and the names of those that it left out. A measurement that has begun is finished."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds
        self._left_out: dict[str, None] = {}

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - time.monotonic()

    def allows(self, what: str = "") -> bool:
        """Return whether a measurement may start. If not, its name is noted."""
        if self.left > 0:
            return True
        self._left_out |= {what: None}
        return False

    @property
    def left_out(self) -> list[str]:
        """Names of the measurements that did not start, each once."""
        return [*self._left_out]
