"""The adjoint system as levels, and the gradient from its solution.

With lam[N] the cotangent of the last state, ``lam[n] = (dPhi_n/du at u[n])^T lam[n+1]`` is a chain of steps from the last
layer to the first. Its levels are the transposed forward levels, which solvers treat like those. The finest one is linearised
at the states of the forward solve's final sweep, which determine the limit. A coarse one is linearised at the C-points after that
sweep if its steps begin at C-points of the forward solve, and otherwise at the final sweep's states, too.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import in_chunks
from lp_jax._arrays._types import (
    Advance,
    Arrays,
    CPoints,
    Points,
    PyTree,
    Slices,
    Stacked,
    State,
    Transfer,
)
from lp_jax._levels._chain import Chain
from lp_jax._levels._layer import Linearised
from lp_jax._levels._level import Level, identity
from lp_jax._levels._relax import entering
from lp_jax._levels._result import if_finite
from lp_jax._solvers._solver import Solver, Stats, iterate

_LEAST = 4  # fewest layers that are summed over at once


class Forward(NamedTuple):
    """Arrays that the forward solve leaves for the adjoint, from its final sweep on the finest level."""

    c_points: CPoints  # states that leave every interval, ``(intervals, ...)``
    # states that entered every interval; None where they follow from ``c_points``
    entered: CPoints | None = None
    # states that entered every layer, ``(N, ...)``; None where they are to be recomputed
    states: Stacked | None = None
    # arrays that `Linearised` keeps for every layer, ``(N, ...)``; there if, and only if, ``states`` are
    linearisations: PyTree = None


def solve_adjoint(
    chain: Chain,
    solver: Solver,
    saved: Forward,
    stride: int,
    y1_cotangent: State,
    aux_cotangents: Sequence[Stacked | None] = (),
    guess: CPoints | str | None = None,
) -> tuple[Arrays, Stats]:
    """Solve the adjoint system of ``chain`` and form the gradient, None for leaves that are not differentiated.

    ``stride`` is that of the forward solve; ``adjoint_guess`` in the gradient are cotangents of states that enter intervals.
    """
    forward = solver.discretize(chain)
    # The adjoint solver may coarsen otherwise than the forward solver, so its levels are made anew from the same chain.
    fine, linearised = forward[0], None if saved.linearisations is None else chain.linearised
    # Some coarse steps have all states of the finest level as operands, and then those states must exist before the solve.
    needs_states = any(level.with_states for level in forward)
    # States can be recomputed inside each sweep if both solves cut the chain into the same intervals, and if the intervals are
    # not evaluated all at once, as then all states would be alive together anyway. A single interval that is evaluated layer
    # by layer counts as not at once, although it is all of them, hence the 2.
    recompute = (
        saved.states is None
        and stride == fine.factor > 1
        and fine.at_once < max(2, fine.intervals)
        and not needs_states
    )
    if saved.states is not None:
        states = saved.states
    else:
        # With "c_points" the forward solve left one state per interval. Where its final sweep moved the C-points, it also left
        # the states from which that sweep started, because the layers were evaluated at those.
        level = chain.finest(stride, at_once=fine.at_once)
        states = level.incoming(saved.c_points) if saved.entered is None else saved.entered
        if not recompute:
            states = entering(level, states)
    forward = tuple(level.fill_in(states) for level in forward)

    def entering_coarse(span: int) -> Points:
        """States that enter every ``span``-th layer: C-points of the forward solve where they begin such steps."""
        if span % stride:
            return jax.tree.map(lambda x: x[::span], states)
        c_points = chain.workers.incoming(saved.c_points, chain.y0, stride, reverse=False)
        return jax.tree.map(lambda x: x[:: span // stride], c_points)

    # An aux output adds a source to each adjoint step: lam[n] = (dPhi_n/du)^T lam[n+1] + (daux_n/du)^T a[n].
    advance, sources = emitting(chain, aux_cotangents)
    # Without a kept linearisation the sources enter through the vjp of each step. With one they are pulled back once, before
    # the iterations, and become the right-hand side.
    of_aux = None
    if linearised is None:
        finest = transpose(fine, states, y1_cotangent, advance, sources, recompute=recompute)
    else:
        finest = transpose(
            fine, states, y1_cotangent, sources=saved.linearisations, linearised=linearised
        )
        if sources:
            rhs, of_aux = gradient_of_aux(chain, aux_cotangents, states, at_once=fine.at_once)
            finest = finest.with_rhs(rhs)
    # levels[0] is the finest one, as in the forward solve.
    levels = (finest, *transpose_coarse(forward, entering_coarse, y1_cotangent))

    if isinstance(guess, str):
        guess = _tree.zeros_like(_tree.repeat(y1_cotangent, fine.intervals))
    if guess is not None and chain.workers.padded:
        # In the adjoint, padding comes before the first step of the chain, and passes the cotangent of y1 on unchanged.
        # Another guess for it would count as a residual.
        places = jnp.arange(fine.intervals, dtype=jnp.int32)
        # `number` counts intervals over all workers.
        number = chain.workers.start(fine.interval_span) + places
        inside = number < chain.workers.total(fine.interval_span)
        guess = _tree.where_rows(inside, guess, _tree.repeat(y1_cotangent, fine.intervals))
    # From here on `lam` holds the cotangents at the C-points, leaves (intervals, ...).
    lam, stats = iterate(solver, levels, guess)
    weights, combine = _tree.partition(fine.shared)
    # The final sweep is the only one that forms gradients, one slice per layer. The cotangents that enter the layers are kept
    # only for shared weights, because their gradient is a contraction over all layers.
    lam, (slices, cotangents) = solver.finish(
        levels, lam, emit_gradient(chain, advance, linearised, keep=bool(weights))
    )
    slices = fine.merge(slices)
    seen = aux_cotangents if linearised is None else ()
    shared = shared_gradient(fine, finest, cotangents, seen, kept=linearised is not None)
    if of_aux is not None:
        slices, shared = _tree.add((slices, shared), of_aux)
    gradient = Arrays(
        slices,
        finest.last(lam),
        # Each worker has summed over its own layers; all workers share the operands.
        combine(chain.workers.sum(shared) if weights else [], fill=None),
        adjoint_guess=lam,
    )
    return gradient, stats._replace(result=if_finite(stats.result, gradient.y0))


def transpose_coarse(
    forward: Sequence[Level], entering_coarse: Callable[[int], Points], cotangent: State
) -> list[Level]:
    """The adjoints of all coarse levels, each linearised at ``entering_coarse(span)``."""
    levels = []
    # `transfers` collects the spatial restrictions down to the current level, through which its states must go, too.
    transfers: list[Callable[[State], State]] = []
    for finer, level in itertools.pairwise(forward):
        if finer.transfer is not None:
            transfers.append(jax.vmap(finer.transfer[0]))
            restrict, _ = _transpose_transfer(finer)
            cotangent = restrict(cotangent)
        at = functools.reduce(
            lambda u, transfer: transfer(u), transfers, entering_coarse(level.span)
        )
        levels.append(transpose(level, at, cotangent))
    return levels


def transpose(
    level: Level,
    states: Points,
    cotangent: State,
    advance: Advance | None = None,
    sources: Points | None = None,
    *,
    linearised: Linearised | None = None,
    recompute: bool = False,
) -> Level:
    """The adjoint of a level at the ``states`` that enter its steps.

    ``sources`` are cotangents of what ``advance``, the level's step, emits. If the steps are ``linearised``, they are what the
    linearisations kept, and no step is evaluated again. With ``recompute``, ``states`` are only those that enter the intervals;
    the others are recomputed whenever they are needed.
    """
    forward = advance or level.advance

    def step(lam: State, x: tuple[PyTree, State, PyTree], shared: PyTree) -> State:
        operand, u, source = x
        if linearised is not None:
            return linearised.transpose(u, operand, shared, source, lam)[0]
        # The step may emit aux, so its vjp takes a pair: the cotangent of the next state and the source.
        return jax.vjp(lambda u: forward(u, operand, shared), u)[1]((lam, source))[0]

    def expand(x: tuple[PyTree, State, PyTree], shared: PyTree) -> tuple[PyTree, Points, PyTree]:
        """The states that enter each step of an interval, from the one that enters it."""
        operands, u, source = x
        states = _tree.repeat(_tree.zeros_like(u), level.factor)

        def body(i: jax.Array, carry: tuple[State, Points]) -> tuple[State, Points]:
            u, states = carry
            return level.step(u, _tree.take(operands, i), shared), _tree.put(states, u, i)

        # The last step of the interval is not evaluated, because nothing here needs the state after it.
        u, states = _tree.fori_loop(0, level.factor - 1, body, (u, states))
        return operands, _tree.put(states, u, level.factor - 1), source

    # A level whose operands every worker holds is solved without messages. Its adjoint needs the states everywhere, too.
    everywhere = None
    if level.gathered is not None:
        everywhere = (level.gathered, *level.workers.gather((states, sources), level.span))
    return dataclasses.replace(
        level,
        y0=cotangent,
        reverse=True,
        transfer=None if level.transfer is None else _transpose_transfer(level),
        # `origin` stays the step of the forward chain, however often a level is transposed.
        origin=level.origin or level.step,
        chain=None,
        xs=(level.xs, states if recompute else level.split(states), level.split(sources)),
        gathered=everywhere,
        step=identity if level.step is identity else step,
        expand=expand if recompute else None,
        has_sources=linearised is None and bool(jax.tree.leaves(sources)),
    )


def _transpose_transfer(level: Level) -> Transfer:
    """Transposed transfers: restriction of cotangents is the transpose of prolongation, and vice versa."""
    assert level.transfer is not None
    restrict, prolong = level.transfer
    fine = _tree.shape_of(lambda: level.y0)
    coarse = _tree.shape_of(restrict, fine)
    return (
        # `linear_transpose` needs only the shapes of its argument, so no state is evaluated here.
        lambda lam: jax.linear_transpose(prolong, coarse)(lam)[0],
        lambda lam: jax.linear_transpose(restrict, fine)(lam)[0],
    )


def emitting(chain: Chain, cotangents: Sequence[Stacked | None]) -> tuple[Advance, list[Stacked]]:
    """The layer on the finest level, which emits the inexact leaves of aux that the loss sees, and their cotangents.

    The cotangents are zero beyond the last layer.
    """
    layer, sources = chain.step(0, aux=True), [a for a in cotangents if a is not None]

    def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, list[jax.Array]]:
        u_next, aux = layer(u, x, shared)
        # Integer leaves have no cotangent, and `cotangents` has None for leaves that the loss does not see.
        leaves, _ = _tree.partition(jax.tree.map(jnp.asarray, aux) if cotangents else None)
        return u_next, [leaf for leaf, a in zip(leaves, cotangents, strict=True) if a is not None]

    if chain.padded:
        sources = _tree.where_rows(chain.slices.index < chain.layers, sources)
    return advance, sources


def emit_gradient(
    chain: Chain, forward: Advance, linearised: Linearised | None, *, keep: bool
) -> Advance:
    """An adjoint step of the finest level that emits the gradient for its slice, and the cotangent that enters, if ``keep``.

    Its operands have sources, cotangents of what ``forward`` emits; or the kept linearisation.
    """

    def advance(
        lam: State, x: tuple[Slices, State, PyTree], shared: PyTree
    ) -> tuple[State, PyTree]:
        operand, u, more = x
        # Only the leaves that are differentiated enter the vjp; the others are constants of it.
        leaves, combine = _tree.partition(operand, chain.traced.differentiable)
        if linearised is not None:
            lam_next, gradient, _ = linearised.transpose(u, operand, shared, more, lam)
        else:
            back = jax.vjp(lambda u, leaves: forward(u, combine(leaves), shared), u, leaves)[1]
            lam_next, gradient = back((lam, more))
        return lam_next, (combine(gradient, fill=None), lam if keep else None)

    return advance


def gradient_of_aux(
    chain: Chain, aux_cotangents: Sequence[Stacked | None], states: Stacked, *, at_once: int
) -> tuple[Stacked, tuple[Slices, list[jax.Array]]]:
    """Pull the cotangents of aux back: to the adjoint's right-hand side, and to own and shared operands."""
    # This is one evaluation of each layer at known states, so a batch of layers is differentiated at once.
    # `without_padding` takes padding out of the batch, so the layers need not check for it.
    forward, sources = emitting(dataclasses.replace(chain, padded=False), aux_cotangents)
    shared, combine_shared = _tree.partition(chain.shared)

    def layers(
        slices: Slices, states: Stacked, sources: list[Stacked]
    ) -> tuple[list[jax.Array], tuple[Stacked, Slices]]:
        leaves, combine = _tree.partition(slices, chain.traced.differentiable)

        def outputs(
            states: Stacked, leaves: list[jax.Array], shared: list[jax.Array]
        ) -> list[Stacked]:
            weights = combine_shared(shared)
            return jax.vmap(lambda u, x: forward(u, x, weights)[1])(states, combine(leaves))

        # The vjp replaces `states` and `leaves` by their cotangents.
        states, leaves, total = jax.vjp(outputs, states, leaves, shared)[1](sources)
        return total, (states, combine(leaves, fill=None))

    def add(total: list[jax.Array], some: PyTree) -> tuple[list[jax.Array], PyTree]:
        more, of_layers = without_padding(chain, layers)(*some)
        return _tree.add(total, more), of_layers

    operands = chain.slices, states, sources
    total, (of_states, of_slices) = in_chunks(
        add, _tree.zeros_like(shared), operands, chain.at_once(at_once, _LEAST)
    )
    return of_states, (of_slices, total)


