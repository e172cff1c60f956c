"""Times of a network's own layers on the machine at hand, and of messages between workers, in seconds."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lp_jax._comms._comm import Comm, OneDevice
from lp_jax._problem import Problem
from lp_jax._programs import _inputs
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._sweeps import Picard
from lp_jax.planning import _measure
from lp_jax.planning._estimate import estimate
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import ITERATIONS, Deadline, announce, examples_of, few
from lp_jax.planning._work import prefix_messages

_FEW, _ENOUGH = 8, 0.03  # layers that are timed at least, and the seconds that they should take
_CHUNKS = 4  # batches of a timed sweep


def calibrate(
    problem: Problem, *, newton: bool = False, name: str = "", seconds: float = 60.0
) -> Machine:
    """Measure how long the layers of a network take on this machine, one at a time and many at once.

    Serial propagation gives the time of a single layer. Runs that differ in the number of sweeps give that of a sweep over
    1/64, 1/8 and all of the layers, or of those that ``at_once="auto"`` evaluates at once. Where layers run one after another,
    serial propagation through some of them is enough. The gain with fewer examples is measured with a quarter of eight or
    more, and otherwise estimated. The time of relaxation is always estimated, and messages take none.

    Args:
        problem: the network, on one device; with a ``comm`` it raises a ValueError.
        newton: whether to measure Newton's method with full Jacobians too. The first axis of the state must be that of the
            examples, and the state small: a Jacobian has the square of its size.
        name: name of the machine.
        seconds: time after which no measurement starts; what is left out is estimated. A line on standard error says it first.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((32, 8, 8)), jnp.ones((4, 8)))
        >>> machine = lp_jax.calibrate(problem)
        >>> machine.state_bytes, machine.layer_bytes, machine.seconds("forward", 32) > 0
        (128, 256, True)
    """
    announce("calibrate", seconds)
    return dataclasses.replace(measure(problem, newton, Deadline(seconds)), name=name)


def measure(problem: Problem, newton: bool, deadline: Deadline) -> Machine:
    """Return the machine of `calibrate`. What the deadline leaves out is estimated, relative to serial propagation."""
    if problem.comm != OneDevice():
        raise ValueError(
            "calibrate got a problem with a comm; it measures one device. Leave the comm out."
        )
    guess = estimate(problem)
    timed = problem
    if guess.at_once == (1,):
        # Where layers run one after another, time is in proportion to their number, so a part of the network is enough.
        enough = math.ceil(_ENOUGH / sum(guess.per_layer))
        timed = _first(problem, min(problem.layers, max(_FEW, enough)))
    per_layer = guess.per_layer
    if deadline.allows("serial propagation"):
        per_layer = _measure.serial(timed)
    single = [per_layer[0], per_layer[1] / 2, per_layer[1] / 2]
    sweeps = {}
    for size in guess.at_once[:0:-1]:
        if deadline.allows("sweeps"):
            parts = min(_CHUNKS, problem.layers // size)
            sweeps[size] = [
                seconds / parts for seconds in _measure.sweep(_first(problem, parts * size), size)
            ]
    if not sweeps:
        # Batches keep the ratios to a single layer that the estimate has.
        sweeps = {
            size: [x * seconds / guess.forward[0] for x in single]
            for size, seconds in zip(guess.at_once[1:], guess.forward[1:], strict=True)
        }
    rows = dict(sorted({1: single, **sweeps}.items()))
    overhead = guess.overhead
    quarter = few(timed, max(2, guess.examples // 4))
    share = examples_of(quarter.y0) / guess.examples
    if share <= 1 / 4 and deadline.allows("fewer examples"):
        ratio = sum(_measure.serial(quarter)) / sum(per_layer)
        # The time for a share s of the examples is overhead + (1 - overhead) s,
        # relative to all of them; solved for the overhead.
        overhead = min(1.0, max(0.0, (ratio - share) / (1 - share)))
    iterations: list[float] = []
    if newton and deadline.allows("Newton's method"):
        solver = Newton(iterations=ITERATIONS, batch_axes=1)
        slow = problem.layers * sum(per_layer)
        iterations = [_measure.iteration(_first(problem, 2), solver) / 2]
        for fewer, size in itertools.pairwise(rows):
            if iterations[-1] <= slow and deadline.allows("longer runs of Newton's method"):
                iterations.append(_measure.iteration(_first(problem, size), solver))
            else:  # slower than serial propagation through all layers, or time is over
                iterations.append(iterations[-1] * size / fewer)
    forward, adjoint, gradient = zip(*rows.values(), strict=True)
    return dataclasses.replace(
        guess,
        at_once=tuple(rows),
        forward=forward,
        adjoint=adjoint,
        gradient=gradient,
        newton=tuple(iterations) or None,
        overhead=overhead,
    )


def _first(problem: Problem, layers: int) -> Problem:
    times = np.asarray(problem.t1, float)
    times = times if times.ndim else np.linspace(problem.t0, times, problem.layers + 1)
    params, data = jax.tree.map(lambda x: x[:layers], (problem.params, problem.data))
    return problem.replace(params=params, data=data, t1=times[: layers + 1])


def interconnect(
    comm: Comm | Mesh, *, sizes: tuple[int, int] = (1 << 8, 1 << 22)
) -> dict[str, float]:
    """Measure messages between several workers, by sweeps over a chain that computes almost nothing.

    Returns two fields of a `Machine`. The same sweep on one worker is subtracted. What is left are a state to the neighbour,
    one for each step of a prefix sum, and the residual norm to all. ``sizes`` are the bytes of a small and of a large state.
    """
    comm = _inputs.comm(comm)
    solver = Picard(sweeps=17)

    def sweep(comm: Comm, size: int) -> float:
        # The chain has one layer for each worker, and on one worker a single layer, so arithmetic cancels in the difference.
        params = comm.share(jnp.ones(comm.size, jnp.float32), (solver,))
        y0 = jnp.ones(size // 4, jnp.float32)
        problem = Problem(lambda y, layer: y + layer.dt * layer.params * y, params, y0, comm=comm)
        return _measure.iteration(problem, solver, samples=5, repeats=10)  # as often on every rank

    messages = 1 + prefix_messages(comm.size)
    hops = (comm.size - 1).bit_length()
    small, large = (sweep(comm, size) - sweep(OneDevice(), size) for size in sizes)
    # The norm goes up a tree of `hops` messages. It is one number, so only latency counts for it.
    latency = max(small, 1e-9) / (messages + hops)
    bandwidth = messages * (sizes[1] - sizes[0]) / max(large - small, 1e-9)
    return {"latency": latency, "bandwidth": bandwidth}
