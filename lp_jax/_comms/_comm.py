"""Where the layers live: in contiguous runs on a row of workers, which a `Comm` decides.

`Workers` is the row as one worker sees it inside a solve: a solver has its own intervals, and asks for states beyond them.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
from jax.extend import core

from lp_jax._arrays._types import PyTree, Stacked
from lp_jax._comms._workers import Local, Workers

Solve = Callable[[PyTree], PyTree]  # a solve as a function of its arrays


class Unit(Protocol):
    """The part of a solver that a `Comm` uses: how many layers must stay together on one worker."""

    def unit(self, steps: int) -> int:
        """Number of layers that stay together, those of one step of the coarsest level, in a network of ``steps`` layers."""


class Operands(NamedTuple):
    """The operands of a network, as its caller passed them: a `Comm` may refuse some."""

    stacked: Stacked  # ``params`` and ``data``, leaves ``(layers, ...)``
    common: PyTree  # ``y0`` and ``shared``
    times: dict[str, str]  # those of ``t0`` and ``t1`` that are known when the network is traced


class Comm(abc.ABC):
    """Where the layers of a network live, for ``solve(comm=...)``. Subclasses are frozen and hashable.

    Methods after `place` are for engines whose workers do not share their arrays; by default they return their arguments.
    """

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of workers."""

    @property
    def platform(self) -> str:
        """Platform of the workers, "cpu", "gpu" or "tpu"; by default that of JAX."""
        return default_platform()

    @property
    def kind(self) -> str:
        """The `jax.Device.device_kind` of the workers if they may not be JAX's own devices; empty by default."""
        return ""

    @property
    def splits(self) -> bool:
        """Whether the caller of `solve` passes this process's layers only."""
        return False

    @abc.abstractmethod
    def place(
        self, layers: int, solvers: Sequence[Unit], operands: Operands, inside: bool = False
    ) -> Workers:
        """Decide which layers each worker holds, of the number of ``layers`` that the caller of `solve` passed.

        Of the forward and the adjoint solver, a ``unit`` of layers must stay on one worker. With ``inside``, every worker passes
        its own layers, because it calls the pieces of a cycle by itself.
        """

    def adopt(self, tree: PyTree) -> PyTree:
        """Move arrays that lie elsewhere to the workers."""
        return tree

    def init(
        self, make: Callable[[jax.Array], PyTree], keys: jax.Array, solvers: Sequence[Unit] | None
    ) -> PyTree:
        """Return ``make(keys)``, stacked over the layers, on the workers that use it. It is not spread if ``solvers`` is None."""
        return make(keys if solvers is None else self.share(keys, solvers))

    def share(self, stacked: Stacked, solvers: Sequence[Unit]) -> Stacked:
        """Return the part of arrays over all layers that the caller of `solve` passes on this worker."""
        return stacked

    def replicate(self, tree: PyTree) -> PyTree:
        """Return the tree. Its gradient is summed over the workers, because each one uses it for its own layers."""
        return tree

    def compared(self, tree: PyTree) -> PyTree:
        """Return the tree of ``y0`` and ``shared``. A comm may compare its numbers between the processes."""
        return tree

    # Most workers evaluate any step, so this is empty and not abstract.
    def check_step(self, program: core.Jaxpr) -> None:  # noqa: B027
        """Refuse the program of a step that the workers cannot evaluate."""

    def adapt(self, program: Solve, arrays: PyTree, specs: Callable[[], PyTree]) -> Solve:
        """Return ``program`` for these arrays. Types that hold a partition take that of the outputs from ``specs()``."""
        return program

    def spread(self, stacked: Stacked) -> Stacked:
        """Return arrays over all layers, made under jit, spread over the workers where they divide evenly."""
        return stacked


def default_platform() -> str:
    """The platform that JAX computes on: that of `jax.default_device`, else `jax.default_backend`."""
    # The setting is a device, or the name of a platform.
    device: object = getattr(jax.config, "jax_default_device", None)
    return jax.default_backend() if device is None else str(getattr(device, "platform", device))


@dataclasses.dataclass(frozen=True)
class OneDevice(Comm):
    """All layers on one device: ``comm=None``."""

    size = 1

    def place(
        self, layers: int, solvers: Sequence[Unit], operands: Operands, inside: bool = False
    ) -> Workers:
        return Local(layers=layers, held=(layers,))


def common_unit(solvers: Sequence[Unit], steps: int) -> int:
    """Number of layers that must stay on one worker for all of these solvers of ``steps`` layers."""
    return math.lcm(*(solver.unit(steps) for solver in solvers))