def without_padding(
    chain: Chain, layers: Callable[..., tuple[PyTree, PyTree]]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return ``layers`` for batches with padding, which becomes a copy of the last layer, with cotangents and results of zero.

    ``layers`` is a function of the slices of a batch of layers, of the arrays at which they are evaluated, and of cotangents. It
    returns a sum over the layers, and results of each. The state after the last layer enters padding. A layer may have no finite
    derivative there, and zero times infinity is NaN.
    """
    if not (chain.padded and chain.steps):
        return layers

    def within(slices: Slices, at: PyTree, cotangents: PyTree) -> tuple[PyTree, PyTree]:
        inside = slices.index < chain.layers
        x = slices.t, slices.dt, slices.index, at
        # Padding has the other operands of the last layer already.
        last = _tree.take(x, jnp.maximum(jnp.sum(inside) - 1, 0))
        t, dt, index, at = jax.tree.map(lambda x, y: _tree.where_rows(inside, x, y), x, last)
        slices = slices._replace(t=t, dt=dt, index=index)
        total, each = layers(slices, at, _tree.where_rows(inside, cotangents))
        # If all of the batch is padding, there is no layer to copy, and the results may not be finite.
        total = _tree.where(inside[0], total, _tree.zeros_like(total))
        return total, _tree.where_rows(inside, each)

    return within


def shared_gradient(
    fine: Level,
    adjoint: Level,
    cotangents: Stacked | None,
    aux_cotangents: Sequence[Stacked | None],
    *,
    kept: bool,
) -> list[jax.Array]:
    """Gradient for the shared operands, as one contraction over this worker's layers.

    Layers are contracted in groups, of those that are evaluated at once and at least four; each group adds to the sum. Where
    linearisations are ``kept``, and cover the weights, no layer is evaluated.
    """
    leaves, combine = _tree.partition(fine.shared)
    if not leaves:
        return []
    # `without_padding` takes padding out of a batch, so the layers need not check for it.
    batch = dataclasses.replace(fine.chain, padded=False)
    linearised, forward = batch.linearised, emitting(batch, aux_cotangents)[0]

    def contract(
        slices: Slices, at: tuple[Stacked, PyTree], cotangents: tuple[Stacked, PyTree]
    ) -> tuple[list[jax.Array], None]:
        states, arrays = at
        if kept and linearised.weights:
            try:
                # The kept linearisation holds all that the contraction needs, so that no layer is evaluated.
                lams = cotangents[0]
                return linearised.contract(states, slices, fine.shared, arrays, lams), None
            # A custom gradient in the step cannot be transposed. The weights' gradient then comes from a vjp of the layers.
            except NotImplementedError:
                pass

        def outputs(leaves: list[jax.Array]) -> tuple[Stacked, PyTree]:
            return jax.vmap(lambda u, x: forward(u, x, combine(leaves)))(states, slices)

        # One vjp over the batch contracts layers and examples together, where a scan would add one outer product per layer.
        return jax.vjp(outputs, leaves)[1](cotangents)[0], None

    def sum_over(operands: PyTree) -> list[jax.Array]:
        def add(total: list[jax.Array], some: PyTree) -> tuple[list[jax.Array], None]:
            slices, states, more, lams = some
            arrays, sources = (more, []) if kept else (None, more)
            over = without_padding(fine.chain, contract)
            return _tree.add(total, over(slices, (states, arrays), (lams, sources))[0]), None

        return in_chunks(add, _tree.zeros_like(leaves), operands, most)[0]

    most, xs, expand = fine.chain.at_once(adjoint.at_once, _LEAST), adjoint.xs, adjoint.expand
    if expand is None:
        # All states are there, so intervals and their layers become one axis, ``(N, ...)``.
        return sum_over(adjoint.merge((*xs, cotangents)))

    # The states of one interval at a time are recomputed, so that only those are alive.
    def interval(total: list[jax.Array], one: tuple[PyTree, State]) -> tuple[list[jax.Array], None]:
        return _tree.add(total, sum_over((*expand(one[0], fine.shared), one[1]))), None

    return _tree.scan(interval, _tree.zeros_like(leaves), (xs, cotangents))[0]
