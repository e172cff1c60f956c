"""Choose a solver for a network on a machine: the fastest one whose gradient is exact enough."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import State
from lp_jax._choice._fastest import SERIAL, Pair
from lp_jax._choice._processor import named
from lp_jax._comms._comm import Comm, OneDevice
from lp_jax._problem import Problem
from lp_jax._programs import _inputs
from lp_jax._programs._traced import Tracing
from lp_jax._solvers._coarse_step import Identity, Rediscretize
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._solver import Solver, Stats
from lp_jax._solvers._sweeps import Picard, Secant, Sweeps
from lp_jax.planning._calibrate import interconnect, measure
from lp_jax.planning._compiled import mesh_on
from lp_jax.planning._cost import predict
from lp_jax.planning._estimate import estimate
from lp_jax.planning._gradient_error import inner_products, relative_error
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import Deadline, announce, as_pair, jitted, require, small, solved
from lp_jax.planning._result import WORTH, Choice, Plan, Probed, fix_iterations
from lp_jax.planning._spread import spread

Probe = Callable[[Solver, Solver], Probed]

_FIRST = (
    0.1  # part of the time of a plan that the first probe has, although calibration took all of it
)
_TOLERANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


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
    topology: str | Mesh | None = None,
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
        seconds: time after which no calibration, half of it, or probe starts. One that has begun is finished, its compilations
            included, and the first probe is always made, because no error would be known otherwise. It counts once messages are
            measured. A line on standard error says it first, and the plan names what was left out.
        solvers: further solvers to compare, your own or with your settings, or pairs (solver, adjoint solver). They are
            probed first.
        topology: accelerators that need not be here, as `planning.topology` takes and returns them: "v5e:2x4", "h200:4". Nothing
            is run then, so that shapes are enough and no gradient error is known: times are by the devices' data sheet. Half the
            sum of squares of the last state is compiled, with its gradient, in each way to spread it over them: along the
            examples, the weights, the layers by a pipeline, both, and the layers by the default, a relay, and ``solvers``.
            ``plan.spread`` says of each whether it fits, what it sends, and the compiler's cycles.

    It recommends serial propagation if no solver that is exact enough is predicted to be 15 % faster.

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
    require(problem)
    if topology is not None:
        return _absent(problem.replace(comm=None), mesh_on(topology), error, solvers)
    there = _inputs.comm(problem.comm if comm is None else comm)
    # All measurements and probes of layers are those of one device.
    problem = problem.replace(comm=None)
    if there != OneDevice():
        if workers not in (1, there.size):
            raise ValueError(
                f"plan got workers={workers} and a comm of {there.size}. Leave workers out."
            )
        workers = there.size
    _require(problem.layers, workers, error)
    announce("plan", seconds)
    messages: dict[str, Any] = interconnect(there) if there.size > 1 else {}
    # Probes have the time that messages and calibration leave, and calibration has half of it.
    end = Deadline(seconds)
    half = Deadline(seconds / 2)
    if machine is None:
        machine = measure(problem, small(problem.y0), half)
    machine = dataclasses.replace(machine, **messages)
    probe = _probe(problem, cotangent)
    best = choose(
        problem.layers,
        machine,
        error=error,
        workers=workers,
        probe=probe,
        seconds=max(end.left, _FIRST * seconds),
        solvers=solvers,
    )
    notes = [f"Left out for lack of time: {', '.join(half.left_out)}."] if half.left_out else []
    if not Tracing(problem, (Picard(),)).footprint.counted:
        notes.append(
            "A layer has a callback, a foreign call or an open loop: "
            'at_once="auto" takes one at a time.'
        )
    return dataclasses.replace(best, note=" ".join(notes))


def _absent(problem: Problem, on: Mesh, error: float, solvers: Sequence[Solver | Pair]) -> Plan:
    """Return a plan for devices that need not be here: times by their data sheet, and each way to use them compiled."""
    kind = on.devices.flat[0].device_kind
    sheet = named(kind)
    machine = dataclasses.replace(
        estimate(problem, device=kind),
        latency=sheet.latency,
        bandwidth=min(sheet.bandwidth, sheet.link),
        name=kind,
    )
    best = choose(problem.layers, machine, error=error, workers=on.size, solvers=solvers)
    return dataclasses.replace(best, spread=spread(problem, on, solvers))


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
    serial propagation is known to be exact enough. The other arguments are those of `plan`; ``seconds`` bounds the probes.
    """
    _require(layers, workers, error)

    def choice(pair: Pair, probed: Probed | None = None) -> Choice:
        return Choice(
            *pair, predict(*fix_iterations(pair, probed), layers, machine, workers=workers), probed
        )

    serial = choice(SERIAL)
    choices = [serial]
    deadline = Deadline(seconds)
    unprobed = 0

    def look(pairs: list[Pair], *, anyway: bool = False) -> None:
        """Probe solvers of one program, loosest tolerance first. If compiled in time, it runs until one is exact enough."""
        nonlocal unprobed
        # Solvers that differ in tolerances only are one program, because tolerances are not static.
        family = [choice(pair) for pair in pairs]
        limit = min(
            [serial.cost.seconds / WORTH, *(c.cost.seconds for c in choices if c.within(error))]
        )
        faster = any(c.cost.seconds < limit for c in family)
        if probe is None or deadline.left <= 0 or not (anyway or faster):
            choices.extend(family)
            unprobed += faster and probe is not None
            return
        for pair in pairs:
            found = probe(*pair)
            choices.append(choice(pair, found))
            if not math.isfinite(found.error) or (deadline.left <= 0 and found.error <= error):
                break

    for pair in map(as_pair, solvers):
        look([pair], anyway=True)
    look(_sweeps(Picard), anyway=True)  # slow here, they may be fast on more devices
    # relaxations keep a solver that is good for a new network good for the trained one
    if machine.newton is not None:
        look(
            [
                as_pair(Newton(iterations=10, relaxations=16, rtol=rtol, batch_axes=1))
                for rtol in _TOLERANCES[1:4]
            ]
        )
    only_serial = sum(c.within(error) for c in choices) == 1
    if probe is not None and only_serial and deadline.left > 0:
        look(_sweeps(Secant))
    # Every cycle compiles a program of its own, so the fastest ones are probed while there is time.
    for pair in sorted(cycles(layers, workers), key=lambda pair: choice(pair).cost.seconds):
        look([pair])
    choices.sort(key=lambda c: c.cost.seconds)
    # Serial propagation is exact, so that one of them is always exact enough.
    best = next(c for c in choices if c.within(error))
    best = best if best.cost.seconds * WORTH <= serial.cost.seconds else serial
    return Plan(tuple(choices), best, serial, machine, layers, workers, error, unprobed)


