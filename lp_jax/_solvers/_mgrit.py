"""Multigrid-reduction-in-time over the layers."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

import jax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Advance, CPoints, PyTree, Scalar, State, Transfer
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._relax import Relaxed, c_relax, fcf_relax, with_points, with_residual
from lp_jax._levels._sweep import sweep
from lp_jax._levels._transfer import fit_transfer
from lp_jax._solvers._coarse_step import CoarseStep, PerInterval
from lp_jax._solvers._cycle import VISITS, cascade, fas_cycle
from lp_jax._solvers._picard import Picard
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Needs, Solver, Start, constant

Relaxation: TypeAlias = str | Callable[[Level, CPoints], CPoints]
AnyCoarseStep: TypeAlias = Callable[..., State] | CoarseStep

T = TypeVar("T")


@register("rtol", "atol", "c_weight", "coarse_step", "coarsest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MGRIT(Solver):
    """Multigrid-reduction-in-time: iterates on all layers at once, and converges to the result of serial propagation.

    Args:
        levels: number of levels, the finest included; 1 is serial propagation. Coarsening stops earlier where a level
            would have fewer than ``min_coarse`` steps.
        coarsening: coarsening factor m, or one per level (the last one repeats).
        iterations: number of cycles; with a tolerance their maximum.
        rtol: stop when the residual norm is at most this times the first one that was measured.
        atol: stop when the residual norm is at most this. A tolerance below rounding is raised to it. A
            negative one disables the test.
        fallback: propagate the layers serially if the tolerance is not met. An iteration that diverges (its residual norm has
            grown by ten) or stalls is given up at once.
        relaxation: "F", "FCF", "FCFCF", ..., or a function ``r(level, u) -> u`` made of `f_relax` and `c_relax`; or one per
            level, finest first (the last one repeats).
        c_weight: weight w of C-relaxation, ``u_c <- w Phi(u[c-1]) + (1 - w) u_c``.
        cycle: "V", "F" or "W".
        start: "cascade": the first iteration goes from coarse to fine: solve the coarsest level, then inject and F-relax level
            by level. It needs no guess; where a trajectory is given, the first iteration is a cycle that starts there. "guess":
            the first iteration is a cycle.
        min_coarse: fewest steps of the coarsest level.
        coarse_step: replaces the layers of an interval on the coarse levels: `Rediscretize`; any solver with fixed effort,
            run on the interval's own layers; or a function ``f(step, y, layers) -> y``, where the leaves of
            ``layers``, a `Layer`, have the interval's layers as leading axis and ``step(y, layer)`` is the user's own.
        coarsest: solver of the coarsest level.
        spatial: None, or per level (the last one repeats) a pair (restrict, prolong) of linear functions on the state,
            or None where the state keeps its size; `spatial` makes such pairs. Needs C-relaxation there ("FCF"): nothing else
            corrects the part of the state that a restriction drops.
        storage: arrays that the forward solve keeps for the adjoint: "c_points" (one state per interval; the others are
            recomputed, and each layer linearised again, in every sweep) or "all" (those that a scan's gradient keeps; no
            layer is evaluated again).
        at_once: number of independent layers that a worker evaluates at once, `math.inf` for all, or "auto": by the memory of
            a layer. Numbers change by rounding only.

    Raises:
        ValueError: for a value out of range, naming the field.
        TypeError: for a number of levels, a factor or a number of iterations that is not an integer.

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
    cycle: str = "V"
    start: str = "cascade"
    min_coarse: int = 2
    coarse_step: AnyCoarseStep = Picard(sweeps=1)
    coarsest: Solver = Serial()
    spatial: Transfer | tuple[Transfer | None, ...] | None = None
    storage: str = "c_points"
    at_once: int | float | str = "auto"

    def __post_init__(self) -> None:
        if callable(self.coarse_step) and not isinstance(self.coarse_step, type | CoarseStep):
            object.__setattr__(self, "coarse_step", PerInterval(self.coarse_step))
        _check.integer("levels", self.levels, least=1)
        _check.integer("iterations", self.iterations, least=1)
        _check.integer("min_coarse", self.min_coarse, least=1)
        for factor in _per_level(self.coarsening):
            _check.integer("coarsening", factor, least=2)
        for relaxation in _per_level(self.relaxation):
            if not (callable(relaxation) or (isinstance(relaxation, str) and re.fullmatch("F(CF)*", relaxation))):
                raise ValueError(
                    'relaxation must be "F", "FCF", "FCFCF", ..., or a function r(level, u) -> u (or one per level); got '
                    f"{relaxation!r}."
                )
        _check.one_of("cycle", self.cycle, VISITS)
        _check.one_of("start", self.start, ("cascade", "guess"))
        _check.one_of("storage", self.storage, ("c_points", "all"))
        _check.at_once(self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)
        for pair in self._transfers():
            if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
                raise ValueError(
                    f"spatial must be None or per level a pair (restrict, prolong) of functions; got {pair!r}."
                )

    def c_relaxations(self, level: int) -> int:
        """Number of C-relaxations (each followed by F) in the pre-relaxation on ``level``."""
        relaxation = self._relaxation(level)
        return 0 if callable(relaxation) else relaxation.count("C")

    def grid(self, steps: int) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        while len(sizes) + 1 < self.levels:
            factor = _at(_per_level(self.coarsening), len(sizes))
            coarse = -(-steps // factor)
            if coarse < self.min_coarse or coarse == steps:
                break
            sizes.append((steps, factor))
            steps = coarse
        return [*sizes, (steps, 1)]

    @property
    def stretches_dt(self) -> bool:
        return self.levels > 1 and self._coarse.stretches_dt

    @property
    def keeps_states(self) -> bool:
        return self.storage == "all"

    def stride(self, steps: int) -> int:
        return self.grid(steps)[0][1]

    def unit(self, steps: int) -> int:
        return math.prod(factor for _, factor in self.grid(steps))

    def needs(self, steps: int) -> Needs:
        return Needs([_at(self._transfers(), level) for level in range(len(self.grid(steps)) - 1)])

    def resolve(self, steps: int, *, warm: bool = False) -> Solver:
        if not isinstance(self.coarse_step, CoarseStep):
            raise TypeError(
                "coarse_step must be Rediscretize(...), a solver with fixed effort, like Picard(sweeps=1) or Serial(), or a "
                f'function f(step, y, layers) -> y; got {self.coarse_step!r}. Injection is Rediscretize("inject").'
            )
        if not isinstance(self.coarsest, Solver) or isinstance(self.coarsest, MGRIT):
            raise TypeError(
                f"coarsest must be a solver that works on one level, like Serial(), Picard(...) or Newton(...); got "
                f"{self.coarsest!r}."
            )
        if len(self.grid(steps)) == 1:
            return Serial()
        return dataclasses.replace(self, start="guess") if warm else self

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        at_once = chain.at_once(self.at_once)
        transfer = [*self.needs(chain.total).transfers, None]
        (_, factor), *coarser = self.grid(chain.total)
        levels = [chain.finest(factor, at_once=at_once, transfer=fit_transfer(transfer[0], chain.y0))]
        for number, (_, factor) in enumerate(coarser, 1):
            finer = levels[-1]
            y0 = finer.y0 if finer.transfer is None else finer.transfer[0](finer.y0)
            step, xs, linearise_at = self._coarse.coarsen(chain, number, finer.interval_span, at_once=at_once)
            if linearise_at is not None and any(transfer):
                raise ValueError(
                    'coarse_step takes the states of the finest level (around="trajectory"), which do not fit on a level that '
                    f"`spatial` made smaller; got {self.coarse_step!r}. Leave one of the two out."
                )
            levels.append(
                dataclasses.replace(
                    finer,
                    xs=xs if factor == 1 else _tree.split(xs, factor),
                    step=step,
                    y0=y0,
                    steps=finer.intervals,
                    factor=factor,
                    number=number,
                    span=finer.interval_span,
                    at_once=max(1, at_once // finer.interval_span),
                    unroll=1,
                    transfer=fit_transfer(transfer[number], y0),
                    linearise_at=linearise_at,
                )
            )
        if self.coarsest.exact:
            levels[-1] = levels[-1].with_gathered(self.iterations)
        return tuple(levels)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        if self.start == "cascade":
            return Start(cascade(self, levels), spent=1)
        return Start(constant(levels[0], guess))

    def improve(self, levels: Sequence[Level], state: CPoints) -> tuple[CPoints, Scalar]:
        return fas_cycle(self, levels, state, self.cycle)

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, PyTree]:
        swept, emitted = sweep(levels[0], levels[0].incoming(u), advance=advance)
        return _tree.blend(self.c_weight, swept, u), emitted

    def pre_relax(self, level: Level, u: CPoints, *, points: bool) -> Relaxed:
        """Relax, then compute the residual; with the states that enter every step if ``points``."""
        relaxation = self._relaxation(level.number)
        count = self.c_relaxations(level.number)
        if callable(relaxation):
            u = relaxation(level, u)
        elif not points:
            return fcf_relax(level, u, count, self.c_weight)
        for _ in range(count):
            u = c_relax(level, u, self.c_weight)
        return with_points(level, u) if points else with_residual(level, u)

    def _relaxation(self, level: int) -> Relaxation:
        settings: tuple[Relaxation, ...] = _per_level(self.relaxation)
        return _at(settings, level)

    def _transfers(self) -> tuple[Transfer | None, ...]:
        if self.spatial is None:
            return (None,)
        single = len(self.spatial) == 2 and all(map(callable, self.spatial))
        return cast(tuple[Transfer | None, ...], (self.spatial,) if single else self.spatial)

    @property
    def _coarse(self) -> CoarseStep:
        return cast(CoarseStep, self.coarse_step)


def _per_level(setting: T | tuple[T, ...]) -> tuple[T, ...]:
    return setting if isinstance(setting, tuple) else (setting,)


def _at(settings: tuple[T, ...], level: int) -> T:
    return settings[min(level, len(settings) - 1)]
