"""A relay takes the state through the layers of one worker after the other, exactly. With several microbatches it is a pipeline.

A worker's layers keep what their transposes need, for each microbatch. Cotangents of the state come back from worker to worker.
Then all workers form the gradients of their own layers at once, layer by layer, summed over microbatches: no array has an axis
for both. Layers of a few rows on a CPU, and those that keep nothing, are one step here, which JAX differentiates as a whole.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._place import placed_here
from lp_jax._arrays._types import Arrays, PyTree, Slices, Stacked, State
from lp_jax._comms import _wire
from lp_jax._comms._workers import one_after_another
from lp_jax._levels._chain import Chain
from lp_jax._levels._layer import Linearised
from lp_jax._levels._two_passes import TwoPasses, in_two_passes
from lp_jax._programs._asked import report_stats
from lp_jax._solvers._serial import no_stats, propagate
from lp_jax._solvers._solver import Stats

T = TypeVar("T")
# cotangents of the inexact leaves of aux, None for leaves that the loss does not see; empty if it sees none
AuxCotangents = tuple[jax.Array | None, ...]

LAYERS, WHOLE = "layers", "whole"
"""The steps of a relay: layers, or all layers of a worker as one step that JAX differentiates."""


class Mapped(NamedTuple):
    """The microbatches of a solve: which leaves differ between them. All of the state do."""

    slices: tuple[bool, ...]
    shared: tuple[bool, ...]
    checkpoint: bool = False  # whether a worker keeps only the states that enter it


class Kept(NamedTuple):
    """Arrays that the steps of a worker keep for the gradient, leaves ``(count, steps, ...)`` for ``count`` microbatches."""

    states: Stacked  # that enter the steps
    linearisations: PyTree


@dataclasses.dataclass(frozen=True)
class Relay:
    """A worker's part. Its steps are its layers, or all of them are one step if ``whole``."""

    chain: Chain  # the worker's layers; ``y0`` is that of all microbatches
    # operands of the steps and cotangents of aux: ``(steps, ...)``, or ``(steps, count, ...)`` where microbatches differ
    stacked: tuple[Slices, AuxCotangents]
    mapped: Mapped
    whole: bool

    @classmethod
    def of(cls, chain: Chain, mapped: Mapped, steps: str, seen: AuxCotangents = ()) -> "Relay":
        """``chain`` has slices ``(n, ...)``, or ``(n, count, ...)`` where microbatches differ, as in ``seen``."""
        mapped = mapped._replace(slices=(*mapped.slices, *(True for _ in jax.tree.leaves(seen))))
        stacked, whole = (chain.slices, seen), steps == WHOLE or not chain.steps
        # A whole step has one entry on the axis of the steps, and all its layers within it.
        if whole:  # one step of all layers
            stacked = jax.tree.map(lambda x: x[None], _swapped(stacked, mapped.slices))
        return cls(chain, stacked, mapped, whole)

    def operands(
        self, number: jax.Array | int, *step: jax.Array | int
    ) -> tuple[tuple[Slices, AuxCotangents], PyTree]:
        """Stacked and shared operands of a microbatch, for all its steps or for one of them."""
        stacked = _tree.take(self.stacked, *step) if step else self.stacked
        return (
            _entries(stacked, self.mapped.slices, number, axis=1 - len(step)),
            _entries(self.chain.shared, self.mapped.shared, number),
        )

    def forward(self, *, keep: bool) -> tuple[Stacked, Kept | None, PyTree]:
        """Return the last states of this worker, what its steps keep, and (aux, states), leaves ``(n, count, ...)``."""
        # A linearisation evaluates the step and keeps the arrays that its transpose needs.
        linearised = self._linearised() if keep else None

        def turn(u: State, number: jax.Array | int) -> tuple[State, PyTree, None]:
            stacked, shared = self.operands(number)

            def step(
                u: State, x: tuple[Slices, AuxCotangents]
            ) -> tuple[State, tuple[Kept | None, PyTree]]:
                if linearised is None:
                    u_next, out = self._step(u, x[0], shared)
                    return u_next, (None, out)
                (u_next, out), kept = linearised.evaluate(u, x[0], shared)
                return u_next, (Kept(u, kept), out)

            last, (kept, out) = self._along(step, u, stacked)
            return last, (kept, out), None

        lasts, (kept, out), _ = self.chain.workers.pipeline(turn, self.chain.y0, reverse=False)
        # from (count, steps, ...) to (n, count, ...)
        layers = jax.tree.map(lambda x: x[:, 0], out) if self.whole else out
        return lasts, kept, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), layers)

    def backward(self, kept: Kept, lams: Stacked) -> tuple[Slices, State, PyTree]:
        """Return the gradients of slices, first states and shared operands, from cotangents of the last states."""
        chain, structure, count = self.chain, jax.tree.structure(lams), _tree.leading(lams)
        # `count` is the number of microbatches.
        mine = chain.traced.differentiable
        own, combine = _tree.partition(self.stacked[0], mine)
        common, combine_shared = _tree.partition(chain.shared)
        # of the gradients, those of a step's own operands before those of shared ones: whether each microbatch has its own
        each = [
            *_picked(self.mapped.slices[: len(mine)], mine),
            *_picked(self.mapped.shared, map(_tree.inexact, jax.tree.leaves(chain.shared))),
        ]
        # Gradients are early if the first pass, which carries cotangents of the state from worker to worker, makes them anyway.
        # Late ones wait until all workers have their cotangents, so that no worker delays the next one by forming them.
        two, n = self._two_passes(kept, lams), len(own)
        late, early = two.late, [not late for late in two.late]
        n_early, n_late = sum(early[:n]), sum(late[:n])

        def turn(lam: State, number: jax.Array | int) -> tuple[State, PyTree, PyTree]:
            stacked, shared = self.operands(number)

            def back(carry: tuple[State, PyTree], x: PyTree) -> tuple[PyTree, PyTree]:
                (lam, total), ((x, seen), kept) = carry, x
                # `passed` are the arrays of the first pass that the second one needs.
                lam, gradients, passed = two.back((lam, seen), (x, shared, kept))
                lam = jax.tree.unflatten(structure, lam)
                # Gradients of shared operands add up over the steps; those of a step's own operands are stacked by the scan.
                total = _tree.add(total, gradients[n_early:])
                return (lam, total), (gradients[:n_early], passed)

            # The sum over the steps starts from zeros of the early shared gradients.
            none = _picked(_tree.zeros_like(_tree.partition(shared)[0]), early[n:])
            (lam, total), (of_steps, passed) = self._along(
                back, (lam, none), (stacked, _tree.take(kept, number)), reverse=True
            )
            flags = _picked(each, early)
            of_steps = _placed(of_steps, flags[:n_early], number, count, axis=1)
            return lam, passed, [*of_steps, *_placed(total, flags[n_early:], number, count)]

        def of_step(total: list[jax.Array], k: jax.Array | int) -> tuple[PyTree, PyTree]:
            """The late gradients of a step, over all microbatches."""

            def one(same: jax.Array, number: jax.Array | int) -> tuple[jax.Array, None, PyTree]:
                (x, seen), shared = self.operands(number, k)
                kept_here, passed_here = _tree.take((kept, passed), number, k)
                gradients = two.gradients((passed_here, seen), (x, shared, kept_here))
                return same, None, _placed(gradients, _picked(each, late), number, count)

            _, _, gradients = one_after_another(one, jnp.zeros(count, jnp.int32))
            return _tree.add(total, gradients[n_late:]), gradients[:n_late]

        # Cotangents of the state go through the row in reverse; after that no worker waits for another one.
        y0, passed, at_once = chain.workers.pipeline(turn, lams, reverse=True)
        none = _picked(_tree.zeros_like(common), late[n:])
        total, of_steps = self._along(of_step, none, jnp.arange(_tree.leading(self.stacked)))
        # Put the early and the late gradients back into the order of the operands.
        parts = iter(at_once), iter([*of_steps, *total])
        gradients = [next(parts[is_late]) for is_late in late]
        slices = combine(gradients[:n], fill=None)
        if self.whole:
            slices = _swapped(jax.tree.map(lambda x: x[0], slices), each[:n])
        return slices, y0, combine_shared(chain.workers.sum(gradients[n:]), fill=None)

    def _step(self, u: State, x: Slices, shared: PyTree) -> tuple[State, tuple[PyTree, Stacked]]:
        """Make a step, and return the next state, and the pair of aux and the states after its layers."""
        if self.whole:
            # `home` is the mesh under which the step was traced.
            home = self.chain.traced.steps[0][1].home or jax.sharding.get_abstract_mesh()
            # what JAX keeps for the gradient has the types of the step
            with jax.sharding.use_abstract_mesh(home):
                u, x, shared = jax.tree.map(placed_here, (u, x, shared))
                chain = dataclasses.replace(self.chain, slices=x, y0=u, shared=shared)
                last, (states, aux) = propagate(chain, None)
            return jax.tree.map(placed_here, (last, (aux, states)))
        u_next, aux = self.chain.step(0, aux=True, in_turn=True)(u, x, shared)
        return u_next, (aux, u_next)

    def _first(self) -> tuple[State, tuple[Slices, AuxCotangents], PyTree]:
        """Shapes of the arguments of a step."""
        stacked, shared = _tree.shape_of(lambda: self.operands(0))
        return _tree.entry_like(self.chain.y0), _tree.entry_like(stacked), shared

    def _linearised(self) -> Linearised:
        step = jax.checkpoint(self._step) if self.mapped.checkpoint else self._step
        u, (x, _), shared = self._first()
        aux, states = _tree.shape_of(self._step, u, x, shared)[1]
        # The loss sees aux, but not the states within a worker, so those have no cotangents.
        emits = *map(_tree.inexact, jax.tree.leaves(aux)), *(False for _ in jax.tree.leaves(states))
        return Linearised(step, self.chain.traced.differentiable, weights=True, emits=emits)

    def _two_passes(self, kept: Kept, lams: Stacked) -> TwoPasses:
        """The transposed step in two passes."""
        linearised = self._linearised()

        def transpose(
            lam: State, seen: AuxCotangents, operands: PyTree
        ) -> tuple[State, list[jax.Array]]:
            x, shared, kept = operands
            arrays = kept.states, x, shared, kept.linearisations
            lam, own, weights = linearised.transpose(*arrays, lam, seen)
            return lam, [*own, *weights]

        _, (x, seen), shared = self._first()
        # Without the axes (count, steps), these are the arrays of one step.
        here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), kept)
        return in_two_passes(transpose, _tree.entry_like(lams), seen, (x, shared, here))

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


