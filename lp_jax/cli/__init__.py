"""The command ``lp-jax``."""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lp_jax.cli._commands import run
from lp_jax.cli._errors import describe, stop, terminate
from lp_jax.cli._heap import keep_heap


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal."""
    args = list(sys.argv[1:] if args is None else args)
    code = 0
    handlers = {
        number: signal.signal(number, f) for number, f in {signal.SIGTERM: terminate, signal.SIGINT: stop}.items()
    }
    keep_heap()
    try:
        run(args)
    except (Exception, KeyboardInterrupt) as error:
        message, code = describe(error, args)
        print(message, file=sys.stderr)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    sys.exit(code)
