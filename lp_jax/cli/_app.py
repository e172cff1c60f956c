"""The commands and their options."""

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from lp_jax.cli._catalog import MODELS, PROBLEMS, RESNETS
from lp_jax.cli._grouped import Command, Group, Option
from lp_jax.cli._solver import build, default_solvers, solver_options

_SUITES = {
    "resnet": "Training step of a convolutional ResNet.",
    "dense": "Gradient of a dense ResNet, looped and batched; compile time and memory.",
    "ranks": "Layers on two workers: host devices and MPI ranks.",
    "single": "Training steps on one device, with every kind of solver.",
    "memory": "Memory of the gradient against the number of layers.",
    "frontier": "Error of the gradient against depth and work.",
    "accuracy": "What training reaches, over seeds.",
    "pipeline": "Two devices: layers, examples, or a pipeline of microbatches.",
    "model": "Predicted times beside all measured ones.",
    "profile": "Where the time of a training step goes.",
}
_WHAT, _HOW, _WHERE, _OUT, _PLAN = "Model", "Training", "Devices", "Output", "Plan"


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    examples=[
        ("lp-jax train digits", "train on scikit-learn's digits, nothing to download"),
        ("lp-jax train digits --help", "all that can be chosen"),
        ("lp-jax plan digits", "which solver, and what it would give"),
        ("lp-jax info", "versions, devices, MPI"),
    ],
)
@click.version_option(package_name="lp_jax", message="lp_jax %(version)s")
def app() -> None:
    """Layer-parallel training of deep networks in JAX.

    The layers of a network are solved for all at once, by multigrid (MGRIT), forward and adjoint.
    """


@app.command()
def info() -> None:
    """Versions, devices, MPI."""
    from lp_jax.cli._info import report

    click.echo(report())


@app.group(
    cls=Group,
    examples=[
        ("lp-jax bench ranks --help", "the options of a suite"),
        ("lp-jax bench dense --quick", "a tiny row, to see that all works"),
    ],
)
def bench() -> None:
    """Time the library beside what one would use instead. The suites come with the source."""


def _suite(name: str, about: str) -> click.Command:
    @click.pass_context
    def run_suite(ctx: click.Context, arguments: tuple[str, ...]) -> None:
        root = Path(__file__).resolve().parents[2]
        if not (root / "benchmarks" / "command.py").exists():
            raise click.ClickException(
                "the benchmarks come with the source and not with the package: clone the repository, and in its folder "
                "pip install -e '.[bench]'."
            )
        sys.path.insert(0, str(root))
        module = importlib.import_module(f"benchmarks.{name}")
        ctx.exit(module.main(arguments))

    argument = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}  # they are the suite's, --help too
    return click.Command(
        name, params=[argument], callback=run_suite, help=about, add_help_option=False, context_settings=settings
    )


for _name, _about in _SUITES.items():
    bench.add_command(_suite(_name, _about))


@app.group(
    cls=Group,
    examples=[
        ("lp-jax train digits", "8 x 8 pixels, within scikit-learn"),
        ("lp-jax train mnist --data FOLDER", "from the four IDX files"),
        ("lp-jax train gum --data FOLDER", "tag the words of a treebank with a transformer"),
        ("lp-jax train timeseries --data FOLDER --name BasicMotions", "a recurrent network, parallel in time"),
    ],
)
def train() -> None:
    """Train a deep network, layer-parallel, and compare with the exact baseline."""


def _option(flag: str, group: str, **kwargs: Any) -> Any:
    return click.option(flag, cls=Option, group=group, show_default=kwargs.get("default") is not None, **kwargs)


_POSITIVE = {"type": click.IntRange(min=1), "metavar": "N"}
_RATE = {"type": click.FloatRange(min=0.0, min_open=True), "metavar": "X"}


