"""Errors of the command line. Every error is shown in one line, with an exit code."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


class CommandError(Exception):
    """A command that cannot do its work; the message says what to do."""


class UsageError(Exception):
    """Options that are wrong or contradict each other; the help of ``command`` describes them."""

    def __init__(self, message: str, command: str):
        super().__init__(f"{message} (see {command} --help)")


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise an exception on SIGTERM, outside of a training loop (which would finish its step first)."""
    raise KeyboardInterrupt(signal.SIGTERM.name)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the process on Ctrl-C, outside of a training loop. An exception could be caught, for example by an import."""
    show("\nlp-jax: SIGINT: stopped")
    os._exit(128 + number)


def describe(error: BaseException) -> tuple[str, int]:
    """Return the line for an error, and the exit code: 1 (failed), 2 (wrong use), 128 + signal."""
    code = 1
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        # A shell reports a process that a signal ended as 128 + its number, so the command does the same.
        number = signal.SIGTERM if text == signal.SIGTERM.name else signal.SIGINT
        code = 128 + number
        text = f"{number.name}: stopped"
    elif isinstance(error, BrokenPipeError):  # of ``| head -1``: nobody reads what comes
        return "", 128 + signal.SIGPIPE
    elif isinstance(error, UsageError):
        code = 2
    elif isinstance(error, ModuleNotFoundError):
        if "lp_jax[" not in text:  # else the message says what to install
            text = f"{error.name} is missing; pip install 'lp_jax[train]' installs it"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'cannot write'}: {error.strerror}"
    return f"lp-jax: {' '.join(text.split()) or type(error).__name__}", code


def show(message: str) -> None:
    """Print a message as an error, unless there is none or nobody reads it."""
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
