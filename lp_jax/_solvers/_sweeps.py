"""Sweeps over all layers at once, which add up their increments: plain ones, ones that learn a slope, and ones over windows."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import batched, chunk, in_chunks
from lp_jax._arrays._check import register
from lp_jax._arrays._types import CPoints, Points, PyTree, Scalar, SliceStep, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, Residual, measure, squares_of
from lp_jax._levels._sweep import single, sweep
from lp_jax._levels._tolerance import eps_of
from lp_jax._solvers._coarse_step import Coarse
from lp_jax._solvers._solver import (
    WITHOUT_TOLERANCE,
    AllStates,
    Start,
    constant,
    require_fixed_effort,
)


class Swept(NamedTuple):
    """State of the sweeps: the states that enter the layers, which are exclusive prefix sums of the increments.

    So nothing is shifted by a layer between two sweeps.
    """

    entering: Points  # the layers, ``(n, ...)``
    last: State  # that leaves this worker's last layer
    change: Points | None = None  # of ``entering`` in the sweep before, for `Secant`
    slope: Scalar | None = None  # of that sweep, for `Secant`

    def leaving(self, level: Level) -> Points:
        """The states that leave the layers."""
        return _tree.push(self.entering, self.last, reverse=not level.reverse)


def begin(level: Level, leaving: Points | None) -> Swept:
    """Start at the states that leave the layers, or at ``y0`` everywhere."""
    if leaving is None:
        return Swept(constant(level, None), level.y0)
    return Swept(level.incoming(leaving), level.edge(leaving))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweeps(AllStates):
    """A solver whose iterations are sweeps over all layers; `Picard` has the meaning of the fields."""

    sweeps: int = 2
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    storage: str = "all"
    at_once: int | float | str = "auto"
    iteration_name = "sweep"

    def __post_init__(self) -> None:
        if self.sweeps == 0:
            raise ValueError(
                "sweeps must be at least 1; got 0. A coarse step that does nothing is Identity()."
            )
        _check.integer("sweeps", self.sweeps, least=1)
        self.check_settings()

    @property
    def iterations(self) -> int:
        return self.sweeps

    def with_effort(self, iterations: int) -> "Sweeps":
        return dataclasses.replace(self, sweeps=iterations, **WITHOUT_TOLERANCE)

    @property
    def summary(self) -> str:
        return f"{self.effort} over the layers"

    def improve(self, levels: Sequence[Level], state: Swept) -> tuple[Swept, Residual]:
        level = levels[0]
        # Chunks of layers need less memory than all layers at once.
        if chunk(level.steps, level.at_once) < level.steps:
            return _by_chunks(level, state)
        stepped, _ = sweep(level, state.entering)
        # y[n] <- y0 + sum of D_i(y_i) over i < n, with D_i(y) = Phi_i(y) - y.
        increments = _tree.sub(stepped, state.entering)
        swept = Swept(*level.workers.prefix_sums(increments, level.y0, reverse=level.reverse))
        return swept, measure(level, _tree.sub(stepped, state.leaving(level)))

    def c_points(self, levels: Sequence[Level], state: Swept) -> CPoints:
        return state.leaving(levels[0])

    def states(self, levels: Sequence[Level], state: Swept) -> tuple[Points, State]:
        return state.entering, state.last


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picard(Sweeps):
    r"""Fixed-point sweeps over all layers at once.

    With the increment :math:`D_n(y) = \Phi_n(y) - y` of layer n, a sweep is
    :math:`y_n \leftarrow y_0 + \sum_{i<n} D_i(y_i)`: one batched evaluation and a prefix sum, no sequential chain. The
    error after s sweeps is about :math:`(L T)^s / s!`, L the Lipschitz constant of the right-hand side; after N sweeps
    it is zero. A sweep has the work of one serial propagation and the depth of one layer.

    As a solver it sweeps over all N layers, forward or adjoint. As ``coarse_step`` of `MGRIT` it makes a fixed number of
    sweeps over the layers of each interval.

    Args:
        sweeps: number of sweeps; with a tolerance their maximum.
        rtol: stop when the last sweep has changed the states by at most this times their size, or times their distance to
            ``y0`` where that is smaller, and the state that leaves the chain by at most this times itself. Each component of
            the state is compared with its own size, the largest at any layer, so that units do not matter; what counts is the
            root of the mean square over the components of a leaf. A residual can be small where the error is large; a change
            adds the residuals up.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially if the tolerance is not met. Sweeps that diverge or stall are given up at once,
            and those whose first two changes show that the others will miss the tolerance.
        storage: arrays that the forward solve keeps for the adjoint: "all" (those that a scan's gradient keeps; no layer is
            evaluated again), or "states" (only these; each layer is linearised again in every sweep).
        at_once: number of independent layers that a worker evaluates at once, `math.inf` for all, or "auto": by the memory of
            a layer. Numbers change by rounding only.
        around: states at which a coarse step evaluates its increments: "start", the state that enters the interval, or
            "trajectory", the states of the last relaxation, shifted by the change of the state that enters. The latter is
            more accurate far from an ODE and stores all states.

    Raises:
        ValueError: for less than one sweep, and for an unknown ``around`` or ``storage``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=lp_jax.Picard(sweeps=8)).y1.round(4)
        Array(2.5658, dtype=float32)

    Reference:
        Gander, "50 years of time parallel time integration", 2015, section 2.1 (Picard-Lindeloef, waveform relaxation).
    """

    around: str = "start"
    errors_fall_fast = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.one_of("around", self.around, ("start", "trajectory"))

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        return Start(begin(levels[0], guess))

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        # A tolerance would make the number of sweeps depend on the data.
        require_fixed_effort(self)
        through = functools.partial(_sweep_interval, chain.step(level), self.sweeps, at_once)
        # With "trajectory" the states of the last relaxation become operands of the coarse steps.
        with_states = None if self.around == "start" else lambda xs, states: (xs[0], states)
        return Coarse(through, (_tree.split(chain.slices, span), None), with_states)


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Windowed(Sweeps):
    """Sweeps of `Picard` over windows of layers, one window after the other, each from the state that leaves the one before.

    The last sweep goes over all layers. A window has 1/W of the time, so that fewer sweeps are enough, and 1/W of the layers,
    which are evaluated at once. W (sweeps - 1) + 1 evaluations wait for each other, also on several workers.

    Args:
        windows: number W of windows.
        sweeps: number of sweeps over each window, the last one over all layers included.
        rtol: the last sweep is to change the states by at most this times their size, as in `Picard`.
        atol: the residual norm of the last sweep is to be at most this.
        fallback: propagate the layers serially if the tolerance is not met.
        storage, at_once: as in `Picard`.

    Raises:
        ValueError: for less than one sweep, or two with a tolerance, an unknown ``storage``, and where a guess is given.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> exact, windows = (problem.solve(solver=s).y1 for s in (lp_jax.Serial(), lp_jax.Windowed(windows=4, sweeps=5)))
        >>> bool(jnp.allclose(windows, exact, rtol=1e-4))
        True
    """

    windows: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.integer("windows", self.windows, least=1)
        if self.has_tolerance and self.sweeps < 2:
            raise ValueError(
                f"Windowed(windows={self.windows}) with a tolerance takes at least 2 sweeps; got "
                f"sweeps=1."
            )

    def resolve(self, steps: int, *, warm: bool = False) -> Sweeps:
        if warm:
            raise ValueError(
                f"guess is not used by Windowed(windows={self.windows}), whose windows start from "
                f"the state that leaves the "
                "one before. Leave the guess out, or take Picard(...)."
            )
        return self

    def unit(self, steps: int) -> int:
        return -(-steps // self.windows)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level, spent = levels[0], self.sweeps - 1
        if level.number > 0:
            raise ValueError(
                f"coarsest must sweep over its whole level; got {self!r}. Take Picard(...)."
            )

        def window(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, tuple[State, Points]]:
            # The window is a level of its own, on one worker, that starts from ``u``.
            inside = level.window(*operands, u)
            # The first sweep over a window evaluates all layers at the state that enters it.
            at = begin(inside, None)

            def again(_: int, at: Swept) -> Swept:
                return self.improve((inside,), at)[0]

            if spent:
                unroll = spent <= _UNROLLED or level.workers.processor.loop_unroll(
                    spent, again, 0, at
                )
                at = _tree.fori_loop(0, spent, again, at, unroll=unroll)
            return at.last, (at.last, at.leaving(inside))

        def run(y0: State) -> tuple[CPoints, Points]:
            return _tree.scan(window, y0, windows, reverse=level.reverse)[1]

        windows = _tree.split((level.xs, level.rhs), self.unit(level.workers.total(level.span)))
        # Windows follow each other over the workers, too; no window is cut between two of them.
        _, leaving = level.workers.relay(run, level.y0, reverse=level.reverse)
        return Start(begin(level, _tree.merge(leaving)), spent)


_UNROLLED = 5  # most sweeps over a window that are not a loop


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Secant(Sweeps):
    r"""Sweeps over all layers at once that learn how much of a change survives a layer.

    A sweep is :math:`y_{n+1} \leftarrow \Phi_n(u_n) + (1 + a) (y_n - u_n)` for the states u of the sweep before, with one
    slope a in [-1, 0] for all layers. The slope fits the responses to the last change: where the states changed by d, it is that
    of least squares of :math:`\Phi(u) - \Phi(u - d) \approx (1 + a) d`. With a = 0 a sweep is one of `Picard`, as is the
    first. Chains that contract, such as a GRU, take a quarter of the sweeps; others take as many. No Jacobian is formed.

    Args:
        sweeps: number of sweeps; with a tolerance their maximum.
        rtol, atol, fallback, storage, at_once: as in `Picard`.

    Raises:
        ValueError: for less than one sweep, an unknown ``storage``, and as a coarse step.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: 0.9 * y + layer.params, jnp.ones(64), jnp.ones(()))
        >>> solvers = lp_jax.Picard(sweeps=64, rtol=1e-4), lp_jax.Secant(sweeps=64, rtol=1e-4)
        >>> [int(problem.solve(solver=solver).stats.iterations) for solver in solvers]
        [20, 3]

    Reference:
        Wegstein, "Accelerating convergence of iterative processes", Comm. ACM 1 (1958): the secant method of a fixed point,
        here with one slope for a chain.
    """

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        swept = begin(levels[0], guess)
        # The first sweep has slope 0, and no change to learn from.
        slope = _tree.varying(jnp.zeros((), _tree.wide_dtype(swept.last)), swept)
        return Start(swept._replace(change=_tree.zeros_like(swept.entering), slope=slope))

    def improve(self, levels: Sequence[Level], state: Swept) -> tuple[Swept, Residual]:
        level, workers, (u, _, change, slope) = levels[0], levels[0].workers, state
        assert slope is not None
        stepped, _ = sweep(level, u)
        residuals = _tree.sub(stepped, state.leaving(level))
        # Phi(u) - Phi(u - d) is (1 + slope) d plus the residuals. Squares of each component are
        # weighed by those of its states, so that the slope does not depend on units
        states = u
        if workers.padded:  # slots beyond the last layer do not count
            real = workers.start(level.span) + jnp.arange(level.steps, dtype=jnp.int32)
            states = _tree.where_rows(real < workers.total(level.span), u)
        pairs = (residuals, change), (change, change), (states, states)
        # One message for all inner products.
        *products, sizes = workers.sum([_tree.inner_by_component(*pair) for pair in pairs])
        along, squared = (_in_sizes(product, sizes) for product in products)
        # a change of rounding teaches nothing
        noise = sum(x.size * (8 * eps_of(x)) ** 2 for x in jax.tree.leaves(level.y0))
        # Least squares: the part of the residuals along the last change, over the square of that change.
        learned = jnp.where(squared > noise, along / squared, 0)
        slope = jnp.clip(slope + learned, -1, 0)
        slope = jnp.where(jnp.isfinite(slope), slope, 0)
        factor = 1 + slope
        # y[n+1] = factor y[n] + (Phi_n(u_n) - factor u_n) is a prefix sum that decays by `factor` in each layer.
        increments = jax.tree.map(lambda f, y: f - factor.astype(f.dtype) * y, stepped, u)
        entering, last = workers.prefix_sums(
            increments, level.y0, reverse=level.reverse, factor=factor
        )
        change, n = _tree.sub(entering, u), level.steps
        if workers.padded and not level.reverse and n:
            # all slots beyond the last layer get the state that leaves it, with no change
            end = jnp.asarray(
                jnp.clip(workers.total(level.span) - workers.start(level.span), 0, n), jnp.int32
            )
            number = jnp.arange(n, dtype=jnp.int32)
            last = jax.tree.map(
                lambda x, y: jnp.where(end < n, x[jnp.minimum(end, n - 1)], y), entering, last
            )
            entering = _tree.at(entering, jnp.minimum(number, end))
            change = _tree.where_rows(number < end, change)
        return Swept(entering, last, change, slope), measure(level, residuals)

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        raise ValueError(
            f"coarse_step={self!r} would depend on the sweeps before it. Take "
            f"Picard(sweeps={self.sweeps})."
        )


def _in_sizes(products: State, sizes: State) -> Scalar:
    """Sum of the components' products, each in parts of the component's size."""
    parts = jax.tree.map(lambda x, s: jnp.sum(x / jnp.where(s > 0, s, jnp.inf)), products, sizes)
    return jax.tree.reduce(jnp.add, parts)


def _by_chunks(level: Level, u: Swept) -> tuple[Swept, Residual]:
    """`Sweeps.improve` over ``level.at_once`` layers at a time.

    It adds up increments and squares residuals on the way: the states of all layers pass through memory once, not four
    times. A layer's residual is known once the state that enters the next layer is.
    """
    alone, dtype = level.workers.active == 1, _tree.wide_dtype(level.y0)
    size = chunk(level.steps, level.at_once)
    stepped_from = batched(single(level), size)

    def square(
        total: jax.Array, before: jax.Array, stepped: jax.Array, entering: jax.Array
    ) -> jax.Array:
        """Squares of the state after each layer's predecessor, minus the state that enters the layer."""
        left = _tree.push(stepped, before, reverse=level.reverse)
        new = squares_of(level, left - entering)
        return total + _tree.pad_zeros(new, len(total) - len(left))

    def layers(
        carry: tuple[State, State, State], operands: tuple[State, PyTree]
    ) -> tuple[tuple[State, State, State], State]:
        total, squares, before = carry
        stepped, _ = stepped_from(*operands)
        squares = jax.tree.map(square, squares, before, stepped, operands[0])
        entering, total = _tree.prefix_sums(
            _tree.sub(stepped, operands[0]), total, reverse=level.reverse
        )
        return (total, squares, _tree.take(stepped, 0 if level.reverse else -1)), entering

    start = _tree.wide(level.y0 if alone else _tree.zeros_like(level.y0))
    squares = _tree.zeros_like(
        _tree.repeat(start, size), dtype
    )  # of each number; they are summed once, at the end
    entered = _tree.take(u.entering, -1 if level.reverse else 0)
    operands = u.entering, (level.xs, level.rhs)
    carry = start, squares, entered
    (total, squares, stepped), entering = in_chunks(
        layers, carry, operands, size, reverse=level.reverse
    )
    summed = jax.tree.map(
        lambda x, y: jnp.sum(x, axis=0) + y, squares, squares_of(level, _tree.sub(stepped, u.last))
    )
    if not alone:
        before = _tree.add(
            _tree.wide(level.y0), level.workers.exclusive_scan(total, reverse=level.reverse)
        )
        entering = _tree.narrow(_tree.add(_tree.wide(entering), _tree.at(before, None)), entering)
        total = _tree.add(total, before)
    return Swept(entering, _tree.narrow(total, level.y0)), Residual(summed)


