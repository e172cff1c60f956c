"""Count a solver's evaluations and messages by formulas, along its path through the levels.

A plan counts hundreds of solvers, so nothing is traced here, except for plain functions as coarse steps.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from lp_jax._arrays._jaxpr import live
from lp_jax._arrays._types import Layer, PyTree
from lp_jax._choice._cost import cost_of
from lp_jax._levels._relax import at_level, per_level
from lp_jax._solvers._coarse_step import CoarseStep, Identity, PerInterval
from lp_jax._solvers._cycle import VISITS
from lp_jax._solvers._elementwise import Elementwise
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Sweeps, Windowed
from lp_jax.planning._solvers import busiest, most_at_once
from lp_jax.planning._work import Event, Schedule, prefix_messages


def training_step(
    solver: Solver,
    adjoint_solver: Solver,
    layers: int,
    *,
    workers: int = 1,
    at_once: float = math.inf,
) -> Schedule:
    """Count the work of value and gradient on the busiest worker; ``at_once`` is the number of layers for "auto"."""
    kept = solver.resolve(layers).keeps_states
    forward = count(solver, layers, workers=workers, at_once=at_once, kept=kept)
    return forward + count(
        adjoint_solver, layers, workers=workers, at_once=at_once, kept=kept, adjoint=True
    )


def count(
    solver: Solver,
    layers: int,
    *,
    workers: int = 1,
    at_once: float = math.inf,
    kept: bool = False,
    adjoint: bool = False,
) -> Schedule:
    """Count a forward solve, or an adjoint solve with the gradient; ``kept`` says that the forward solve keeps linearisations."""
    solver = solver.resolve(layers)
    most = most_at_once(solver, at_once)
    chain = _Chain(
        layers=layers, workers=workers, at_once=most, kept=kept, adjoint=adjoint, events=[]
    )
    _record(solver, chain)
    # the last state, and the residual norms
    return Schedule(chain.events, 2 if workers > 1 else 0)


class Stop(NamedTuple):
    """A stop on a solver's path through the levels."""

    level: int  # 0 is the finest
    label: str  # "solve", or the relaxation, like "FCF"
    iteration: int | None = None  # number of the iteration that begins here; None within one
    title: str = ""  # name of that iteration


def relaxation_at(solver: MGRIT, level: int) -> Any:
    """Return the relaxation on a level: a word like "FCF", or a function."""
    return at_level(per_level(solver.relaxation), level)


def path(solver: MGRIT, steps: int, iterations: int) -> list[Stop]:
    """Return the stops of ``iterations`` cycles and the final sweep; successive stops on one level are merged."""
    stops: list[Stop] = []
    relaxations = [relaxation_at(solver, level) for level in range(len(solver.grid(steps)))]
    labels = tuple(getattr(relaxation, "__name__", str(relaxation)) for relaxation in relaxations)
    kind, name = solver.cycle, f"{solver.cycle}-cycle"
    if callable(solver.cycle):
        # A function is drawn and counted as if it went down and up once.
        kind, name = "V", getattr(solver.cycle, "__name__", "a cycle of its own")
    for iteration in range(1, iterations + 1):
        first = solver.start == "cascade" and iteration == 1
        # The first stop of a cycle carries the number and the name of the iteration.
        begin, *rest = cycle_stops(labels, kind, cascade=first)
        title = "coarse to fine" if first else name
        stops += [begin._replace(iteration=iteration, title=title), *rest]
    stops.append(Stop(0, "FC"))
    # Where the path stays on a level, the later relaxation includes the earlier one, with which no iteration begins.
    return [last for _, (*_, last) in itertools.groupby(stops, key=lambda stop: stop.level)]


@functools.cache
def cycle_stops(
    labels: tuple[str, ...], kind: str, level: int = 0, *, cascade: bool = False
) -> tuple[Stop, ...]:
    """Return the stops of a cycle from ``level`` down and up again, or up only where a cascade stands for the first visits."""
    stops = [] if cascade else [Stop(level, labels[level])]
    if level + 2 == len(labels):
        stops.append(Stop(level + 1, "solve"))
    else:
        for number, visit in enumerate(VISITS[kind]):
            stops += cycle_stops(labels, visit, level + 1, cascade=cascade and number == 0)
    return (*stops, Stop(level, "F"))


