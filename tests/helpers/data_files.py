"""Small files for the loaders to read, and what they say about bad ones."""

import contextlib
import gzip
import io
import re
from pathlib import Path

import pytest

from lp_jax import data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def write(path, content):
    """Text or bytes in a file, packed where its name says so; folders are made."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def refused(expected, call, *arguments, **options):
    """A DataError: one line that begins as expected, the file first, and says what is wanted."""
    with pytest.raises(data.DataError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in message and message.endswith(".")
    assert message.startswith(str(expected)) and "; wanted " in message


def run_page(package):
    """The example of docs/data.md that imports a package, and what it should print."""
    (code,) = (
        c
        for c in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        if f"import {package}\n" in c
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"docs/data.md: {package}", "exec"), {"__name__": "example"})
    promised = re.findall(r"print.*# (.*)", code)
    assert out.getvalue().splitlines() == promised and promised
