"""The commands and their options."""

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from lp_jax.cli._grouped import Command, Group, Option
from lp_jax.cli._solver import build, solver_options

_SUITES = {
    "resnet": "Training step of a convolutional ResNet.",
    "dense": "Gradient of a dense ResNet, looped and batched; compile time and memory.",
    "ranks": "Layers on two workers: host devices and MPI ranks.",
}
_WHAT, _HOW, _WHERE, _OUT = "Model", "Training", "Devices", "Output"


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    examples=[
        ("lp-jax train digits", "train on scikit-learn's digits, nothing to download"),
        ("lp-jax train digits --help", "all that can be chosen"),
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
        ctx.exit(importlib.import_module("benchmarks.command").run(module.SUITE, arguments))

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
    ],
)
def train() -> None:
    """Train a deep residual network, layer-parallel, and compare with the exact baseline."""


def _option(flag: str, group: str, **kwargs: Any) -> Any:
    return click.option(flag, cls=Option, group=group, show_default=kwargs.get("default") is not None, **kwargs)


_POSITIVE = {"type": click.IntRange(min=1), "metavar": "N"}
_RATE = {"type": click.FloatRange(min=0.0, min_open=True), "metavar": "X"}


def _training_options(*, out: str, epochs: int) -> Any:
    """The options of every problem."""
    options = [
        _option(
            "--model", _WHAT, type=click.Choice(["dense", "conv"]), default="dense", help="kind of residual layers"
        ),
        _option("--layers", _WHAT, **_POSITIVE, default=64, help="number of residual layers"),
        _option("--width", _WHAT, **_POSITIVE, help="size of the state, or channels  [default: 64, conv 8]"),
        _option("--t1", _WHAT, **_RATE, default=2.0, help="time of the last layer; each layer has dt = t1 / layers"),
        _option("--epochs", _HOW, **_POSITIVE, default=epochs, help="number of epochs"),
        _option("--batch-size", _HOW, **_POSITIVE, default=50, help="examples per step"),
        _option("--learning-rate", _HOW, **_RATE, default=3e-3, help="of Adam"),
        _option(
            "--seed",
            _HOW,
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            help="of split, initial parameters and order of batches",
        ),
        solver_options,
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
        _option("--out", _OUT, type=click.Path(path_type=Path), default=out, help="folder for all results"),
        _option("--resume", _OUT, is_flag=True, help="go on with the run in --out; options left out are as they were"),
        _option("--checkpoint-every", _OUT, **_POSITIVE, default=200, help="steps between checkpoints"),
        _option("--probe-every", _OUT, **_POSITIVE, help="steps between gradient probes  [default: 6 in a run]"),
        _option("--log-every", _OUT, **_POSITIVE, default=10, help="steps between fetching metrics"),
        _option("--no-compare", _OUT, is_flag=True, help="leave out the serial baseline"),
        _option("--no-pictures", _OUT, is_flag=True, help="draw nothing"),
        _option("--debug", _OUT, is_flag=True, help="show where an error comes from"),
    ]

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@train.command(
    cls=Command,
    examples=[
        ("lp-jax train digits", "the demo: layer-parallel, then serial"),
        ("lp-jax train digits --serial --out runs/exact", "the exact baseline alone"),
        ("lp-jax train digits --levels 3 --coarsening 4,2 --cycle F", "three levels, another cycle"),
        ("lp-jax train digits --coarse-step inject --iterations 3", "the field's standard coarse step"),
        ("lp-jax train digits --iterations 3 --adjoint-iterations 2", "more cycles, fewer for the gradient"),
        ("lp-jax train digits --solver picard --sweeps 3", "fixed-point sweeps, no coarse level"),
        ("lp-jax train digits --model conv --layers 32 --epochs 10", "a convolutional network"),
        ("lp-jax train digits --devices 4", "the layers over four devices"),
        ("lp-jax train digits --mesh layers=2,data=2", "layers and examples over four devices"),
        ("mpirun -n 4 lp-jax train digits --mpi", "the layers over four MPI ranks"),
        ("lp-jax train digits --resume", "go on after an interruption"),
    ],
)
@_training_options(out="runs/digits", epochs=30)
@click.pass_context
def digits(ctx: click.Context, /, **options: Any) -> None:
    """Train on the 1,797 handwritten digits of scikit-learn; a fifth is held out."""
    _train(ctx, "digits", options)


@train.command(
    cls=Command,
    examples=[
        ("lp-jax train mnist --data ~/mnist", "a dense network"),
        ("lp-jax train mnist --data ~/mnist --model conv --layers 32 --t1 1", "a convolutional one"),
        ("lp-jax train mnist --resume", "go on after an interruption"),
    ],
)
@_option("--data", "Data", type=click.Path(path_type=Path), help="folder of the four IDX files, plain or .gz")
@_training_options(out="runs/mnist", epochs=5)
@click.pass_context
def mnist(ctx: click.Context, /, **options: Any) -> None:
    """Train on MNIST, Fashion-MNIST or the like, from IDX files."""
    if options["data"] is None and not options["resume"]:
        raise click.UsageError("Missing option '--data': the folder of the four IDX files.", ctx)
    _train(ctx, "mnist", options)


def _train(ctx: click.Context, problem: str, options: dict[str, Any]) -> None:
    explicit = {name for name in options if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    if not (options["mpi"] or options["distributed"]):  # several processes refuse together, when they have met
        build(options)  # before anything heavy is imported
    from lp_jax.cli._train import train_command

    train_command(problem, options, explicit)
