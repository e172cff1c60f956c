"""Small files for the loaders to read, and what they say about bad ones."""

import contextlib
import gzip
import io
import re
from pathlib import Path

import pytest

from lp_jax import data


def write(path, content):
    """Text or bytes in a file, packed where its name says so; folders are made."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def refusal(call, *arguments, **options):
    """The message of a DataError: one line that begins with the file."""
    with pytest.raises(data.DataError) as caught:
        call(*arguments, **options)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and "wanted" in message
    return message


def run_page(package):
    """The example of docs/data.md that imports a package, and what it should print."""
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if f"import {package}\n" in c)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"docs/data.md: {package}", "exec"), {"__name__": "example"})
    promised = re.findall(r"print.*# (.*)", code)
    assert out.getvalue().splitlines() == promised and promised
