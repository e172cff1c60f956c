"""The log of a run: flat rows, in memory and as JSON lines; and its progress on a terminal."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lp_jax._arrays._types import StrPath

Row = dict[str, Any]


class Log:
    """Rows of a run, each a flat dictionary of strings, numbers, booleans and None.

    Every row has ``kind`` ("train", "test", "probe", "warning", ...) and ``step``. With a path, each row is appended to
    the file as one line of JSON and flushed; numbers that are not finite become null. The rows of an existing file are read;
    an incomplete last line is left out. Another line that is not a row raises ValueError.

    Example:
        >>> from lp_jax import train
        >>> log = train.Log()
        >>> log.write(kind="train", step=1, loss=0.7)
        >>> log.write(kind="train", step=2, loss=0.6)
        >>> log.rewind(1)
        >>> log.rows
        [{'kind': 'train', 'step': 1, 'loss': 0.7}]
    """

    def __init__(self, path: StrPath | None = None):
        self.path = None if path is None else Path(path)
        self.rows: list[Row] = (
            list(read_rows(self.path)) if self.path is not None and self.path.exists() else []
        )

    def write(self, *, kind: str, step: int, **values: object) -> None:
        """Append a row."""
        row = {"kind": kind, "step": step}
        for name, value in values.items():
            value = value.item() if hasattr(value, "item") else value
            row[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self.rows.append(row)
        if self.path is not None:
            with self.path.open(
                "a", encoding="utf-8"
            ) as file:  # closing it hands the line to the system
                file.write(_line(row))

    def rewind(self, step: float) -> None:
        """Remove all rows after ``step``; a run that is resumed there writes them again. Those of earlier runs stay."""
        steps = [row["step"] for row in self.rows]
        begun = max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)
        self.rows[begun:] = [row for row in self.rows[begun:] if row["step"] <= step]
        if self.path is not None and self.path.exists():
            scratch = self.path.with_name(self.path.name + ".new")
            scratch.write_text("".join(map(_line, self.rows)), encoding="utf-8")
            scratch.replace(self.path)  # atomic: if killed, the old file or the new one remains

    def of(self, kind: str) -> list[Row]:
        """Return the rows of one kind, oldest first."""
        return [row for row in self.rows if row["kind"] == kind]


def read_rows(path: StrPath) -> Iterable[Row]:
    """Yield the rows of a file of JSON lines, as `Log` does."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row["kind"], str) or not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                return
            raise ValueError(
                f"{path}, line {number}, is not a row of metrics: {line[:60]!r}."
            ) from None
        yield row


def unflat(prefix: str, row: Mapping[str, Any]) -> list[float]:
    """Return the values of the numbered columns that `measured` wrote; NaN for missing ones and for None."""
    numbered = {
        int(name[len(prefix) + 1 :]): row[name]
        for name in row
        if re.fullmatch(rf"{prefix}_\d+", name)
    }
    values = [numbered.get(number) for number in range(1, max(numbered, default=0) + 1)]
    return [math.nan if value is None else value for value in values]


def measured(prefix: str, norms: Iterable[float]) -> Row:
    """Return the measured residual norms as columns; ``{prefix}_1`` is that of the first iteration."""
    return {f"{prefix}_{number}": norm for number, norm in enumerate(norms, 1) if not norm < 0}


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


class Meter:
    """Display of a run. `fit` calls ``start``, then ``show`` and ``say``, and in any case ``stop``.

    A class that inherits from this one overrides the methods that it needs; the others do nothing.

    Example:
        >>> from lp_jax import train
        >>> class Losses(train.Meter):
        ...     def show(self, row):
        ...         print(row["step"], row["loss"])
        >>> Losses().show({"kind": "train", "step": 10, "loss": 0.5})  # fit(..., meter=Losses()) calls it
        10 0.5
        >>> bar = train.Bar("digits")  # or such a bar, with a title
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
    """A progress bar behind a title, on standard error or another console; outside a terminal, one line per evaluation."""

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
        if done < total and not self.console.is_terminal:
            self._print(f"{self.title}: compiling")
        self._progress.update(self._task, total=total, completed=done)
        self._progress.start()

    def show(self, row: Row) -> None:
        """Move the bar to the row's step and show its main numbers."""
        kind = row["kind"]
        names = {"train": "loss", "test": "test loss"}
        if kind == "test" and row.get("accuracy") is not None:
            self._latest["test accuracy"] = f"{row['accuracy']:.1%}"
        elif kind in names and row["loss"] is not None:
            self._latest[names[kind]] = f"{row['loss']:.3g}"
        elif kind == "probe":
            self._latest["gradient error"] = f"{row['gradient_error']:.1e}"
        latest = "  ".join(f"{name} {value}" for name, value in self._latest.items())
        self._progress.update(self._task, completed=row["step"], latest=latest)
        if kind == "test" and not self.console.is_terminal:
            self._print(f"{self.title}  step {row['step']}  {latest}")

    def say(self, message: str) -> None:
        """Print above the bar."""
        self._print(f"{self.title}: {message}")

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
