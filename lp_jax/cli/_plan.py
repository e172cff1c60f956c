"""``lp-jax plan``: recommend a solver for a network, and predict its time."""

import argparse
import dataclasses
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt
from rich.console import Console

from lp_jax import planning
from lp_jax.cli._errors import UsageError
from lp_jax.cli._experiment import described, experiment
from lp_jax.cli._menu import MenuParser, description
from lp_jax.cli._models import Task
from lp_jax.cli._options import first_look, parse, parser_of, spelled_out
from lp_jax.cli._problems import PROBLEMS, Settings, prepare
from lp_jax.cli._workers import mesh_comm


def run(name: str, args: Sequence[str]) -> None:
    plan, out = _of_machine(args) if name == "machine" else _of_problem(name, args)
    print(plan)
    if out is not None:
        from lp_jax import viz

        out.mkdir(parents=True, exist_ok=True)
        viz.plan(plan).savefig(out / "plan.png")
        print(f"\nIn {out}: plan.png")


def _of_problem(name: str, args: Sequence[str]) -> tuple[planning.Plan, Path | None]:
    problem = PROBLEMS[name]
    args = list(spelled_out(args))
    kind = problem.kind(first_look(args, f"lp-jax plan {name}").model)
    about = description(
        "Recommend a solver for this network, and predict its time. Nothing is trained.",
        [
            (
                f"lp-jax plan {name} --workers 8 --save machine.json",
                "for eight such machines; keep what was measured",
            )
        ],
    )
    parser = parser_of(f"lp-jax plan {name}", problem, kind, about, ("epochs", "learning_rate"))
    add = _add_plan(parser).add_argument
    add("--machine", type=Path, metavar="FILE", help="Machine file, to read instead of measuring.")
    add("--save", type=Path, metavar="FILE", help="File to store the measurements in.")
    add(
        "--seconds",
        type=PositiveFloat,
        metavar="X",
        default=10.0,
        help="Seconds to time layers and probe gradients.",
    )
    options, _ = parse(parser, problem, args, {})
    machine = None if options.machine is None else planning.Machine.load(options.machine)
    settings, task = prepare(name, vars(options))
    if not 1 <= options.workers <= settings.layers:
        raise UsageError(
            f"--workers must be from 1 to the {settings.layers} layers; got {options.workers}."
        )
    print(described(settings, task), file=sys.stderr)
    plan = make_plan(
        settings,
        task,
        machine=machine,
        workers=options.workers,
        error=options.error,
        seconds=options.seconds,
    )
    if options.save is not None:
        plan.machine.save(options.save)
    return plan, options.out


def _of_machine(args: Sequence[str]) -> tuple[planning.Plan, Path | None]:
    about = "Predict times from a machine file, which lp-jax plan PROBLEM --save FILE writes. Gradient errors stay unknown."
    parser = MenuParser(prog="lp-jax plan machine", description=about, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="Machine file.")
    parser.add_argument(
        "--layers", type=PositiveInt, metavar="N", required=True, help="Number of layers."
    )
    _add_plan(parser)
    options = parser.parse_args(list(spelled_out(args)))
    machine = planning.Machine.load(options.file)
    try:
        plan = planning.choose(
            options.layers, machine, workers=options.workers, error=options.error
        )
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    return plan, options.out


def make_plan(
    settings: Settings,
    task: Task,
    *,
    machine: planning.Machine | None = None,
    workers: int = 1,
    **limits: float,
) -> planning.Plan:
    """Plan a network with its initial parameters, on its first batch; ``limits`` are ``error`` and ``seconds``."""
    from lp_jax import train

    made = experiment(settings, task)
    comm = (
        mesh_comm({"layers": workers})
        if machine is None and jax.device_count() >= workers > 1
        else None
    )
    with Console(stderr=True).status(
        "measuring layers, and the gradients of solvers that would be faster"
    ):
        plan = train.plan(
            made.model,
            made.params,
            next(made.batches(0)),
            loss=task.measure,
            workers=workers,
            machine=machine,
            comm=comm,
            **limits,
        )
    if machine is None:
        name = f"{jax.devices()[0].device_kind} ({platform.machine()}), {settings.problem}, {settings.kind}"
        plan = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, name=name))
    return plan


def _add_plan(parser: argparse.ArgumentParser | ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("Plan")
    about = "Number of devices that the layers are spread over."
    add = group.add_argument
    add("--workers", type=PositiveInt, metavar="N", default=1, help=about)
    add(
        "--error",
        type=PositiveFloat,
        metavar="X",
        default=1e-2,
        help="Largest relative error of the gradient.",
    )
    add("--out", type=Path, metavar="FOLDER", help="Folder for plan.png.")
    return group
