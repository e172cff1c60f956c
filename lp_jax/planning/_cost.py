r"""Time and memory of a training step: its work, and a machine's times for this work.

.. math::
    T = T_{fixed} + n_{own} t_{update} + \sum_{batches} n\, t_{kind}(layers) + \sum_{kind} n_{rows}\, t_{kind}(row)
        + n_{states} (\lambda + |u| / \beta)
        + n_{reductions} \lceil \log_2 P \rceil (\lambda + |u| / \beta)
        + 2 \lceil \log_2 D \rceil \lambda + 2 \frac{D - 1}{D} \frac{|w|}{\beta_{sum}}

`Schedule` has the batches, rows, messages and reductions. `Machine` has the times t, the latency :math:`\lambda` and the
bandwidths :math:`\beta`. P workers share the layers, each with :math:`n_{own}` of them. D workers share the examples; the
gradients w are summed over these.
"""

import functools
import math
from typing import NamedTuple

from lp_jax._solvers._solver import Solver
from lp_jax.planning._machine import Machine
from lp_jax.planning._schedule import count
from lp_jax.planning._work import Schedule, evaluates, held, most_at_once


class Time(NamedTuple):
    """Seconds of a training step, by kind."""

    evaluations: float  # layers and their transposes
    messages: float  # states sent between neighbours, where a worker waits for them
    reductions: float  # sums and broadcasts over all workers of the layers
    gradients: float  # the sum of gradients over the workers of the examples
    fixed: float  # the step's fixed time and the optimizer's update

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self)


def predict(
    solver: Solver, adjoint_solver: Solver, layers: int, machine: Machine, *, workers: int = 1, data_workers: int = 1
) -> Time:
    """Predict the time of a training step, value and gradient, on ``data_workers`` times ``workers`` devices.

    Each of the ``data_workers`` groups has a part of the examples, and spreads the layers over its ``workers``. A solver with a
    tolerance counts with all of its iterations. ``seconds`` of the result is the sum of its fields ``evaluations``,
    ``messages``, ``reductions`` (sums over the workers of the layers), ``gradients`` (their sum over the workers of the
    examples) and ``fixed``.

    Raises:
        NotImplementedError: for Newton's method within multigrid, or on a machine without times of Newton's method.
        ValueError: for more data workers than examples.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> gpu = planning.Machine(at_once=(1, 1024), **flat)  # a layer does not fill it
        >>> solvers = lp_jax.Serial(), lp_jax.Picard(sweeps=6)
        >>> serial, picard = (planning.predict(s, s, 1024, gpu).seconds for s in solvers)
        >>> round(serial / picard)
        219
    """
    if data_workers > machine.examples:
        raise ValueError(f"data_workers={data_workers} is more than the {machine.examples} examples.")
    mine = math.ceil(layers / workers)
    machine = machine.divided(data_workers)
    message = machine.message(machine.state_bytes)
    kept = solver.resolve(layers).keeps_states
    spread = functools.partial(count, layers=layers, workers=workers, at_once=machine.auto or math.inf, kept=kept)
    forward, adjoint = spread(solver), spread(adjoint_solver, adjoint=True)
    schedule = forward + adjoint
    hops = (workers - 1).bit_length()
    return Time(
        evaluations=_evaluations(solver, forward, machine) + _evaluations(adjoint_solver, adjoint, machine),
        messages=schedule.states * message,
        reductions=schedule.reductions * hops * message,
        gradients=all_reduce(mine * machine.layer_bytes, data_workers, machine),
        fixed=machine.fixed + mine * machine.update,
    )


def _evaluations(solver: Solver, schedule: Schedule, machine: Machine) -> float:
    """Seconds of a solve's batches.

    Where layers run one after another, relaxation of an interval keeps its state at hand. A sweep stores and reads the states
    of all layers, so its layers take longer.
    """
    order = evaluates(solver)
    if order == "series":  # its gradient is measured as a whole
        forward, backward = machine.per_layer
        return schedule.depth("forward", "linearise") * forward + schedule.depth("gradient") * backward
    in_rows = order == "intervals" and most_at_once(solver, machine.auto or math.inf) == 1
    seconds = machine.seconds_across if order == "intervals" else machine.seconds
    rows = sum(n * machine.row(kind) for kind, n in schedule.rows.items())
    return rows + sum(
        n * (machine.in_a_row(kind) if in_rows and layers == 1 else seconds(kind, layers))
        for (kind, layers), n in schedule.batches.items()
    )


def all_reduce(size: float, workers: int, machine: Machine) -> float:
    """Seconds of a sum of ``size`` bytes over workers: the latency of a tree and the bandwidth of a ring.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    if workers == 1:
        return 0.0
    bandwidth = machine.bandwidth if machine.sum_bandwidth is None else machine.sum_bandwidth
    return 2 * (workers - 1).bit_length() * machine.latency + 2 * (workers - 1) / workers * size / bandwidth


def pipeline(layers: int, machine: Machine, workers: int, microbatches: int) -> float:
    r"""Seconds of a training step in a pipeline: serial propagation of microbatches that follow each other.

    M microbatches on P workers take :math:`(M + P - 1)` turns of :math:`\lceil N / P \rceil` layers, forward and backward. A
    message follows each turn, and the gradients of all turns are added up. The gradient is exact. The bubble is
    :math:`(P - 1) / (M + P - 1)` of the turns.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019.
    """
    part = machine.divided(microbatches)
    turns, mine = microbatches + workers - 1, math.ceil(layers / workers)
    sent = 2 * part.message(part.state_bytes) if workers > 1 else 0.0
    added = (turns - 1) * mine * machine.adding
    return turns * (mine * sum(part.per_layer) + sent) + added + mine * machine.update + machine.fixed


class Memory(NamedTuple):
    """Bytes on one worker, by kind."""

    parameters: int  # of the worker's layers, and their gradient
    kept: int  # states and linearisations that the forward solve keeps for the adjoint
    working: int  # temporary arrays of the solvers

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(self)


def memory(solver: Solver, layers: int, machine: Machine, *, workers: int = 1, data_workers: int = 1) -> Memory:
    """Predict the memory of a training step, value and gradient without the optimizer's state; arguments as for `predict`.

    With n layers on a worker, a state of |u| bytes and a linearisation with k further bytes, serial propagation keeps
    n (|u| + k) bytes. The number of arrays that a sweep or a cycle has live at once was counted in compiled programs (suite
    ``memory`` of the benchmarks). The memory does not depend on the adjoint solver, which uses what the forward solver keeps.
    ``bytes`` of the result is the sum of its fields ``parameters`` (with their gradient), ``kept`` and ``working``.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> times = dict.fromkeys(("at_once", "forward", "adjoint", "gradient"), (1,))
        >>> machine = planning.Machine(**times, auto=1, state_bytes=8192, kept_bytes=16384, layer_bytes=16640)
        >>> scan, picard = lp_jax.Serial(), lp_jax.Picard()
        >>> [planning.memory(solver, 4096, machine).bytes // 10**6 for solver in (scan, picard)]
        [236, 337]
    """
    machine = machine.divided(data_workers)
    parameters = 2 * math.ceil(layers / workers) * machine.layer_bytes
    return Memory(parameters, *held(solver.resolve(layers), machine, layers, workers))
