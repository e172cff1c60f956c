"""SIGINT (Ctrl-C) and SIGTERM while training: the step is finished first."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupted(RuntimeError):
    """A signal stopped the training after a finished step.

    Attributes:
        signal: number of the signal.
        step: number of steps done; with checkpoints, the last one is of this step.
    """

    def __init__(self, number: int, step: int, path: str | None):
        saved = f"saved to {path}" if path else "nothing is saved without checkpoints"
        super().__init__(f"{signal.Signals(number).name}: stopped after step {step}; {saved}")
        self.signal = number
        self.step = step


class Interrupts:
    """Context manager that stores the first SIGINT or SIGTERM in ``received``; a second one acts as usual.

    It does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
