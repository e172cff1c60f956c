"""Layers one after another over a row of workers, exactly: a relay; with several microbatches that follow each other, a pipeline.

A worker's layers keep what their transposes need, for each microbatch. Cotangents of the state come back from worker to worker.
Then all workers form the gradients of their own layers at once, layer by layer, summed over microbatches: no array has an axis
for both. Layers that are small on a CPU, and those that keep nothing, are one step here, which JAX differentiates as a whole.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._place import placed_here
from lp_jax._arrays._types import Arrays, PyTree, Slices, Stacked, State
from lp_jax._comms._workers import one_after_another
from lp_jax._levels._chain import Chain
from lp_jax._levels._layer import Linearised
from lp_jax._levels._two_passes import TwoPasses, in_two_passes
from lp_jax._programs._asked import report_stats
from lp_jax._solvers._serial import no_stats, propagate
from lp_jax._solvers._solver import Stats

T = TypeVar("T")
# cotangents of the inexact leaves of aux, None for leaves that the loss does not see; empty if it sees none
Seen = tuple[jax.Array | None, ...]

LAYERS, WHOLE = "layers", "whole"
"""The steps of a relay: layers, or all layers of a worker as one step that JAX differentiates."""


class Mapped(NamedTuple):
    """The microbatches of a solve: which leaves differ between them. All of the state do."""

    slices: tuple[bool, ...]
    shared: tuple[bool, ...]
    checkpoint: bool = False  # whether a worker keeps only the states that enter it


class Kept(NamedTuple):
    """What the steps of a worker keep for the gradient, leaves ``(count, steps, ...)`` for ``count`` microbatches."""

    states: Stacked  # that enter the steps
    linearisations: PyTree


class Gradient(NamedTuple):
    """Gradients of a worker's operands."""

    slices: Stacked
    y0: State
    shared: PyTree
    cotangents: Stacked | None  # that leave the steps


