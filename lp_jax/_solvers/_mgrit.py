"""Multigrid-reduction-in-time over the layers."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._types import Advance, CPoints, PyTree, State, Transfer
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, Residual
from lp_jax._levels._relax import Relaxation, at_level, per_level
from lp_jax._levels._sweep import sweep
from lp_jax._solvers._coarse_step import CoarseStep, PerInterval, coarser
from lp_jax._solvers._cycle import VISITS, Scheme, coarse_to_fine, fas_cycle
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Needs, Solver, Start
from lp_jax._solvers._sweeps import Picard

Cycle: TypeAlias = Callable[[Sequence[Level], CPoints], tuple[CPoints, Residual]]
AnyCoarseStep: TypeAlias = CoarseStep | Callable[..., State]


@register("rtol", "atol", "c_weight", "coarse_step", "coarsest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MGRIT(Solver):
    """Multigrid-reduction-in-time: iterates on all layers at once, and converges to the result of serial propagation.

    Args:
        levels: number of levels, the finest included; 1 is serial propagation. Coarsening stops earlier where a level
            would have fewer than ``min_coarse`` steps.
        coarsening: coarsening factor m, or one per level (the last one repeats).
        iterations: number of cycles, of which a cascade counts as the first; with a tolerance their maximum.
        rtol: stop when the residuals are at most this times the first ones that were measured, or times the states, whichever
            is smaller. Each component of the state is compared with its own size, the largest at any C-point, so that units do
            not matter; what counts is the root of the mean square over the components of a leaf. What rounding leaves of a
            component counts as zero.
        atol: stop when the residual norm is at most this. A negative tolerance is never met, so that all iterations are made.
        fallback: propagate the layers serially if the tolerance is not met. An iteration that diverges (its error grew 12-fold)
            or stalls is given up at once.
        relaxation: "F", "FCF", "FCFCF", ..., or a function ``r(level, u) -> u`` made of `f_relax` and `c_relax`; or one per
            level, finest first (the last one repeats).
        c_weight: weight w of C-relaxation, ``u_c <- w Phi(u[c-1]) + (1 - w) u_c``.
        cycle: "V", "F" or "W"; or a function ``f(levels, u) -> (u, residual)`` made of the pieces in `lp_jax.multigrid`: C-points
            of ``levels[0]``, and what `multigrid.measure` says of this worker's residuals before they were corrected.
            It relaxes and solves the coarsest level itself; ``relaxation``, ``c_weight`` and ``coarsest`` serve the cascade.
        start: "cascade": the first iteration goes from coarse to fine: solve the coarsest level, then inject and F-relax level
            by level. It needs no guess; where a trajectory is given, the first iteration is a cycle that starts there. "guess":
            the first iteration is a cycle.
        min_coarse: fewest steps of the coarsest level.
        coarse_step: replaces the layers of an interval on the coarse levels: `Rediscretize`; any solver with fixed effort,
            run on the interval's own layers; or a function ``f(step, y, layers) -> y``, where the leaves of
            ``layers``, a `Layer`, have the interval's layers as leading axis and ``step(y, layer)`` is the user's own.
        coarsest: solver of the coarsest level.
        spatial: None, or per level (the last one repeats) a pair (restrict, prolong) of linear functions on the state,
            or None where the state keeps its size. Needs C-relaxation there ("FCF"): nothing else corrects the part of the
            state that a restriction drops.
        storage: arrays that the forward solve keeps for the adjoint: "c_points" (one state per interval; the others are
            recomputed, and each layer linearised again, in every sweep) or "all", as in `Picard`.
        at_once: as in `Picard`.

    Raises:
        ValueError: for a value out of range, naming the field; in the solve for `spatial` beside coarse steps that need the
            trajectory, and for a ``jacobian_of`` in ``coarse_step`` or ``coarsest``.
        TypeError: for a number of levels, a factor or a number of iterations that is not an integer; in the solve for a
            ``coarse_step`` or ``coarsest`` of another kind.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.MGRIT(coarsening=2, iterations=8, coarse_step=lp_jax.Rediscretize())
        >>> lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=solver).y1.round(4)
        Array(2.5658, dtype=float32)

    References:
        Falgout, Friedhoff, Kolev, MacLachlan, Schroder, "Parallel time integration with multigrid", SIAM J. Sci.
        Comput. 36 (2014); Guenther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel training of deep residual neural
        networks", SIAM J. Math. Data Sci. 2 (2020).
    """

    levels: int = 2
    coarsening: int | tuple[int, ...] = 4
    iterations: int = 2
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    relaxation: tuple[Relaxation, ...] | Relaxation = ("F", "FCF")
    c_weight: float | jax.Array = 1.0
    cycle: str | Cycle = "V"
    start: str = "cascade"
    min_coarse: int = 2
    coarse_step: AnyCoarseStep = Picard(sweeps=1)
    coarsest: Solver = Serial()
    spatial: Transfer | tuple[Transfer | None, ...] | None = None
    storage: str = "c_points"
    at_once: int | float | str = "auto"
    iteration_name = "cycle"

    def __post_init__(self) -> None:
        if callable(self.coarse_step) and not isinstance(self.coarse_step, type | CoarseStep):
            object.__setattr__(self, "coarse_step", PerInterval(self.coarse_step))
        _check.integer("levels", self.levels, least=1)
        _check.integer("iterations", self.iterations, least=1)
        _check.integer("min_coarse", self.min_coarse, least=1)
        for name in ("coarsening", "relaxation"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} must have at least one entry; got ().")
        for factor in per_level(self.coarsening):
            _check.integer("coarsening", factor, least=2)
        for relaxation in per_level(self.relaxation):
            if not (
                callable(relaxation)
                or (isinstance(relaxation, str) and re.fullmatch("F(CF)*", relaxation))
            ):
                raise ValueError(
                    'relaxation must be "F", "FCF", "FCFCF", ..., or a function r(level, u) -> u '
                    "(or one per level); got "
                    f"{relaxation!r}."
                )
        if not callable(self.cycle):
            _check.one_of(
                "cycle", self.cycle, VISITS, otherwise="or a function f(levels, u) -> (u, residual)"
            )
        _check.one_of("start", self.start, ("cascade", "guess"))
        self.check_settings("c_points")
        for pair in self._transfers():
            if pair is not None and not (
                isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))
            ):
                raise ValueError(
                    f"spatial must be None or per level a pair (restrict, prolong) of functions; "
                    f"got {pair!r}."
                )

    def grid(self, steps: int) -> list[tuple[int, int]]:
        """Number of steps and coarsening factor of each level, finest first; the factor of the coarsest is 1."""
        sizes: list[tuple[int, int]] = []
        while len(sizes) + 1 < self.levels:
            factor = at_level(per_level(self.coarsening), len(sizes))
            coarse = -(-steps // factor)
            if coarse < self.min_coarse or coarse == steps:
                break
            sizes.append((steps, factor))
            steps = coarse
        return [*sizes, (steps, 1)]

    @property
    def stretches_dt(self) -> bool:
        return self.levels > 1 and cast(CoarseStep, self.coarse_step).stretches_dt

    def stride(self, steps: int) -> int:
        return self.grid(steps)[0][1]

    def unit(self, steps: int) -> int:
        return math.prod(factor for _, factor in self.grid(steps))

    def needs(self, steps: int) -> Needs:
        return Needs(
            [at_level(self._transfers(), level) for level in range(len(self.grid(steps)) - 1)]
        )

    def resolve(self, steps: int, *, warm: bool = False) -> Solver:
        if not isinstance(self.coarse_step, CoarseStep):
            raise TypeError(
                "coarse_step must be Rediscretize(...), a solver with fixed effort, like "
                "Picard(sweeps=1) or Serial(), or a "
                f"function f(step, y, layers) -> y; got {self.coarse_step!r}. Injection is "
                'Rediscretize("inject").'
            )
        if not isinstance(self.coarsest, Solver) or isinstance(self.coarsest, MGRIT):
            raise TypeError(
                f"coarsest must be a solver that works on one level, like Serial(), Picard(...) or "
                f"Newton(...); got {self.coarsest!r}."
            )
        for name in ("coarse_step", "coarsest"):
            if getattr(getattr(self, name), "jacobian_of", None) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} takes the Jacobian of another step than the "
                    "layers', which only a solver of the layers themselves can do. Leave "
                    "jacobian_of out, or take Newton(...) in place of MGRIT."
                )
        if len(self.grid(steps)) == 1:
            return Serial()
        return dataclasses.replace(self, start="guess") if warm else self

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        at_once = chain.at_once(self.at_once)
        transfer = [*self.needs(chain.total).transfers, None]
        (_, factor), *coarse_grid = self.grid(chain.total)
        levels = [chain.finest(factor, at_once=at_once, transfer=transfer[0])]
        for number, (_, factor) in enumerate(coarse_grid, 1):
            coarse = cast(CoarseStep, self.coarse_step).coarsen(
                chain, number, levels[-1].interval_span, at_once=at_once
            )
            if coarse.with_states is not None and any(transfer):
                raise ValueError(
                    'coarse_step takes the states of the finest level (around="trajectory"), '
                    "which do not fit on a level that "
                    f"`spatial` made smaller; got {self.coarse_step!r}. Leave one of the two out."
                )
            levels.append(coarser(levels[-1], coarse, factor, transfer[number]))
        if self.coarsest.exact:
            # The number of solves is that of V-cycles. F- and W-cycles make more, and a tolerance may be met earlier. It only
            # decides which way of solving sends less: both ways have the same results.
            levels[-1] = levels[-1].with_gathered(self.iterations)
        return tuple(levels)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        # With a guess, `resolve` has set ``start="guess"``, so none is lost here.
        if self.start == "cascade":
            kind = "V" if callable(self.cycle) else self.cycle
            return Start(coarse_to_fine(self._scheme, levels, kind), spent=1)
        return super().init(levels, guess)

    def improve(self, levels: Sequence[Level], state: CPoints) -> tuple[CPoints, Residual]:
        if callable(self.cycle):
            return self.cycle(levels, state)
        return fas_cycle(self._scheme, levels, state, self.cycle)

    def finish(
        self, levels: Sequence[Level], u: CPoints, advance: Advance | None
    ) -> tuple[CPoints, PyTree]:
        # The final sweep is one more C-relaxation, so it has the same weight.
        swept, emitted = sweep(levels[0], levels[0].incoming(u), advance=advance)
        return _tree.blend(self.c_weight, swept, u), emitted

    @property
    def _scheme(self) -> Scheme:
        return Scheme(self.relaxation, self.c_weight, self.coarsest)

    def _transfers(self) -> tuple[Transfer | None, ...]:
        if self.spatial is None:
            return (None,)
        single = len(self.spatial) == 2 and all(map(callable, self.spatial))
        return cast(tuple[Transfer | None, ...], (self.spatial,) if single else self.spatial)
