"""Memory of a training step with a solver, by functions that are registered for the classes of solvers."""

import functools
import math
from collections.abc import Sequence

from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Secant
from lp_jax.planning._machine import Machine

# arrays of all states: points, what was stepped, cotangents; increments add up on the way
_OF_A_SWEEP = 3
_OF_A_CYCLE = 8  # arrays of C-points per level, forward and adjoint
_F_POINTS = 2  # arrays of all states, where intervals are recomputed as one batch
_OF_NEWTON = 6  # arrays of all states: those of a sweep, entries, increments, their sum
_OF_A_SCAN = 3  # arrays of all Jacobians: themselves, and two in the scan
_BYTES = 4  # of a number


@functools.singledispatch
def held(solver: Solver, machine: Machine, layers: int, workers: int) -> tuple[int, int]:
    """Return the bytes of a training step on one worker: kept by the forward solve for the adjoint, and temporary arrays.

    By default they are those of a sweep over all layers. Register a function for a class of solvers with
    ``@planning.held.register``.

    Example:
        >>> from lp_jax import Solver, planning
        >>> class Lean(Solver):
        ...     iterations = 3
        >>> lean = lambda solver, machine, layers, workers: (machine.state_bytes, 2 * layers // workers * machine.state_bytes)
        >>> _ = planning.held.register(Lean, lean)
        >>> times = dict.fromkeys(("at_once", "forward", "adjoint", "gradient"), (1,))
        >>> planning.held(Lean(), planning.Machine(**times, state_bytes=8), 64, 4)
        (8, 256)
    """
    mine = math.ceil(layers / workers)
    if solver.keeps_states:
        kept = mine * machine.linearised_bytes
    else:
        kept = math.ceil(mine / solver.stride(layers)) * machine.state_bytes
    return kept, _working(solver, machine, layers, workers, mine)


@functools.singledispatch
def _working(solver: Solver, machine: Machine, layers: int, workers: int, mine: int) -> int:
    """Return the bytes of temporary arrays on a worker with ``mine`` layers: by default those of a sweep."""
    return _OF_A_SWEEP * mine * machine.state_bytes


@_working.register
def _(solver: MGRIT, machine: Machine, layers: int, workers: int, mine: int) -> int:
    grid = solver.grid(layers)[:-1]
    intervals = [busiest(grid, level, workers) for level in range(len(grid))]
    cycle = _OF_A_CYCLE * sum(intervals) * machine.state_bytes
    if solver.keeps_states:
        return cycle
    at_once = min(most_at_once(solver, machine.at_once[-1]), intervals[0])
    if at_once < max(2, intervals[0]):  # as in `_adjoint.solve_adjoint`
        return cycle + int(at_once * grid[0][1] * machine.linearised_bytes)
    return cycle + _F_POINTS * mine * machine.state_bytes


@_working.register
def _(solver: Secant, machine: Machine, layers: int, workers: int, mine: int) -> int:
    return (_OF_A_SWEEP + 1) * mine * machine.state_bytes  # one more for the last change


@_working.register
def _(solver: Newton, machine: Machine, layers: int, workers: int, mine: int) -> int:
    states = _OF_NEWTON * mine * machine.state_bytes
    if solver.jacobian not in ("full", "shared"):
        return states
    matrices = 1 if solver.jacobian == "shared" else machine.examples
    jacobian = (machine.state_bytes / machine.examples) ** 2 / _BYTES
    return states + math.ceil(_OF_A_SCAN * mine * matrices * jacobian)


@_working.register
def _(solver: Serial, machine: Machine, layers: int, workers: int, mine: int) -> int:
    span = min(mine, solver.checkpoint_every or 0)
    return span * (machine.linearised_bytes + 2 * machine.layer_bytes)


def busiest(grid: Sequence[tuple[int, int]], level: int, workers: int) -> int:
    """Return the number of intervals of a level on the busiest worker, which holds whole intervals of all levels."""
    steps, factor = grid[level]
    intervals = math.ceil(steps / factor)
    together = math.prod(factor for _, factor in grid[level + 1 :])
    return min(intervals, math.ceil(math.ceil(intervals / together) / workers) * together)


def most_at_once(solver: Solver, auto: float) -> float:
    """Return the number of layers that are evaluated at once, given the number for "auto"."""
    return auto if solver.at_once == "auto" else float(solver.at_once)