@dataclasses.dataclass(frozen=True)
class Relay:
    """A worker's part. Its steps are its layers, or all of them are one step if ``whole``."""

    chain: Chain  # the worker's layers; ``y0`` is that of all microbatches
    xs: Slices  # operands of the steps, leaves ``(steps, ...)``, or ``(steps, count, ...)`` where microbatches differ
    mapped: Mapped
    whole: bool

    @classmethod
    def of(cls, chain: Chain, mapped: Mapped, steps: str) -> "Relay":
        """``chain`` has slices ``(n, ...)``, or ``(n, count, ...)`` where microbatches differ."""
        whole = steps == WHOLE or not chain.steps
        xs = _leafwise(_as_one_step, chain.slices, mapped.slices) if whole else chain.slices
        return cls(chain, xs, mapped, whole)

    def forward(self, *, keep: bool) -> tuple[Stacked, Kept | None, PyTree]:
        """Return the last states of this worker, what its steps keep, and (aux, states), leaves ``(n, count, ...)``."""
        linearised = self._linearised() if keep else None

        def turn(u: State, number: jax.Array | int) -> tuple[State, PyTree, None]:
            shared = _entries(self.chain.shared, self.mapped.shared, number)

            def step(u: State, x: Slices) -> tuple[State, tuple[Kept | None, PyTree]]:
                if linearised is None:
                    u_next, out = self._step(u, x, shared)
                    return u_next, (None, out)
                u_next, out, kept = linearised.evaluate(u, x, shared)
                return u_next, (Kept(u, kept), out)

            xs = _entries(self.xs, self.mapped.slices, number, axis=1)
            last, (kept, out) = self._along(step, u, xs)
            return last, (kept, out), None

        lasts, (kept, out), _ = self.chain.workers.pipeline(turn, self.chain.y0, reverse=False)
        return lasts, kept, jax.tree.map(self._by_layer, out)

    def backward(
        self, kept: Kept, sources: Sequence[Stacked | None], lams: Stacked, *, keep: bool
    ) -> Gradient:
        """Return the gradients, from cotangents of the last states, and of the leaves of aux: ``(n, count, ...)`` or None."""
        chain, mapped = self.chain, self.mapped
        if self.whole:
            sources = [None if a is None else _as_one_step(a, True) for a in sources]
        everywhere = [True] * len(jax.tree.leaves(sources))
        own = _picked(mapped.slices, chain.traced.differentiable)
        common = _picked(mapped.shared, list(map(_tree.inexact, jax.tree.leaves(chain.shared))))
        two = self._two_passes(kept, sources, lams)
        late, early = two.late, [not late for late in two.late]
        # gradients of own operands come before those of shared ones
        flags, n = [*own, *common], len(own)
        n_early, structure = sum(early[:n]), jax.tree.structure(lams)

        def turn(lam: State, number: jax.Array | int) -> tuple[State, PyTree, PyTree]:
            shared = _entries(chain.shared, mapped.shared, number)

            def back(carry: tuple[State, list[jax.Array]], x: PyTree) -> tuple[PyTree, PyTree]:
                (lam, total), (x, kept, sources) = carry, x
                lam, gradients, passed = two.back((lam, sources), (x, shared, kept))
                lam, total = (
                    jax.tree.unflatten(structure, lam),
                    _tree.add(total, gradients[n_early:]),
                )
                return (lam, total), (gradients[:n_early], passed, lam if keep else None)

            xs = _entries(self.xs, mapped.slices, number, axis=1)
            seen = _entries(sources, everywhere, number, axis=1)
            none = _picked(_tree.zeros_like(_tree.partition(shared)[0]), early[n:])
            (lam, total), (gradients, passed, lams) = self._along(
                back, (lam, none), (xs, _tree.take(kept, number), seen), reverse=True
            )
            each, summed = _divided([*gradients, *total], _picked(flags, early))
            return lam, (each, passed, lams), summed

        lams, (each, passed, cotangents), summed = chain.workers.pipeline(turn, lams, reverse=True)
        first = sum(_picked(own, early[:n]))
        each = [*(jnp.swapaxes(x, 0, 1) for x in each[:first]), *each[first:]]
        at_once = _woven(_picked(flags, early), each, summed)

        def of_step(total: list[jax.Array], k: jax.Array | int) -> tuple[PyTree, PyTree]:
            """The late gradients of a step, over all microbatches."""
            x, seen = _tree.take((self.xs, sources), k)

            def one(_: jax.Array, number: jax.Array | int) -> tuple[jax.Array, PyTree, PyTree]:
                operands = (
                    _entries(x, mapped.slices, number),
                    _entries(chain.shared, mapped.shared, number),
                    _tree.take(kept, number, k),
                )
                given = _tree.take(passed, number, k), _entries(seen, everywhere, number)
                return _, *_divided(two.gradients(given, operands), _picked(flags, late))

            numbers = jnp.zeros(_tree.leading(kept), jnp.int32)
            gradients = _woven(_picked(flags, late), *one_after_another(one, numbers)[1:])
            return _tree.add(total, gradients[n - n_early :]), gradients[: n - n_early]

        totals = _picked(_tree.zeros_like(_tree.partition(chain.shared)[0]), late[n:])
        steps = jnp.arange(_tree.leading(self.xs), dtype=jnp.int32)
        totals, of_steps = self._along(of_step, totals, steps)
        gradients = _woven(late, [*of_steps, *totals], at_once)
        if self.whole:
            gradients[:n] = map(_as_layers, gradients[:n], own)
        return Gradient(
            _tree.partition(chain.slices, chain.traced.differentiable)[1](gradients[:n], fill=None),
            lams,
            _tree.partition(chain.shared)[1](chain.workers.sum(gradients[n:]), fill=None),
            jax.tree.map(lambda x: x[0], cotangents),
        )

    def _step(self, u: State, x: Slices, shared: PyTree) -> tuple[State, tuple[PyTree, Stacked]]:
        """A step: the next state; aux, and the states after its layers."""
        if self.whole:
            home = self.chain.traced.steps[0][1].home or jax.sharding.get_abstract_mesh()
            # what JAX keeps for the gradient has the types of the step
            with jax.sharding.use_abstract_mesh(home):
                u, x, shared = jax.tree.map(placed_here, (u, x, shared))
                chain = dataclasses.replace(self.chain, slices=x, y0=u, shared=shared)
                last, (states, aux) = propagate(chain, None)
            return jax.tree.map(placed_here, (last, (aux, states)))
        u_next, aux = self.chain.step(0, aux=True)(u, x, shared)
        return u_next, (aux, u_next)

    def _first(self) -> tuple[State, Slices, PyTree]:
        """Shapes of the arguments of a step."""
        one = _tree.shape_of(
            lambda: (
                _entries(self.xs, self.mapped.slices, 0, axis=1),
                _entries(self.chain.shared, self.mapped.shared, 0),
            )
        )
        return _tree.entry_like(self.chain.y0), _tree.entry_like(one[0]), one[1]

    def _linearised(self) -> Linearised:
        step = jax.checkpoint(self._step) if self.mapped.checkpoint else self._step
        aux, states = _tree.shape_of(self._step, *self._first())[1]
        emits = *map(_tree.inexact, jax.tree.leaves(aux)), *(False for _ in jax.tree.leaves(states))
        return Linearised(step, self.chain.traced.differentiable, weights=True, emits=emits)

    def _two_passes(
        self, kept: Kept, sources: Sequence[Stacked | None], lams: Stacked
    ) -> TwoPasses:
        """The transposed step in two passes."""
        linearised = self._linearised()

        def transpose(
            lam: State, sources: PyTree, operands: PyTree
        ) -> tuple[State, list[jax.Array]]:
            x, shared, kept = operands
            pull = linearised.transpose(kept.states, x, shared, kept.linearisations)
            lam, own, weights = pull(lam, sources)
            return lam, [*own, *weights]

        _, x, shared = self._first()
        of_step = functools.partial(
            jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype)
        )
        return in_two_passes(
            transpose, _tree.entry_like(lams), of_step(sources), (x, shared, of_step(kept))
        )

    def _along(
        self,
        f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        carry: PyTree,
        xs: PyTree,
        *,
        reverse: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """Scan over the steps."""
        if self.whole:  # one step
            carry, y = f(carry, jax.tree.map(lambda x: x[0], xs))
            return carry, jax.tree.map(lambda y: y[None], y)
        unroll = self.chain.workers.processor.serial_unroll(self.chain.traced.footprint)
        return _tree.scan(f, carry, xs, reverse=reverse, unroll=unroll)

    def _by_layer(self, x: jax.Array) -> jax.Array:
        """From ``(count, steps, ...)`` to ``(n, count, ...)``."""
        return jnp.swapaxes(x[:, 0] if self.whole else x, 0, 1)


def forward(program: Any, arrays: Arrays, *, keep: bool) -> tuple[PyTree, Kept | None]:
    """The forward solve of a `Program`, with what its gradient needs if ``keep``."""
    workers, (slices, y0, shared), mapped = program.workers, *_by_microbatch(program, arrays)

    def body(slices: Slices, common: tuple[State, PyTree]) -> tuple[PyTree, State]:
        chain = program.chain(slices, *common)
        lasts, kept, out = Relay.of(chain, mapped, program.relay).forward(keep=keep)
        return (kept, out), chain.workers.broadcast(lasts, workers.active - 1)

    (kept, out), y1 = workers.map(body)(program.slots(slices), (y0, shared))
    stats = no_stats(y1, program.done)
    report_stats("forward", arrays.solver, workers.layers, stats)
    stats = _tree.repeat(stats, _tree.leading(y1))
    aux, states = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), workers.trim(out))
    whole = y1, aux, (stats, states)
    return (whole if program.mapped else jax.tree.map(lambda x: x[0], whole)), kept


