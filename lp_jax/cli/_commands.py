"""The menus of ``lp-jax``. Each command reads its own options."""

import ast
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lp_jax._arrays._check import nearest
from lp_jax.cli._errors import CommandError
from lp_jax.cli._menu import Parser, columns

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_ABOUT = """\
Layer-parallel training of deep networks in JAX: all layers at once, by multigrid (MGRIT) or Picard
sweeps."""
_COMMANDS = {
    "demo": "Train one network in six ways, and compare the times to the same accuracy.",
    "plan": "Predict the time of layer-parallel training, and recommend a solver.",
    "bench": "Time the library against its alternatives. The suites come with the source.",
    "info": "Show versions, devices and MPI.",
}
_PLANS = {
    "digits": "Plan a dense residual network that learns scikit-learn's digits.",
    "machine": "Predict times from a machine file, for any number of layers.",
}
_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "": [
        ("lp-jax demo", "what it gains on this machine, in two minutes"),
        ("lp-jax plan digits", "recommend a solver, predict its time and error"),
        ("lp-jax info", "versions, devices, MPI"),
    ],
    "plan": [
        ("lp-jax plan digits", "a solver for this network on this machine"),
        ("lp-jax plan digits --save machine.json", "the same; keep what was measured"),
        ("lp-jax plan machine machine.json --layers 1024", "predict from what was measured"),
    ],
    "bench": [
        ("lp-jax bench ranks --help", "the options of a suite"),
        ("lp-jax bench dense --quick", "a tiny row, to see that all works"),
    ],
}


def run(args: Sequence[str]) -> None:
    """Run the command that the arguments name, or print the menu."""
    command, rest = _choose("", _ABOUT, _COMMANDS, args)
    if command == "bench":
        suite, rest = _choose(command, _COMMANDS[command], _suites(), rest)
        # The benchmarks are a package next to lp_jax in the repository, which is not installed.
        sys.path.insert(0, str(_BENCHMARKS.parent))
        sys.exit(importlib.import_module(f"benchmarks.{suite}").main(rest))
    if command == "plan":
        problem, rest = _choose(command, _COMMANDS[command], _PLANS, rest)
        # A command is imported when it runs, because Flax, optax and matplotlib take seconds to import.
        importlib.import_module("lp_jax.cli._plan").run(problem, rest)
    elif command == "demo":
        importlib.import_module("lp_jax.cli._demo").run(rest)
    else:
        importlib.import_module("lp_jax.cli._info").run(rest)


def _choose(
    command: str, about: str, entries: Mapping[str, str], args: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the first argument, an entry of the menu, and the arguments after it; print the menu if there are none."""
    # A command without arguments shows its help.
    first, *rest = args or ["--help"]
    if first in entries:
        return first, rest
    parser = Parser(f"lp-jax {command}".rstrip(), about, _EXAMPLES[command])
    parser.usage = f"{parser.prog} COMMAND ..."
    parser.epilog = "\n".join(["commands:", *columns(entries.items())])
    version = f"lp_jax {importlib.metadata.version('lp_jax')}"
    parser.add_argument("--version", action="version", version=version, help="Version of lp_jax.")
    if first.startswith("-"):
        parser.parse_args([first])
    # A misspelt command gets the name that is closest to it.
    near = nearest(first, entries)
    hint = f"; did you mean {near}?" if near else "."
    parser.error(f"{first!r} is none of {', '.join(entries)}{hint}")


def _suites() -> dict[str, str]:
    """Return the modules of benchmarks that have a ``main``, with the first line of their docstrings, without importing them."""
    suites = {}
    for path in sorted(_BENCHMARKS.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        # The text is read instead of importing the module, because benchmarks import libraries that may be missing.
        if re.search(r"^(def main\(arguments|main = )", text, re.M):
            about = ast.get_docstring(ast.parse(text)) or ""
            suites[path.stem] = about.partition("\n")[0]
    if not suites:
        raise CommandError(
            "the benchmarks come with the source and not with the package: clone the repository, "
            "and in its folder pip install -e '.[bench]'."
        )
    return suites
