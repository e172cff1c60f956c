"""What a run shows while it goes on."""

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lp_jax.train._log import Row, unflat


class Meter(Protocol):
    """Shows a run. `fit` calls ``start``, then ``show`` and ``say`` as things happen, and ``stop`` in any case."""

    def start(self, done: int, total: int) -> None:
        """``done`` of ``total`` steps are behind."""

    def show(self, row: Row) -> None:
        """A row was logged."""

    def say(self, message: str) -> None:
        """Something that the user should read."""

    def stop(self) -> None:
        """The run ended, well or not."""


class Silent:
    """A meter that shows nothing; what there is to say stays in the log."""

    def start(self, done: int, total: int) -> None:
        """Nothing."""

    def show(self, row: Row) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Bar:
    """A progress bar on a terminal; elsewhere one line per evaluation.

    Args:
        title: what stands before the bar.
        console: where it is drawn; standard error if None.
    """

    def __init__(self, title: str = "training", console: Console | None = None):
        self.console = Console(stderr=True) if console is None else console
        self.title = title
        self._latest: dict[str, str] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[latest]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=None, latest="compiling")

    def start(self, done: int, total: int) -> None:
        """Draw the bar."""
        self._progress.update(self._task, total=total, completed=done)
        self._progress.start()

    def show(self, row: Row) -> None:
        """Move the bar to the row's step, and show its main numbers."""
        self._latest |= _main_numbers(row)
        latest = "  ".join(f"{name} {value}" for name, value in self._latest.items())
        self._progress.update(self._task, completed=row["step"], latest=latest)
        if row["kind"] == "test" and not self.console.is_terminal:
            self._print(f"{self.title}  step {row['step']}  {latest}")

    def say(self, message: str) -> None:
        """Print above the bar."""
        self._print(f"{self.title}: {message}")

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _main_numbers(row: Row) -> dict[str, str]:
    if row["kind"] == "train":
        numbers = {"loss": f"{row['loss']:.3g}"} if row["loss"] is not None else {}
        measured = [norm for norm in unflat("forward_residual", row) if norm == norm]
        return numbers | ({"residual": f"{measured[-1]:.1e}"} if measured else {})
    if row["kind"] == "test":
        return {"test accuracy": f"{row['accuracy']:.1%}"}
    if row["kind"] == "probe":
        return {"gradient error": f"{row['gradient_error']:.1e}"}
    return {}
