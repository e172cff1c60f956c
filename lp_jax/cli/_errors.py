"""Errors of the command line. Every error is shown in one line, with an exit code."""

import contextlib
import errno
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


class UserError(Exception):
    """Base of errors with a message that is complete for a user."""


class CommandError(UserError):
    """A command that cannot do its work; the message says what to do."""


class UsageError(UserError):
    """Options that are wrong or contradict each other; the help of ``command`` describes them."""

    def __init__(self, message: str, command: str | None = None):
        super().__init__(message)
        self.command = command


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise an exception on SIGTERM, outside of a training loop (which would finish its step first)."""
    raise KeyboardInterrupt(signal.SIGTERM.name)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the process on Ctrl-C, outside of a training loop. An exception could be caught, for example by an import."""
    show("\nlp-jax: SIGINT: stopped")
    os._exit(128 + number)


def describe(error: BaseException, args: Sequence[str] = ()) -> tuple[str, int]:
    """Return the line for an error, and the exit code: 1 (failed), 2 (wrong use), 128 + signal."""
    code = 1
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        number = signal.SIGTERM if text == signal.SIGTERM.name else signal.SIGINT
        code = 128 + number
        text = f"{number.name}: stopped"
    elif isinstance(error, BrokenPipeError):  # of ``| head -1``: nobody reads what comes
        return "", 128 + signal.SIGPIPE
    elif isinstance(error, UsageError):
        words = itertools.takewhile(lambda arg: not arg.startswith("-"), args)
        code = 2
        text = f"{error} (see {error.command or ' '.join(['lp-jax', *words][:3])} --help)"
    elif isinstance(error, ModuleNotFoundError):
        if "lp_jax[" not in text:  # else the message says what to install
            text = f"{error.name} is missing; pip install 'lp_jax[train]' installs it"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" {error.filename}" if error.filename else ""
        text = f"cannot write{where}: {error.strerror}; free some space and add --resume, or choose another --out"
    elif isinstance(error, UserError):
        pass
    elif "--debug" in args:
        return "".join(traceback.format_exception(error)).rstrip(), 1
    elif isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    else:
        where = "".join(frame.name for frame in traceback.extract_tb(error.__traceback__)[-1:])
        hint = " (--debug shows where)" if args[:1] == ["train"] else ""
        text = f"{text or f'{type(error).__name__} in {where}'}{hint}"
    return f"lp-jax: {' '.join(text.split())}", code


def show(message: str) -> None:
    """Print a message as an error, unless there is none or nobody reads it."""
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