def _sweep_interval(
    step: SliceStep,
    sweeps: int,
    at_once: int,
    u: State,
    x: tuple[PyTree, Points | None],
    shared: PyTree,
) -> State:
    """The state after one interval's layers, for a coarse step.

    ``x`` has the operands of the layers, ``(span, ...)``; and the states at which their increments are evaluated, or None for
    the state that enters the interval.
    """
    xs, states = x
    if states is None:
        incoming = _tree.repeat(u, _tree.leading(xs))
    else:  # shifted by the change of the state that enters
        incoming = jax.tree.map(lambda s, y: s + (y - s[0])[None], states, u)

    def increment(y: State, x: PyTree) -> State:
        return _tree.sub(step(y, x, shared), y)

    size = chunk(_tree.leading(xs), at_once)
    if size == 1:  # one increment at a time: only the total is kept for the transpose
        for _ in range(sweeps):
            total, incoming = _tree.scan(
                lambda total, operands: (
                    _tree.add(total, _tree.wide(increment(*operands))),
                    _tree.narrow(total, u),
                ),
                _tree.wide(u),
                (incoming, xs),
            )
        return _tree.narrow(total, u)

    increments = batched(increment, size)

    def add(total: State, operands: tuple[Points, PyTree]) -> tuple[State, Points]:
        before, total = _tree.prefix_sums(increments(*operands), total, reverse=False)
        return total, before

    def last(total: State, operands: tuple[Points, PyTree]) -> tuple[State, None]:
        return _tree.add(total, _tree.total(increments(*operands))), None

    # All sweeps but the last one have to leave the states that enter the layers; the last one only needs the sum.
    for _ in range(sweeps - 1):
        incoming = in_chunks(add, _tree.wide(u), (incoming, xs), size)[1]
    return _tree.narrow(in_chunks(last, _tree.wide(u), (incoming, xs), size)[0], u)
