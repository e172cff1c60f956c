"""Options of ``lp-jax train`` and ``lp-jax plan``: a parser for each problem, and the reading of its options."""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
from jsonargparse import (
    ActionConfigFile,
    ArgumentParser,
    DefaultHelpFormatter,
    get_loader,
    set_parsing_settings,
)
from jsonargparse.typing import PositiveFloat, PositiveInt, register_type

import lp_jax
from lp_jax import Solver
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._menu import MenuParser, in_words, unknown_option
from lp_jax.cli._models import Model, Pair, Training
from lp_jax.cli._problems import Problem
from lp_jax.planning import with_effort
from lp_jax.planning._words import code

set_parsing_settings(
    subclasses_enabled=["is_pure_dataclass"]
)  # a coarse step may be `Rediscretize` or a solver
register_type(jax.Array, float, float)  # a tolerance may be traced; here it is a number

OF_THIS_CALL = (
    "config",
    "out",
    "resume",
    "skip_damaged",
    "debug",
    "mpi",
    "distributed",
    "coordinator",
    "process",
)
"""Options of a call, not of a run: never taken from a folder."""

_FIRST = {
    "config",
    "data",
    "name",
    "model",
    "layers",
    "width",
    "epochs",
    "batch_size",
    "learning_rate",
    "solver",
    "method",
    "devices",
    "mpi",
    "out",
    "resume",
    "workers",
    "error",
    "save",
}
"""Options of the short help."""

_MOST = 10_000  # values in a file of options


class _ShortHelp(argparse.Action):
    """``--help``: show the options that most runs take."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for action in parser._actions:
            if action.dest not in (*_FIRST, "help", "help_all"):
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the lines of examples, and leaves out types and trivial defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = re.sub(r"type: %\(type\)s(, )?", "", super()._get_help_string(action) or "")
        if action.default is None or action.default is False:
            text = re.sub(r"(, )?default: %\(default\)s", "", text)
        return text.replace("(, ", "(").replace(" ()", "")


def spelled_out(args: Iterable[str]) -> Iterator[str]:
    """Yield the arguments with ``--serial`` as ``--solver Serial``, and ``--batch-size`` as ``--batch_size``."""
    for arg in args:
        if arg == "--serial":
            yield from ("--solver", "Serial")
        else:
            name, equals, value = arg.partition("=")
            yield (
                (name.replace("-", "_").replace("__", "--", 1) if arg.startswith("--") else name)
                + equals
                + value
            )


def first_look(args: Sequence[str], command: str) -> argparse.Namespace:
    """Return the options on which the others depend: model, folder, processes. The others are ignored.

    ``named`` are all values of the options of solvers: classes and functions that this command line trusts.
    """
    parser = MenuParser(prog=command, add_help=False, allow_abbrev=False)
    for name in ("--config", "--model", "--solver", "--adjoint_solver"):
        parser.add_argument(name)
    add_devices_and_output(parser, command.split()[-1])
    look = parser.parse_known_args(args)[0]
    in_file = {} if look.config is None else _options_in(Path(look.config))
    found = {
        name: _class(in_file[name]) or in_file[name] for name in vars(look) if in_file.get(name)
    }
    if wrong := [
        name for name, value in found.items() if getattr(look, name) is False and value is not True
    ]:
        raise UsageError(f"--config: {wrong[0]} must be true or false; got {found[wrong[0]]!r}.")
    parser.set_defaults(
        **{name: value if value is True else str(value) for name, value in found.items()}
    )
    look = parser.parse_known_args(args)[0]
    words = [word for arg in args for word in arg.split("=", 1)]
    pairs = [
        *itertools.pairwise(words),
        *((f"--{name}", value) for name, value in _leaves(in_file)),
    ]
    look.named = {
        value
        for name, value in pairs
        if re.match("--(adjoint_)?solver", name) and isinstance(value, str)
    }
    return look


def _options_in(path: Path) -> dict[str, Any]:
    """Return what a YAML or JSON file holds."""
    if not path.is_file():
        raise UsageError(f"--config: there is no file {path}.")
    try:
        stored = get_loader("yaml")(path.read_text(encoding="utf-8"))
        count = sum(1 for _ in itertools.islice(_leaves(stored), _MOST))
    except Exception as error:  # of the encoding, of the loader, of what nests without end
        raise UsageError(f"--config: {path} cannot be read as YAML or JSON ({error}).") from None
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
        raise UsageError(f"--config: {path} must hold options by name, like layers: 8.")
    if count == _MOST:
        raise UsageError(
            f"--config: {path} holds {_MOST:,} values or more; an alias counts as all that it stands for."
        )
    return stored


def _leaves(tree: object, option: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values in dictionaries and lists, each with its option: ``solver.coarse_step``."""
    if isinstance(tree, dict) and tree:
        if not isinstance(tree.get("class_path", ""), str) or not isinstance(
            tree.get("init_args", {}), dict
        ):
            raise ValueError(f"{option}: class_path must be a name, init_args options by name")
        for name, value in tree.items():
            inner = (
                option if name in ("class_path", "init_args") else f"{option}.{name}".lstrip(".")
            )
            yield from _leaves(value, inner)
    elif isinstance(tree, list) and tree:
        for value in tree:
            yield from _leaves(value, option)
    else:
        yield option, tree