def _require(layers: int, workers: int, error: float) -> None:
    """Refuse numbers that cannot be, before anything is measured."""
    _check.integer("layers", layers, least=1)
    if not 1 <= workers <= layers:
        raise ValueError(
            f"workers must be from 1 to the number of layers, {layers}; got {workers}."
        )
    if not error > 0:
        raise ValueError(f"error must be a positive number, like 1e-2; got {error}.")


def _sweeps(kind: type[Sweeps]) -> list[Pair]:
    """Return sweeps to several tolerances, which share one program. The adjoint's tolerance is ten times looser."""
    pairs = itertools.pairwise(_TOLERANCES)
    return [(kind(sweeps=32, rtol=rtol), kind(sweeps=32, rtol=loose)) for loose, rtol in pairs]


def cycles(layers: int, workers: int = 1) -> list[Pair]:
    """Return multigrid pairs: one interval per worker with the identity as coarse step; few levels with sweeps or injection."""
    kept = functools.partial(MGRIT, storage="all")
    factors = [-(-layers // intervals) for intervals in ((workers,) if workers > 1 else (4, 8))]
    sweeps = Picard(sweeps=1), Picard(sweeps=2), Picard(sweeps=2, around="trajectory")
    hierarchies = [
        *(kept(coarsening=m, coarse_step=Identity()) for m in factors if 2 <= m < layers),
        *(kept(coarsening=m, coarse_step=step) for m in (4, 8) for step in sweeps),
        kept(levels=3, coarse_step=Picard(sweeps=1)),
        kept(levels=3, coarse_step=Rediscretize()),
    ]
    return [
        (one.with_effort(forward), one.with_effort(adjoint))
        for one in hierarchies
        if not one.resolve(layers).exact
        for forward, adjoint in ((1, 1), (2, 1), (2, 2), (3, 3))
    ]


def _probe(problem: Problem, cotangent: State | None) -> Probe:
    """Return a probe of the gradient of parameters and shared values; of the initial state where there are none."""
    run = jitted(solved, problem, fast=True)

    def gradient(solver: Solver, adjoint_solver: Solver) -> tuple[list[jax.Array], Stats, Stats]:
        gradients, stats, adjoint_stats = run(solver, adjoint_solver, cotangent)
        leaves, _ = _tree.partition((gradients.params, gradients.shared))
        return leaves or _tree.partition(gradients.y0)[0], stats, adjoint_stats

    # The exact gradient is computed once, for the first probe.
    exact = functools.cache(lambda: gradient(*SERIAL)[0])
    distance = jax.jit(lambda g, e: relative_error(sum(map(inner_products, g, e)))[0])

    def probe(solver: Solver, adjoint_solver: Solver) -> Probed:
        wanted = exact()
        leaves, stats, adjoint_stats = gradient(solver, adjoint_solver)
        return Probed(
            float(distance(leaves, wanted)), int(stats.iterations), int(adjoint_stats.iterations)
        )

    return probe
