"""Picard iteration: evaluate all layers at once, and add up their increments."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import chunk
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Advance, CPoints, Points, PyTree, Scalar, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import sweep
from lp_jax._solvers._coarse_step import Coarse
from lp_jax._solvers._picard_sweeps import (
    Swept,
    corrections,
    from_points,
    secant_sweep,
    sweep_by_chunks,
    sweep_interval,
    with_slope,
)
from lp_jax._solvers._solver import Solver, Start, constant, require_fixed_effort
from lp_jax._solvers._windows import slide


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    r"""Fixed-point sweeps over all layers at once.

    With the increment :math:`D_n(y) = \Phi_n(y) - y` of layer n, a sweep is
    :math:`y_n \leftarrow y_0 + \sum_{i<n} D_i(y_i)`: one batched evaluation and a prefix sum, no sequential chain. The
    error after s sweeps is about :math:`(L T)^s / s!`, L the Lipschitz constant of the right-hand side; after N sweeps
    it is zero. A sweep has the work of one serial propagation and the depth of one layer.

    As a solver it sweeps over all N layers, forward or adjoint. As ``coarse_step`` of `MGRIT` it makes a fixed number of
    sweeps over the layers of each interval.

    Args:
        sweeps: number of sweeps; with a tolerance their maximum.
        windows: number W of windows of layers. All sweeps but the last go over one window after the other, each from the state
            that leaves the window before; the last sweep goes over all layers. A window has 1/W of the time, so that fewer
            sweeps are enough, and 1/W of the layers, which are evaluated at once. W (sweeps - 1) + 1 evaluations wait for
            each other, also on several workers. With a tolerance one window of 1/W of the layers slides: converged layers
            leave it, later ones enter, in W (sweeps - 1) sweeps at most.
        rtol: stop when the last sweep has changed all states by at most this times what the first one did, or times the states
            where these are smaller, and the state that leaves the chain by at most this times itself. A residual can be small
            where the error is large; a change adds the residuals up. With windows: when the residual norm is at most this
            times the first one.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially if the tolerance is not met. Sweeps that diverge or stall are given up at once,
            and those whose first two changes show that the others will miss the tolerance.
        secant: whether a sweep also estimates how the layers respond to a change: :math:`y_{n+1} \leftarrow \Phi_n(u_n) +
            (1 + a) (y_n - u_n)` for the states u of the sweep before, with one slope a in [-1, 0] for all layers, from the last
            two sweeps. Plain sweeps have a = 0. Chains that contract, such as a GRU, take a quarter of the sweeps; others
            take as many.
        around: states at which a coarse step evaluates its increments: "start", the state that enters the interval, or
            "trajectory", the states of the last relaxation, shifted by the change of the state that enters. The latter is
            more accurate far from an ODE and stores all states.
        storage: arrays that the forward solve keeps for the adjoint: "all" (those that a scan's gradient keeps; no layer is
            evaluated again), or "states" (only these; each layer is linearised again in every sweep).
        at_once: number of independent layers that a worker evaluates at once, `math.inf` for all, or "auto": by the memory of
            a layer. Numbers change by rounding only.

    Raises:
        ValueError: for less than one sweep, or two with windows and a tolerance, for an unknown ``around`` or ``storage``, and
            for ``secant`` with windows or in a coarse step.

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
    secant: bool = False
    around: str = "start"
    storage: str = "all"
    at_once: int | float | str = "auto"

    def __post_init__(self) -> None:
        if self.sweeps == 0:
            raise ValueError("sweeps must be at least 1; got 0. A coarse step that does nothing is Identity().")
        _check.integer("sweeps", self.sweeps, least=1)
        _check.integer("windows", self.windows, least=1)
        if self.windows > 1 and self.has_tolerance and self.sweeps < 2:
            raise ValueError(f"Picard(windows={self.windows}) with a tolerance takes at least 2 sweeps; got sweeps=1.")
        if self.windows > 1 and self.secant:
            raise ValueError(f"Picard(secant=True) sweeps over all layers; got windows={self.windows}. Leave one out.")
        _check.one_of("around", self.around, ("start", "trajectory"))
        _check.one_of("storage", self.storage, ("states", "all"))
        _check.at_once(self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)

    @property
    def iterations(self) -> int:
        return self.sweeps

    @property
    def keeps_states(self) -> bool:
        return self.storage == "all"

    def resolve(self, steps: int, *, warm: bool = False) -> Solver:
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
        if self.windows == 1:
            begin = Swept(constant(level, None), level.y0) if guess is None else from_points(level, guess)
            return Start(with_slope(begin) if self.secant else begin, corrections=functools.partial(corrections, level))
        if level.number > 0:
            raise ValueError(f"coarsest must sweep over its whole level; got {self!r}. Leave windows out.")
        if self.has_tolerance:
            size = self.unit(level.workers.total(level.span))
            points, sweeps, first = slide(level, size, (self.sweeps - 1) * self.windows, self.rtol, self.atol)
            return Start(from_points(level, points), self.sweeps - 1, sweeps, first)
        return Start(from_points(level, self._march(level)), self.sweeps - 1)

    def _march(self, level: Level) -> Points:
        """The states after every step, window after window."""
        size = self.unit(level.workers.total(level.span))

        def window(u: State, operands: tuple[PyTree, PyTree]) -> tuple[State, tuple[State, Points]]:
            inside = level.window(*operands, u)
            at = Swept(constant(inside, None), u)
            for _ in range(self.sweeps - 1):
                at, _ = self.improve((inside,), at)
            return at.last, (at.last, at.points(inside))

        windows = _tree.split((level.xs, level.rhs), size)

        def run(y0: State, _: PyTree = None, /) -> tuple[CPoints, Points]:
            return lax.scan(window, y0, windows, reverse=level.reverse)[1]

        _, points = level.workers.relay(run, level.y0, reverse=level.reverse)
        return _tree.merge(points)

    def improve(self, levels: Sequence[Level], u: Swept) -> tuple[Swept, Scalar]:
        level = levels[0]
        if self.secant:
            return secant_sweep(level, u)
        if chunk(level.steps, level.at_once) < level.steps:
            return sweep_by_chunks(level, u)
        stepped, _ = sweep(level, u.entering)
        entering, last = level.workers.prefix_sums(_tree.sub(stepped, u.entering), level.y0, reverse=level.reverse)
        return Swept(entering, last), sum_of_squares(level, _tree.sub(stepped, u.points(level)))

    def c_points(self, levels: Sequence[Level], u: Swept) -> CPoints:
        return u.points(levels[0])

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, PyTree]:
        return u, None if advance is None else sweep(levels[0], levels[0].incoming(u), advance=advance)[1]

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        if self.windows > 1:
            return super().coarsen(chain, level, span, at_once=at_once)
        require_fixed_effort(self)
        if self.secant:
            raise ValueError(f"coarse_step={self!r} would depend on the sweeps before it; leave secant out.")
        xs, step = _tree.split(chain.slices, span), chain.step(level)

        def linearise_at(xs: PyTree, states: Points) -> PyTree:
            return (xs[0], states)

        through = functools.partial(sweep_interval, step, self.sweeps, at_once)
        return Coarse(through, (xs, None), linearise_at if self.around == "trajectory" else None)
