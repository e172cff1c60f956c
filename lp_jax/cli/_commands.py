"""The menus of ``lp-jax``: which command is meant. Each command reads its own options."""

import argparse
import ast
import functools
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lp_jax.cli._errors import CommandError, UsageError

Examples = Sequence[tuple[str, str]]

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_COMMANDS = {
    "train": "Train a deep network, layer-parallel, and compare with the exact baseline.",
    "plan": "Predict before training what layer-parallelism gives, and with which solver.",
    "bench": "Time the library against its alternatives. The suites come with the source.",
    "info": "Show versions, devices and MPI.",
}


class MenuParser(argparse.ArgumentParser):
    """A parser that raises what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        error = UsageError(message)
        error.command = self.prog
        raise error


def run(args: Sequence[str]) -> None:
    """Run the command that the arguments name, or print the menu.

    Raises:
        UsageError: for a command that does not exist.
    """
    if "" not in sys.path:
        sys.path.append("")  # solvers of the user: --solver mymodule.MySolver
    about = (
        "Layer-parallel training of deep networks in JAX: all layers at once, by multigrid (MGRIT) or Picard sweeps."
    )
    examples = [
        ("lp-jax train digits", "train on scikit-learn's digits, nothing to download"),
        ("lp-jax train digits --help", "all options of a command"),
        ("lp-jax plan digits", "recommend a solver, predict its time and error"),
        ("lp-jax info", "versions, devices, MPI"),
    ]
    command, rest = choose("lp-jax", about, examples, _COMMANDS, args)
    {"train": _train, "plan": _plan, "bench": _bench, "info": _info}[command](rest)


def choose(
    prog: str, about: str, examples: Examples, commands: Mapping[str, str], args: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the command that comes first, and the arguments after it; print the menu where there is none."""
    parser = MenuParser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description=description(about, examples),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=20),
    )
    parser.add_argument("--version", action="version", version=_version())
    entries = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, text in commands.items():
        entries.add_parser(name, help=text.replace("%", "%%"), add_help=False)
    return parser.parse_args(args[:1] or ["--help"]).command, list(args[1:])


def description(about: str, examples: Examples) -> str:
    """Return what a command does, and examples of calls."""
    width = max((len(call) for call, _ in examples), default=0)
    return "\n".join([about, "", "examples:", *(f"  {call:<{width}}  {what}" for call, what in examples)])


def summaries(folder: Path, pattern: str = "") -> dict[str, str]:
    """Return the first line of every public module's docstring, of those whose source matches; none is imported."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("[!_]*.py"))}
    found = {name: text for name, text in sources.items() if re.search(pattern, text, re.MULTILINE)}
    return {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in found.items()}


def _problems() -> dict[str, str]:
    return summaries(Path(__file__).parent / "problems")


def _train(args: Sequence[str]) -> None:
    examples = [
        ("lp-jax train digits", "8 x 8 pixels, from scikit-learn"),
        ("lp-jax train mnist --data FOLDER", "from the four IDX files"),
        ("lp-jax train gum --data FOLDER", "tag the words of a treebank with a transformer"),
        ("lp-jax train timeseries --data FOLDER --name BasicMotions", "a recurrent network, parallel in time"),
    ]
    problem, rest = choose("lp-jax train", _COMMANDS["train"], examples, _problems(), args)
    from lp_jax.cli._train import train_command

    train_command(problem, rest)


def _plan(args: Sequence[str]) -> None:
    examples = [
        ("lp-jax plan digits", "a solver for this network on this machine"),
        ("lp-jax plan digits --workers 8 --error 1e-3", "layers spread over eight such machines, a closer gradient"),
        ("lp-jax plan digits --save machine.json", "keep what was measured"),
        ("lp-jax plan machine machine.json --layers 1024", "predict from what was measured elsewhere"),
    ]
    commands = {**_problems(), "machine": "Predict times from a machine file, for any number of layers."}
    problem, rest = choose("lp-jax plan", _COMMANDS["plan"], examples, commands, args)
    from lp_jax.cli._plan import plan_machine, plan_problem

    plan_machine(rest) if problem == "machine" else plan_problem(problem, rest)


def _bench(args: Sequence[str]) -> None:
    examples = [
        ("lp-jax bench ranks --help", "the options of a suite"),
        ("lp-jax bench dense --quick", "a tiny row, to see that all works"),
    ]
    suites = summaries(_BENCHMARKS, r"^(def main\(arguments|main = )")
    if args and not suites:
        raise CommandError(
            "the benchmarks come with the source and not with the package: clone the repository, and in its folder "
            "pip install -e '.[bench]'."
        )
    suite, rest = choose("lp-jax bench", _COMMANDS["bench"], examples, suites, args)
    sys.path.insert(0, str(_BENCHMARKS.parent))
    sys.exit(importlib.import_module(f"benchmarks.{suite}").main(rest))


def _info(args: Sequence[str]) -> None:
    MenuParser(prog="lp-jax info", description=_COMMANDS["info"]).parse_args(args)
    from lp_jax.cli._info import report

    print(report())


def _version() -> str:
    from lp_jax.cli._info import version

    return f"lp_jax {version('lp_jax')}"
