"""The adjoint system as levels of its own, and the gradient that its solution gives.

With lam[N] the cotangent of the last state, ``lam[n] = (dPhi_n/du at u[n])^T lam[n+1]`` is a chain of steps that runs
from the last layer to the first. Transposing every forward level, linearised at one consistent trajectory, gives the
levels of the adjoint solve; the solvers do not know the difference.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _tree
from lp_jax._chain import Chain
from lp_jax._iterate import Stats, iterate
from lp_jax._level import Advance, Level, Operand, Transfer, identity
from lp_jax._relax import entering
from lp_jax._solver import Solver
from lp_jax._types import PyTree, Slices, State


class Checkpoints(NamedTuple):
    """What the forward solve leaves for the adjoint: the trajectory after its final sweep, in one of two forms.

    Attributes:
        c_points: states that leave every interval of the forward solve's finest level, ``(intervals, ...)``.
        f_relaxed_from: C-points from which the final sweep got its F-points, where they are others, ``(intervals, ...)``.
        states: states that enter every layer, ``(N, ...)``; None where they are to be recomputed.
    """

    c_points: State
    f_relaxed_from: State | None = None
    states: State | None = None


class Cotangents(NamedTuple):
    """Gradients of the loss with respect to the operands of a solve; None for leaves that are not differentiable."""

    y0: State
    slices: Slices
    shared: PyTree


def solve_adjoint(
    chain: Chain, solver: Solver, checkpoints: Checkpoints, stride: int, y1_cotangent: State, guess: str
) -> tuple[Cotangents, Stats, jax.Array]:
    """Solve the adjoint system and form the gradient.

    Args:
        chain: the forward problem.
        solver: settings of the adjoint solve.
        checkpoints: of the forward solve.
        stride: number of layers between two C-points of the checkpoints.
        y1_cotangent: cotangent of the state after the last layer.
        guess: "constant" or "zeros", where the first down-cycle is not skipped.

    Returns:
        The gradients, the adjoint solve's stats, and whether its tolerances were met.
    """
    forward = solver.discretize(chain)
    fine = forward[0]
    anchored = any(level.anchor for level in forward)  # coarse steps linearised at all states
    if checkpoints.states is None and stride == fine.factor > 1 and fine.looped and not anchored:
        c_points, before = checkpoints.c_points, checkpoints.f_relaxed_from
        entered, every = fine.entries(c_points), stride
        recompute_from = entered if before is None else fine.entries(before)
    else:
        entered, every, recompute_from = all_states(chain, checkpoints, stride, looped=fine.looped), 1, None
        forward = tuple(level.anchored(entered) for level in forward)
    levels = _transposed(forward, entered, every, recompute_from, y1_cotangent)

    start = None if guess == "constant" else _tree.zeros_like(_tree.repeat(y1_cotangent, fine.intervals))
    lam, stats, met = iterate(solver, levels, start)
    differentiable, _ = _partition(fine.shared)
    lam, (slices, cotangents) = solver.finish(levels, lam, _emit_gradient(chain, fine, keep=bool(differentiable)))
    return (
        Cotangents(
            y0=levels[0].comm.last(lam, reverse=True),
            slices=_tree.merge(slices, fine.steps),
            shared=_shared_gradient(fine, levels[0], cotangents),
        ),
        stats,
        met,
    )


def all_states(chain: Chain, checkpoints: Checkpoints, stride: int, *, looped: bool) -> State:
    """States that enter every layer, recomputed from the C-points if need be."""
    if checkpoints.states is not None:
        return checkpoints.states
    level = chain.finest(stride, looped=looped)
    if checkpoints.f_relaxed_from is None:
        return entering(level, checkpoints.c_points)
    states = _tree.split(entering(level, checkpoints.f_relaxed_from), stride)
    return _tree.merge(with_c_points(level, states, checkpoints.c_points), chain.steps)


def with_c_points(level: Level, states: State, u: State) -> State:
    """States that enter every step, ``(intervals, factor, ...)``, with ``u`` at the C-points."""
    return jax.tree.map(lambda x, c: x.at[:, 0].set(c), states, level.entries(u))


def _transposed(
    forward: Sequence[Level], entered: State, every: int, recompute_from: State | None, cotangent: State
) -> tuple[Level, ...]:
    """Every level's adjoint, linearised at ``entered``: the states that enter every ``every``-th layer."""
    levels: list[Level] = []
    states, stride = entered, every
    for level in forward:
        if level.span > stride:
            states = jax.tree.map(lambda x, k=level.span // stride: x[::k], states)
            stride = level.span
        levels.append(_transpose(level, states, cotangent, recompute_from if level is forward[0] else None))
        if level.transfer is not None:
            states = jax.vmap(level.transfer[0])(states)
            restrict, _ = _transposed_transfer(level)
            cotangent = restrict(cotangent)
    return tuple(levels)


def _transpose(level: Level, states: State, cotangent: State, recompute_from: State | None) -> Level:
    """The adjoint of a level at ``states``, those that enter its steps.

    With ``recompute_from`` these are only the states that enter its intervals, and those that enter the other steps are
    recomputed, interval by interval, from ``recompute_from``.
    """

    def step(lam: State, x: tuple[Operand, State], shared: PyTree) -> State:
        operand, u = x
        return jax.vjp(lambda u: level.step(u, operand, shared), u)[1](lam)[0]

    def expand(x: tuple[Operand, State, State], shared: PyTree) -> tuple[Operand, State]:
        operands, first, start = x
        return operands, _tree.put(_interval_states(level, operands, start, shared), first, 0)

    recompute = recompute_from is not None
    return dataclasses.replace(
        level,
        xs=(level.xs, states, recompute_from) if recompute else (level.xs, _tree.split(states, level.factor)),
        y0=cotangent,
        step=identity if level.step is identity else step,
        reverse=True,
        transfer=None if level.transfer is None else _transposed_transfer(level),
        expand=expand if recompute else None,
    )


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


def _interval_states(level: Level, operands: Operand, u: State, shared: PyTree) -> State:
    """States that enter each step of one interval, ``(factor, ...)``."""
    last = level.factor - 1
    states = jax.tree.map(lambda x: jnp.zeros((level.factor, *x.shape), x.dtype), u)

    def body(i: jax.Array, carry: tuple[State, State]) -> tuple[State, State]:
        u, states = carry
        return level.step(u, _tree.take(operands, i), shared), _tree.put(states, u, i)

    u, states = lax.fori_loop(0, last, body, (u, states))
    return _tree.put(states, u, last)


def _emit_gradient(chain: Chain, fine: Level, *, keep: bool) -> Advance:
    """One adjoint step of the finest level that emits the gradient of its slice, and the cotangent if asked to keep it."""

    def advance(lam: State, x: tuple[Operand, State], shared: PyTree) -> tuple[State, Any]:
        operand, u = x
        leaves, combine = _partition(operand.x, chain.differentiable)

        def forward(u: State, leaves: list[jax.Array]) -> State:
            return fine.step(u, operand._replace(x=combine(leaves)), shared)

        lam_next, gradient = jax.vjp(forward, u, leaves)[1](lam)
        return lam_next, (combine(gradient, fill=None), lam if keep else None)

    return advance


def _shared_gradient(fine: Level, adjoint: Level, cotangents: State | None) -> PyTree:
    """Gradient of what all layers share, as one contraction over each interval's layers (over all layers if batched)."""
    leaves, combine = _partition(fine.shared)
    if not leaves:
        return combine([], fill=None)

    def interval(xs: PyTree, lams: State) -> list[jax.Array]:
        operands, states = adjoint.expand(xs, fine.shared) if adjoint.expand else xs

        def forward(leaves: list[jax.Array]) -> State:
            return jax.vmap(lambda u, x: fine.step(u, x, combine(leaves)))(states, operands)

        return jax.vjp(forward, leaves)[1](lams)[0]

    if adjoint.looped:
        total, _ = lax.scan(
            lambda total, args: (_tree.add(total, interval(*args)), None),
            _tree.zeros_like(leaves),
            (adjoint.xs, cotangents),
        )
    else:
        flat = _tree.merge((adjoint.xs, cotangents), fine.intervals * fine.factor)
        total = interval(*flat)
    return combine(total, fill=None)


def _partition(tree: PyTree, mask: Sequence[bool] | None = None) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """The leaves to differentiate (all inexact ones by default), and how to put the tree together around others."""
    leaves, structure = jax.tree.flatten(tree)
    mask = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves] if mask is None else mask

    def combine(new: Sequence[Any], *, fill: Any = ...) -> PyTree:
        values = iter(new)
        kept = [next(values) if m else (x if fill is ... else fill) for x, m in zip(leaves, mask, strict=True)]
        return jax.tree.unflatten(structure, kept)

    return [x for x, m in zip(leaves, mask, strict=True) if m], combine
