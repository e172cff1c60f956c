r"""Memory of a training step on one worker.

What a solver keeps are arrays of states: with n layers on a worker, |u| bytes of a state and k of what a layer's
linearisation holds beside it, serial propagation keeps :math:`n (|u| + k)`. How many arrays of states a sweep or a cycle has
live at once is counted in compiled programs (suite ``memory`` of the benchmarks).
"""

import math
from typing import NamedTuple

from lp_jax._mgrit import MGRIT
from lp_jax._newton import Newton
from lp_jax._picard import Picard
from lp_jax._serial import Serial
from lp_jax._solver import Solver
from lp_jax.planning._machine import Machine

_OF_A_SWEEP = 3  # arrays of all states: points, what was stepped, cotangents; increments add up on the way
_OF_NEWTON = 6  # besides: entries, increments, their sum
_OF_A_CYCLE = 8  # arrays of C-points per level, forward and adjoint
_OF_A_SCAN = 3  # arrays of all Jacobians: their own, and two of the scan's
_BYTES = 4  # of a number
_F_POINTS = 2  # arrays of all states, where intervals are recomputed as one batch


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
        >>> times = dict.fromkeys(("layers", "forward", "linearise", "adjoint", "gradient"), (1,))
        >>> machine = planning.Machine(**times, looped=True, state_bytes=8192, kept_bytes=16384, layer_bytes=16640)
        >>> scan, picard = lp_jax.Serial(), lp_jax.Picard()
        >>> [planning.memory(solver, 4096, machine).bytes // 10**6 for solver in (scan, picard)]
        [236, 337]
    """
    machine = machine.share(data_workers)
    solver, mine = solver.resolve(layers), math.ceil(layers / workers)
    state, linearised = machine.state_bytes, machine.state_bytes + machine.kept_bytes
    parameters = 2 * mine * machine.layer_bytes
    if isinstance(solver, Serial):
        if solver.checkpoint_every is None:
            return Memory(parameters, mine * linearised, 0)
        span = min(mine, solver.checkpoint_every)
        return Memory(parameters, math.ceil(mine / span) * state, span * (linearised + 2 * machine.layer_bytes))
    if isinstance(solver, Picard):
        kept = mine * (linearised if solver.keeps_states else state)
        return Memory(parameters, kept, _OF_A_SWEEP * mine * state)
    if isinstance(solver, Newton):
        kept = mine * (linearised if solver.keeps_states else state)
        numbers = state / machine.examples * (state / machine.examples) / _BYTES  # of a full Jacobian, in bytes
        jacobians = _OF_A_SCAN * mine * machine.examples * (numbers if solver.jacobian == "full" else 0)
        return Memory(parameters, kept, _OF_NEWTON * mine * state + math.ceil(jacobians))
    assert isinstance(solver, MGRIT)
    levels = solver.grid(layers)[:-1]
    intervals = [math.ceil(math.ceil(steps / factor) / workers) for steps, factor in levels]
    working = _OF_A_CYCLE * sum(intervals) * state
    if solver.keeps_states:
        return Memory(parameters, mine * linearised, working)
    looped = machine.looped if solver.interval_map == "auto" else solver.interval_map == "loop"
    recomputed = levels[0][1] * linearised if looped else _F_POINTS * mine * state
    return Memory(parameters, intervals[0] * state, working + recomputed)
