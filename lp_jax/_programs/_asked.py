"""A context that replaces the solvers of all solves traced inside it, or reports their stats; a key of ``jax.jit``'s caches."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._choice._processor import Processor
from lp_jax._comms._comm import Comm
from lp_jax._solvers._solver import Solver, Stats


@dataclasses.dataclass(unsafe_hash=True)
class ResultCounter:
    """Holds the array whose cotangent is the sum of `_results.counts_of` over the solves.

    It is compared by its key, as a part of the keys of JAX's caches: what is compiled for one counter is there for all others
    without a key. A program that is traced closes over the array, so that it belongs to one counter, whose key is its own.
    """

    array: jax.Array = dataclasses.field(compare=False)
    key: object = None

    @property
    def counts(self) -> jax.Array:
        if self.key is None and is_tracing():
            raise Captured
        return self.array


class Captured(Exception):
    """A program that is traced would close over the array of a counter without a key."""


def is_tracing() -> bool:
    """Whether operations become a program, such as that of ``jax.jit``, instead of numbers."""
    return isinstance(jnp.zeros(1), jax.core.Tracer)


@dataclasses.dataclass(frozen=True)
class Piping:
    """How microbatches go through a row of workers, for the solves of one of them; compared by its key, as `ResultCounter` is."""

    comm: Comm
    # of the microbatch: an array that ``jax.vmap`` maps over them
    number: jax.Array = dataclasses.field(compare=False)
    checkpoint: bool
    key: object


# ``report(direction, solver, layers)`` returns a function that is called on the host with the stats of a solve
Report = Callable[[str, Solver, int], Callable[[Stats], None]]


class SolveContext(NamedTuple):
    """Replacements and reports for the solves inside the context; None leaves them as they are."""

    solvers: tuple[Solver, Solver | None] | None = None  # forward and adjoint, of all solves
    report: Report | None = None
    counter: ResultCounter | None = None  # counts the solves that are differentiated
    processor: Processor | None = None
    piping: Piping | None = None  # serial solves become parts of a pipeline


# JAX makes a user context a part of the keys of its caches, so that a jitted function is traced anew in another context.
asked = jax.make_user_context(SolveContext())


def report_stats(direction: str, solver: Solver, layers: int, stats: Stats) -> None:
    """Report a solve, if the context asks for it."""
    report = asked.value.report
    if report is not None:
        jax.debug.callback(report(direction, solver, layers), jax.lax.stop_gradient(stats))
