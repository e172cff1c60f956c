"""The menus of ``lp-jax``. Each command reads its own options."""

import argparse
import ast
import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lp_jax._arrays._check import nearest
from lp_jax.cli._errors import CommandError
from lp_jax.cli._menu import PROBLEMS, MenuParser, description

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_ABOUT = "Layer-parallel training of deep networks in JAX: all layers at once, by multigrid (MGRIT) or Picard sweeps."
_COMMANDS = {
    "train": "Train a deep network, layer-parallel, and compare with the exact baseline.",
    "demo": "Train one network in six ways, and compare the times to the same accuracy.",
    "plan": "Predict the time of layer-parallel training, and recommend a solver.",
    "bench": "Time the library against its alternatives. The suites come with the source.",
    "info": "Show versions, devices and MPI.",
}
_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "": [
        ("lp-jax demo", "what it gains on this machine, in two minutes"),
        ("lp-jax train digits", "train on scikit-learn's digits, nothing to download"),
        ("lp-jax train digits --help", "the options that most runs take"),
        ("lp-jax plan digits", "recommend a solver, predict its time and error"),
        ("lp-jax info", "versions, devices, MPI"),
    ],
    "train": [
        ("lp-jax train digits", "8 x 8 pixels, from scikit-learn"),
        ("lp-jax train arrays --data mine.npz", "your own x and y, from a file of NumPy's"),
    ],
    "plan": [
        ("lp-jax plan digits", "a solver for this network on this machine"),
        (
            "lp-jax plan digits --workers 8 --error 1e-3",
            "layers spread over eight such machines, a closer gradient",
        ),
        (
            "lp-jax plan machine machine.json --layers 1024",
            "predict from what was measured elsewhere",
        ),
    ],
    "bench": [
        ("lp-jax bench ranks --help", "the options of a suite"),
        ("lp-jax bench dense --quick", "a tiny row, to see that all works"),
    ],
}


def run(args: Sequence[str]) -> None:
    """Run the command that the arguments name, or print the menu."""
    if "--debug" not in args:
        logging.getLogger("absl").setLevel(
            logging.CRITICAL
        )  # orbax logs tracebacks of errors that it raises, too
    if "" not in sys.path:
        sys.path.append("")  # solvers of the user: --solver mymodule.MySolver
    command, rest = _choose("", _ABOUT, _COMMANDS, args)
    if command == "info":
        MenuParser(prog="lp-jax info", description=_COMMANDS["info"]).parse_args(rest)
        from lp_jax.cli._info import report

        print(report())
    elif command == "demo":
        from lp_jax.cli._demo import run as demo

        demo(rest)
    elif command == "bench":
        suite, rest = _choose(command, _COMMANDS[command], _suites(), rest)
        sys.path.insert(0, str(_BENCHMARKS.parent))
        sys.exit(importlib.import_module(f"benchmarks.{suite}").main(rest))
    elif command == "plan":
        machine = {"machine": "Predict times from a machine file, for any number of layers."}
        problem, rest = _choose(command, _COMMANDS[command], PROBLEMS | machine, rest)
        from lp_jax.cli._plan import run as plan

        plan(problem, rest)
    else:
        problem, rest = _choose(command, _COMMANDS[command], PROBLEMS, rest)
        from lp_jax.cli._train import run as train

        train(problem, rest)


def _choose(
    command: str, about: str, entries: Mapping[str, str], args: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the first argument, an entry of the menu, and the arguments after it; print the menu if there are none."""
    prog = f"lp-jax {command}".rstrip()
    parser = MenuParser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description=description(about, _EXAMPLES[command]),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=20
        ),
    )
    if not command:
        version = importlib.metadata.version("lp_jax")
        parser.add_argument(
            "--version", action="version", version=f"lp_jax {version}", help="Version of lp_jax."
        )
    menu = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, text in entries.items():
        menu.add_parser(name, help=text.replace("%", "%%"), add_help=False)
    if args and not args[0].startswith("-") and args[0] not in entries:
        near = nearest(args[0], entries)
        parser.error(
            f"{args[0]!r} is none of {', '.join(entries)}"
            + (f"; did you mean {near}?" if near else ".")
        )
    return parser.parse_args(args[:1] or ["--help"]).command, list(args[1:])


def _suites() -> dict[str, str]:
    """Return the modules of benchmarks that have a ``main``, with the first line of their docstrings, without importing them."""
    sources = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(_BENCHMARKS.glob("[!_]*.py"))
    }
    suites = {
        name: text
        for name, text in sources.items()
        if re.search(r"^(def main\(arguments|main = )", text, re.M)
    }
    if not suites:
        raise CommandError(
            "the benchmarks come with the source and not with the package: clone the repository, and in its folder "
            "pip install -e '.[bench]'."
        )
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in suites.items()
    }
