"""The log of a run: its rows, oldest first."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


class Log:
    """Rows of a run, each a flat dictionary of strings, numbers, booleans and None.

    Every row has ``kind`` ("train", "test", "warning", ...) and ``step``.

    Args:
        show: called with each row as it is written. It may move a progress bar, print a warning, or append a line of JSON to a
            file; a run that goes on after an interruption then appends the steps after its checkpoint once more.

    Example:
        >>> import json
        >>> from lp_jax import train
        >>> log = train.Log(lambda row: print(json.dumps(row)))
        >>> log.write(kind="train", step=1, loss=0.7)  # as `fit` does
        {"kind": "train", "step": 1, "loss": 0.7}
        >>> log.of("train") == log.rows
        True
    """

    def __init__(self, show: Callable[[Row], object] = lambda row: None):
        self.show = show
        self.rows: list[Row] = []

    def write(self, *, kind: str, step: int, **values: Any) -> None:
        """Append a row, with arrays of a single number as numbers, and show it."""
        numbers = {name: v.item() if hasattr(v, "item") else v for name, v in values.items()}
        self.rows.append({"kind": kind, "step": step, **numbers})
        self.show(self.rows[-1])

    def of(self, kind: str) -> list[Row]:
        """Return the rows of one kind, oldest first."""
        return [row for row in self.rows if row["kind"] == kind]
