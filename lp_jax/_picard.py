"""Picard iteration: every layer evaluated at once, their increments added up."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax import _check, _tree
from lp_jax._at_once import check as check_at_once
from lp_jax._at_once import chunk, in_chunks, several
from lp_jax._chain import Chain
from lp_jax._coarse_step import Coarse, Identity
from lp_jax._comm import Local
from lp_jax._level import Level, single, sweep
from lp_jax._pytree import register
from lp_jax._solver import Solver, Start, constant, require_fixed_effort, solve_intervals
from lp_jax._types import Advance, CPoints, Points, PyTree, Scalar, SliceStep, State
from lp_jax._windows import slide


class _Swept(NamedTuple):
    """What sweeps work on: the states that enter the layers, ``(n, ...)``, and the one that leaves this worker's last.

    Sums of increments are these states: nothing has to be shifted by a layer between two sweeps.
    """

    entering: Points
    last: State

    def points(self, level: Level) -> Points:
        """The states that leave the layers."""

        def leaf(x: jax.Array, last: jax.Array) -> jax.Array:
            if not x.shape[0]:
                return x
            return jnp.concatenate([last[None], x[:-1]] if level.reverse else [x[1:], last[None]])

        return jax.tree.map(leaf, self.entering, self.last)


def _swept(level: Level, points: Points) -> _Swept:
    """From the states that leave the layers."""
    edge = 0 if level.reverse else -1
    last = jax.tree.map(lambda x, y: x[edge] if x.shape[0] else y, points, level.y0)
    return _Swept(level.incoming(points), last)


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    r"""Fixed-point sweeps over all layers at once.

    With the increment :math:`D_n(y) = \Phi_n(y) - y` of layer n, a sweep is
    :math:`y_n \leftarrow y_0 + \sum_{i<n} D_i(y_i)`: one batched evaluation and a prefix sum, no sequential chain. The
    error after s sweeps is about :math:`(L T)^s / s!`, L the Lipschitz constant of the right-hand side; after N sweeps
    it is zero. Its work per sweep is that of one serial propagation, its depth that of one layer.

    As a solver it sweeps over all N layers, forward or adjoint. As ``coarse_step`` of `MGRIT` it sweeps over the layers
    of each interval, a fixed number of times.

    Args:
        sweeps: number of sweeps; with a tolerance their largest number. 0, as a coarse step only, is `Identity`.
        windows: number of windows that the layers are cut into: all sweeps but the last go over one window after the other,
            each from the state that leaves the one before; the last one goes over all layers. With W windows a sweep sees a
            W-th of the time, so that fewer are enough, a W-th of the layers is evaluated at once, and W (sweeps - 1) + 1
            evaluations wait for each other. Windows are solved one by one on several workers, too. With a tolerance one window
            of a W-th of the layers slides: converged layers leave it, later ones enter, in W (sweeps - 1) sweeps at most.
        rtol: stop when the residual norm is at most this times the first one.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially, in the end, where the tolerance is not met. An iteration that diverges (its
            residual norm has grown by ten) or that gets no further is given up at once.
        around: where a coarse step takes its increments: "start", the state that enters the interval, or "trajectory",
            the states of the last relaxation, shifted by the change of the state that enters. The latter is more
            accurate far from an ODE and stores all states.
        storage: what the adjoint finds, of a solver: "all" (what a scan's gradient keeps; no layer is evaluated again), or
            "states" (no more than these; each layer is linearised again in every sweep).
        at_once: number of layers that a worker evaluates at once where they do not depend on each other, `math.inf` for all,
            or "auto": by what a layer holds. Numbers change by rounding only.

    Raises:
        ValueError: for a negative number of sweeps, an unknown ``around`` or ``storage``, and for windows with less than one
            sweep, or two with a tolerance.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=lp_jax.Picard(sweeps=8)).y1.round(4)
        Array(2.5658, dtype=float32)

    Reference:
        Gander, "50 years of time parallel time integration", 2015, section 2.1 (Picard-Lindeloef, waveform relaxation).
    """

    sweeps: int = 2
    windows: int = 1
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    around: str = "start"
    storage: str = "all"
    at_once: int | float | str = "auto"

    def __post_init__(self) -> None:
        _check.integer("sweeps", self.sweeps, least=0)
        _check.integer("windows", self.windows, least=1)
        if self.windows > 1 and self.sweeps < 1 + self.has_tolerance:
            least = "2 with a tolerance" if self.has_tolerance else "1"
            raise ValueError(f"Picard(windows={self.windows}) takes at least {least} sweeps; got sweeps={self.sweeps}.")
        _check.one_of("around", self.around, ("start", "trajectory"))
        _check.one_of("storage", self.storage, ("states", "all"))
        check_at_once("at_once", self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)

    @property
    def iterations(self) -> int:
        return self.sweeps

    @property
    def keeps_states(self) -> bool:
        return self.storage == "all"

    def resolve(self, steps: int, *, warm: bool = False) -> Solver:
        if self.sweeps == 0:
            raise ValueError(
                "solver=Picard(sweeps=0) does nothing: it is a coarse step, the identity. Use sweeps of at least 1, or "
                "MGRIT(coarse_step=Identity())."
            )
        if warm and self.windows > 1:
            raise ValueError(
                f"guess is not used by Picard(windows={self.windows}), whose windows start from the state that leaves the "
                "one before. Leave the guess out, or set windows=1."
            )
        return self

    def unit(self, steps: int) -> int:
        return -(-steps // self.windows) if self.windows > 1 else 1

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level = levels[0]
        if self.windows == 1 and guess is None:
            return Start(_Swept(constant(level, None), level.y0))
        if self.windows == 1:
            return Start(_swept(level, guess))
        if level.number > 0:
            raise ValueError(f"coarsest must sweep over its whole level; got {self!r}. Leave windows out.")
        if self.has_tolerance:
            size = self.unit(level.workers.total(level.span))
            slid = slide(level, size, (self.sweeps - 1) * self.windows, self.rtol, self.atol)
            return Start(_swept(level, slid.points), self.sweeps - 1, slid.sweeps, jnp.sqrt(slid.first))
        return Start(_swept(level, self._march(level)), self.sweeps - 1)

    def _march(self, level: Level) -> Points:
        """The states after every step, window after window."""
        size = self.unit(level.workers.total(level.span))
        alone = Local(layers=size, held=(size,), processor=level.workers.processor)

        def window(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, tuple[State, Points]]:
            xs, rhs = operands
            inside = dataclasses.replace(level, xs=xs, rhs=rhs, y0=u, steps=size, workers=alone)
            swept = _Swept(constant(inside, None), u)
            for _ in range(self.sweeps - 1):
                swept, _ = self.improve((inside,), swept)
            return swept.last, (swept.last, swept.points(inside))

        windows = _tree.split((level.xs, level.rhs), size)

        def run(y0: State) -> tuple[CPoints, Points]:
            return lax.scan(window, y0, windows, reverse=level.reverse)[1]

        _, points = level.workers.relay(run, level.y0, reverse=level.reverse)
        return _tree.merge(points)

    def improve(self, levels: Sequence[Level], u: _Swept) -> tuple[_Swept, Scalar]:
        level = levels[0]
        if chunk(level.steps, level.at_once) < level.steps:
            return _by_chunks(level, u)
        stepped, _ = sweep(level, u.entering)
        entering, last = level.workers.prefix_sums(_tree.sub(stepped, u.entering), level.y0, reverse=level.reverse)
        return _Swept(entering, last), _tree.sum_of_squares(_tree.sub(stepped, u.points(level)))

    def c_points(self, levels: Sequence[Level], u: _Swept) -> CPoints:
        return u.points(levels[0])

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, Any]:
        return u, None if advance is None else sweep(levels[0], levels[0].incoming(u), advance=advance)[1]

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        if self.windows > 1:
            return solve_intervals(self, chain, level, span)
        require_fixed_effort(self)
        xs, step = _tree.split(chain.slices, span), chain.step(level)
        if self.sweeps == 0:
            return Identity().coarsen(chain, level, span, at_once=at_once)

        def solve_interval(u: State, x: PyTree, shared: PyTree) -> State:
            x, states = x
            return self._interval(step, u, x, states, shared, at_once=at_once)

        def around(xs: PyTree, states: Points) -> PyTree:
            return (xs[0], states)

        return Coarse(solve_interval, (xs, None), around if self.around == "trajectory" else None)

    def _interval(
        self,
        step: SliceStep,
        u: State,
        xs: PyTree,
        states: State | None,
        shared: PyTree,
        *,
        at_once: int,
    ) -> State:
        """The state after one interval's layers. ``xs`` and ``states`` have leaves ``(span, ...)``."""
        if states is None:
            incoming = _tree.repeat(u, _tree.leading(xs))
        else:  # moved by the change of the state that enters
            incoming = jax.tree.map(lambda s, y: s + (y - s[0])[None], states, u)

        def increment(y: State, x: PyTree) -> State:
            return _tree.sub(step(y, x, shared), y)

        size = chunk(_tree.leading(xs), at_once)
        if size == 1:  # with one increment at a time nothing but the total is kept for the transpose

            def one(total: State, operands: tuple[State, PyTree]) -> tuple[State, State]:
                return _tree.add(total, _tree.wide(increment(*operands))), _tree.narrow(total, u)

            for _ in range(self.sweeps - 1):
                incoming = lax.scan(one, _tree.wide(u), (incoming, xs))[1]
            return _tree.narrow(lax.scan(one, _tree.wide(u), (incoming, xs))[0], u)

        increments = several(increment, size)

        def add(total: State, operands: tuple[Points, PyTree]) -> tuple[State, Points]:
            before, total = _tree.prefix_sums(increments(*operands), total, reverse=False)
            return total, before

        def last(total: State, operands: tuple[Points, PyTree]) -> tuple[State, None]:
            return _tree.add(total, _tree.total(increments(*operands))), None

        for _ in range(self.sweeps - 1):
            incoming = in_chunks(add, _tree.wide(u), (incoming, xs), size)[1]
        return _tree.narrow(in_chunks(last, _tree.wide(u), (incoming, xs), size)[0], u)