def add_devices_and_output(parser: argparse.ArgumentParser | ArgumentParser, problem: str) -> None:
    add = parser.add_argument_group("Devices").add_argument
    add(
        "--devices",
        type=PositiveInt,
        metavar="N",
        help="Number of devices that the layers are spread over.",
    )
    about = "Sizes of the axes that layers and examples are spread over: layers=2,data=2."
    add("--mesh", type=str, metavar="AXES", help=about)
    add(
        "--mpi",
        action="store_true",
        help="MPI ranks hold the layers: mpirun -n 4 lp-jax train ... --mpi.",
    )
    about = "Processes of jax.distributed hold the layers: srun lp-jax train ... --distributed."
    add("--distributed", action="store_true", help=about)
    about = "Address of process 0; srun and mpirun set it by themselves."
    add("--coordinator", type=str, metavar="HOST:PORT", help=about)
    about = "Number of this process and of all of them, like 0/2; needs --coordinator."
    add("--process", type=str, metavar="I/N", help=about)
    add("--debug", action="store_true", help="Show the traceback of an error instead of one line.")
    add = parser.add_argument_group("Output").add_argument
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("runs", problem),
        help="Folder for all results.",
    )
    add(
        "--resume",
        action="store_true",
        help="Continue the run in --out. Options that are left out keep their values.",
    )
    add("--skip_damaged", action="store_true", help="With --resume: leave out damaged checkpoints.")


def add_training(parser: ArgumentParser, model: Model, problem: str) -> None:
    """Add the options of training: solvers, method, devices and output."""
    solver, adjoint_solver = (code(one) for one in model.solvers)
    add = parser.add_argument_group("Solvers").add_argument
    about = (
        "Solver of the layers: a class of lp_jax, or your own as module.Class. Its fields are options, like --solver.levels 3; "
        f"--solver.help CLASS lists them. Default: {solver}. --serial is short for --solver Serial; auto is the solver that "
        "lp-jax plan recommends."
    )
    add("--solver", type=Solver | Literal["auto"] | None, metavar="CLASS", help=about)
    about = f"Solver of the adjoint system. Default: the same as --solver; without --solver, {adjoint_solver}."
    add("--adjoint_solver", type=Solver | None, metavar="CLASS", help=about)
    about = "Number of iterations of the adjoint solver, without a tolerance."
    add("--adjoint_iterations", type=PositiveInt, metavar="N", help=about)
    about = "Keep the gradient's error below this part of its mini-batch noise, by changing the tolerances. Try 0.1. "
    add(
        "--controller",
        type=PositiveFloat,
        metavar="BOUND",
        help=about + "Needs solvers with a tolerance.",
    )
    add = parser.add_argument_group("Method").add_argument
    about = (
        "How to train. direct takes a step for each batch. one-shot takes all examples in each step, one step an epoch; each "
        "solve begins where the last one ended, and the optimizer is L-BFGS. nested trains shallow networks first, those of "
        "--depths."
    )
    add("--method", choices=("direct", "one-shot", "nested"), default="direct", help=about)
    about = "Numbers of layers that nested goes through, the network's own last. Default: a quarter, a half and all."
    add("--depths", type=list[PositiveInt] | None, metavar="[N, ...]", help=about)
    add_devices_and_output(parser, problem)
    add = parser.add_argument_group("Watching").add_argument
    add(
        "--checkpoint_every",
        type=PositiveInt,
        metavar="N",
        default=200,
        help="Number of steps between checkpoints.",
    )
    about = "Number of steps between gradient probes. Default: 6 probes in a run."
    add("--probe_every", type=PositiveInt, metavar="N", help=about)
    add(
        "--log_every",
        type=PositiveInt,
        metavar="N",
        default=10,
        help="Number of steps between fetching metrics.",
    )
    add("--no_compare", action="store_true", help="Train no exact baseline for comparison.")
    add("--no_pictures", action="store_true", help="Draw no pictures.")


def parser_of(
    command: str, problem: Problem, kind: str, about: str, unused: Collection[str] = ()
) -> ArgumentParser:
    """Return the parser of a command on a problem, with the options of data, model and training but the unused ones."""
    model = problem.models[kind]
    parser = ArgumentParser(
        prog=command,
        usage=f"{command} [OPTIONS]",
        description=about,
        formatter_class=_Formatter,
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", action=_ShortHelp, nargs=0, help="Show the options that most runs take."
    )
    parser.add_argument("--help_all", action="help", help="Show all options.")
    parser.add_argument(
        "--config", action=ActionConfigFile, help="YAML or JSON file of options, by name."
    )
    add = parser.add_argument_group("Data and model").add_argument
    for name, text in problem.sources.items():
        add(f"--{name}", type=Path if name == "data" else str, metavar=name.upper(), help=text)
    kinds = "; ".join(f"{name}: {one.about()}" for name, one in problem.models.items())
    add(
        "--model",
        choices=list(problem.models),
        default=kind,
        help=f"The model. Its options are those below. {kinds}.",
    )
    parser.add_class_arguments(type(model), None)
    parser.add_class_arguments(Training, None, skip=set(unused))
    training = {
        name: value
        for name, value in dataclasses.asdict(problem.training).items()
        if name not in unused
    }
    parser.set_defaults(**dataclasses.asdict(model), **training)
    return parser


