"""``lp-jax`` in this process and, run as a program, as one process of several.

The program leaves the number of its process in a folder, then runs. Its arguments: folder, this process's number or the
name of the variable that holds it, arguments of the command.
"""

import os
import sys
from pathlib import Path

import pytest

from lp_jax.cli import main


def run(capsys, *args):
    """Exit code, standard output and standard error of the command."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    return (caught.value.code, *capsys.readouterr())


def one_line(text):
    """The error, and nothing but it."""
    assert text.startswith("lp-jax: ") and text.count("\n") == 1 and text.endswith("\n"), text
    assert "Traceback" not in text
    return text


if __name__ == "__main__":
    folder, number, *arguments = sys.argv[1:]
    Path(folder, f"pid-{os.environ.get(number, number)}").write_text(str(os.getpid()))
    main(arguments)
