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
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import examples_of, kept_bytes, layers_at_once

_SHORT, _LONG = 4, 16  # layers of an interval, at least
_BATCHES = (4, 16)  # layers at once, beside as many as there are
_FEW, _ENOUGH = 8, 0.03  # layers that tell how many are enough; seconds that those take

_Times = tuple[float, float, float]


def calibrate(
    problem: Problem,
    *,
    fewer: Mapping[str, Any] | None = None,
    newton: bool = False,
    batched: bool = False,
    name: str = "",
) -> Machine:
    """Measure how long the layers of a network take on this machine, alone and many at once.

    Serial propagation gives the time of a single layer. Runs of Picard sweeps that differ only in their number give that of
    a sweep, forward and adjoint: over 1/64, 1/8 and all of the layers, or of those that ``at_once="auto"`` evaluates at once.
    Where that is one, a run over as many as take 30 ms is enough. There the layers of an interval, which follow each other,
    take less than those of a sweep, which stores the states of all layers: cycles without coarse steps give their time, over
    intervals of four layers and over four intervals, and that of the interval itself. Where the latter would be short,
    serial propagation stands for them. Where layers are evaluated at once, one relaxation tells what those of different
    intervals take, which no sweep sums up.

    Args:
        problem: the network, on one device.
        fewer: those of ``y0``, ``shared`` and ``data`` that examples make smaller, with a quarter of the examples, say. How a
            layer's time falls with the examples decides what data parallelism gives. None takes it to fall like that of many
            layers at once with their number; in proportion where one is evaluated at a time.
        newton: whether to measure Newton's method with full Jacobians too, for a small state whose first axis is that of the
            examples: a Jacobian has the square of its numbers.
        batched: whether to measure layers at once also where "auto" evaluates one at a time, for solvers that are told
            otherwise.
        name: of the result.

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
    if problem.comm != OneDevice():
        raise ValueError("calibrate got a problem with a comm; it measures one device. Leave the comm out.")
    count, auto = problem.layers, layers_at_once(problem)
    looped = auto == 1 < count
    most = _enough(problem) if looped else count
    sizes = [most] if looped else sorted({max(2, auto // 64), max(2, auto // 8), auto})
    serial = forward, backward = _measure.serial(_first(problem, most))
    rows = {1: [forward, backward / 2, backward / 2]}
    rows |= {size: _sweep(problem, size, 1 if looped else size) for size in sizes}
    relaxation = interval = None
    if looped:  # batches are counted as single layers there
        rows = {1: [seconds / most for seconds in rows[most]]}
        if most >= 2 * _SHORT:
            relaxation, interval = _intervals(_first(problem, most // _SHORT * _SHORT), serial)
        for size in sorted({*_BATCHES, most // _SHORT}) if batched else ():
            if most >= size * _SHORT:
                rows[size] = _batch(_first(problem, most // size * size), size)
    across = None if looped else _across(problem, min(auto, count // _SPAN), rows)
    forwards, adjoints, gradients = zip(*rows.values(), strict=True)
    overhead = 0.0 if looped else _overhead(sizes, forwards)
    if fewer is not None:
        overhead = _overhead_of(problem, most, fewer, sum(serial))
    return Machine(
        at_once=tuple(rows),
        forward=forwards,
        linearise=forwards,
        adjoint=adjoints,
        gradient=gradients,
        newton=_newton(problem, sizes, tuple(rows), looped, sum(serial)) if newton else None,
        serial=serial,
        relaxation=relaxation,
        interval=interval,
        across=across,
        auto=None if auto == count else auto,
        adding=_measure.adding(problem.params) / count,
        state_bytes=_tree.nbytes(problem.y0),
        layer_bytes=_tree.nbytes(problem.params) // count,
        kept_bytes=kept_bytes(*trace(problem, (Serial(),))),
        examples=examples_of(problem.y0),
        overhead=overhead,
        name=name,
    )


_CHUNKS = 4


def _sweep(problem: Problem, size: int, at_once: int) -> list[float]:
    """Seconds of a sweep over ``size`` layers; of one of several such parts, where that is fewer than there are."""
    parts = min(_CHUNKS, problem.layers // size)
    return [seconds / parts for seconds in _measure.sweep(_first(problem, parts * size), at_once)]


def _first(problem: Problem, layers: int) -> Problem:
    times = np.asarray(problem.t1, float)
    times = times if times.ndim else np.linspace(problem.t0, times, problem.layers + 1)
    params, data = jax.tree.map(lambda x: x[:layers], (problem.params, problem.data))
    return dataclasses.replace(problem, params=params, data=data, t1=times[: layers + 1])


def _enough(problem: Problem) -> int:
    """Number of layers whose serial propagation takes 30 ms: more tell nothing new where they do not run at once."""
    if problem.layers <= _FEW:
        return problem.layers
    whole = math.ceil(_ENOUGH / sum(_measure.serial(_first(problem, _FEW))) / _SHORT)
    return min(problem.layers, max(_FEW, whole * _SHORT))


def _overhead(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Part of the time of one layer that is not its arithmetic, which is what one layer more takes."""
    more = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[-1] / sizes[-1]
    return min(1.0, max(0.0, 1 - more / times[0]))


def _overhead_of(problem: Problem, layers: int, fewer: Mapping[str, Any], whole: float) -> float:
    """Part of the time of a layer that does not shrink with the examples."""
    parts = _first(dataclasses.replace(problem, **fewer), layers)
    share = examples_of(parts.y0) / examples_of(problem.y0)
    ratio = sum(_measure.serial(parts)) / whole
    return min(1.0, max(0.0, (ratio - share) / (1 - share)))


def _newton(
    problem: Problem, sizes: Sequence[int], at_once: Sequence[int], looped: bool, serial: float
) -> tuple[float, ...]:
    """Seconds of a Newton iteration on so many layers at once.

    Where one on some of the layers takes longer than serial propagation through all, that on more is not measured.
    """
    times = {1: _measure.newton(_first(problem, 2)) / 2}
    for size in sizes:
        before = max(times)
        hopeless = before > 1 and times[before] > serial
        times[size] = times[before] * size / before if hopeless else _measure.newton(_first(problem, size))
    return tuple(times[sizes[-1]] / sizes[-1] * size if looped else times[size] for size in at_once)


def _intervals(problem: Problem, serial: tuple[float, float]) -> tuple[_Times, _Times]:
    """Where layers run one after another: what those of an interval take, and the interval itself.

    From short intervals and from long ones. Where layers are too few for these, serial propagation is one interval of all of
    them; the parts of its gradient are as those of the short ones'.
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
    found: list[float] = (size * _measure.relaxation(problem, problem.layers // size, size)).tolist()
    return found


_SPAN, _MOST_SPAN = 8, 16  # layers of an interval, at least and at most


def _across(problem: Problem, size: int, rows: Mapping[int, Sequence[float]]) -> _Times | None:
    """Of so many intervals' layers at once, the time in parts of a sweep's over as many; None for too few layers."""
    if size < 2:
        return None
    span = min(problem.layers // size, _MOST_SPAN)
    swept = [np.interp(size, [*rows], times) for times in zip(*rows.values(), strict=True)]
    return _times(np.array(_batch(_first(problem, span * size), size)) / swept)


def _times(seconds: np.ndarray) -> _Times:
    forward, adjoint, gradient = seconds.tolist()
    return forward, adjoint, gradient