def backward(
    program: Any, arrays: Arrays, left: Kept, cotangent: State, seen: Seen, *, keep: bool
) -> tuple[Arrays, Stats]:
    """The gradient, with the cotangents that leave the layers as ``adjoint_guess`` if ``keep``, and the stats."""
    workers, (slices, y0, shared), mapped = program.workers, *_by_microbatch(program, arrays)
    if not program.mapped:
        cotangent, seen = jax.tree.map(lambda x: x[None], (cotangent, seen))

    def body(
        spread: tuple[Slices, Kept, Seen], common: tuple[State, PyTree, State]
    ) -> tuple[PyTree, PyTree]:
        (slices, kept, seen), (y0, shared, cotangent) = spread, common
        chain = program.chain(slices, y0, shared, kept, seen, cotangent)
        if chain.padded:
            seen = _tree.where_rows(slices.index < workers.layers, seen)
        relay = Relay.of(chain, mapped, program.relay)
        gradient = relay.backward(kept, seen, cotangent, keep=keep)
        y0 = chain.workers.broadcast(gradient.y0, 0)
        return (gradient.slices, gradient.cotangents), (y0, gradient.shared)

    seen = workers.pad(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), seen))
    spread = program.slots(slices), left, seen
    (slices, ended), (y0, shared) = workers.map(body)(spread, (y0, shared, cotangent))
    stats = no_stats(y0, program.done)
    report_stats("adjoint", arrays.adjoint_solver, workers.layers, stats)
    own = _picked(mapped.slices, program.traced.differentiable)
    slices = _swapped(workers.trim(slices), own)
    if program.mapped:
        stats = _tree.repeat(stats, _tree.leading(y0))
    else:
        y0 = jax.tree.map(lambda x: x[0], y0)
    return Arrays(slices, y0, shared, adjoint_guess=workers.trim(ended)), stats


