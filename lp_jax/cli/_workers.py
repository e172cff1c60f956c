"""``--devices`` and ``--mesh``: where the layers, and the examples of a batch, are spread."""

import math
import os
from collections.abc import Mapping
from typing import Any

import click
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lp_jax import MeshComm

AXES = ("layers", "data")


def mesh_comm(options: Mapping[str, Any]) -> MeshComm | None:
    """The mesh that was asked for; None for one device. On a CPU the devices are made: parts of the processor.

    Raises:
        click.UsageError: for an unknown axis, for both options at once, and for a batch that cannot be split evenly.
        click.ClickException: where there are too few devices.
    """
    if options["mesh"] is not None and options["devices"] is not None:
        raise click.UsageError("--devices N is short for --mesh layers=N; give one of the two.")
    sizes = _sizes(options["mesh"]) if options["mesh"] is not None else {"layers": options["devices"] or 1}
    needed = math.prod(sizes.values())
    if needed == 1:
        return None
    if options["batch_size"] % sizes.get("data", 1):
        raise click.UsageError(
            f"--batch-size {options['batch_size']} cannot be split evenly over data={sizes['data']}; choose a multiple."
        )
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", needed)
    if jax.device_count() < needed:
        raise click.ClickException(
            f"{needed} devices are needed and there are {jax.device_count()} ({jax.default_backend()}); "
            "ask for fewer with --devices or --mesh."
        )
    sizes = {"layers": 1} | sizes
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )
    return MeshComm(mesh)


def split_batch(batch: Any, comm: MeshComm | None) -> Any:
    """A batch with its examples spread over the axis "data", where there is one."""
    if comm is None or "data" not in comm.mesh.axis_names:
        return batch
    return jax.device_put(batch, NamedSharding(comm.mesh, PartitionSpec("data")))


def everywhere(tree: Any, comm: MeshComm | None) -> Any:
    """Arrays that lie on one device, on all of the mesh; those that are spread already as they are."""
    if comm is None:
        return tree
    devices = set(comm.mesh.devices.flat)
    same = NamedSharding(comm.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.sharding.device_set == devices else jax.device_put(x, same), tree)


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise click.UsageError(
                f"--mesh takes sizes of the axes layers and data, like layers=2,data=2; got {text!r}."
            )
        sizes[name] = int(number)
    return sizes
