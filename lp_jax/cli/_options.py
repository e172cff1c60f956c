"""Options of ``lp-jax train`` and ``lp-jax plan``: a parser for each problem, and the reading of its options."""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, get_loader, set_parsing_settings
from jsonargparse.typing import PositiveFloat, PositiveInt, register_type

import lp_jax
from lp_jax._solvers._solver import Solver
from lp_jax.cli._errors import UsageError
from lp_jax.cli._menu import MenuParser, in_words, unknown_option
from lp_jax.cli._models import Model, Pair
from lp_jax.cli._problem import Problem, model_and_training
from lp_jax.cli._task import Training
from lp_jax.planning import with_effort
from lp_jax.planning._words import code

set_parsing_settings(subclasses_enabled=["is_pure_dataclass"])  # a coarse step may be `Rediscretize` or a solver
register_type(jax.Array, float, float)  # a tolerance may be traced; here it is a number

ONE_SHOT: Pair = (lp_jax.Picard(sweeps=1), lp_jax.Picard(sweeps=2))
"""A line search with two sweeps leaves states from which one sweep is enough for a gradient."""

_FIRST = {
    *("config", "data", "name", "model", "layers", "width", "epochs", "batch_size", "learning_rate"),
    *("solver", "method", "devices", "mpi", "out", "resume", "workers", "error", "save"),
}
"""Options of the short help."""


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
            yield (name.replace("-", "_").replace("__", "--", 1) if arg.startswith("--") else name) + equals + value


def first_look(args: Sequence[str], command: str) -> argparse.Namespace:
    """Return the options on which the others depend: model, folder, processes. The others are ignored."""
    parser = MenuParser(prog=command, add_help=False, allow_abbrev=False)
    for name in ("--config", "--model", "--solver", "--adjoint_solver"):
        parser.add_argument(name)
    add_launch(parser)
    add_folder(parser, command.split()[-1])
    look = parser.parse_known_args(args)[0]
    if look.config is not None and Path(look.config).is_file():
        stored = get_loader("yaml")(Path(look.config).read_text(encoding="utf-8"))
        parser.set_defaults(**{name: stored[name] for name in vars(look) if name in stored})
        look = parser.parse_known_args(args)[0]
    look.out = Path(look.out)
    return look


def add_launch(parser: argparse.ArgumentParser | ArgumentParser) -> None:
    add = parser.add_argument_group("Devices").add_argument
    add("--devices", type=PositiveInt, metavar="N", help="Number of devices that the layers are spread over.")
    add("--mesh", metavar="AXES", help="Sizes of the axes that layers and examples are spread over: layers=2,data=2.")
    add("--mpi", action="store_true", help="MPI ranks hold the layers: mpirun -n 4 lp-jax train ... --mpi.")
    add(
        "--distributed",
        action="store_true",
        help="Processes of jax.distributed hold the layers: srun lp-jax train ... --distributed.",
    )
    add("--coordinator", metavar="HOST:PORT", help="Address of process 0; srun and mpirun set it by themselves.")
    add("--process", metavar="I/N", help="Number of this process and of all of them, like 0/2; needs --coordinator.")
    add("--debug", action="store_true", help="Show the traceback of an error instead of one line.")


def add_folder(parser: argparse.ArgumentParser | ArgumentParser, problem: str) -> None:
    add = parser.add_argument_group("Output").add_argument
    add("--out", type=Path, metavar="FOLDER", default=Path("runs", problem), help="Folder for all results.")
    add("--resume", action="store_true", help="Continue the run in --out. Options that are left out keep their values.")
    add("--skip_damaged", action="store_true", help="With --resume: leave out damaged checkpoints.")


def add_training(parser: ArgumentParser, model: Model, problem: str) -> None:
    """Add the options of training: solvers, method, devices and output."""
    solver, adjoint_solver = (code(one) for one in model.solvers)
    add = parser.add_argument_group("Solvers").add_argument
    add(
        "--solver",
        type=Solver | Literal["auto"] | None,
        metavar="CLASS",
        help="Solver of the layers: a class of lp_jax, or your own as module.Class. Its fields are options, like "
        f"--solver.levels 3; --solver.help CLASS lists them. Default: {solver}. --serial is short for --solver Serial; "
        "auto is the solver that lp-jax plan recommends.",
    )
    add(
        "--adjoint_solver",
        type=Solver | None,
        metavar="CLASS",
        help=f"Solver of the adjoint system. Default: the same as --solver; without --solver, {adjoint_solver}.",
    )
    add(
        "--adjoint_iterations",
        type=PositiveInt,
        metavar="N",
        help="Number of iterations of the adjoint solver, without a tolerance.",
    )
    add(
        "--spatial",
        type=PositiveInt,
        metavar="D",
        help="Number of axes of space along which coarse levels have half the points: 2 for images. Needs --solver MGRIT "
        "--solver.relaxation FCF.",
    )
    add(
        "--controller",
        type=PositiveFloat,
        metavar="BOUND",
        help="Keep the gradient's error below this part of its mini-batch noise, by changing the tolerances. Try 0.1. "
        "Needs solvers with a tolerance.",
    )
    add = parser.add_argument_group("Method").add_argument
    add(
        "--method",
        choices=("direct", "one-shot", "nested"),
        default="direct",
        help="How to train. direct takes a step for each batch. one-shot takes all examples in each step, one step an epoch; "
        "each solve begins where the last one ended, and the optimizer is L-BFGS. nested trains shallow "
        "networks first, those of --depths.",
    )
    add(
        "--depths",
        type=list[PositiveInt] | None,
        metavar="[N, ...]",
        help="Numbers of layers that nested goes through, the network's own last. Default: a quarter, a half and all.",
    )
    add_launch(parser)
    add_folder(parser, problem)
    add = parser.add_argument_group("Watching").add_argument
    add("--checkpoint_every", type=PositiveInt, metavar="N", default=200, help="Number of steps between checkpoints.")
    add(
        "--probe_every",
        type=PositiveInt,
        metavar="N",
        help="Number of steps between gradient probes. Default: 6 probes in a run.",
    )
    add("--log_every", type=PositiveInt, metavar="N", default=10, help="Number of steps between fetching metrics.")
    add("--no_compare", action="store_true", help="Train no exact baseline for comparison.")
    add("--no_pictures", action="store_true", help="Draw no pictures.")