def _by_microbatch(program: Any, arrays: Arrays) -> tuple[tuple[Slices, State, PyTree], Mapped]:
    """The operands with the layers before the microbatches, of which there is one if none are given."""
    slices, y0, shared = arrays[:3]
    if program.mapped:
        return (_swapped(slices, program.mapped.slices), y0, shared), program.mapped
    none = [(False,) * len(jax.tree.leaves(tree)) for tree in (slices, shared)]
    return (slices, jax.tree.map(lambda x: x[None], y0), shared), Mapped(none[0], none[1])


def _swapped(tree: PyTree, flags: Sequence[bool]) -> PyTree:
    """Exchange the axes of the layers and the microbatches in the leaves that have both."""
    return _leafwise(lambda x, each: jnp.swapaxes(x, 0, 1) if each else x, tree, flags)


def _as_one_step(x: jax.Array, each: bool) -> jax.Array:
    """From ``(n, ...)`` or, for ``each`` microbatch, ``(n, count, ...)`` to one step of n layers."""
    return (jnp.swapaxes(x, 0, 1) if each else x)[None]


def _as_layers(x: jax.Array, each: bool) -> jax.Array:
    """Undo `_as_one_step`."""
    return jnp.swapaxes(x[0], 0, 1) if each else x[0]


def _leafwise(
    f: Callable[[jax.Array, bool], jax.Array], tree: PyTree, flags: Sequence[bool]
) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(f, leaves, flags))


def _entries(tree: PyTree, flags: Sequence[bool], number: jax.Array | int, axis: int = 0) -> PyTree:
    """The operands of a microbatch, from those of all of them; flags say which leaves have an axis for it."""

    def one(x: jax.Array, each: bool) -> jax.Array:
        return lax.dynamic_index_in_dim(x, number, axis, keepdims=False) if each else x

    return _leafwise(one, tree, flags)


def _picked(values: Sequence[T], flags: Sequence[bool]) -> list[T]:
    return [x for x, flag in zip(values, flags, strict=True) if flag]


def _divided(values: Sequence[T], flags: Sequence[bool]) -> tuple[list[T], list[T]]:
    """The flagged values, and the others."""
    return _picked(values, flags), _picked(values, [not flag for flag in flags])


def _woven(flags: Sequence[bool], flagged: Sequence[T], others: Sequence[T]) -> list[T]:
    """Undo `_divided`."""
    parts = iter(others), iter(flagged)
    return [next(parts[flag]) for flag in flags]
