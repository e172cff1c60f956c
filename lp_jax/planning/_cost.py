r"""Time and memory of a training step: its work, and a machine's times for this work.

.. math::
    T = \sum_{batches} n\, t_{kind}(layers) + n_{states} (\lambda + |u| / \beta)
        + n_{reductions} \lceil \log_2 P \rceil (\lambda + |u| / \beta)
        + 2 \lceil \log_2 D \rceil \lambda + 2 \frac{D - 1}{D} \frac{|w|}{\beta}

`Schedule` has the batches, messages and reductions. `Machine` has the times t, the latency :math:`\lambda` and the bandwidth
:math:`\beta`. P workers share the layers. D workers share the examples; the gradients w are summed over these, with the
latency of a tree and the bandwidth of a ring.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

import math
from typing import NamedTuple

from lp_jax._solvers._solver import Solver
from lp_jax.planning._machine import Machine
from lp_jax.planning._schedule import count
from lp_jax.planning._solvers import held
from lp_jax.planning._work import Schedule


class Cost(NamedTuple):
    """Predicted seconds of a training step, and bytes on one worker, by kind."""

    evaluations: float  # seconds of layers and their transposes
    messages: float  # of states sent between neighbours, where a worker waits for them
    reductions: float  # of sums and broadcasts over all workers of the layers
    gradients: float  # of the sum of gradients over the workers of the examples
    parameters: int  # bytes of the worker's layers, and of their gradient
    kept: int  # of states and linearisations that the forward solve keeps for the adjoint
    working: int  # of temporary arrays of the solvers

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self[:4])

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(self[4:])


def predict(
    solver: Solver,
    adjoint_solver: Solver,
    layers: int,
    machine: Machine,
    *,
    workers: int = 1,
    data_workers: int = 1,
) -> Cost:
    """Predict time and memory of a training step, value and gradient, on ``data_workers`` times ``workers`` devices.

    Each of the ``data_workers`` groups has a part of the examples, and spreads the layers over its ``workers``. A solver with a
    tolerance counts with all of its iterations. The optimizer is not counted.

    Raises:
        NotImplementedError: for Newton's method on a machine without times of Newton's method.
        ValueError: for more data workers than examples.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> gpu = planning.Machine(at_once=(1, 1024), **flat, state_bytes=8192)  # a layer does not fill it
        >>> solvers = lp_jax.Serial(), lp_jax.Picard(sweeps=6)
        >>> serial, picard = (planning.predict(s, s, 1024, gpu) for s in solvers)
        >>> round(serial.seconds / picard.seconds), picard.bytes // serial.bytes
        (219, 4)
    """
    if data_workers > machine.examples:
        raise ValueError(
            f"data_workers={data_workers} is more than the {machine.examples} examples."
        )
    machine = machine.divided(data_workers)
    resolved = solver.resolve(layers)
    parameters = math.ceil(layers / workers) * machine.layer_bytes
    evaluations = 0.0
    schedule = Schedule()
    for each, adjoint in ((solver, False), (adjoint_solver, True)):
        work = count(
            each,
            layers,
            workers=workers,
            at_once=machine.at_once[-1],
            kept=resolved.keeps_states,
            adjoint=adjoint,
        )
        relaxes = each.resolve(layers).stride(layers) > 1
        for (kind, size), number in work.batches.items():
            faster = relaxes and size > 1 and kind in ("forward", "linearise", "adjoint")
            evaluations += (
                number * machine.seconds(kind, size) * (machine.relaxation if faster else 1.0)
            )
        schedule += work
    message = machine.message(machine.state_bytes)
    hops = (data_workers - 1).bit_length()
    kept, working = held(resolved, machine, layers, workers)
    return Cost(
        evaluations=evaluations,
        messages=schedule.states * message,
        reductions=schedule.reductions * (workers - 1).bit_length() * message,
        gradients=2 * hops * machine.latency
        + 2 * (data_workers - 1) / data_workers * parameters / machine.bandwidth,
        parameters=2 * parameters,
        kept=kept,
        working=working,
    )


class Piped(NamedTuple):
    """The number of microbatches and the predicted cost of a training step with `lp_jax.pipeline`."""

    microbatches: int
    cost: Cost


def pipeline(layers: int, machine: Machine, workers: int, microbatches: int) -> Cost:
    r"""Predict time and memory of a training step with `lp_jax.pipeline`.

    M microbatches on P workers take :math:`M + P - 1` turns of :math:`\lceil N / P \rceil` layers forward, and as many for
    cotangents, each with a message. Then each worker forms the gradients of its layers from M microbatches. It keeps what its
    layers keep for all of them, and a cotangent of each layer.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019.
    """
    part, mine = machine.divided(microbatches), math.ceil(layers / workers)
    turns = microbatches + workers - 1
    return Cost(
        evaluations=mine
        * (turns * (part.forward[0] + part.adjoint[0]) + microbatches * part.gradient[0]),
        messages=2 * turns * part.message(part.state_bytes) if workers > 1 else 0.0,
        reductions=0.0,
        gradients=0.0,
        parameters=2 * mine * machine.layer_bytes,
        kept=microbatches * mine * part.linearised_bytes,
        working=microbatches * mine * part.state_bytes,
    )


def fastest_pipeline(layers: int, machine: Machine, workers: int) -> Piped:
    """Return the pipeline that is predicted to be fastest, of those whose number of microbatches is a power of two."""
    parts = [2**k for k in range(machine.examples.bit_length())]
    options = [Piped(part, pipeline(layers, machine, workers, part)) for part in parts]
    return min(options, key=lambda option: option.cost.seconds)
