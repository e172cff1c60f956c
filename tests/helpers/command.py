"""``lp-jax`` in this process."""

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
