r"""Time and memory of a training step, from what it does and what a machine takes for it.

.. math::
    T = T_{fixed} + n_{own} t_{update} + \sum_{batches} n\, t_{kind}(layers) + \sum_{kind} n_{rows}\, t_{kind}(row)
        + n_{states} (\lambda + |u| / \beta)
        + n_{reductions} \lceil \log_2 P \rceil (\lambda + |u| / \beta)
        + 2 \lceil \log_2 D \rceil \lambda + 2 \frac{D - 1}{D} \frac{|w|}{\beta_{sum}}

with the batches, rows, messages and reductions of `Schedule`, the times t, the latency :math:`\lambda` and the bandwidths
:math:`\beta` of `Machine`, P workers for the layers, each with :math:`n_{own}` of them, and D for the examples, over which
the gradients w are summed.
"""

import math
from typing import Any, NamedTuple

from lp_jax._solvers._solver import Solver
from lp_jax.planning._machine import Machine
from lp_jax.planning._schedule import count
from lp_jax.planning._work import Schedule, Sizes, evaluates, held, most_at_once


class Time(NamedTuple):
    """Seconds of a training step, by what they are spent on.

    Attributes:
        evaluations: of layers, and their transposes.
        messages: of states between neighbours, waited for.
        reductions: over all workers.
        gradients: their sum over workers that have other examples.
        fixed: whatever does not depend on the solver: what a step takes once, and updates of a worker's own layers.
    """

    evaluations: float
    messages: float
    reductions: float
    gradients: float
    fixed: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def predict(
    solver: Solver, adjoint_solver: Solver, layers: int, machine: Machine, *, workers: int = 1, data_workers: int = 1
) -> Time:
    """Predict a training step, value and gradient, with ``data_workers`` rows of ``workers``, each with its part of the examples.

    A solver with a tolerance counts as if it took all of its iterations.

    Raises:
        NotImplementedError: for Newton's method within multigrid, and where the machine has no times of it.
        ValueError: for more data workers than examples.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> flat = {kind: (1e-5, 1e-5) for kind in ("forward", "linearise", "adjoint", "gradient")}
        >>> gpu = planning.Machine(at_once=(1, 1024), **flat)  # that a layer does not fill
        >>> serial, picard = lp_jax.Serial(), lp_jax.Picard(sweeps=6)
        >>> serial, picard = (planning.predict(s, s, 1024, gpu).seconds for s in (serial, picard))
        >>> round(serial / picard)
        219
    """
    if data_workers > machine.examples:
        raise ValueError(f"data_workers={data_workers} is more than the {machine.examples} examples.")
    mine = math.ceil(layers / workers)
    machine = machine.divided(data_workers)
    message = machine.message(machine.state_bytes)
    kept = solver.resolve(layers).keeps_states
    spread: dict[str, Any] = {"workers": workers, "at_once": machine.auto or math.inf, "kept": kept}
    there = count(solver, layers, **spread)
    back = count(adjoint_solver, layers, **spread, adjoint=True)
    schedule = there + back
    hops = (workers - 1).bit_length()
    return Time(
        evaluations=_evaluations(solver, there, machine) + _evaluations(adjoint_solver, back, machine),
        messages=schedule.states * message,
        reductions=schedule.reductions * hops * message,
        gradients=all_reduce(mine * machine.layer_bytes, data_workers, machine),
        fixed=machine.fixed + mine * machine.update,
    )


def _evaluations(solver: Solver, schedule: Schedule, machine: Machine) -> float:
    """Seconds of a solve's batches.

    Where layers at once are evaluated one after another, those of an interval still follow each other, while a sweep
    stores and reads the states of all layers.
    """
    if evaluates(solver) == "series":
        return _in_series(schedule, machine)
    intervals = evaluates(solver) == "intervals"
    in_rows = intervals and most_at_once(solver, machine.auto or math.inf) == 1
    seconds = machine.seconds_across if intervals else machine.seconds
    rows = sum(n * machine.row(kind) for kind, n in schedule.rows.items())
    return rows + sum(
        n * (machine.in_a_row(batch.kind) if in_rows and batch.layers == 1 else seconds(*batch))
        for batch, n in schedule.batches.items()
    )


def _in_series(schedule: Schedule, machine: Machine) -> float:
    """Of serial propagation: its gradient is known as a whole."""
    forward, backward = machine.per_layer
    return schedule.depth("forward", "linearise") * forward + schedule.depth("gradient") * backward


def all_reduce(size: float, workers: int, machine: Machine) -> float:
    """Seconds of a sum of so many bytes over workers: up and down a tree, or round a ring, whichever term counts.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    if workers == 1:
        return 0.0
    bandwidth = machine.bandwidth if machine.sum_bandwidth is None else machine.sum_bandwidth
    return 2 * (workers - 1).bit_length() * machine.latency + 2 * (workers - 1) / workers * size / bandwidth


def pipeline(layers: int, machine: Machine, workers: int, microbatches: int) -> float:
    r"""Seconds of a training step of serial propagation, microbatches following each other from worker to worker.

    With M microbatches and P workers: :math:`(M + P - 1)` turns of :math:`\lceil N / P \rceil` layers, forward and backward, a
    message after each, and the gradients of all turns are added up. Its gradient is exact; :math:`(P - 1) / (M + P - 1)` of the
    turns are its bubble.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019.
    """
    part = machine.divided(microbatches)
    turns, mine = microbatches + workers - 1, math.ceil(layers / workers)
    sent = 2 * part.message(part.state_bytes) if workers > 1 else 0.0
    added = (turns - 1) * mine * machine.adding
    return turns * (mine * sum(part.per_layer) + sent) + added + mine * machine.update + machine.fixed


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
    """Predict the memory of a training step, value and gradient without the optimizer's state; arguments as for `predict`.

    What a solver keeps are arrays of states: with n layers on a worker, |u| bytes of a state and k of what a layer's
    linearisation holds beside it, serial propagation keeps n (|u| + k). How many arrays a sweep or a cycle has live at
    once is counted in compiled programs (suite ``memory`` of the benchmarks). The adjoint solver needs what the forward one
    keeps, whichever it is.

    Example:
        >>> import lp_jax
        >>> from lp_jax import planning
        >>> times = dict.fromkeys(("at_once", "forward", "linearise", "adjoint", "gradient"), (1,))
        >>> machine = planning.Machine(**times, auto=1, state_bytes=8192, kept_bytes=16384, layer_bytes=16640)
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
        auto=machine.auto or math.inf,
    )
    return Memory(2 * sizes.mine * sizes.parameters, *held(solver.resolve(layers), sizes))
