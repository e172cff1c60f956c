"""``--devices`` and ``--mesh`` as numbers."""

import os
from collections.abc import Mapping
from typing import Any

import click
import jax

AXES = ("layers", "data")


def mesh_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the axes that are named; empty where none is.

    Raises:
        click.UsageError: for an unknown axis, no number, and for both options at once.
    """
    if options["mesh"] is not None and options["devices"] is not None:
        raise click.UsageError("--devices N is short for --mesh layers=N; give one of the two.")
    if options["mesh"] is None:
        return {} if options["devices"] is None else {"layers": options["devices"]}
    sizes: dict[str, int] = {}
    for part in options["mesh"].split(","):
        name, _, number = part.partition("=")
        if name not in AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise click.UsageError(
                f"--mesh takes sizes of the axes layers and data, like layers=2,data=2; got {options['mesh']!r}."
            )
        sizes[name] = int(number)
    return sizes


def set_cpu_devices(count: int) -> None:
    """Cut this machine's processor into so many devices, where it is what jax will run on. Before jax is first used."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