def parser_of(
    command: str, problem: Problem, kind: str, about: str, unused: frozenset[str] = frozenset()
) -> ArgumentParser:
    """Return the parser of a command on a problem, with the options of data, model and training but the unused ones.

    The defaults are those of the problem and its model; ``about`` is the head of the help.
    """
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
    parser.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="Show the options that most runs take.")
    parser.add_argument("--help_all", action="help", help="Show all options.")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML or JSON file of options, by name.")
    add = parser.add_argument_group("Data and model").add_argument
    for name, text in problem.sources.items():
        add(f"--{name}", type=Path if name == "data" else str, metavar=name.upper(), help=text)
    kinds = "; ".join(f"{name}: {one.about()}" for name, one in problem.models.items())
    add("--model", choices=list(problem.models), default=kind, help=f"The model. Its options are those below. {kinds}.")
    parser.add_class_arguments(type(model), None)
    parser.add_class_arguments(Training, None, skip=set(unused))
    training = {name: value for name, value in dataclasses.asdict(problem.training).items() if name not in unused}
    parser.set_defaults(**dataclasses.asdict(model), **training)
    return parser


def parse(
    parser: ArgumentParser, problem: Problem, args: Sequence[str], stored: Mapping[str, object] | None = None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options twice: with solvers as objects, and by name as JSON values to store."""
    config = [] if stored is None else ["--config", json.dumps(dict(stored))]
    if wrong := unknown_option(args, parser._option_string_actions):
        raise UsageError(wrong)
    try:
        read = parser.parse_args([*config, *args])
        options = parser.instantiate(read)
    except argparse.ArgumentError as error:
        raise UsageError(_reason(in_words(error))) from None
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(_reason(str(error))) from None
    try:
        model_and_training(problem, vars(options))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--{error}") from None
    for name, text in problem.sources.items():
        if getattr(options, name) is None:
            raise UsageError(f"Missing option --{name}: {text[0].lower()}{text[1:]}")
    kept = json.loads(parser.dump(read, format="json", skip_unset=False))
    if "data" in kept:
        kept["data"] = str(options.data.resolve())  # resuming may happen elsewhere
    return options, kept


def solvers(options: argparse.Namespace, model: Model) -> Pair:
    """Return the forward and the adjoint solver of the options."""
    solver, adjoint_solver, iterations = options.solver, options.adjoint_solver, options.adjoint_iterations
    if solver == "auto":
        if adjoint_solver is not None or iterations is not None:
            raise UsageError("--solver auto chooses the adjoint solver, too; leave out --adjoint_... options.")
        return model.solvers
    forward, adjoint = model.solvers if solver is None else (solver, solver.for_adjoint())
    if solver is None and options.method == "one-shot":
        forward, adjoint = ONE_SHOT
    adjoint = adjoint_solver or adjoint
    adjoint = adjoint if iterations is None else with_effort(adjoint, iterations)
    return _coarsened(forward, options.spatial), _coarsened(adjoint, options.spatial)


def _coarsened(solver: Any, dims: int | None) -> Solver:
    if dims is None:
        return solver
    try:
        return dataclasses.replace(solver, spatial=lp_jax.spatial(dims))
    except TypeError:
        raise UsageError(f"--spatial needs a solver with levels, like --solver MGRIT; got {code(solver)}.") from None


_FRAMES = ("Parser key ", "Problem with ", "Does not validate ", "Subtypes: ", "Errors:", "Given value", "Type ")
"""Beginnings of the lines in which jsonargparse says where a value is wrong. The others say what is wrong, for each type."""


def _reason(text: str) -> str:
    """Return the cause in a parser's message, and what solvers there are if it is about one."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    causes = [line for line in lines if not line.startswith(_FRAMES)] or lines
    cause = next((line for line in reversed(causes) if not line.startswith("Expected a ")), causes[0])
    if cause.startswith("Expected a <") and "value" not in cause:
        cause = f"{cause}. {lines[-1]}"
    cause = re.sub(r"Expected a dot import path string: (.*)", r"there is no solver '\1'", cause)
    if key := re.match(r'Parser key "([\w.]+)":', text):
        cause = f"--{key[1]}: {cause}"
    if not re.match("--(adjoint_)?solver:", cause):
        return cause
    classes = "MGRIT, Picard, Secant, Windowed, Newton, Serial or module.Class"
    return f"{cause}. It is {classes}, then its options, like --solver.levels 3; --solver.help CLASS lists them."


def overridden(stored: Mapping[str, Any], look: argparse.Namespace) -> dict[str, Any]:
    """Return stored options without those that the command line replaces as a whole."""
    void: set[str] = set()
    if look.solver is not None:  # another class does not inherit fields
        void |= {"solver", "adjoint_solver", "adjoint_iterations", "spatial"}
    if look.adjoint_solver is not None:
        void |= {"adjoint_solver", "adjoint_iterations"}
    if look.devices or look.mesh or look.mpi or look.distributed:
        void |= {"devices", "mesh"}
    return {name: value for name, value in stored.items() if name not in void}
