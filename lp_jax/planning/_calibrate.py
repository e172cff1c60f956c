"""Times of a network's own layers on the machine at hand, in seconds."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lp_jax._arrays import _tree
from lp_jax._comms._comm import OneDevice
from lp_jax._problem import Problem
from lp_jax._programs._traced import trace
from lp_jax._solvers._serial import Serial
from lp_jax.planning import _measure
from lp_jax.planning._deadline import Deadline
from lp_jax.planning._estimate import estimate
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import examples_of, few, kept_bytes, layers_at_once

_SHORT, _LONG = 4, 16  # layers of an interval, at least
_BATCHES = (4, 16)  # layers at once, besides all intervals
_FEW, _ENOUGH = 8, 0.03  # layers of a first timing; seconds that the timed layers should take

_Times = tuple[float, float, float]


def calibrate(problem: Problem, *, newton: bool = False, batched: bool = False, name: str = "") -> Machine:
    """Measure how long the layers of a network take on this machine, one at a time and many at once.

    Serial propagation gives the time of a single layer. Two runs of Picard sweeps that differ in the number of sweeps give
    the time of a sweep, forward and adjoint. Sweeps go over 1/64, 1/8 and all of the layers, or of those that
    ``at_once="auto"`` evaluates at once.

    Where layers run one after another, a run of 30 ms is enough. Layers of an interval are faster there than layers of a
    sweep, which stores the states of all layers. Cycles without coarse steps give the time of these layers and of the
    interval itself: over intervals of four layers, and over four intervals. Networks too short for that use serial
    propagation instead. Where layers are evaluated at once, one relaxation gives the time of layers of different intervals.

    How a layer's time falls with the examples decides the gain of data parallelism. It is measured with a quarter of them, of
    eight or more. Otherwise it falls like the time of many layers at once; in proportion where layers run one after another.

    Args:
        problem: the network, on one device.
        newton: whether to measure Newton's method with full Jacobians too. The first axis of the state must be that of the
            examples, and the state small: a Jacobian has the square of its size.
        batched: whether to measure layers at once also where "auto" evaluates one at a time, for solvers with another
            ``at_once``.
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
    return dataclasses.replace(measure(problem, newton, batched), name=name)


