"""What is said of an error, in one line, and the exit code."""

import signal
import traceback
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM where no training is going on that could be finished first."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handler of SIGTERM."""
    raise Terminated


def last_words(error: BaseException, *, debug: bool = False) -> tuple[str, int]:
    """The line, and the code: 1 (failed), 2 (wrong use), 128 + signal.

    Args:
        error: what ended the program.
        debug: whether to say of an error that nobody thought of where it comes from.
    """
    import click

    if isinstance(error, click.Abort | KeyboardInterrupt | Terminated):  # the first is what click makes of Ctrl-C
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        message = f"{number.name}: stopped; what was saved before is kept, and --resume goes on from there"
        return _line(message), 128 + number
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "lp-jax"
        return _line(f"{error.format_message()} (see {where} --help)"), error.exit_code
    if isinstance(error, click.ClickException):
        return _line(error.format_message()), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return missing(error), 1
    if debug:
        return "".join(traceback.format_exception(error)).rstrip(), 1
    return _line(f"{str(error) or type(error).__name__} (--debug shows where)"), 1


def missing(error: ModuleNotFoundError) -> str:
    """Of a package that is not installed; its message where it says already what to do."""
    if "lp_jax[" in str(error):
        return _line(str(error))
    return _line(f"this needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'")


def _line(message: str) -> str:
    return f"lp-jax: {' '.join(message.split())}"
