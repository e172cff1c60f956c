"""The log of a run: its rows, oldest first."""

import json
from collections.abc import Callable
from typing import Any

from lp_jax._arrays._types import StrPath

Row = dict[str, Any]


class Log:
    """Rows of a run, each a flat dictionary of strings, numbers, booleans and None.

    Every row has ``kind`` ("train", "test", "warning", ...) and ``step``.

    Args:
        path: a file to which each row is appended as a line of JSON. A run that goes on after an interruption appends the steps
            after its checkpoint once more, so that the last row of a step is the one that counts.
        show: called with each row as it is written, to move a progress bar or to print a warning.

    Example:
        >>> import json
        >>> from lp_jax import train
        >>> log = train.Log(show=lambda row: print(json.dumps(row)))
        >>> log.write(kind="train", step=1, loss=0.7)  # as `fit` does
        {"kind": "train", "step": 1, "loss": 0.7}
        >>> log.of("train") == log.rows
        True
    """

    def __init__(
        self, path: StrPath | None = None, *, show: Callable[[Row], object] = lambda row: None
    ):
        self.path = path
        self.show = show
        self.rows: list[Row] = []

    def write(self, *, kind: str, step: int, **values: Any) -> None:
        """Append a row, with arrays of a single number as numbers, and show it."""
        numbers = {name: v.item() if hasattr(v, "item") else v for name, v in values.items()}
        self.rows.append({"kind": kind, "step": step, **numbers})
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
        self.show(self.rows[-1])

    def of(self, kind: str) -> list[Row]:
        """Return the rows of one kind, oldest first."""
        return [row for row in self.rows if row["kind"] == kind]