def forward(program: Any, arrays: Arrays, *, keep: bool) -> PyTree:
    """The forward solve of a `Program`, with what its gradient needs if ``keep``."""
    workers, (slices, y0, shared), mapped = program.workers, *_by_microbatch(program, arrays)

    def body(slices: Slices, common: tuple[State, PyTree]) -> tuple[PyTree, State]:
        chain = program.chain(slices, *common)
        lasts, kept, out = Relay.of(chain, mapped, program.relay).forward(keep=keep)
        # Only the last worker of the row has the last states.
        return (kept, out), chain.workers.broadcast(lasts, workers.active - 1)

    (kept, out), y1 = workers.map(body)(program.slots(slices), (y0, shared))
    stats = no_stats(y1, program.done)
    report_stats("forward", arrays.solver, workers.layers, stats)
    # Each microbatch is a solve of its own, with its own stats.
    stats = _tree.repeat(stats, _tree.leading(y1))
    aux, states = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), workers.trim(out))
    whole = *_wire.batched_alike((y1, aux), arrays), (stats, states)
    out = whole if program.mapped else jax.tree.map(lambda x: x[0], whole)
    return (out, kept) if keep else out


def backward(
    program: Any, arrays: Arrays, saved: Kept, cotangent: State, seen: AuxCotangents
) -> tuple[Arrays, Stats]:
    """The gradient and the stats."""
    workers, (slices, y0, shared), mapped = program.workers, *_by_microbatch(program, arrays)
    if not program.mapped:
        cotangent, seen = jax.tree.map(lambda x: x[None], (cotangent, seen))

    def body(
        spread: tuple[Slices, Kept, AuxCotangents], common: tuple[State, PyTree, State]
    ) -> tuple[Slices, PyTree]:
        (slices, kept, seen), (y0, shared, cotangent) = spread, common
        chain = program.chain(slices, y0, shared, kept, seen, cotangent)
        # Slots beyond the last layer hold copies of the last one's cotangents, which must not count twice.
        if chain.padded:
            seen = _tree.where_rows(slices.index < workers.layers, seen)
        relay = Relay.of(chain, mapped, program.relay, seen)
        slices, y0, shared = relay.backward(kept, cotangent)
        # The first worker of the row has the cotangents of the first states; `backward` has summed the shared ones already.
        return slices, (chain.workers.broadcast(y0, 0), shared)

    seen = workers.pad(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), seen))
    spread = program.slots(slices), saved, seen
    slices, (y0, shared) = workers.map(body)(spread, (y0, shared, cotangent))
    stats = no_stats(y0, program.done)
    report_stats("adjoint", arrays.adjoint_solver, workers.layers, stats)
    own = _picked(mapped.slices, program.traced.differentiable)
    slices = _swapped(workers.trim(slices), own)
    if program.mapped:
        stats = _tree.repeat(stats, _tree.leading(y0))
    else:
        y0 = jax.tree.map(lambda x: x[0], y0)
    return Arrays(slices, y0, shared), stats


