"""Entry point of the program ``lp-jax``. Ctrl-C ends it from the first moment, even before lp_jax and JAX are imported."""

import signal
import sys
from typing import NoReturn

signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import could catch Python's exception


def main() -> NoReturn:
    """Run the command."""
    from lp_jax.cli import main as command

    command(sys.argv[1:])
