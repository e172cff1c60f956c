"""One level of the hierarchy: a chain of dependent steps, grouped into intervals.

The finest level of a forward solve has no right-hand side. A coarse level has another step, and the right-hand side of the FAS
scheme. The adjoint system is a level too, reversed. If aux has cotangents, they are its right-hand side where linearised steps
are kept, and enter its steps otherwise. So cycles and sweeps are the same on all levels.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._types import CPoints, Points, PyTree, Scalar, SliceStep, State, Transfer
from lp_jax._comms._workers import Local, Workers, select


@register("xs", "shared", "y0", "rhs", "gathered", "scale", "chain")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """A chain of steps in intervals of ``factor`` steps: ``u[n+1] = step(u[n], x[n], shared) + rhs[n]``, ``u[0] = y0``.

    C-points are the states that leave the intervals, stacked, leaves ``(intervals, ...)``. F-points, the states between them,
    follow from them and are not stored.

    Attributes:
        xs: operands of the steps, as `split` groups them.
        shared: operand of every step.
        y0: the state that enters the chain.
        step: ``step(u, x, shared) -> u_next``; the identity beyond the last layer.
        factor: coarsening factor to the next level; 1 on the coarsest.
        workers: where the intervals live.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, coarse = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> fine.steps, fine.factor, fine.intervals, coarse.steps
        (64, 4, 16, 16)
    """

    xs: PyTree
    shared: PyTree
    y0: State
    step: SliceStep
    factor: int
    workers: Workers
    number: int = 0  # of the level; 0 is the finest
    span: int = 1  # number of layers that one step stands for
    rhs: Points | None = None  # right-hand side, as `split` groups it; None for zero
    reverse: bool = False  # whether the chain runs from the last step to the first
    # largest number of intervals, each with one step, that are evaluated at once; it may exceed their number
    at_once: int = 1
    unroll: int = 1  # number of steps to unroll where they follow each other
    # (restrict, prolong) of the state to and from the next coarser level
    transfer: Transfer | None = None
    # from one interval's ``xs`` to operands of each step
    expand: Callable[[PyTree, PyTree], PyTree] | None = None
    # puts the states at which coarse steps are evaluated (around="trajectory"), those that entered all layers in the last
    # relaxation, into ``xs``; None if the steps need none
    with_states: Callable[[PyTree, Points], PyTree] | None = None
    # operands of all workers' steps, where the level is solved on every worker
    gathered: PyTree = None
    # size of ``y0``, by which residuals are divided before they are squared; None for 1
    scale: Scalar | None = None
    # step whose Jacobian Newton takes, None for the level's own; of an adjoint level the step that was transposed
    origin: SliceStep | None = None
    has_sources: bool = False  # whether the steps are affine: an adjoint with sources
    chain: PyTree = None  # the layers, from which coarser levels are made; None on an adjoint level

    @property
    def intervals(self) -> int:
        """Number of intervals on this worker."""
        return _tree.leading(self.xs)

    @property
    def steps(self) -> int:
        """Number of steps on this worker, a multiple of ``factor``."""
        return self.intervals * self.factor

    @property
    def interval_span(self) -> int:
        """Number of layers that one interval stands for."""
        return self.span * self.factor

    def split(self, tree: Points) -> PyTree:
        """Group leaves ``(steps, ...)`` by intervals, ``(intervals, factor, ...)``; unchanged where an interval is one step.

        XLA copies operands that enter a loop with an axis of length 1.
        """
        return tree if self.factor == 1 else _tree.split(tree, self.factor)

    def merge(self, tree: PyTree) -> PyTree:
        """Undo `split`."""
        return tree if self.factor == 1 else _tree.merge(tree)

    def incoming(self, u: CPoints) -> CPoints:
        """States that enter the intervals, given the C-points that leave them."""
        return self.workers.incoming(u, self.y0, self.interval_span, reverse=self.reverse)

    def last(self, u: CPoints) -> State:
        """The state that leaves the chain, given the C-points."""
        return self.workers.last(u, self.interval_span, reverse=self.reverse)

    def edge(self, u: CPoints) -> State:
        """The state that leaves this worker, given its C-points, or ``y0`` if it has none."""
        at = 0 if self.reverse else -1
        return jax.tree.map(lambda x, y: x[at] if len(x) else y, u, self.y0)

    def cumsum(self, increments: CPoints, y0: State) -> CPoints:
        """Prefix sums of increments in the order of the chain, starting from ``y0``."""
        wide = _tree.wide(increments)
        before, _ = self.workers.prefix_sums(wide, y0, reverse=self.reverse)
        return _tree.narrow(_tree.add(before, wide), increments)

    @property
    def ends_short(self) -> bool:
        """Whether the chain ends within an interval. The state after its last step is a C-point all the same."""
        return (
            bool(self.workers.total(self.span) % self.factor)
            and not self.reverse
            and self.steps > 0
        )

    def c_points(self, leaving: Points) -> CPoints:
        """The C-points among the states that leave every step, leaves ``(steps, ...)``."""
        edge = 0 if self.reverse else -1
        # A C-point is the last point of its interval in the order of the chain.
        u = jax.tree.map(lambda x: x[:, edge], _tree.split(leaving, self.factor))
        if self.ends_short:
            here, at = self.workers.end(self.span, self.steps)
            # The chain ends before the last position of its interval, so the C-point is taken from where it ends.
            last = at // self.factor
            u = _tree.put(u, select(here, _tree.take(leaving, at), _tree.take(u, last)), last)
        return u

    def with_c_points(self, leaving: Points, u: CPoints) -> Points:
        """Set the last state of the chain to the last C-point, where the chain ends within an interval."""
        if not self.ends_short:
            return leaving
        here, at = self.workers.end(self.span, self.steps)
        return _tree.put(
            leaving, select(here, _tree.take(u, at // self.factor), _tree.take(leaving, at)), at
        )

    def with_rhs(self, rhs: Points) -> "Level":
        """This level with a right-hand side, leaves ``(steps, ...)``."""
        return dataclasses.replace(self, rhs=self.split(rhs))

    def window(self, xs: PyTree, rhs: Points | None, y0: State) -> "Level":
        """Some of the steps as a level on one worker, which ``y0`` enters; for a level with ``factor`` 1."""
        steps = _tree.leading(xs)
        workers = Local(layers=steps, held=(steps,), processor=self.workers.processor)
        return dataclasses.replace(self, xs=xs, rhs=rhs, y0=y0, workers=workers)

    def fill_in(self, states: Points) -> "Level":
        """This level with the ``states`` that enter every layer among its operands, if its steps need them."""
        if self.with_states is None:
            return self
        # Group the states of all layers by steps of this level, then by its intervals.
        states = self.split(_tree.split(states, self.span))
        return dataclasses.replace(self, xs=self.with_states(self.xs, states), with_states=None)

    def with_gathered(self, solves: int) -> "Level":
        """This level with the operands of all workers, if that makes ``solves`` solves of it faster.

        Never where the operands change from cycle to cycle, nor where the solution is a prefix sum.
        """
        total = self.workers.total(self.span)
        # A level whose step is the identity is a prefix sum, which needs no operands.
        stays = self.step is identity or self.with_states is not None
        if stays or not self.workers.prefers_gather(self.xs, self.y0, total, solves):
            return self
        return dataclasses.replace(self, gathered=self.workers.gather(self.xs, self.span))

    def norm(self, residual: "Residual") -> jax.Array:
        """Return the 2-norm of the residuals of all workers; ``residual`` is this worker's part, made by `measure`."""
        return self.norm_of(self.workers.sum(residual.total))

    def norm_of(self, squares: jax.Array) -> jax.Array:
        """Return the norms that belong to sums of squares over all workers."""
        root = jnp.sqrt(squares)
        # The squares were taken of numbers divided by the level's scale.
        return root if self.scale is None else root * self.scale.astype(root.dtype)

    def advance(self, u: State, x: PyTree, shared: PyTree) -> tuple[State, None]:
        """The step as an `Advance` that emits nothing."""
        return self.step(u, x, shared), None


