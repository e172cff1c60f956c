"""Choose a solver for a network on a machine: the fastest one whose gradient is exact enough."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lp_jax._arrays._types import State
from lp_jax._comms._comm import Comm, OneDevice
from lp_jax._problem import Problem
from lp_jax._programs import _inputs
from lp_jax._solvers._default import SERIAL, Pair
from lp_jax._solvers._solver import Solver, Stats
from lp_jax._solvers._sweeps import Picard, Secant
from lp_jax.planning._calibrate import measure
from lp_jax.planning._candidates import as_pair, cycles, newton, sweeps
from lp_jax.planning._cost import predict
from lp_jax.planning._deadline import Deadline
from lp_jax.planning._gradient_error import inner_products, relative_error
from lp_jax.planning._interconnect import interconnect
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import has_counts, small, solving
from lp_jax.planning._result import WORTH, Choice, Plan, Probed, fix_iterations

Probe = Callable[[Solver, Solver], Probed]


def plan(
    problem: Problem,
    *,
    cotangent: State | None = None,
    error: float = 1e-2,
    workers: int = 1,
    comm: Comm | Mesh | None = None,
    machine: Machine | None = None,
    seconds: float = 10.0,
    solvers: Sequence[Solver | Pair] = (),
) -> Plan:
    """Recommend solvers: calibrate, predict times, and probe gradients, fastest first, until one is exact enough.

    Args:
        problem: the network, and a typical state: times and errors are those of this batch, on one device.
        cotangent: cotangent of the last state, as a loss gives it; None takes the last state, as a sum of squares gives it.
        error: largest relative error of the gradient, in the 2-norm.
        workers: number of workers that the layers will be spread over. All runs here use one.
        comm: the workers themselves, if they are at hand; by default those of the problem. The times of their messages are
            always measured. On MPI ranks all call this together.
        machine: times of the layers; None measures them (`calibrate`).
        seconds: bound of calibration, which has half of it, and probes. It counts once messages are measured. A measurement that
            has begun is finished, its compilations included. None starts after that time. The plan names those left out.
        solvers: further solvers to compare, your own or with your settings, or pairs (solver, adjoint solver). They are
            probed first.

    Returns:
        The `Plan`. It recommends serial propagation if no solver that is exact enough is predicted to be 15 % faster.

    Raises:
        ValueError: if the error is not positive, if there are more workers than layers, or if ``workers`` contradicts ``comm``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> gpu = planning.Machine(at_once=(1, 1024), **flat)  # a layer does not fill it
        >>> problem = lp_jax.Problem(step, jnp.ones((64, 4, 4)) / 8, jnp.ones((2, 4)))
        >>> print(lp_jax.plan(problem, machine=gpu).code)
        solver=lp_jax.Picard(sweeps=32, rtol=0.01), adjoint_solver=lp_jax.Picard(sweeps=32, rtol=0.1)
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a lp_jax.Problem(step, params, y0); got {type(problem).__name__}.")
    there = _inputs.comm(problem.comm if comm is None else comm)
    problem = problem.replace(comm=None)
    messages: dict[str, Any] = {}
    if there != OneDevice():
        if workers not in (1, there.size):
            raise ValueError(f"plan got workers={workers} and a comm of {there.size}. Leave workers out.")
        workers = there.size
        messages = interconnect(there) if workers > 1 else {}
    end, half = Deadline(seconds), Deadline(seconds / 2)
    if machine is None:
        machine = measure(problem, small(problem.y0), half)
    machine = dataclasses.replace(machine, **messages)
    probe, left = _probe(problem, cotangent), end.left
    best = choose(problem.layers, machine, error=error, workers=workers, probe=probe, seconds=left, solvers=solvers)
    notes = [f"Left out for lack of time: {', '.join(half.left_out)}."] if half.left_out else []
    if not has_counts(problem):
        notes.append(
            'A layer has a callback, a foreign call or a loop of unknown length: at_once="auto" evaluates one at a time.'
        )
    return dataclasses.replace(best, note=" ".join(notes))