def measure(problem: Problem, newton: bool, batched: bool = False, deadline: Deadline | None = None) -> Machine:
    """Return the machine of `calibrate`.

    Serial propagation comes first, then the longest sweep. `estimate` replaces the times of serial propagation, and the ratio
    of a sweep's times to them, if the deadline leaves them out. Other times then have their defaults.
    """
    if problem.comm != OneDevice():
        raise ValueError("calibrate got a problem with a comm; it measures one device. Leave the comm out.")
    deadline = Deadline() if deadline is None else deadline
    count, auto = problem.layers, layers_at_once(problem)
    looped = auto == 1 < count
    most, serial = _serial(problem, looped, deadline)
    forward, backward = serial
    rows = {1: [forward, backward / 2, backward / 2]}
    sizes = [most] if looped else sorted({max(2, auto // 64), max(2, auto // 8), auto})
    for size in reversed(sizes):
        if deadline.allows("shorter sweeps" if len(rows) > 1 else "sweeps (estimated)"):
            rows[size] = _sweep(problem, size, 1 if looped else size)
    if not looped and len(rows) == 1:
        guess = estimate(problem)
        ratios = zip(guess.at_once[1:], np.divide(guess.forward[1:], guess.per_layer[0]).tolist(), strict=True)
        rows |= {size: [x * ratio for x in rows[1]] for size, ratio in ratios}
    more: dict[str, Any] = {}
    if looped:  # batches are counted as single layers there
        rows = {1: [seconds / most for seconds in rows[most]] if most in rows else rows[1]}
        if most >= 2 * _SHORT and deadline.allows("intervals"):
            more["relaxation"], more["interval"] = _intervals(_first(problem, most // _SHORT * _SHORT), serial)
        for size in sorted({*_BATCHES, most // _SHORT}) if batched else ():
            if most >= size * _SHORT and deadline.allows("batches"):
                rows[size] = _batch(_first(problem, most // size * size), size)
    rows = dict(sorted(rows.items()))
    forwards, adjoints, gradients = zip(*rows.values(), strict=True)
    if not looped:
        some = min(auto, count // _SPAN)
        if deadline.allows("intervals") and some > 1:
            more["across"] = _across(problem, some, rows)
        more["overhead"] = 0.0 if len(rows) == 1 else _overhead([*rows][1:], forwards)
    quarter = few(problem, max(2, examples_of(problem.y0) // 4))
    if 4 * examples_of(quarter.y0) <= examples_of(problem.y0) and deadline.allows("fewer examples"):
        more["overhead"] = _overhead_of(problem, _first(quarter, most), sum(serial))
    if newton and deadline.allows("Newton's method"):
        more["newton"] = _newton(problem, sizes, tuple(rows), looped, count * sum(serial), deadline)
    if deadline.allows("sums of gradients"):
        more["adding"] = _measure.adding(problem.params) / count
    return Machine(
        at_once=tuple(rows),
        forward=forwards,
        adjoint=adjoints,
        gradient=gradients,
        serial=serial,
        auto=None if auto == count else auto,
        state_bytes=_tree.nbytes(problem.y0),
        layer_bytes=_tree.nbytes(problem.params) // count,
        kept_bytes=kept_bytes(*trace(problem, (Serial(),))),
        examples=examples_of(problem.y0),
        **more,
    )


_CHUNKS = 4


def _sweep(problem: Problem, size: int, at_once: int) -> list[float]:
    """Seconds of a sweep over ``size`` layers; the mean over several such parts where the network has more layers."""
    parts = min(_CHUNKS, problem.layers // size)
    return [seconds / parts for seconds in _measure.sweep(_first(problem, parts * size), at_once)]


def _first(problem: Problem, layers: int) -> Problem:
    times = np.asarray(problem.t1, float)
    times = times if times.ndim else np.linspace(problem.t0, times, problem.layers + 1)
    params, data = jax.tree.map(lambda x: x[:layers], (problem.params, problem.data))
    return dataclasses.replace(problem, params=params, data=data, t1=times[: layers + 1])


def _serial(problem: Problem, looped: bool, deadline: Deadline) -> tuple[int, tuple[float, float]]:
    """Number of layers to measure, and the times of a layer in serial propagation through them.

    Where layers run one after another, as many are enough as take 30 ms.
    """
    few = min(_FEW, problem.layers) if looped else problem.layers
    if not deadline.allows("serial propagation (estimated)"):
        return few, estimate(problem).per_layer
    times = _measure.serial(_first(problem, few))
    most = min(problem.layers, max(few, math.ceil(_ENOUGH / sum(times) / _SHORT) * _SHORT))
    if most > few and deadline.allows("longer serial propagation"):
        times = _measure.serial(_first(problem, most))
    return most, times


def _overhead(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Part of a layer's time that is not arithmetic: its time minus that of one more layer in a batch."""
    more = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[-1] / sizes[-1]
    return min(1.0, max(0.0, 1 - more / times[0]))


def _overhead_of(problem: Problem, quarter: Problem, whole: float) -> float:
    """Part of the time of a layer that does not shrink with the examples; ``whole`` is that time for all of them."""
    share = examples_of(quarter.y0) / examples_of(problem.y0)
    ratio = sum(_measure.serial(quarter)) / whole
    return min(1.0, max(0.0, (ratio - share) / (1 - share)))


def _newton(
    problem: Problem, sizes: Sequence[int], at_once: Sequence[int], looped: bool, serial: float, deadline: Deadline
) -> tuple[float, ...]:
    """Seconds of a Newton iteration on each number of layers at once.

    Larger numbers are extrapolated once an iteration takes longer than serial propagation through all layers, or time is over.
    """
    times = {1: _measure.newton(_first(problem, 2)) / 2}
    for size in sizes:
        largest = max(times)
        hopeless = largest > 1 and times[largest] > serial
        measured = not hopeless and deadline.allows("longer runs of Newton's method (extrapolated)")
        times[size] = _measure.newton(_first(problem, size)) if measured else times[largest] * size / largest
    return tuple(times[sizes[-1]] / sizes[-1] * size if looped else times[size] for size in at_once)


def _intervals(problem: Problem, serial: tuple[float, float]) -> tuple[_Times, _Times]:
    """Seconds per layer and per interval, where layers run one after another.

    Short and long intervals are timed. A network too short for long intervals counts serial propagation as one interval, with
    the gradient divided as in short intervals.
    """
    short = _measure.relaxation(problem, _SHORT)
    if problem.layers < _SHORT * _LONG:
        span, (forward, backward) = problem.layers, serial
        long = np.array([forward, *(backward * short[1:] / sum(short[1:]))])
    else:
        span = problem.layers // _SHORT
        long = _measure.relaxation(problem, span)
    interval = np.maximum(0.0, (short - long) / (1 / _SHORT - 1 / span))
    return _times(np.maximum(_measure.LEAST, short - interval / _SHORT)), _times(interval)


def _batch(problem: Problem, size: int) -> list[float]:
    """Seconds of a number of layers at once: forward, adjoint, and of the gradient."""
    times: list[float] = (size * _measure.relaxation(problem, problem.layers // size, size)).tolist()
    return times


_SPAN, _MOST_SPAN = 8, 16  # layers of an interval, at least and at most


def _across(problem: Problem, size: int, rows: Mapping[int, Sequence[float]]) -> _Times:
    """Time of layers of ``size`` intervals at once, relative to a sweep over as many layers."""
    span = min(problem.layers // size, _MOST_SPAN)
    swept = [np.interp(size, [*rows], times) for times in zip(*rows.values(), strict=True)]
    return _times(np.array(_batch(_first(problem, span * size), size)) / swept)


def _times(seconds: np.ndarray) -> _Times:
    forward, adjoint, gradient = seconds.tolist()
    return forward, adjoint, gradient