class _Chain(NamedTuple):
    """A chain of steps in a forward or adjoint solve. Its methods add the work that is done on it to ``events``."""

    layers: int  # steps of the chain, on all workers
    workers: int
    at_once: float  # layers that are evaluated at once
    kept: bool
    adjoint: bool
    events: list[Event]
    step: CoarseStep | None = None  # the coarse step, if the chain is a coarse level
    span: int = 1  # layers that a step stands for
    unit: int = 1  # steps that must live on one worker
    phase: str = "sweep"
    in_turn: bool = False

    @property
    def mine(self) -> int:
        """Number of steps on the busiest worker, including those that pad its last unit."""
        return math.ceil(math.ceil(self.layers / self.unit) / self.workers) * self.unit

    def add(self, kind: str, count: int, layers: int) -> None:
        """Add ``count`` batches of one kind, each cut into parts of at most `at_once` layers."""
        most = max(1, int(min(layers, self.at_once)))
        for times, size in (count * (layers // most), most), (count, layers % most):
            if times and size:
                self.events.append(Event(self.phase, kind, times, size, self.in_turn))

    def send(self, states: int) -> None:
        """Add messages of a state between neighbours, one after the other."""
        if self.workers > 1 and states:
            self.events.append(Event(self.phase, "message", states, 0, self.in_turn))

    def evaluate(self, count: int, places: int, *, gradient: bool = False) -> None:
        """Add ``count`` steps, one after the other, each at several places at once. In an adjoint solve they are transposes."""
        kinds = ["adjoint" if self.adjoint else "forward"]
        if self.adjoint and (
            self.step is not None or not self.kept
        ):  # linearised again, in one loop
            kinds.append("linearise")
        # A coarse step may itself be a solve through the layers that it stands for.
        row, at_once = _evaluations(self.step, self.span)
        for kind in kinds + ["gradient"] * (gradient and self.adjoint):
            self.add(kind, count * row, places * at_once)

    def evaluate_again(self, count: int, places: int) -> None:
        """Add the forward evaluations of states that the adjoint solve needs and the forward solve did not keep."""
        if self.adjoint and not self.kept:
            self._replace(phase="states again").add("forward", count, places)

    def evaluate_last(self) -> None:
        """Add the last evaluation of a solver with a state after every layer: it linearises the layers, or forms the gradient."""
        if self.step is not None or not (self.adjoint or self.kept):
            return
        last = self._replace(phase="final sweep")
        last.send(1)
        for kind in ["linearise"] * (not self.kept) + ["gradient"] if self.adjoint else ["forward"]:
            last.add(kind, 1, self.mine)

    def finish(self, factor: int, intervals: int) -> None:
        """Add the final sweep of a solver with states at C-points, through intervals of ``factor`` layers."""
        self.evaluate_again(factor - 1, intervals)
        last = self._replace(phase="final sweep")
        last.evaluate(factor, intervals, gradient=self.step is None)
        last.send(1)


@functools.lru_cache(maxsize=1024)
def _of_function(function: Callable[..., PyTree], span: int) -> tuple[int, int]:
    """Count the evaluations that a plain function makes, and those at once.

    It is traced with a step that has a product of three terms, because products of that shape can be told from others.
    """

    def traced(y: jax.Array, matrices: jax.Array) -> PyTree:
        index = jnp.arange(span, dtype=jnp.int32)
        times = index.astype(y.dtype)
        layers = Layer(matrices, None, None, times, times, index, None)  # type: ignore[arg-type]
        return function(lambda y, layer: y + jnp.sum(layer.params @ y), y, layers)

    # A product of a (5, 3) matrix and a vector costs 2 * 5 * 3 flops, and each evaluation has one.
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3,), (span, 5, 3))]
    cost = cost_of(live(jax.make_jaxpr(traced)(*shapes).jaxpr), 3)
    # Each product in the program is a batch of evaluations. Batches are made one after the other.
    return cost.products, math.ceil(cost.flops / (2 * 5 * 3) / max(1, cost.products))


def _evaluations(step: CoarseStep | None, span: int) -> tuple[int, int]:
    """Return the evaluations of layers that a step of ``span`` layers makes one after the other, and the layers in each."""
    if isinstance(step, Identity):
        return 0, 0
    if isinstance(step, PerInterval):
        return _of_function(step.function, span)
    if isinstance(step, Solver):
        # As a coarse step a solver solves the chain of one interval, on one worker.
        solved = count(step, span)
        return solved.depth(), math.ceil(solved.work() / solved.depth())
    return 1, 1