def _by_chunks(level: Level, u: _Swept) -> tuple[_Swept, Scalar]:
    """A sweep over so many layers at once as the level says, and as many after these.

    Increments are added up, and residuals squared, on the way: the states of all layers pass through memory once, not four
    times. A layer's residual is known when its successor's entering state is.
    """
    first, n = level.workers.active == 1, level.steps
    dtype = _tree.real_dtype(level.y0, at_least=jnp.float32)
    if not n:
        return u, jnp.zeros((), dtype)
    size = chunk(n, level.at_once)
    stepped_from = several(single(level, level.advance), size)

    def square(total: jax.Array, before: jax.Array, stepped: jax.Array, entering: jax.Array) -> jax.Array:
        """Squares of what each layer's predecessor leaves, less what enters it."""
        one = before[None]
        left = jnp.concatenate([stepped[1:], one] if level.reverse else [one, stepped[:-1]])
        squares = jnp.square(jnp.abs(left - entering)).astype(dtype)
        return total + _tree.padded(squares, len(total) - len(left))

    def layers(carry: tuple[State, State, State], operands: tuple[State, PyTree]) -> tuple[Any, State]:
        total, squares, before = carry
        stepped, _ = stepped_from(*operands)
        squares = jax.tree.map(square, squares, before, stepped, operands[0])
        entering, total = _tree.prefix_sums(_tree.sub(stepped, operands[0]), total, reverse=level.reverse)
        return (total, squares, _tree.take(stepped, 0 if level.reverse else -1)), entering

    start = _tree.wide(level.y0 if first else _tree.zeros_like(level.y0))
    squares = _tree.zeros_like(_tree.repeat(start, size), dtype)  # of each number: sums take time
    entered = _tree.take(u.entering, -1 if level.reverse else 0)
    operands = u.entering, (level.xs, level.rhs)
    carry = start, squares, entered
    (total, squares, stepped), entering = in_chunks(layers, carry, operands, size, reverse=level.reverse)
    squares = [jnp.sum(x) for x in jax.tree.leaves(squares)]
    squares.append(_tree.sum_of_squares(_tree.sub(stepped, u.last)).astype(dtype))
    if not first:
        before = _tree.add(_tree.wide(level.y0), level.workers.exclusive_scan(total, reverse=level.reverse))
        entering = _tree.narrow(jax.tree.map(lambda x, y: x + y[None], _tree.wide(entering), before), entering)
        total = _tree.add(total, before)
    return _Swept(entering, _tree.narrow(total, level.y0)), sum(squares[1:], squares[0])


DEFAULT = Picard(sweeps=32, rtol=1e-3, fallback=True)
ADJOINT_DEFAULT = Picard(sweeps=32, rtol=1e-2, fallback=True)
"""What solves where no solver is named: sweeps to a tolerance, and serial propagation where they do not meet it."""


def or_default(solver: Solver | None, adjoint_solver: Solver | None) -> tuple[Solver, Solver | None]:
    """The solvers that are named, and the default where none is."""
    if solver is None:
        return DEFAULT, ADJOINT_DEFAULT if adjoint_solver is None else adjoint_solver
    return solver, adjoint_solver