def _by_microbatch(program: Any, arrays: Arrays) -> tuple[tuple[Slices, State, PyTree], Mapped]:
    """Return the operands with the axis of the layers first. Without microbatches the whole solve is a single one."""
    slices, y0, shared = arrays[:3]
    if program.mapped:
        return (_swapped(slices, program.mapped.slices), y0, shared), program.mapped
    own, common = ((False,) * len(jax.tree.leaves(tree)) for tree in (slices, shared))
    return (slices, jax.tree.map(lambda x: x[None], y0), shared), Mapped(own, common)


def _swapped(tree: PyTree, flags: Sequence[bool]) -> PyTree:
    """Exchange the axes of the layers and the microbatches in the leaves that have both."""
    return _leafwise(lambda x, each: jnp.swapaxes(x, 0, 1) if each else x, tree, flags)


def _leafwise(
    f: Callable[[jax.Array, bool], jax.Array], tree: PyTree, flags: Sequence[bool]
) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    new = [f(x, flag) for x, flag in zip(leaves, flags, strict=True)]
    return jax.tree.unflatten(structure, new)


def _entries(tree: PyTree, flags: Sequence[bool], number: jax.Array | int, axis: int = 0) -> PyTree:
    """Pick the operands of a microbatch. The flags say which leaves have an axis for the microbatches."""

    def one(x: jax.Array, each: bool) -> jax.Array:
        return lax.dynamic_index_in_dim(x, number, axis, keepdims=False) if each else x

    return _leafwise(one, tree, flags)


def _placed(
    values: Sequence[jax.Array],
    flags: Sequence[bool],
    number: jax.Array | int,
    count: int,
    axis: int = 0,
) -> list[jax.Array]:
    """Undo `_entries` for the gradients of a microbatch. Gradients of its own operands are zero for all other microbatches."""

    def one(x: jax.Array, each: bool) -> jax.Array:
        if not each:
            return x
        # Zeros for the other microbatches let the caller add the results of all of them.
        none = jnp.zeros((*x.shape[:axis], count, *x.shape[axis:]), x.dtype)
        return lax.dynamic_update_index_in_dim(none, x, number, axis)

    return [one(x, each) for x, each in zip(values, flags, strict=True)]


def _picked(values: Sequence[T], flags: Iterable[bool]) -> list[T]:
    return [x for x, flag in zip(values, flags, strict=True) if flag]