def choose(
    layers: int,
    machine: Machine,
    *,
    error: float = 1e-2,
    workers: int = 1,
    probe: Probe | None = None,
    seconds: float = 10.0,
    solvers: Sequence[Solver | Pair] = (),
) -> Plan:
    """Recommend solvers as `plan` does, from the number of layers and their times.

    ``probe(solver, adjoint_solver)`` returns the error of a gradient and the iterations of both solves. Without a probe only
    serial propagation is known to be exact enough, and the other solvers are sorted by their times. The other arguments, and
    errors, are those of `plan`; ``seconds`` bounds the probes.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1; got {layers}.")
    if not 1 <= workers <= layers:
        raise ValueError(
            f"workers must be from 1 to the number of layers, {layers}, so that each has one; got {workers}."
        )
    if not error > 0:
        raise ValueError(f"error must be a positive number, like 1e-2; got {error}.")

    def choice(pair: Pair, probed: Probed | None = None) -> Choice:
        return Choice(*pair, predict(*fix_iterations(pair, probed), layers, machine, workers=workers), probed)

    serial = choice(SERIAL)
    choices, deadline, unprobed = [serial], Deadline(seconds), 0

    def limit() -> float:
        """Seconds that a solver must be faster than to be recommended."""
        return min([serial.cost.seconds / WORTH, *(c.cost.seconds for c in choices if c.within(error))])

    def look(pairs: list[Pair], *, anyway: bool = False) -> None:
        """Probe solvers of one program, loosest tolerance first, if they are fast, or anyway.

        A program that is compiled when time is over is run until one is exact enough.
        """
        nonlocal unprobed
        family = [choice(pair) for pair in pairs]
        faster = any(c.cost.seconds < limit() for c in family)
        if probe is None or not (anyway or faster):
            choices.extend(family)
        elif not deadline.allows():
            choices.extend(family)
            unprobed += faster
        else:
            for pair in pairs:
                found = probe(*pair)
                choices.append(choice(pair, found))
                if not math.isfinite(found.error) or (deadline.left <= 0 and found.error <= error):
                    break

    for pair in map(as_pair, solvers):
        look([pair], anyway=True)
    look(sweeps(Picard), anyway=True)  # slow here, they may be fast on more devices
    if machine.newton is not None:
        look(newton())
    only_serial = sum(c.within(error) for c in choices) == 1
    if probe is not None and only_serial and deadline.left > 0:
        look(sweeps(Secant))
    for pair in sorted(cycles(layers, workers), key=lambda pair: choice(pair).cost.seconds):
        look([pair])
    choices.sort(key=lambda c: c.cost.seconds)
    best = next(c for c in choices if c.within(error))
    best = best if best.cost.seconds * WORTH <= serial.cost.seconds else serial
    return Plan(tuple(choices), best, serial, machine, layers, workers, error, unprobed)


def _probe(problem: Problem, cotangent: State | None) -> Probe:
    """Return a probe: it compares gradients of all parameters and shared values with the exact ones.

    Where there are none, as in a scan over integers, it compares the gradient of the initial state.
    """
    solved = solving(problem, fast=True)

    def gradient(solver: Solver, adjoint_solver: Solver) -> tuple[list[jax.Array], Stats, Stats]:
        gradients, stats, adjoint_stats = solved(solver, adjoint_solver, cotangent)
        trees = (gradients.params, gradients.shared), gradients.y0
        leaves, initial = ([x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0] for tree in trees)
        return leaves or initial, stats, adjoint_stats

    @jax.jit
    def distance(leaves: list[jax.Array], exact: list[jax.Array]) -> jax.Array:
        return relative_error(functools.reduce(jnp.add, map(inner_products, leaves, exact)))[0]

    @functools.cache
    def exact() -> list[jax.Array]:
        return gradient(*SERIAL)[0]

    def probe(solver: Solver, adjoint_solver: Solver) -> Probed:
        wanted = exact()
        leaves, stats, adjoint_stats = gradient(solver, adjoint_solver)
        return Probed(float(distance(leaves, wanted)), int(stats.iterations), int(adjoint_stats.iterations))

    return probe
