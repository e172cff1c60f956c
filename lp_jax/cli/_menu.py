"""A parser that raises, the texts of menus and of help."""

import argparse
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from lp_jax._arrays._check import nearest
from lp_jax.cli._errors import UsageError

PROBLEMS = {
    "arrays": "Classes or values of your own: x and y in a file of NumPy's.",
    "digits": "Train on the 1,797 handwritten digits of scikit-learn; a fifth is held out.",
    "peaks": "Train on 5,000 points of the plane in five level sets of the peaks function.",
}
"""The problems of `lp_jax.cli._problems`, with their help: a menu imports none of what they need."""


class MenuParser(argparse.ArgumentParser):
    """A parser that raises its errors as `UsageError`, and suggests an option that is like an unknown one."""

    def __init__(self, **options: Any):
        super().__init__(exit_on_error=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            self.error(in_words(error))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(
                unknown_option(rest, self._option_string_actions)
                or f"{rest[0]!r} is not an option."
            )
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.prog)


def in_words(error: argparse.ArgumentError) -> str:
    """Return a parser's message, after the name of its option if it has one."""
    message = error.message.removeprefix("argument ")
    return f"{error.argument_name}: {message}" if error.argument_name else message


def unknown_option(args: Iterable[str], options: Collection[str]) -> str | None:
    """Return a message about the first unknown option, with a similar one; None if all are known."""
    names = (arg.partition("=")[0] for arg in args if arg.startswith("--"))
    unknown = next((name for name in names if name.partition(".")[0] not in options), None)
    if unknown is None:
        return None
    near = nearest(
        unknown.lstrip("-").replace("-", "_"),
        [option[2:] for option in options if option.startswith("--")],
    )
    return f"there is no option {unknown}" + (f"; did you mean --{near}?" if near else ".")


def description(about: str, examples: Sequence[tuple[str, str]]) -> str:
    """Return the head of a help text: the purpose of the command, and example calls."""
    width = max((len(call) for call, _ in examples), default=0)
    return "\n".join(
        [about, "", "examples:", *(f"  {call:<{width}}  {what}" for call, what in examples)]
    )
