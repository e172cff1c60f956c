"""The command ``lp-jax``."""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lp_jax.cli._commands import run
from lp_jax.cli._errors import Terminated, describe, terminate


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, or with one line on standard error 1 (failed), 2 (wrong use), 128 + signal."""
    args = list(sys.argv[1:] if args is None else args)
    code, before = 0, signal.signal(signal.SIGTERM, terminate)
    try:
        run(args)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        message, code = describe(error, args)
        print(message, file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)
