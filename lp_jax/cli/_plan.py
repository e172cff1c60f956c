"""``lp-jax plan``: which solver for a network, and what it would give."""

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console

from lp_jax import planning
from lp_jax.cli._experiment import experiment, settings_and_task
from lp_jax.cli._settings import Settings
from lp_jax.cli._tasks import Task
from lp_jax.cli._workers import mesh_comm


def plan_problem(problem: str, options: Mapping[str, Any]) -> None:
    """Build the network, plan for it, show the plan.

    Args:
        problem: one of the catalog.
        options: of the command line, by name.
    """
    machine = None if options["machine"] is None else _machine(options["machine"])
    settings, learned = settings_and_task(problem, options)
    if not 1 <= options["workers"] <= settings.layers:
        raise click.UsageError(f"--workers must be from 1 to the {settings.layers} layers; got {options['workers']}.")
    console = Console(stderr=True)
    found = planned(
        settings,
        learned,
        console,
        machine=machine,
        workers=options["workers"],
        error=options["error"],
        seconds=options["seconds"],
    )
    if options["save"] is not None:
        found.machine.save(options["save"])
    _show(found, options["out"])


def plan_file(file: Path, layers: int, workers: int, error: float, out: Path | None) -> None:
    """Times by a machine file alone.

    Args:
        file: what `Machine.save` wrote.
        layers: number of layers.
        workers: number of workers that they are spread over.
        error: largest error of the gradient.
        out: folder for the picture, or None.
    """
    try:
        _show(planning.choose(layers, _machine(file), workers=workers, error=error), out)
    except ValueError as problem:
        raise click.UsageError(f"--{problem}") from None


def planned(
    settings: Settings,
    learned: Task,
    console: Console,
    *,
    machine: planning.Machine | None = None,
    workers: int = 1,
    error: float = 1e-2,
    seconds: float = 10.0,
) -> planning.Plan:
    """The plan for a network at its initial parameters, on its first batch.

    Args:
        settings: what is trained.
        learned: what it is trained on.
        console: where progress is shown.
        machine: what layers take; None measures it.
        workers: as for `lp_jax.plan`.
        error: as for `lp_jax.plan`.
        seconds: as for `lp_jax.plan`.
    """
    from lp_jax import train

    made = experiment(settings, learned)
    with console.status("measuring layers, and the gradients of solvers that would be faster"):
        batch = next(iter(made.batches(0)))
        interconnect = None
        if machine is None and jax.device_count() >= workers > 1:
            interconnect = planning.interconnect(mesh_comm({"layers": workers}))
        found = train.plan(
            made.model,
            made.params,
            batch,
            error=error,
            workers=workers,
            machine=machine,
            interconnect=interconnect,
            seconds=seconds,
        )
    if machine is None:
        name = f"{jax.devices()[0].device_kind} ({platform.machine()}), {settings.problem}, {settings.model}"
        found = dataclasses.replace(found, machine=dataclasses.replace(found.machine, name=name))
    return found


def _machine(path: Path) -> planning.Machine:
    try:
        return planning.Machine.load(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _show(found: planning.Plan, out: Path | None) -> None:
    click.echo(str(found))
    if out is not None:
        from lp_jax import viz

        out.mkdir(parents=True, exist_ok=True)
        viz.plan(found).savefig(out / "plan.png")
        click.echo(f"\nIn {out}: plan.png")
