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

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Base of errors with a message that is complete for a user."""

    code: int


class CommandError(UserError):
    """A command that cannot do its work; the message says what to do."""

    code = 1


class UsageError(UserError):
    """Options that are wrong or contradict each other; the help of ``command`` describes them."""

    code = 2
    command: str | None = None


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise an exception on SIGTERM, outside of a training loop (which would finish its step first)."""
    raise KeyboardInterrupt(signal.SIGTERM.name)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the process on Ctrl-C, outside of a training loop. An exception could be caught, for example by an import."""
    sys.stderr.write(f"\n{_line('SIGINT: stopped')}\n")
    sys.stderr.flush()
    os._exit(128 + number)


def describe(error: BaseException, args: Sequence[str] = ()) -> tuple[str, int]:
    """Return the line for an error, and the exit code: 1 (failed), 2 (wrong use), 128 + signal."""
    if isinstance(error, KeyboardInterrupt):
        number = signal.SIGTERM if str(error) == signal.SIGTERM.name else signal.SIGINT
        return _line(f"{number.name}: stopped"), 128 + number
    if isinstance(error, BrokenPipeError):  # of ``| head -1``: nobody reads what comes
        return "", 128 + signal.SIGPIPE
    if isinstance(error, UsageError):
        words = itertools.takewhile(lambda arg: not arg.startswith("-"), args)
        command = error.command or " ".join(["lp-jax", *words][:3])
        return _line(f"{error} (see {command} --help)"), error.code
    if isinstance(error, UserError):
        return _line(str(error)), error.code
    if isinstance(error, ModuleNotFoundError):
        known = "lp_jax[" in str(error)  # the message says what to install
        return _line(str(error) if known else f"{error.name} is missing; pip install 'lp_jax[train]' installs it"), 1
    if isinstance(error, OSError) and error.errno in _FULL:
        where = f" {error.filename}" if error.filename else ""
        return _line(
            f"cannot write{where}: {error.strerror}; free some space and add --resume, or choose another --out"
        ), 1
    if "--debug" in args:
        return "".join(traceback.format_exception(error)).rstrip(), 1
    if isinstance(error, OSError) and error.filename:
        return _line(f"{error.filename}: {error.strerror}"), 1
    hint = " (--debug shows where)" if args[:1] == ["train"] else ""
    where = "".join(frame.name for frame in traceback.extract_tb(error.__traceback__)[-1:])
    return _line(f"{str(error) or f'{type(error).__name__} in {where}'}{hint}"), 1


def show(message: str) -> None:
    """Print a message as an error, unless there is none or nobody reads it."""
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def _line(message: str) -> str:
    return f"lp-jax: {' '.join(message.split())}"
