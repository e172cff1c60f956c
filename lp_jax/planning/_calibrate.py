"""Times of a network's own layers on the machine at hand, in seconds."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from lp_jax._comms._comm import OneDevice
from lp_jax._problem import Problem
from lp_jax.planning import _measure
from lp_jax.planning._deadline import Deadline
from lp_jax.planning._estimate import estimate
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import examples_of, few

_FEW, _ENOUGH = 8, 0.03  # layers that are timed at least, and the seconds that they should take
_CHUNKS = 4  # batches of a timed sweep


def calibrate(problem: Problem, *, newton: bool = False, name: str = "") -> Machine:
    """Measure how long the layers of a network take on this machine, one at a time and many at once.

    Serial propagation gives the time of a single layer. Two runs of Picard sweeps that differ in the number of sweeps give
    the time of a sweep, forward and adjoint. Sweeps go over 1/64, 1/8 and all of the layers, or of those that
    ``at_once="auto"`` evaluates at once. Where layers run one after another, serial propagation through some of them is
    enough.

    How a layer's time falls with the examples decides the gain of data parallelism. It is measured with a quarter of them, of
    eight or more, and otherwise estimated. The time of relaxation relative to a sweep is always estimated.

    Args:
        problem: the network, on one device.
        newton: whether to measure Newton's method with full Jacobians too. The first axis of the state must be that of the
            examples, and the state small: a Jacobian has the square of its size.
        name: name of the machine.

    Returns:
        A `Machine` without an interconnect: messages take no time.

    Raises:
        ValueError: for a problem with a ``comm``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((32, 8, 8)), jnp.ones((4, 8)))
        >>> machine = lp_jax.calibrate(problem)
        >>> machine.state_bytes, machine.layer_bytes, machine.seconds("forward", 32) > 0
        (128, 256, True)
    """
    return dataclasses.replace(measure(problem, newton, Deadline()), name=name)


def measure(problem: Problem, newton: bool, deadline: Deadline) -> Machine:
    """Return the machine of `calibrate`. What the deadline leaves out is estimated, relative to serial propagation."""
    if problem.comm != OneDevice():
        raise ValueError("calibrate got a problem with a comm; it measures one device. Leave the comm out.")
    guess, timed = estimate(problem), problem
    if guess.at_once == (1,):
        enough = math.ceil(_ENOUGH / sum(guess.per_layer))
        timed = _first(problem, min(problem.layers, max(_FEW, enough)))
    forward, backward = guess.per_layer
    if deadline.allows("serial propagation"):
        forward, backward = _measure.serial(timed)
    single = [forward, backward / 2, backward / 2]
    sweeps = {size: _sweep(problem, size) for size in guess.at_once[:0:-1] if deadline.allows("sweeps")}
    if not sweeps:
        ratios = np.divide(guess.forward[1:], guess.forward[0]).tolist()
        sweeps = {size: [x * r for x in single] for size, r in zip(guess.at_once[1:], ratios, strict=True)}
    rows = dict(sorted({1: single, **sweeps}.items()))
    forwards, adjoints, gradients = zip(*rows.values(), strict=True)
    overhead = guess.overhead
    quarter = few(timed, max(2, guess.examples // 4))
    share = examples_of(quarter.y0) / guess.examples
    if share <= 1 / 4 and deadline.allows("fewer examples"):
        ratio = sum(_measure.serial(quarter)) / (forward + backward)
        overhead = min(1.0, max(0.0, (ratio - share) / (1 - share)))
    return dataclasses.replace(
        guess,
        at_once=tuple(rows),
        forward=forwards,
        adjoint=adjoints,
        gradient=gradients,
        newton=_newton(problem, tuple(rows), problem.layers * (forward + backward), deadline) if newton else None,
        overhead=overhead,
    )


def _sweep(problem: Problem, size: int) -> list[float]:
    """Seconds of a sweep over ``size`` layers; the mean over several such parts where the network has more layers."""
    parts = min(_CHUNKS, problem.layers // size)
    return [seconds / parts for seconds in _measure.sweep(_first(problem, parts * size), size)]


def _first(problem: Problem, layers: int) -> Problem:
    times = np.asarray(problem.t1, float)
    times = times if times.ndim else np.linspace(problem.t0, times, problem.layers + 1)
    params, data = jax.tree.map(lambda x: x[:layers], (problem.params, problem.data))
    return dataclasses.replace(problem, params=params, data=data, t1=times[: layers + 1])


def _newton(problem: Problem, sizes: Sequence[int], serial: float, deadline: Deadline) -> tuple[float, ...] | None:
    """Seconds of a Newton iteration on each number of layers at once; None if time is over.

    Larger numbers are extrapolated once an iteration takes longer than serial propagation through all layers, or time is over.
    """
    if not deadline.allows("Newton's method"):
        return None
    times = [_measure.newton(_first(problem, 2)) / 2]
    for last, size in itertools.pairwise(sizes):
        measured = times[-1] <= serial and deadline.allows("longer runs of Newton's method")
        times.append(_measure.newton(_first(problem, size)) if measured else times[-1] * size / last)
    return tuple(times)
