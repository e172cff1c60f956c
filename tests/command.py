"""``lp-jax`` as one process of several: leaves the number of this process in a folder, then runs.

Arguments: folder, this process's number or the name of the variable that holds it, arguments of the command.
"""

import os
import sys
from pathlib import Path

import jax

from lp_jax.cli import main

jax.config.update("jax_disable_most_optimizations", True)

folder, number, *arguments = sys.argv[1:]
Path(folder, f"pid-{os.environ.get(number, number)}").write_text(str(os.getpid()))
main(arguments)
