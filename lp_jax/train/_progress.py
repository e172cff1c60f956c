"""Display of a run's progress."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lp_jax.train._log import Row, unflat


class Meter:
    """Display of a run. `fit` calls ``start``, then ``show`` and ``say``, and in any case ``stop``.

    A class that inherits from this one overrides the methods that it needs; the others do nothing.
    """

    def start(self, done: int, total: int) -> None:
        """Called when the run starts, with ``done`` of ``total`` steps done."""

    def show(self, row: Row) -> None:
        """Called for every row that is logged."""

    def say(self, message: str) -> None:
        """Called with every message to the user."""

    def stop(self) -> None:
        """Called when the run ends, also by an error."""


class Silent(Meter):
    """A meter that shows nothing; warnings are still in the log."""


class Bar(Meter):
    """A progress bar on a terminal; elsewhere one line per evaluation.

    Args:
        title: text before the bar.
        console: where the bar is drawn; standard error if None.
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
        """Move the bar to the row's step and show its main numbers."""
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
