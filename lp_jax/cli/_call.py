"""The options of one call of ``lp-jax train``, without those of settings and solvers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from lp_jax._arrays._types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one call: method, processes, devices, and the folder of the results.

    Attributes:
        out: folder for all results.
        resume: whether to continue the run in that folder.
        debug: whether an error shows its traceback.
        devices: number of devices that the layers are spread over.
        mesh: sizes of the axes that layers and examples are spread over, like "layers=2,data=2".
        mpi: whether MPI ranks hold the layers.
        distributed: whether processes of ``jax.distributed`` hold the layers.
        coordinator: address of process 0 of ``jax.distributed``.
        process: number of this process and number of processes, like "0/2".
        method: method of training, one of `METHODS`.
        depths: numbers of layers of the method's stages; None for the defaults.
        controller: bound of the gradient's error, as a part of its noise; None trains without a controller.
        checkpoint_every: number of steps between checkpoints.
        probe_every: number of steps between gradient probes; None for the default.
        log_every: number of steps between fetching metrics.
        no_compare: whether to leave the exact baseline out.
        no_pictures: whether to leave pictures out.
    """

    out: Path
    resume: bool
    debug: bool
    devices: int | None
    mesh: str | None
    mpi: bool
    distributed: bool
    coordinator: str | None
    process: str | None
    method: str
    depths: Sequence[int] | None
    controller: float | None
    checkpoint_every: int
    probe_every: int | None
    log_every: int
    no_compare: bool
    no_pictures: bool

    @staticmethod
    def of(values: Mapping[str, PyTree]) -> "Options":
        """Return the record of a parser's values."""
        return Options(**{field.name: values[field.name] for field in dataclasses.fields(Options)})


METHODS = ("direct", "one-shot", "nested", "mgopt")
