"""How the reference reads docstrings: an extension of griffe, for mkdocstrings."""

import re
from typing import Any

import griffe
import latex2mathml.converter


class Docstrings(griffe.Extension):
    """Tell griffe that "Example:" in a docstring is code, not a remark, and draw formulas as pages do."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change headings and formulas."""
        if obj.docstring:
            text = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            draw = lambda match: f"<span>{latex2mathml.converter.convert(match[1])}</span>"  # noqa: E731
            obj.docstring.value = re.sub(r":math:`([^`]*)`", draw, text)
