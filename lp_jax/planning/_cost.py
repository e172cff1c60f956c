r"""Time of a training step, from what it does and what a machine takes for it.

.. math::
    T = T_{fixed} + \sum_{batches} n\, t_{kind}(layers) + n_{states} (\lambda + |u| / \beta)
        + n_{reductions} \lceil \log_2 P \rceil (\lambda + |u| / \beta)

with the batches, messages and reductions of `Schedule`, and the times t, the latency :math:`\lambda` and the bandwidth
:math:`\beta` of `Machine`.
"""

from typing import NamedTuple

from lp_jax._serial import Serial
from lp_jax._solver import Solver
from lp_jax.planning._machine import Machine
from lp_jax.planning._schedule import training_step


class Time(NamedTuple):
    """Seconds of a training step, by what they are spent on.

    Attributes:
        evaluations: of layers, and their transposes.
        messages: of states between neighbours, waited for.
        reductions: over all workers.
        fixed: whatever does not depend on the solver.
    """

    evaluations: float
    messages: float
    reductions: float
    fixed: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def time(solver: Solver, adjoint_solver: Solver, layers: int, machine: Machine, *, workers: int = 1) -> Time:
    """Of a training step: value and gradient.

    Args:
        solver: of the forward solve; with a tolerance, as if it took all of its iterations.
        adjoint_solver: of the adjoint solve.
        layers: number of layers.
        machine: what they take.
        workers: number of workers that the layers are spread over.

    Raises:
        NotImplementedError: for Newton's method.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> flat = {kind: (1e-5, 1e-5) for kind in ("forward", "linearise", "adjoint", "gradient")}
        >>> gpu = planning.Machine(layers=(1, 1024), **flat)  # that a layer does not fill
        >>> serial, picard = lp_jax.Serial(), lp_jax.Picard(sweeps=6)
        >>> serial, picard = (planning.time(s, s, 1024, gpu).seconds for s in (serial, picard))
        >>> round(serial / picard)
        219
    """
    message = machine.message(machine.state_bytes)
    schedule = training_step(solver, adjoint_solver, layers, workers=workers, looped=machine.looped)
    if isinstance(solver.resolve(layers), Serial) and isinstance(adjoint_solver.resolve(layers), Serial):
        evaluations = layers * sum(machine.per_layer)
    else:
        evaluations = sum(n * machine.seconds(batch.kind, batch.layers) for batch, n in schedule.batches.items())
    hops = (workers - 1).bit_length()
    return Time(evaluations, schedule.states * message, schedule.reductions * hops * message, machine.fixed)
