"""What the program ``lp-jax`` runs. Ctrl-C ends it from its first moment: before lp_jax and JAX are imported, too."""

import signal
import sys
from typing import NoReturn

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own, an exception, is lost where an import catches it


def main() -> NoReturn:
    """Run the command."""
    from lp_jax.cli import main as command

    command(sys.argv[1:])
