"""The options of one call of ``lp-jax train``, apart from those that settings and solvers are made of."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How one call trains, on which processes and devices, and where its results go.

    Attributes:
        out: folder for all results.
        resume: whether to go on with the run in that folder.
        debug: whether an error shows its traceback.
        devices: number of devices that the layers are spread over.
        mesh: sizes of the axes that layers and examples are spread over, like "layers=2,data=2".
        mpi: whether MPI ranks hold the layers.
        distributed: whether processes of ``jax.distributed`` do.
        coordinator: address of process 0 of these.
        process: number of this process and of all of them, like "0/2".
        method: how to train, one of `METHODS`.
        depths: numbers of layers that a method goes through, if not its own.
        controller: bound of the gradient's error, as a part of its noise; None trains without a controller.
        checkpoint_every: number of steps between checkpoints.
        probe_every: number of steps between gradient probes, if not the usual one.
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
    def of(given: Mapping[str, Any]) -> "Options":
        """Return the record of options that a parser returned by name."""
        return Options(**{field.name: given[field.name] for field in dataclasses.fields(Options)})


METHODS = ("direct", "one-shot", "nested", "mgopt")
