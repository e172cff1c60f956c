"""The command ``lp-jax``."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lp_jax.cli._commands import run
from lp_jax.cli._errors import describe, show, stop, terminate
from lp_jax.cli._heap import keep_heap


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal."""
    args = list(sys.argv[1:] if args is None else args)
    code = 0
    ours = {signal.SIGTERM: terminate, signal.SIGINT: stop}
    handlers = {number: signal.signal(number, handler) for number, handler in ours.items()}
    keep_heap()
    try:
        try:
            run(args)
        finally:
            print(end="", flush=True)  # what cannot be written is an error like others
    except (Exception, KeyboardInterrupt) as error:
        message, code = describe(error)
        show(message)
        try:
            print(end="", flush=True)
        except OSError:  # else Python says so once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    sys.exit(code)
