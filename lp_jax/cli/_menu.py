"""The parser of all commands."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from lp_jax.cli._errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with example calls, (call, what it does), and which raises errors as `UsageError`."""

    def __init__(self, prog: str, about: str, examples: Sequence[tuple[str, str]]):
        width = max(len(call) for call, _ in examples)
        calls = (f"  {call:<{width}}  {what}" for call, what in examples)
        super().__init__(
            prog=prog,
            description="\n".join([about, "", "examples:", *calls]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.prog)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is wanted; got {text!r}")
    return int(text)