def _network_options(name: str) -> list[Any]:
    """What is trained, and on what."""
    problem = PROBLEMS[name]

    def default(field: str) -> str:
        """The defaults of a setting: that of the first model, and those of others that differ."""
        values = {model: getattr(sizes, field) for model, sizes in problem.models.items()}
        shown = {model: "as the data" if value is None else f"{value:g}" for model, value in values.items()}
        first = shown.pop(problem.model)
        others = "".join(f", {model} {value}" for model, value in shown.items() if value != first)
        return f"  [default: {first}{others}]"

    models = list(problem.models)
    resnet = ["resnet"] if any(model in RESNETS for model in models) else []
    explained = "; ".join(f"{model}: {MODELS[model]}" for model in models)
    files = (
        []
        if problem.files is None
        else [_option("--data", "Data", type=click.Path(path_type=Path), help=problem.files)]
    )
    if name == "timeseries":
        files.append(_option("--name", "Data", metavar="TEXT", help="of the data set in the folder"))
    return [
        *files,
        _option(
            "--model",
            _WHAT,
            type=click.Choice([*models, *resnet]),
            help=f"{explained}  [default: {problem.model}]",
        ),
        _option("--layers", _WHAT, **_POSITIVE, help="number of layers" + default("layers")),
        _option("--width", _WHAT, **_POSITIVE, help="size of the state, or channels" + default("width")),
        _option(
            "--stride",
            _WHAT,
            **_POSITIVE,
            help="(conv) the opening layer leaves every Nth point along each axis" + default("stride"),
        ),
        _option("--t1", _WHAT, **_RATE, help="time of the last layer; each has dt = t1 / layers" + default("t1")),
        _option("--heads", _WHAT, **_POSITIVE, default=4, help="(transformer) heads of attention"),
        _option(
            "--buffers",
            _WHAT,
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            help="(transformer) serial layers at either end",
        ),
        _option(
            "--dropout",
            _WHAT,
            type=click.FloatRange(0.0, 1.0, max_open=True),
            metavar="X",
            default=0.0,
            help="(transformer) rate",
        ),
        _option("--units", _WHAT, **_POSITIVE, default=1, help="(gru) units on top of each other"),
        _option("--epochs", _HOW, **_POSITIVE, help="number of epochs" + default("epochs")),
        _option("--batch-size", _HOW, **_POSITIVE, help="examples per step" + default("batch_size")),
        _option("--learning-rate", _HOW, **_RATE, help="of Adam" + default("learning_rate")),
        _option(
            "--seed",
            _HOW,
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            help="of split, initial parameters and order of batches",
        ),
    ]


def _training_options(name: str) -> Any:
    """The options of a problem."""
    problem = PROBLEMS[name]
    return _all(
        *_network_options(name),
        solver_options(problem.model),
        _option("--devices", _WHERE, **_POSITIVE, help="spread the layers over N devices  [default: 1]"),
        _option("--mesh", _WHERE, metavar="TEXT", help="spread layers and examples: layers=2,data=2"),
        _option(
            "--mpi",
            _WHERE,
            is_flag=True,
            help="one of the ranks that mpirun started: mpirun -n 4 lp-jax train ... --mpi",
        ),
        _option(
            "--distributed",
            _WHERE,
            is_flag=True,
            help="one of several processes of jax.distributed: srun lp-jax train ...",
        ),
        _option(
            "--coordinator",
            _WHERE,
            metavar="HOST:PORT",
            help="where process 0 listens; srun and mpirun tell by themselves",
        ),
        _option("--process", _WHERE, metavar="I/N", help="with --coordinator: this is process I of N"),
        _option("--out", _OUT, type=click.Path(path_type=Path), default=f"runs/{name}", help="folder for all results"),
        _option("--resume", _OUT, is_flag=True, help="go on with the run in --out; options left out are as they were"),
        _option("--checkpoint-every", _OUT, **_POSITIVE, default=200, help="steps between checkpoints"),
        _option("--probe-every", _OUT, **_POSITIVE, help="steps between gradient probes  [default: 6 in a run]"),
        _option("--log-every", _OUT, **_POSITIVE, default=10, help="steps between fetching metrics"),
        _option("--no-compare", _OUT, is_flag=True, help="leave out the serial baseline"),
        _option("--no-pictures", _OUT, is_flag=True, help="draw nothing"),
        _option("--debug", _OUT, is_flag=True, help="show where an error comes from"),
    )