def parse(
    parser: ArgumentParser, problem: Problem, args: Sequence[str], stored: Mapping[str, object]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options twice: with solvers as objects, and by name as JSON values to store."""
    if wrong := unknown_option(args, parser._option_string_actions):
        raise UsageError(wrong)
    try:
        read = parser.parse_args([*(["--config", json.dumps(stored)] if stored else []), *args])
        options = parser.instantiate(read)
    except (TypeError, ValueError, argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        raise UsageError(_reason(error)) from None
    for name, text in problem.sources.items():
        if getattr(options, name) is None:
            raise UsageError(f"Missing option --{name}: {text[0].lower()}{text[1:]}")
    kept = json.loads(parser.dump(read, format="json", skip_unset=False))
    if "data" in kept:
        kept["data"] = str(options.data.resolve())  # resuming may happen elsewhere
    return options, kept


def solvers(options: argparse.Namespace, model: Model) -> Pair:
    """Return the forward and the adjoint solver of the options."""
    solver = options.solver
    adjoint_solver = options.adjoint_solver
    iterations = options.adjoint_iterations
    if solver == "auto":
        if adjoint_solver is not None or iterations is not None:
            raise UsageError(
                "--solver auto chooses the adjoint solver, too; leave out --adjoint_... options."
            )
        return model.solvers
    if solver is not None and solver.chooses:
        raise UsageError(
            "--solver Fastest chooses solvers as the network is traced, and the table of a training counts the work of named "
            "ones. --solver auto takes those that lp-jax plan recommends."
        )
    forward, adjoint = model.solvers if solver is None else (solver, solver.for_adjoint())
    if solver is None and options.method == "one-shot":
        # a line search with two sweeps leaves states from which one sweep is enough for a gradient
        forward = lp_jax.Picard(sweeps=1)
        adjoint = lp_jax.Picard(sweeps=2)
    adjoint = adjoint_solver or adjoint
    adjoint = adjoint if iterations is None else with_effort(adjoint, iterations)
    return forward, adjoint


_PLAINER = {
    "Expected a dot import path string:": "there is no class",
    "<class 'int'>": "whole number",
    "<class 'float'>": "number",
    "does not conform to restriction v>0": "is not above 0",
    "invalid literal for int() with base 10": "this is no whole number",
}


def _reason(error: BaseException) -> str:
    """Return the innermost cause of a parser's error, after the name of its option."""
    keys: list[str] = []
    while True:
        key = re.match(r'Parser key "([\w.]+)"', str(error))
        if key and key[1] not in keys[-1:]:
            keys.append(key[1])
        if error.__cause__ is None:
            break
        error = error.__cause__
    cause = in_words(error) if isinstance(error, argparse.ArgumentError) else str(error)
    for words, plainer in _PLAINER.items():
        cause = cause.replace(words, plainer)
    if keys:
        cause = f"--{'.'.join(keys)}: {cause}"
    if keys not in (["solver"], ["adjoint_solver"]):
        return cause
    classes = "MGRIT, Picard, Secant, Windowed, Newton, Serial or module.Class"
    return f"{cause}. It is {classes}, then its options, like --solver.levels 3; --solver.help CLASS lists them."


def overridden(
    stored: Mapping[str, Any], look: argparse.Namespace, sources: Collection[str]
) -> dict[str, Any]:
    """Return stored options without those of one call, and those that the command line replaces as a whole.

    A run folder is data: whoever wrote it must not choose what is imported. Options that name anything but classes of lp_jax
    and what this command line names are refused.
    """
    void = set(OF_THIS_CALL)
    if look.solver not in (
        None,
        _class(stored.get("solver")),
    ):  # another class does not inherit fields
        void |= {"solver", "adjoint_solver", "adjoint_iterations"}
    if look.adjoint_solver not in (None, _class(stored.get("adjoint_solver"))):
        void |= {"adjoint_solver", "adjoint_iterations"}
    if look.devices or look.mesh or look.mpi or look.distributed:
        void |= {"devices", "mesh"}
    kept = {name: value for name, value in stored.items() if name not in void}
    for option, value in _leaves(
        {name: value for name, value in kept.items() if name not in sources}
    ):
        if not isinstance(value, str) or value in look.named or re.fullmatch(r"[\w=,+-]*", value):
            continue
        if not isinstance(getattr(lp_jax, value.removeprefix("lp_jax."), None), type):
            raise CommandError(
                f"{look.out / 'config.json'} names {value!r} for --{option}, which is no class of lp_jax. If you trust it, name "
                f"it again: --{option} {value}"
            )
    return kept


def _class(stored: object) -> object:
    return stored.get("class_path") if isinstance(stored, dict) else None