class Residual(NamedTuple):
    """Residuals of this worker, as a solver returns them to the driver. Both fields are trees like a state.

    Attributes:
        squares: sums of squared magnitudes over the C-points, for each component, divided by the level's scale so that they
            neither overflow nor vanish; `Level.norm` makes them the 2-norm over all workers.
        largest: largest magnitude of each component, for ``rtol``; None from solvers whose ``rtol`` is for changes of the states.
    """

    squares: State
    largest: State | None = None

    @property
    def total(self) -> Scalar:
        """Sum of squares of this worker."""
        return jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, self.squares))


def measure(level: Level, residuals: CPoints) -> Residual:
    """Measure residuals, leaves ``(intervals, ...)``, for the norms that a solve reports and for its tolerance.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, _ = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> r = lp_jax.multigrid.residual(fine, jnp.zeros(16))
        >>> round(float(fine.norm(lp_jax.multigrid.measure(fine, r))), 3)  # only y0 has a residual there
        1.064
    """
    return Residual(
        jax.tree.map(lambda x: jnp.sum(x, axis=0), squares_of(level, residuals)), largest(residuals)
    )


def squares_of(level: Level, tree: PyTree) -> PyTree:
    """Squared magnitudes, divided by the level's scale before, in at least single precision."""
    dtype = _tree.real_dtype(tree, at_least=jnp.float32)

    def leaf(x: jax.Array) -> jax.Array:
        size = jnp.abs(x)
        if level.scale is not None:
            size = size * (1 / level.scale).astype(size.dtype)
        return jnp.square(size.astype(dtype))

    return jax.tree.map(leaf, tree)


def largest(tree: Points) -> State:
    """Largest magnitude of every component, of leaves ``(points, ...)``; infinite where one is not finite."""

    def leaf(x: jax.Array) -> jax.Array:
        size = jnp.max(jnp.abs(x), axis=0, initial=0)
        return jnp.where(jnp.isnan(size), jnp.inf, size)

    return jax.tree.map(leaf, tree)


def identity(u: State, x: PyTree, shared: PyTree) -> State:
    """The step that does nothing. A chain of them is a prefix sum of its right-hand side."""
    return u
