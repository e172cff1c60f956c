"""Count the evaluations and messages of a solver from outside: its program is read."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._products import live
from lp_jax._arrays._types import Arrays, Layer, PyTree, Stacked, State
from lp_jax._choice._cost import cost_of, depth_of
from lp_jax._choice._processor import ACCELERATOR
from lp_jax._comms._workers import Turn, Workers, one_after_another
from lp_jax._problem import Problem
from lp_jax._programs._adjoint import Forward
from lp_jax._programs._program import Output, Program
from lp_jax._programs._traced import trace
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard
from lp_jax.planning._estimate import assume
from lp_jax.planning._work import Event, Schedule, batches

# terms of the sums in products of each kind; in a gradient it is 1
_STATE = 3
_HIDDEN = 5
_MESSAGE = 7
_REDUCTION = 11


@functools.lru_cache(maxsize=1024)
def read(
    solver: Solver, layers: int, *, workers: int, at_once: float, kept: bool, adjoint: bool
) -> Schedule:
    """Count the batches and messages of a solve of a model network, on one worker, by the shapes of products in its program.

    A layer is a product with a matrix that is not square: its transpose, its gradient and messages have other shapes.
    """
    unit = solver.unit(layers)
    mine = math.ceil(layers / unit / workers) * unit
    held = (mine,) * math.ceil(layers / mine)
    marked = _Counted(sequential="relay", layers=layers, held=held, processor=ACCELERATOR)
    first = (
        solver
        if not adjoint or solver.keeps_states == kept
        else Picard(storage="all" if kept else "states")
    )

    def prepared(matrices: jax.Array, y0: jax.Array) -> tuple[Program, Arrays]:
        with assume(ACCELERATOR):
            program, arrays = trace(Problem(_step, matrices, y0), (first, solver))
        slices = jax.tree.map(lambda x: x[:mine], arrays.slices)
        return dataclasses.replace(program, workers=marked), arrays._replace(slices=slices)

    def forward(matrices: jax.Array, y0: jax.Array) -> tuple[Output, PyTree]:
        program, arrays = prepared(matrices, y0)
        return program.forward(arrays, keep=kept or not first.keeps_states)

    def backward(matrices: jax.Array, y0: jax.Array, left: Forward) -> PyTree:
        program, arrays = prepared(matrices, y0)
        return program.backward(arrays, left, y0, ())

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, _HIDDEN, _STATE), (_STATE,))
    ]
    if adjoint:
        program = live(jax.make_jaxpr(backward)(*shapes, jax.eval_shape(forward, *shapes)[1]).jaxpr)
    else:
        program = live(jax.make_jaxpr(forward)(*shapes).jaxpr)
    events = []
    for kind, terms in (
        ("linearise" if adjoint else "forward", _STATE),
        ("adjoint", _HIDDEN),
        ("gradient", 1),
    ):
        work = int(cost_of(program, terms).flops / (2 * _STATE * _HIDDEN))
        number = max(int(depth_of(program, terms)), math.ceil(work / mine))
        if number:  # as even as can be
            size, more = divmod(work, number)
            events += batches("sweep", kind, number - more, size, at_once)
            events += batches("sweep", kind, more, size + 1, at_once)
    if workers == 1:
        return Schedule(events)
    messages = int(depth_of(program, _MESSAGE))
    reductions = int(cost_of(program, _REDUCTION).flops / (2 * _REDUCTION))
    each = [event._replace(times=1) for event in events for _ in range(event.times)]
    spread = []
    for number, batch in enumerate(each, 1):  # messages between the batches, as even as can be
        due = number * messages // len(each) - (number - 1) * messages // len(each)
        spread += [batch, *[Event(batch.phase, "message", due, 0)] * (due > 0)]
    return Schedule(spread, reductions)


def _step(y: State, layer: Layer) -> State:
    return y + layer.dt * jnp.sum(jnp.tanh(layer.params @ y))


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

    def max(self, tree: PyTree) -> PyTree:
        return _mark(tree, _REDUCTION)

    def gather(self, tree: PyTree, span: int) -> PyTree:
        return jax.tree.map(lambda x: jnp.concatenate([x] * self.active), _mark(tree, _REDUCTION))

    def pipeline(
        self, turn: Turn, entries: Stacked, *, reverse: bool
    ) -> tuple[Stacked, PyTree, PyTree]:
        entry = jax.tree.map(lambda x: x[0], entries)
        first = _tree.fori_loop(1, self.active, lambda _, u: self.shift(turn(u, 0)[0], 1), entry)
        return one_after_another(turn, jax.tree.map(lambda x: x[None], first))


def _mark(tree: PyTree, terms: int) -> PyTree:
    """The same values, after a product with this number of terms."""
    total = sum(jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(tree))
    nothing = jnp.full(terms, 0 * total) @ jnp.ones(terms, jnp.float32)
    return jax.tree.map(lambda x: x + nothing.astype(x.dtype), tree)
