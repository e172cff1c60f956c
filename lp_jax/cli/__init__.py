"""The command ``lp-jax``. Nothing beyond Python's own library is imported before it runs."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal.

    Args:
        args: what follows the command's name; that of the process if None.
    """
    args = list(sys.argv[1:] if args is None else args)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        _dispatch(args)
    except (KeyboardInterrupt, _Terminated) as interruption:
        number = signal.SIGTERM if isinstance(interruption, _Terminated) else signal.SIGINT
        _exit(f"{number.name}: stopped; what was saved before is kept, and --resume goes on from there", 128 + number)
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminated(BaseException):
    """SIGTERM where no training is going on that could be finished first."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _dispatch(args: list[str]) -> NoReturn:
    try:
        import click

        from lp_jax.cli._app import app
    except ModuleNotFoundError as error:
        _missing(error)
    try:
        sys.exit(app.main(args, prog_name="lp-jax", standalone_mode=False) or 0)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "lp-jax"
        _exit(f"{error.format_message()} (see {where} --help)", error.exit_code)
    except click.ClickException as error:
        _exit(error.format_message(), error.exit_code)
    except click.Abort:  # what click makes of Ctrl-C
        raise KeyboardInterrupt from None
    except ModuleNotFoundError as error:
        _missing(error)
    except Exception as error:
        if "--debug" in args:
            raise
        _exit(f"{str(error) or type(error).__name__} (--debug shows where)", 1)


def _missing(error: ModuleNotFoundError) -> NoReturn:
    _exit(f"this needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'", 1)


def _exit(message: str, code: int) -> NoReturn:
    print(f"lp-jax: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
