"""The command ``lp-jax``. Nothing beyond Python's own library is imported before it runs."""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lp_jax.cli._last_words import Terminated, last_words, missing, terminate


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal.

    Args:
        args: what follows the command's name; that of the process if None.
    """
    args = list(sys.argv[1:] if args is None else args)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        _dispatch(args)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        message, code = last_words(error, debug="--debug" in args)
        print(message, file=sys.stderr)
        sys.exit(code)
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch(args: list[str]) -> NoReturn:
    try:
        from lp_jax.cli._app import app
    except ModuleNotFoundError as error:  # click itself, perhaps
        print(missing(error), file=sys.stderr)
        sys.exit(1)
    sys.exit(app.main(args, prog_name="lp-jax", standalone_mode=False) or 0)
