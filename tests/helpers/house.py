"""Sizes of the package: ``python tests/helpers/house.py`` prints them, and test_structure.py holds some as ceilings."""

import ast
import importlib
import io
import tokenize
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("_arrays", "_comms", "_levels", "_solvers", "_programs", ".")
"""Folders of the core; "." is the modules directly in lp_jax."""
PACKAGES = ("", "multigrid", "data", "nn", "planning", "train", "viz")


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines of docstrings, and of the strings below attributes."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for one in node.body if isinstance(node, DOCUMENTED) else ():
            if (
                isinstance(one, ast.Expr)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
            ):
                found.update(range(one.lineno, one.end_lineno + 1))
    return found


def tokens_of(text: str) -> int:
    """Tokens of code: comments, docstrings, blank lines and indentation do not count, and cost nothing."""
    free = docstring_lines(text)
    count = within = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # from Python 3.12 on an f-string is many tokens; it counts as one, as before
        name = tokenize.tok_name[token.type]
        count += within == 0 and token.type not in LAYOUT and token.start[0] not in free
        within += (name == "FSTRING_START") - (name == "FSTRING_END")
    return count


def wide_lines(text: str, columns: int = 100) -> list[int]:
    """Numbers of the lines of code that are longer; docstrings and comments by themselves may be."""
    free = docstring_lines(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in free:
            code.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return [number for number in sorted(code) if len(lines[number - 1]) > columns]


def tokens(*patterns: str) -> int:
    return sum(tokens_of(path.read_text()) for pattern in patterns for path in ROOT.glob(pattern))


def public_names() -> dict[str, int]:
    """Names that a user can import from each package, without those of modules."""
    found = {}
    for name in PACKAGES:
        module = importlib.import_module(f"lp_jax.{name}".rstrip("."))
        public = (v for k, v in vars(module).items() if not k.startswith("_"))
        found[module.__name__] = sum(not isinstance(v, types.ModuleType) for v in public)
    return found


def sizes() -> dict[str, int]:
    return {
        "tokens of code in lp_jax": tokens("lp_jax/**/*.py"),
        "tokens of code in the core": tokens(*(f"lp_jax/{folder}/*.py" for folder in CORE)),
        "tokens of code in tests": tokens("tests/**/*.py"),
        "public names": sum(public_names().values()),
        "public names of lp_jax": public_names()["lp_jax"],
    }


if __name__ == "__main__":
    for what, number in sizes().items():
        print(f"{number:7,} {what}")
