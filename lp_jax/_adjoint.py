"""The adjoint system as levels of its own, and the gradient that its solution gives.

With lam[N] the cotangent of the last state, ``lam[n] = (dPhi_n/du at u[n])^T lam[n+1]`` is a chain of steps that runs
from the last layer to the first. Transposing every forward level, linearised at one consistent trajectory, gives the
levels of the adjoint solve; the solvers do not know the difference.

The finest level is linearised at the states that the forward solve's final sweep met, which fixes what the adjoint solve
converges to; a coarse level, which only decides how fast, at the C-points that the sweep left behind.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _tree
from lp_jax._chain import Chain
from lp_jax._level import Level, identity
from lp_jax._linear import Linearised
from lp_jax._relax import entering
from lp_jax._solver import Solver, Stats, iterate
from lp_jax._types import Advance, CPoints, Points, PyTree, Slices, Stacked, State, Transfer

_AT_ONCE = 4  # layers


class Forward(NamedTuple):
    """What the forward solve leaves for the adjoint.

    Attributes:
        c_points: states that leave every interval of the forward solve's finest level, after its final sweep,
            ``(intervals, ...)``.
        swept_from: the same before the final sweep: from these all states that it met can be recomputed. None where they
            are ``c_points``.
        states: states that entered every layer in the final sweep, ``(N, ...)``; None where they are to be recomputed.
        linearisations: what `Linearised` keeps of every layer at those states, ``(N, ...)``; None with them.
    """

    c_points: CPoints
    swept_from: CPoints | None = None
    states: Stacked | None = None
    linearisations: PyTree = None


class Cotangents(NamedTuple):
    """Gradients of the loss with respect to the operands of a solve; None for leaves that are not differentiable."""

    y0: State
    slices: Slices
    shared: PyTree


def solve_adjoint(
    chain: Chain,
    solver: Solver,
    left: Forward,
    stride: int,
    y1_cotangent: State,
    *,
    zeros: bool,
) -> tuple[Cotangents, Stats, jax.Array]:
    """Solve the adjoint system and form the gradient.

    Args:
        chain: the forward problem.
        solver: settings of the adjoint solve.
        left: what the forward solve left.
        stride: number of layers between two C-points of the forward solve.
        y1_cotangent: cotangent of the state after the last layer.
        zeros: whether the solve starts from zeros, not from the solver's own start.

    Returns:
        The gradients, the adjoint solve's stats, and whether its tolerances were met.
    """
    forward, linearised = solver.discretize(chain), chain.linearised
    fine = forward[0]
    swept_from = left.c_points if left.swept_from is None else left.swept_from
    around = any(level.around for level in forward)  # coarse steps linearised at all states
    recompute = left.states is None and stride == fine.factor > 1 and fine.looped and not around
    if recompute:
        states = fine.incoming(swept_from)
    elif left.states is not None:
        states = left.states
    else:
        states = entering(chain.finest(stride, looped=fine.looped), swept_from)
    if not recompute:
        forward = tuple(level.taken_around(states) for level in forward)

    def entering_coarse(span: int) -> Points:
        """States that enter every ``span``-th layer, C-relaxed where they are C-points of the forward solve."""
        if span % stride:
            return jax.tree.map(lambda x: x[::span], states)
        c_points = chain.workers.incoming(left.c_points, chain.y0, stride, reverse=False)
        return jax.tree.map(lambda x: x[:: span // stride], c_points)

    if left.linearisations is None:
        finest = transpose(fine, states, y1_cotangent, recompute=recompute)
        emit_gradient = _emit_gradient(chain, fine)
    else:
        finest = _transpose_linearised(fine, linearised, states, left.linearisations, y1_cotangent)
        emit_gradient = _emit_linearised_gradient(linearised)
    levels = (finest, *transpose_coarse(forward, entering_coarse, y1_cotangent))

    start = _tree.zeros_like(_tree.repeat(y1_cotangent, fine.intervals)) if zeros else None
    lam, stats, met = iterate(solver, levels, start)
    differentiable, _ = _tree.partition(fine.shared)
    lam, (slices, cotangents) = solver.finish(levels, lam, _with_cotangent(emit_gradient, keep=bool(differentiable)))
    at_hand = None if left.linearisations is None else linearised
    gradients = Cotangents(
        y0=finest.last(lam),
        slices=fine.merge(slices),
        shared=_shared_gradient(fine, finest, cotangents, at_hand),
    )
    return gradients, stats, met


def transpose_coarse(
    forward: Sequence[Level], entering_coarse: Callable[[int], Points], cotangent: State
) -> list[Level]:
    """The adjoints of all levels but the finest, each linearised at ``entering_coarse(span)``."""
    levels = []
    transfers: list[Callable[[State], State]] = []
    for finer, level in itertools.pairwise(forward):
        if finer.transfer is not None:
            transfers.append(jax.vmap(finer.transfer[0]))
            restrict, _ = _transposed_transfer(finer)
            cotangent = restrict(cotangent)
        at = functools.reduce(lambda u, transfer: transfer(u), transfers, entering_coarse(level.span))
        levels.append(transpose(level, at, cotangent))
    return levels


def transpose(level: Level, states: Points, cotangent: State, *, recompute: bool = False) -> Level:
    """The adjoint of a level at ``states``, those that enter its steps.

    With ``recompute`` these are only the states that enter its intervals; those that enter the other steps are recomputed
    from them, interval by interval, whenever they are needed.
    """

    def step(lam: State, x: tuple[PyTree, State], shared: PyTree) -> State:
        operand, u = x
        return jax.vjp(lambda u: level.step(u, operand, shared), u)[1](lam)[0]

    def expand(x: tuple[PyTree, State], shared: PyTree) -> tuple[PyTree, Points]:
        operands, u = x
        return operands, _interval_states(level, operands, u, shared)

    states = states if recompute else level.split(states)
    everywhere = None if level.gathered is None else (level.gathered, level.workers.gather(states, level.span))
    return dataclasses.replace(
        _reversed(level, cotangent),
        xs=(level.xs, states),
        gathered=everywhere,
        step=identity if level.step is identity else step,
        expand=expand if recompute else None,
    )


def _transpose_linearised(
    level: Level, linearised: Linearised, states: Points, kept: PyTree, cotangent: State
) -> Level:
    """The adjoint of the finest level from linearisations of its steps: no step is evaluated again."""

    def step(lam: State, x: tuple[Slices, tuple[State, PyTree]], shared: PyTree) -> State:
        operand, (u, kept) = x
        return linearised.transpose(u, operand, shared, kept)(lam)[0]

    return dataclasses.replace(_reversed(level, cotangent), xs=(level.xs, level.split((states, kept))), step=step)


def _reversed(level: Level, cotangent: State) -> Level:
    """What the adjoint of a level has in common with it."""
    transfer = None if level.transfer is None else _transposed_transfer(level)
    return dataclasses.replace(level, y0=cotangent, reverse=True, transfer=transfer)


def _transposed_transfer(level: Level) -> Transfer:
    """Restriction of cotangents is the transpose of prolongation, and the other way round."""
    assert level.transfer is not None
    restrict, prolong = level.transfer
    fine = jax.eval_shape(lambda: level.y0)
    coarse = jax.eval_shape(restrict, fine)
    return (
        lambda lam: jax.linear_transpose(prolong, coarse)(lam)[0],
        lambda lam: jax.linear_transpose(restrict, fine)(lam)[0],
    )


def _interval_states(level: Level, operands: PyTree, u: State, shared: PyTree) -> Points:
    """States that enter each step of one interval, ``(factor, ...)``."""
    last = level.factor - 1
    states = jax.tree.map(lambda x: jnp.zeros((level.factor, *x.shape), x.dtype), u)

    def body(i: jax.Array, carry: tuple[State, Points]) -> tuple[State, Points]:
        u, states = carry
        return level.step(u, _tree.take(operands, i), shared), _tree.put(states, u, i)

    u, states = lax.fori_loop(0, last, body, (u, states))
    return _tree.put(states, u, last)


def _with_cotangent(advance: Advance, *, keep: bool) -> Advance:
    """``advance``, emitting the cotangent that enters along with its own output, if that is to be kept."""

    def both(lam: State, x: PyTree, shared: PyTree) -> tuple[State, Any]:
        lam_next, emitted = advance(lam, x, shared)
        return lam_next, (emitted, lam if keep else None)

    return both


def _emit_linearised_gradient(linearised: Linearised) -> Advance:
    """`_emit_gradient` from what was kept of the step."""

    def advance(lam: State, x: tuple[Slices, tuple[State, PyTree]], shared: PyTree) -> tuple[State, Slices]:
        operand, (u, kept) = x
        lam_next, leaves, _ = linearised.transpose(u, operand, shared, kept)(lam)
        return lam_next, linearised.combine(operand, leaves, fill=None)

    return advance


def _emit_gradient(chain: Chain, fine: Level) -> Advance:
    """One adjoint step of the finest level that emits the gradient of its slice."""

    def advance(lam: State, x: tuple[Slices, State], shared: PyTree) -> tuple[State, Slices]:
        operand, u = x
        leaves, combine = _tree.partition(operand, chain.differentiable)

        def forward(u: State, leaves: list[jax.Array]) -> State:
            return fine.step(u, combine(leaves), shared)

        lam_next, gradient = jax.vjp(forward, u, leaves)[1](lam)
        slices: Slices = combine(gradient, fill=None)
        return lam_next, slices

    return advance


def _shared_gradient(fine: Level, adjoint: Level, cotangents: Stacked | None, linearised: Linearised | None) -> PyTree:
    """Gradient of what all layers share, as one contraction over all layers.

    Where intervals are looped over, over a few layers at a time, which stay in a processor's cache. ``linearised`` is a
    layer whose linearisation is at hand in the adjoint's operands.
    """
    leaves, combine = _tree.partition(fine.shared)
    if not leaves:
        return combine([], fill=None)

    def layers(operands: Slices, states: Any, lams: Stacked) -> list[jax.Array]:
        if linearised is not None:
            states, kept = states
            if linearised.weights:
                try:
                    return linearised.contract(states, operands, fine.shared, kept, lams)
                except NotImplementedError:  # a custom gradient in the step cannot be transposed
                    pass

        def forward(leaves: list[jax.Array]) -> State:
            return jax.vmap(lambda u, x: fine.step(u, x, combine(leaves)))(states, operands)

        return jax.vjp(forward, leaves)[1](lams)[0]

    def expand(xs: PyTree) -> tuple[Slices, Any]:
        return adjoint.expand(xs, fine.shared) if adjoint.expand else xs

    def interval(xs: PyTree, lams: State) -> list[jax.Array]:
        return summed(layers, _tree.split((*expand(xs), lams), math.gcd(adjoint.factor, _AT_ONCE)))

    def summed(gradient: Callable[..., list[jax.Array]], groups: PyTree) -> list[jax.Array]:
        zeros = _tree.zeros_like(leaves)
        return lax.scan(lambda total, group: (_tree.add(total, gradient(*group)), None), zeros, groups)[0]

    if adjoint.factor == 1:
        operands = (*adjoint.xs, cotangents)
        few = math.gcd(adjoint.steps, _AT_ONCE)
        total = summed(layers, _tree.split(operands, few)) if adjoint.looped else layers(*operands)
    elif adjoint.looped:
        total = summed(interval, (adjoint.xs, cotangents))
    else:
        total = layers(*_tree.merge((*jax.vmap(expand)(adjoint.xs), cotangents)))
    return combine(fine.workers.sum(total), fill=None)
