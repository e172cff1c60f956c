"""Count a solver's evaluations and messages, by its registered functions or from the program of a solve."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays._at_once import ACCELERATOR
from lp_jax._arrays._products import cost_of
from lp_jax._arrays._types import CPoints, Layer, PyTree, Slices, State
from lp_jax._comms._workers import Run, Workers
from lp_jax._levels._chain import Chain
from lp_jax._levels._layer import LayerStep, Traced
from lp_jax._programs._adjoint import Forward, entered_in_final_sweep, solve_adjoint
from lp_jax._solvers._picard import Picard
from lp_jax._solvers._solver import Solver, iterate
from lp_jax.planning._work import Event, Schedule, Uncounted, Work, count_work, most_at_once, with_effort


def training_step(
    solver: Solver, adjoint_solver: Solver, layers: int, *, workers: int = 1, at_once: float = math.inf
) -> Schedule:
    """Count the work of value and gradient on the busiest worker; ``at_once`` is the number of layers for "auto".

    Raises:
        NotImplementedError: for Newton's method within multigrid.
    """
    kept = solver.resolve(layers).keeps_states
    forward = count(solver, layers, workers=workers, at_once=at_once, kept=kept)
    return forward + count(adjoint_solver, layers, workers=workers, at_once=at_once, kept=kept, adjoint=True)


def count(
    solver: Solver,
    layers: int,
    *,
    workers: int = 1,
    at_once: float = math.inf,
    kept: bool = False,
    adjoint: bool = False,
) -> Schedule:
    """Count the work of a forward solve, or of an adjoint solve with the gradient; arguments as for `training_step`.

    ``kept`` says whether the forward solve keeps linearisations of all layers.
    """
    solver = solver.resolve(layers)
    most = most_at_once(solver, at_once)
    work = Work(layers=layers, workers=workers, at_once=most, kept=kept, adjoint=adjoint)
    try:
        count_work(solver, work)
    except Uncounted:
        fixed = with_effort(solver, solver.iterations) if solver.has_tolerance else solver
        return read(fixed, layers, workers=workers, at_once=most, kept=kept, adjoint=adjoint)
    if workers > 1:
        work.schedule.reductions += 2  # the last state, and the residual norms
    return work.schedule


_STATE, _HIDDEN, _MESSAGE, _REDUCTION = 3, 5, 7, 11  # terms of the sums in products of each kind; in a gradient it is 1


@functools.lru_cache(maxsize=1024)
def read(solver: Solver, layers: int, *, workers: int, at_once: float, kept: bool, adjoint: bool) -> Schedule:
    """Count the batches and messages of a solve in its program for a model network, on one worker.

    A layer of the model is one product with a matrix that is not square. The shapes of products distinguish evaluations,
    their transposes and gradients of the parameters. Messages are products of other shapes. The number of iterations must be
    fixed.
    """
    unit = solver.unit(layers)
    mine = math.ceil(layers / unit / workers) * unit
    held = (mine,) * math.ceil(layers / mine)
    needs = solver.needs(layers)
    steps = tuple((which, _LAYER) for which in (*range(len(needs.transfers) + 1), *needs.steps))
    marked = _Counted(sequential="relay", layers=layers, held=held, processor=ACCELERATOR)
    chain = functools.partial(_chain, Traced(steps, layers, (True, False, False, False)), marked)
    first = solver if not adjoint or solver.keeps_states == kept else Picard(storage="all" if kept else "states")
    forward = functools.partial(_forward, first, chain, kept=kept)
    arrays = jax.eval_shape(lambda: (jnp.zeros((mine, _HIDDEN, _STATE), jnp.float32), jnp.zeros(_STATE, jnp.float32)))
    if adjoint:
        left = jax.eval_shape(forward, *arrays)[1]
        program = jax.make_jaxpr(functools.partial(_backward, solver, first.stride(layers), chain))(*arrays, left)
    else:
        program = jax.make_jaxpr(forward)(*arrays)
    batches = Work(layers=layers, at_once=at_once)
    for kind, terms in (("linearise" if adjoint else "forward", _STATE), ("adjoint", _HIDDEN), ("gradient", 1)):
        work, depth = map(int, cost_of(program.jaxpr, unit=2 * _STATE * _HIDDEN, terms=terms))
        number = max(depth, math.ceil(work / mine))
        if number:  # as even as can be
            size, more = divmod(work, number)
            batches.add(kind, number - more, size)
            batches.add(kind, more, size + 1)
    if workers == 1:
        return batches.schedule
    messages = int(cost_of(program.jaxpr, terms=_MESSAGE).depth)
    reductions = int(cost_of(program.jaxpr, unit=2 * _REDUCTION, terms=_REDUCTION).work)
    return Schedule(_spread(messages, batches.schedule.events), reductions)


def _spread(messages: int, events: Sequence[Event]) -> list[Event]:
    """Return the batches with messages between them, as evenly as can be."""
    batches = [event._replace(times=1) for event in events for _ in range(event.times)]
    spread: list[Event] = []
    for number, batch in enumerate(batches, 1):
        due = number * messages // len(batches) - (number - 1) * messages // len(batches)
        spread += [batch, *[Event(batch.phase, "message", due, 0)] * (due > 0)]
    return spread


def _step(y: State, layer: Layer) -> State:
    return y + layer.dt * jnp.sum(jnp.tanh(layer.params @ y))


_LAYER = LayerStep(_step, 0, False, structure=jax.tree.structure(0), in_place=True)


def _chain(traced: Traced, workers: Workers, matrices: jax.Array, y0: jax.Array) -> Chain:
    steps = len(matrices)
    dt = jnp.full(steps, 1 / workers.layers, jnp.float32)
    slices = Slices(matrices, None, jnp.cumsum(dt), dt, jnp.arange(steps, dtype=jnp.int32))
    return Chain(
        traced=traced,
        slices=slices,
        shared=((), ()),
        y0=y0,
        workers=workers,
        padded=workers.padded,
    )


def _forward(
    solver: Solver, chain: Callable[..., Chain], matrices: jax.Array, y0: jax.Array, *, kept: bool
) -> tuple[tuple[State, PyTree], Forward]:
    """Solve forward; return the last state with its statistics, and what the adjoint solve needs."""
    network = chain(matrices, y0)

    def keep(u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
        u_next, _, linearisation = network.linearised.evaluate(u, x, shared)
        return u_next, (u, linearisation)

    levels = solver.discretize(network)
    iterated, stats = iterate(solver, levels, None)
    u, emitted = solver.finish(levels, iterated, keep if kept else None)
    states, linearisations = levels[0].merge(emitted) if kept else (None, None)
    entered = None if kept else entered_in_final_sweep(levels[0], iterated, u)
    return (levels[0].last(u), stats), Forward(u, entered, states, linearisations)


def _backward(
    solver: Solver, stride: int, chain: Callable[..., Chain], matrices: jax.Array, y0: jax.Array, left: Forward
) -> PyTree:
    return solve_adjoint(chain(matrices, y0), solver, left, stride, y0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counted(Workers):
    """Workers that send nothing: a product of a special shape marks each message or sum."""

    def index(self) -> jax.Array:
        return jnp.int32(0)

    @property
    def rows(self) -> tuple[int, int]:
        return self.held[0], self.held[0]

    def shift(self, tree: PyTree, by: int) -> PyTree:
        return _mark(tree, _MESSAGE)

    def sum(self, tree: PyTree) -> PyTree:
        return _mark(tree, _REDUCTION)

    def broadcast(self, tree: PyTree, root: int) -> PyTree:
        return _mark(tree, _REDUCTION)

    def gather(self, tree: PyTree, span: int) -> PyTree:
        return jax.tree.map(lambda x: jnp.concatenate([x] * self.active), _mark(tree, _REDUCTION))

    def local_slice(self, tree: PyTree, span: int) -> PyTree:
        return jax.tree.map(lambda x: x[: len(x) // self.active], tree)

    def relay(self, run: Run, y0: State, *, reverse: bool) -> tuple[CPoints, PyTree]:
        def turn(_: jax.Array, u: State) -> State:
            return self.shift(jax.tree.map(lambda x: x[0 if reverse else -1], run(u)[0]), 1)

        return run(lax.fori_loop(1, self.active, turn, y0))


def _mark(tree: PyTree, terms: int) -> PyTree:
    """The same values, after a product with this number of terms."""
    total = sum(jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(tree))
    nothing = jnp.full(terms, 0 * total) @ jnp.ones(terms, jnp.float32)
    return jax.tree.map(lambda x: x + nothing.astype(x.dtype), tree)
