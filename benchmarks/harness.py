"""Time several ways to compute one thing, side by side.

All contenders live in one process. After a warm-up they are timed in rounds, each contender once a round and in another
order every round, so that whatever disturbs the machine disturbs all of them. Ratios are formed within a round and only
then is their median taken: a round that ran on a busy machine was busy for both.
"""

import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

Tell = Callable[[str], object]
"""Is told what goes on, in a few words."""

LEAST_ROUNDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute the thing."""

    name: str  # unique among those that are compared
    call: Callable[[], Any] = lambda: None  # computes it once; what it returns is waited for
    # instead of `call`: times so many calls in other processes; seconds of wall and of work
    elsewhere: Callable[[int], tuple[float, float]] | None = None
    before: Callable[[], object] | None = None  # called, untimed, ahead of every timing
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # copied into its result


class Clock(NamedTuple):
    """Seconds that passed, and seconds that this process's threads were at work."""

    wall: Callable[[], float] = time.perf_counter
    work: Callable[[], float] = time.process_time


class Timing(NamedTuple):
    """Samples of one contender: each the mean over ``calls`` calls in a row."""

    rounds: list[int]  # in which rounds it took part
    seconds: list[float]  # per call
    cores: list[float]  # processor time over wall time
    calls: int  # calls per sample


def order(count: int, number: int) -> list[int]:
    """Who goes when in round ``number``: a permutation, the same in every run."""
    return random.Random(number).sample(range(count), count)


def measure(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    warmup: int = 1,
    min_time: float = 0.0,
    budget: float = math.inf,
    clock: Clock = Clock(),
    tell: Tell = lambda text: None,
) -> list[Timing]:
    """Time the contenders, the baseline first, in interleaved rounds.

    A sample lasts ``min_time`` seconds at least; a short call is repeated within it. A contender whose samples have taken
    ``budget`` seconds sits out the other rounds, once it has been in three; the baseline never does.
    """
    calls = []
    for contender in contenders:
        tell(f"warming up {contender.name}")
        fastest = min(_sample(contender, 1, clock)[0] for _ in range(warmup))
        calls.append(max(1, math.ceil(min_time / fastest)) if fastest > 0 else 1)
    timings = [Timing([], [], [], n) for n in calls]
    with _no_garbage_collection():
        for number in range(rounds):
            gc.collect()
            for i in order(len(contenders), number):
                spent = sum(timings[i].seconds) * calls[i]
                if i > 0 and number >= LEAST_ROUNDS and spent > budget:
                    continue
                tell(f"round {number + 1} of {rounds}: {contenders[i].name}")
                seconds, cores = _sample(contenders[i], calls[i], clock)
                timings[i].rounds.append(number)
                timings[i].seconds.append(seconds)
                timings[i].cores.append(cores)
    return timings


def _sample(contender: Contender, calls: int, clock: Clock) -> tuple[float, float]:
    """Seconds per call, and how many cores were busy."""
    if contender.before is not None:
        contender.before()
    if contender.elsewhere is not None:
        wall, work = contender.elsewhere(calls)
    else:
        wall, work = timed(contender.call, calls, clock)
    return wall / calls, work / wall if wall > 0 else math.nan


def timed(call: Callable[[], Any], calls: int, clock: Clock = Clock()) -> tuple[float, float]:
    """Seconds of wall and of work that so many calls take."""
    work, wall = clock.work(), clock.wall()
    for _ in range(calls):
        jax.block_until_ready(call())
    return clock.wall() - wall, clock.work() - work


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, by linear interpolation."""
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {"median": float(median), "q1": float(q1), "q3": float(q3)}


def ratios(timing: Timing, baseline: Timing) -> list[float]:
    """Time over the baseline's time of the same round, for the rounds that both were in."""
    seconds = dict(zip(baseline.rounds, baseline.seconds, strict=True))
    return [
        s / seconds[r] for r, s in zip(timing.rounds, timing.seconds, strict=True) if r in seconds
    ]


def summary(contenders: Sequence[Contender], timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """What a result file says of each contender."""
    return [
        {
            "name": contender.name,
            **contender.facts,
            "seconds": spread(timing.seconds),
            "ratio": spread(ratios(timing, timings[0])),
            "cores": float(np.median(timing.cores)),
            "calls_per_sample": timing.calls,
            "rounds": len(timing.rounds),
        }
        for contender, timing in zip(contenders, timings, strict=True)
    ]


def compile_program(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = (), ahead: bool = True
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Compile ahead of time, from cold caches, on the clock.

    Not so where ``ahead`` is false, for programs that exchange MPI messages: JAX runs one that was compiled ahead only
    once, as it loses the token that keeps messages in order.
    """
    jax.clear_caches()
    jitted = jax.jit(function, donate_argnums=donate)
    if not ahead:
        return jitted, {}
    start = time.perf_counter()
    lowered = jitted.lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return compiled, {
        "trace_seconds": traced - start,
        "compile_seconds": end - traced,
        "temporary_bytes": temporary,
    }


def relative_error(a: Any, exact: Any) -> float:
    """Relative 2-norm error of a pytree, summed up in float64."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(exact), strict=True))
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return math.sqrt(
        sum(np.sum((x - y) ** 2) for x, y in wide) / sum(np.sum(y**2) for _, y in wide)
    )
