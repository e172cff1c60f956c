"""The parser of all commands."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from lp_jax.cli._errors import UsageError


def columns(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a list of names or calls, each with a text at its right."""
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return [f"  {name:<{width}}  {text}" for name, text in pairs]


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with example calls, (call, what it does), and which raises errors as `UsageError`."""

    def __init__(self, prog: str, about: str, examples: Sequence[tuple[str, str]]):
        super().__init__(
            prog=prog,
            description="\n".join([about, "", "examples:", *columns(examples)]),
            # argparse would fill the description as one paragraph, and this formatter keeps its lines.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add(
        self,
        name: str,
        kind: Callable[[str], Any],
        default: Any,
        about: str,
        *,
        metavar: str = "N",
    ) -> None:
        """Add an option with one value; ``kind`` reads it, and ``about`` is its help."""
        self.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=about)

    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage and exit; an exception becomes one line, as all errors do.
        raise UsageError(message, self.prog)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is wanted; got {text!r}")
    return int(text)