@functools.singledispatch
def _record(solver: Solver, chain: _Chain) -> None:
    """Add the work of a solve, including its last sweep and the gradient.

    An iteration of a solver from outside is counted as one evaluation of all layers, in intervals of its stride.
    """
    factor = solver.stride(chain.layers)
    intervals = math.ceil(chain._replace(unit=solver.unit(chain.layers)).mine / factor)
    for _ in range(solver.iterations):
        chain.evaluate(factor, intervals)
        chain.send(1)
    chain.finish(factor, intervals)


@_record.register
def _(solver: Serial | Elementwise, chain: _Chain) -> None:
    phase = "propagation" if chain.step is None else chain.phase
    finest, later = chain.step is None, chain.kept and solver.in_turn
    in_turn = chain._replace(in_turn=True, phase=phase)
    in_turn.evaluate(chain.layers, 1, gradient=finest and not later)
    in_turn.send(chain.workers - 1)
    if finest and later and chain.adjoint:  # on all workers at once
        chain._replace(phase="gradient").add("gradient", chain.mine, 1)


@_record.register
def _(solver: Windowed, chain: _Chain) -> None:
    span = solver.unit(chain.layers)
    chain = chain._replace(unit=span)
    in_turn = chain._replace(in_turn=True)
    in_turn.evaluate(-(-chain.layers // span) * (solver.sweeps - 1), span)
    in_turn.send(chain.workers - 1)
    chain.send(1)
    _record_sweeps(1, chain)


def _record_sweeps(sweeps: int, chain: _Chain) -> None:
    if chain.adjoint and not chain.kept:  # the states that enter
        chain.send(1)
    for _ in range(sweeps):
        chain.evaluate(1, chain.mine)
        chain.send(prefix_messages(chain.workers))
    chain.evaluate_last()


_record.register(Sweeps, lambda solver, chain: _record_sweeps(solver.sweeps, chain))


@_record.register
def _(solver: Newton, chain: _Chain) -> None:
    if solver.at_once == "auto":  # an iteration holds the Jacobians of all layers anyway
        chain = chain._replace(at_once=math.inf)
    for _ in range(min(solver.relaxations, chain.layers)):
        chain.evaluate(1, chain.mine)
        chain.send(1)
    iteration = chain._replace(phase="Newton iteration")
    for _ in range(solver.iterations):
        if solver.jacobian == "full":
            iteration.add("newton", 1, chain.mine)
        else:
            # One evaluation gives the states. The second is their derivative for diagonal Jacobians, or the derivative at the
            # mean state with the chain of its Jacobians.
            iteration.evaluate(2, chain.mine)
        iteration.send(1 + prefix_messages(chain.workers))
    chain.evaluate_last()


@_record.register
def _(solver: MGRIT, chain: _Chain) -> None:
    """Add the work of the cycles along their path through the levels, and the final sweep."""
    grid = solver.grid(chain.layers)
    step = cast(CoarseStep, solver.coarse_step)
    span = 1
    levels = [chain]
    for (_, factor), (steps, _) in itertools.pairwise(grid):
        span *= factor
        # A step of a level stands for the product of all coarsening factors above it.
        levels.append(chain._replace(layers=steps, step=step, span=span))
    begun = 0
    # The path stays at the finest level for the final sweep, which `finish` adds.
    for stop, following in itertools.pairwise(
        path(solver, chain.layers, min(2, solver.iterations))
    ):
        if stop.iteration == 2:
            begun = len(chain.events)
        at = stop.level
        level = levels[at]
        factor = grid[at][1]
        intervals = busiest(grid, at, chain.workers)
        if stop.label == "solve":
            solve = level._replace(phase="coarse solve")
            if step == Identity():
                solve.send(prefix_messages(chain.workers))
            else:
                _record(solver.coarsest, solve)
        elif following.level > at:  # down
            relaxed = level._replace(phase="coarse relaxation" if at else "relaxation")
            relaxation = relaxation_at(solver, at)
            # A function is counted as "FCF".
            for _ in range(2 if callable(relaxation) else relaxation.count("F")):
                if at == 0 and level.at_once < max(2, intervals):
                    # The adjoint solve computes the states at F-points again in every sweep.
                    level.evaluate_again(factor - 1, intervals)
                relaxed.evaluate(factor, intervals)
                relaxed.send(1)
            levels[at + 1]._replace(phase="coarse right-hand side").evaluate(1, intervals)
        else:  # up
            corrected = level._replace(phase="correction")
            corrected.evaluate(factor - 1, intervals)
            corrected.send(1)
    # All later cycles are like the second one.
    chain.events.extend((solver.iterations - 2) * chain.events[begun:])
    chain.finish(grid[0][1], busiest(grid, 0, chain.workers))
