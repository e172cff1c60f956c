"""Picard iteration: evaluate all layers at once, and add up their increments."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import batched, chunk, in_chunks
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import CPoints, Points, PyTree, SliceStep, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._tolerance import measure_corrections
from lp_jax._solvers._coarse_step import Coarse
from lp_jax._solvers._solver import Start, require_fixed_effort
from lp_jax._solvers._sweeps import Sweeps, begin


@register("rtol", "atol")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Picard(Sweeps):
    r"""Fixed-point sweeps over all layers at once.

    With the increment :math:`D_n(y) = \Phi_n(y) - y` of layer n, a sweep is
    :math:`y_n \leftarrow y_0 + \sum_{i<n} D_i(y_i)`: one batched evaluation and a prefix sum, no sequential chain. The
    error after s sweeps is about :math:`(L T)^s / s!`, L the Lipschitz constant of the right-hand side; after N sweeps
    it is zero. A sweep has the work of one serial propagation and the depth of one layer.

    As a solver it sweeps over all N layers, forward or adjoint. As ``coarse_step`` of `MGRIT` it makes a fixed number of
    sweeps over the layers of each interval. `Windowed` sweeps over some of the layers at a time; the sweeps of `Secant` learn
    how the layers respond to a change.

    Args:
        sweeps: number of sweeps; with a tolerance their maximum.
        rtol: stop when the last sweep has changed all states by at most this times what the first one did (in each leaf, the
            first that changed it), or times the states where these are smaller, and the state that leaves the chain by at most
            this times itself. A residual can be small where the error is large; a change adds the residuals up.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.one_of("around", self.around, ("start", "trajectory"))

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        return Start(begin(levels[0], guess), corrections=functools.partial(measure_corrections, levels[0]))

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        require_fixed_effort(self)
        xs, step = _tree.split(chain.slices, span), chain.step(level)

        def linearise_at(xs: PyTree, states: Points) -> PyTree:
            return (xs[0], states)

        through = functools.partial(_sweep_interval, step, self.sweeps, at_once)
        return Coarse(through, (xs, None), linearise_at if self.around == "trajectory" else None)


def _sweep_interval(
    step: SliceStep, sweeps: int, at_once: int, u: State, x: tuple[PyTree, Points | None], shared: PyTree
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

        def one(total: State, operands: tuple[State, PyTree]) -> tuple[State, State]:
            return _tree.add(total, _tree.wide(increment(*operands))), _tree.narrow(total, u)

        for _ in range(sweeps):
            total, incoming = lax.scan(one, _tree.wide(u), (incoming, xs))
        return _tree.narrow(total, u)

    increments = batched(increment, size)

    def add(total: State, operands: tuple[Points, PyTree]) -> tuple[State, Points]:
        before, total = _tree.prefix_sums(increments(*operands), total, reverse=False)
        return total, before

    def last(total: State, operands: tuple[Points, PyTree]) -> tuple[State, None]:
        return _tree.add(total, _tree.total(increments(*operands))), None

    for _ in range(sweeps - 1):
        incoming = in_chunks(add, _tree.wide(u), (incoming, xs), size)[1]
    return _tree.narrow(in_chunks(last, _tree.wide(u), (incoming, xs), size)[0], u)
