r"""Memory of a training step on one worker.

What a solver keeps are arrays of states: with n layers on a worker, |u| bytes of a state and k of what a layer's
linearisation holds beside it, serial propagation keeps :math:`n (|u| + k)`. How many arrays of states a sweep or a cycle has
live at once is counted in compiled programs (suite ``memory`` of the benchmarks).
"""

from typing import NamedTuple

from lp_jax._solver import Solver
from lp_jax._work import Sizes
from lp_jax.planning._machine import Machine


class Memory(NamedTuple):
    """Bytes on one worker, by what holds them.

    Attributes:
        parameters: of its layers, and their gradient.
        kept: states and linearisations that the forward solve leaves to the adjoint.
        working: what the solvers need while they work.
    """

    parameters: int
    kept: int
    working: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self)


def memory(solver: Solver, layers: int, machine: Machine, *, workers: int = 1, data_workers: int = 1) -> Memory:
    """Of a training step: value and gradient, without the optimizer's state.

    Args:
        solver: of the forward solve; the adjoint one needs what that keeps, whichever it is.
        layers: number of layers.
        machine: the sizes of a state, a layer's parameters and its linearisation.
        workers: number of workers that the layers are spread over.
        data_workers: number of such rows of workers, each with its part of the examples.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> times = dict.fromkeys(("at_once", "forward", "linearise", "adjoint", "gradient"), (1,))
        >>> machine = planning.Machine(**times, looped=True, state_bytes=8192, kept_bytes=16384, layer_bytes=16640)
        >>> scan, picard = lp_jax.Serial(), lp_jax.Picard()
        >>> [planning.memory(solver, 4096, machine).bytes // 10**6 for solver in (scan, picard)]
        [236, 337]
    """
    machine = machine.divided(data_workers)
    sizes = Sizes(
        layers=layers,
        workers=workers,
        state=machine.state_bytes,
        linearised=machine.state_bytes + machine.kept_bytes,
        parameters=machine.layer_bytes,
        examples=machine.examples,
        looped=machine.looped,
    )
    return Memory(2 * sizes.mine * sizes.parameters, *solver.resolve(layers).held(sizes))