def _all(*options: Any) -> Any:
    """Options as one decorator."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _problem(name: str) -> None:
    """A command for a problem of the catalog."""
    problem = PROBLEMS[name]

    @train.command(name, cls=Command, examples=list(problem.examples), help=problem.about)
    @_training_options(name)
    @click.pass_context
    def command(ctx: click.Context, /, **options: Any) -> None:
        if not options["resume"]:
            _require_data(ctx, name, options)
        _train(ctx, name, options)


def _require_data(ctx: click.Context, problem: str, options: dict[str, Any]) -> None:
    files = PROBLEMS[problem].files
    if files is not None and options["data"] is None:
        raise click.UsageError(f"Missing option '--data': the {files}.", ctx)
    if problem == "timeseries" and options["name"] is None:
        raise click.UsageError("Missing option '--name': of the data set in the folder, like BasicMotions.", ctx)


for _name in PROBLEMS:
    _problem(_name)


@app.group(
    cls=Group,
    examples=[
        ("lp-jax plan digits", "which solver for this network on this machine"),
        (
            "lp-jax plan digits --workers 8 --error 1e-3",
            "its layers spread over eight such machines, a closer gradient",
        ),
        ("lp-jax plan digits --save machine.json", "keep what was measured"),
        ("lp-jax plan machine machine.json --layers 1024", "times alone, of what was measured elsewhere"),
    ],
)
def plan() -> None:
    """Tell before training what layer-parallelism gives, and with which solver."""


_PLANNING = (
    _option("--workers", _PLAN, **_POSITIVE, default=1, help="devices that the layers are spread over"),
    _option("--error", _PLAN, **_RATE, default=1e-2, help="largest relative error of the gradient"),
    _option("--out", _PLAN, type=click.Path(path_type=Path), help="folder for plan.png"),
)


def _planned(name: str) -> None:
    """A command that plans for a problem of the catalog."""
    about = PROBLEMS[name].about

    @plan.command(name, cls=Command, help=f"{about} Planned, not trained.")
    @_all(
        *_network_options(name),
        *_PLANNING,
        _option(
            "--machine",
            _PLAN,
            type=click.Path(path_type=Path),
            help="file with what layers take, in place of measuring it",
        ),
        _option("--save", _PLAN, type=click.Path(path_type=Path), help="file for what was measured"),
        _option("--seconds", _PLAN, **_RATE, default=10.0, help="time for compiling gradients to look at"),
    )
    @click.pass_context
    def command(ctx: click.Context, /, **options: Any) -> None:
        _require_data(ctx, name, options)
        from lp_jax.cli._plan import plan_problem

        plan_problem(name, options)


for _name in PROBLEMS:
    _planned(_name)


@plan.command("machine", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@_all(_option("--layers", _PLAN, **_POSITIVE, required=True, help="number of layers"), *_PLANNING)
def plan_machine(file: Path, layers: int, workers: int, error: float, out: Path | None) -> None:
    """Times on the machine of a FILE (lp-jax plan ... --save FILE); of no network, so without errors of gradients."""
    from lp_jax.cli._plan import plan_file

    plan_file(file, layers, workers, error, out)


def _train(ctx: click.Context, problem: str, options: dict[str, Any]) -> None:
    explicit = {name for name in options if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    if not (options["mpi"] or options["distributed"]):  # several processes refuse together, when they have met
        build(
            options, default_solvers(options["model"] or PROBLEMS[problem].model)
        )  # before anything heavy is imported
    from lp_jax.cli._train import train_command

    train_command(problem, options, explicit)
