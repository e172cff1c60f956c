"""Multigrid-reduction-in-time over the layers."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, cast

import jax

from lp_jax import _check, _tree
from lp_jax._chain import Chain
from lp_jax._cycle import VISITS, cascade, fas_cycle
from lp_jax._level import Advance, Level, Transfer, sweep
from lp_jax._newton import Newton
from lp_jax._path import Stop, cascade_stops, cycle_stops, path
from lp_jax._picard import Picard
from lp_jax._pytree import register
from lp_jax._rediscretize import Rediscretize
from lp_jax._serial import Serial
from lp_jax._solver import Solver, constant
from lp_jax._transfer import fitted
from lp_jax._types import State
from lp_jax._work import Held, Sizes, Work


@register("rtol", "atol", "c_weight", "coarse_step", "coarsest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MGRIT(Solver):
    """Multigrid-reduction-in-time: all layers at once, iteratively, to the same answer as one after another.

    Args:
        levels: number of levels, the finest included; 1 is serial propagation. Coarsening stops earlier where a level
            would have fewer than ``min_coarse`` steps.
        coarsening: coarsening factor m, or one per level (the last one repeats).
        iterations: number of cycles; with a tolerance their largest number.
        rtol: stop when the residual norm is at most this times the first one that was measured.
        atol: stop when the residual norm is at most this.
        relaxation: "F", "FCF", "FCFCF", ..., or one per level, finest first (the last one repeats).
        c_weight: weight w of C-relaxation, ``u_c <- w Phi(u[c-1]) + (1 - w) u_c``.
        cycle: "V", "F" or "W".
        skip_downcycle: make the first iteration the coarse-to-fine cascade: solve the coarsest level, then inject and
            F-relax level by level. It needs no guess and uses none.
        min_coarse: fewest steps of the coarsest level.
        coarse_step: what stands in for the layers of an interval on the coarse levels: `Rediscretize`, or any solver
            with fixed effort: `Picard`, `Newton`, `Serial`.
        coarsest: solver of the coarsest level: `Serial`, `Picard` or `Newton`.
        spatial: None, or per level (the last one repeats) a pair (restrict, prolong) of linear functions on the state,
            or None where the state keeps its size; `spatial` makes such pairs. Needs C-relaxation there ("FCF"): what a
            restriction drops is corrected by nothing else.
        storage: what the adjoint finds: "c_points" (one state per interval; the others are recomputed, and
            each layer linearised again, in every sweep) or "all" (what a scan's gradient keeps; no layer is evaluated again).
        interval_map: "vmap" (all intervals as one batch), "loop" (one after another, least memory), or "auto": loop on
            a CPU, batch on an accelerator.

    Raises:
        ValueError: for a value out of range, naming the field.
        TypeError: for a number of levels, a factor or a number of iterations that is no integer.

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
    relaxation: str | tuple[str, ...] = ("F", "FCF")
    c_weight: float | jax.Array = 1.0
    cycle: str = "V"
    skip_downcycle: bool = True
    min_coarse: int = 2
    coarse_step: Rediscretize | Solver = Picard(sweeps=1)
    coarsest: Serial | Picard | Newton = Serial()
    spatial: Transfer | tuple[Transfer | None, ...] | None = None
    storage: str = "c_points"
    interval_map: str = "auto"

    def __post_init__(self) -> None:
        _check.integer("levels", self.levels, least=1)
        _check.integer("iterations", self.iterations, least=1)
        _check.integer("min_coarse", self.min_coarse, least=1)
        for factor in _per_level(self.coarsening):
            _check.integer("coarsening", factor, least=2)
        for relaxation in _per_level(self.relaxation):
            if not (isinstance(relaxation, str) and re.fullmatch("F(CF)*", relaxation)):
                raise ValueError(f'relaxation must be "F", "FCF", "FCFCF", ... (or one per level); got {relaxation!r}.')
        _check.one_of("cycle", self.cycle, VISITS)
        _check.one_of("storage", self.storage, ("c_points", "all"))
        _check.one_of("interval_map", self.interval_map, ("vmap", "loop", "auto"))
        for pair in self._transfers():
            if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2 and all(map(callable, pair))):
                raise ValueError(
                    f"spatial must be None or per level a pair (restrict, prolong) of functions; got {pair!r}."
                )

    def c_relaxations(self, level: int) -> int:
        """Number of C-relaxations (each followed by F) in the pre-relaxation on ``level``."""
        return _at(_per_level(self.relaxation), level).count("C")

    def plan(self, steps: int) -> list[tuple[int, int]]:
        """(steps, coarsening factor) of every level, finest first; the coarsest has factor 1."""
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
    def keeps_states(self) -> bool:
        return self.storage == "all"

    def resolve(self, steps: int) -> Solver:
        return self if len(self.plan(steps)) > 1 else Serial()

    def check(self) -> None:
        if not isinstance(self.coarse_step, Rediscretize | Solver):
            raise TypeError(
                "coarse_step must be Rediscretize(...) or a solver with fixed effort, like Picard(sweeps=1) or Serial(); got "
                f"{self.coarse_step!r}. Injection is Rediscretize(params='inject')."
            )
        if not isinstance(self.coarsest, Serial | Picard | Newton):
            raise TypeError(f"coarsest must be Serial(), Picard(...) or Newton(...); got {self.coarsest!r}.")
        if getattr(self.coarsest, "windows", 1) > 1:
            raise ValueError(f"coarsest must sweep over its whole level; got {self.coarsest!r}. Leave windows out.")
        if getattr(self.coarse_step, "around", None) == "trajectory" and any(self._transfers()):
            raise ValueError(
                'coarse_step=Picard(around="trajectory") takes the states of the finest level, which do not fit on a level that '
                "`spatial` made smaller. Leave one of the two out."
            )

    def stride(self, steps: int) -> int:
        return self.plan(steps)[0][1]

    def unit(self, steps: int) -> int:
        return math.prod(factor for _, factor in self.plan(steps))

    def transfers(self, steps: int) -> list[Transfer | None]:
        return [_at(self._transfers(), level) for level in range(len(self.plan(steps)) - 1)]

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        plan = self.plan(chain.total)
        looped = chain.looped if self.interval_map == "auto" else self.interval_map == "loop"
        transfer = [*self.transfers(chain.total), None]
        levels = [chain.finest(plan[0][1], looped=looped, transfer=fitted(transfer[0], chain.y0))]
        for number, (total, factor) in enumerate(plan[1:], 1):
            finer = levels[-1]
            span = finer.span * finer.factor
            y0 = finer.y0 if finer.transfer is None else finer.transfer[0](finer.y0)
            parts = self.coarse_step.coarsen(chain, number, span, looped=looped)
            levels.append(
                Level.of(
                    **parts,
                    shared=chain.shared,
                    y0=y0,
                    steps=finer.intervals,
                    total=total,
                    factor=factor,
                    span=span,
                    looped=looped,
                    transfer=fitted(transfer[number], y0),
                    comm=chain.comm,
                )
            )
        if len(levels) > 1 and isinstance(self.coarsest, Serial):
            levels[-1] = levels[-1].collected(self.iterations)
        return tuple(levels)

    def start(self, levels: Sequence[Level], guess: State | None) -> tuple[State, int]:
        if self.skip_downcycle and len(levels) > 1:
            return cascade(self, levels), 1
        return constant(levels[0], guess), 0

    def improve(self, levels: Sequence[Level], u: State) -> tuple[State, jax.Array]:
        return fas_cycle(self, levels, u)

    def finish(self, levels: Sequence[Level], u: State, advance: Advance | None) -> tuple[State, Any]:
        swept, emitted = sweep(levels[0], levels[0].entries(u), advance=advance)
        return _tree.blend(self.c_weight, swept, u), emitted

    def _transfers(self) -> tuple[Transfer | None, ...]:
        if self.spatial is None:
            return (None,)
        single = len(self.spatial) == 2 and all(map(callable, self.spatial))
        return cast(tuple[Transfer | None, ...], (self.spatial,) if single else self.spatial)

    iteration_name = "cycle"

    def variants(self) -> dict[str, Solver]:
        others: dict[str, Rediscretize | Solver] = {
            "injection": Rediscretize(params="inject"),
            "mean of parameters": Rediscretize(params="mean"),
            "1 Picard sweep": Picard(sweeps=1),
            "2 Picard sweeps": Picard(sweeps=2),
        }
        if self.coarse_step not in others.values():
            others["this run's coarse step"] = self.coarse_step
        return {name: dataclasses.replace(self, coarse_step=step) for name, step in others.items()}

    evaluates = "intervals"

    def grid(self, steps: int) -> list[tuple[int, int]]:
        return self.plan(steps)

    def _relaxations(self, levels: int) -> tuple[str, ...]:
        return tuple("F" + "CF" * self.c_relaxations(level) for level in range(levels))

    def stops(self, steps: int, iterations: int) -> list[Stop]:
        relaxations = self._relaxations(len(self.grid(steps)))
        return path(relaxations, self.cycle, iterations, skip=self.skip_downcycle)

    def loops(self, looped: bool) -> bool:
        return looped if self.interval_map == "auto" else self.interval_map == "loop"

    def count(self, work: Work) -> None:
        work = dataclasses.replace(work, looped=self.loops(work.looped), in_rows=True)
        grid = self.grid(work.layers)
        relaxations = self._relaxations(len(grid))
        first = cascade_stops if self.skip_downcycle else cycle_stops
        for stops, times in ((first, 1), (cycle_stops, self.iterations - 1)):
            once = work.apart()
            self._count_stops(once, grid, stops(relaxations, self.cycle))
            work.schedule.include(once.schedule, times)
        intervals, factor = _intervals(grid[0], work.workers), grid[0][1]
        work.evaluate(factor, intervals, gradient=True)
        work.sent(1)
        work.evaluate_again(factor - 1, intervals)

    def _count_stops(self, work: Work, grid: Sequence[tuple[int, int]], stops: Sequence[Stop]) -> None:
        """Record a cycle, up to where its last F-points would be interpolated."""
        spans = [math.prod(factor for _, factor in grid[:level]) for level in range(len(grid))]
        levels = [work, *(work.on(grid[n][0], self.coarse_step, spans[n]) for n in range(1, len(grid)))]
        for stop, following in zip(stops, [*stops[1:], None], strict=True):
            at, level, factor = stop.level, levels[stop.level], grid[stop.level][1]
            intervals = _intervals(grid[at], work.workers)
            if stop.label == "solve":
                self._count_coarsest(level)
            elif following is not None and following.level > at:
                sweeps = stop.label.count("F")
                for _ in range(sweeps):
                    level.steps(factor, intervals)
                    if at == 0 and level.looped:  # states at F-points, in every sweep
                        level.evaluate_again(factor - 1, intervals)
                level.sent(sweeps)
                levels[at + 1].steps(1, intervals)
            elif at > 0:
                level.steps(factor - 1, intervals)
                level.sent(1)

    def _count_coarsest(self, level: Work) -> None:
        if self.coarse_step.is_identity:
            level.sent(level.prefix)
        else:
            self.coarsest.count(level)

    def held(self, sizes: Sizes) -> Held:
        grid = self.grid(sizes.layers)[:-1]
        intervals = [_intervals(level, sizes.workers) for level in grid]
        working = _OF_A_CYCLE * sum(intervals) * sizes.state
        if self.keeps_states:
            return Held(sizes.mine * sizes.linearised, working)
        looped = self.loops(sizes.looped)
        recomputed = grid[0][1] * sizes.linearised if looped else _F_POINTS * sizes.mine * sizes.state
        return Held(intervals[0] * sizes.state, working + recomputed)

    def describe(self, steps: int) -> tuple[str, str]:
        grid = self.grid(steps)
        rest = f"only {grid[-1][0]} coarse steps remain one after another"
        if self.coarse_step.is_identity:
            rest = "the coarse solve is a prefix sum"
        note = "F, C: relaxation of the F- and C-points; FC at the end: final sweep."
        return f"{steps} layers on {len(grid)} levels: {rest}", f"{note} Coarse step: {self.coarse_step.summary()}."

    def label(self, adjoint: Solver) -> str:
        coarse = "identity" if self.coarse_step.is_identity else type(self.coarse_step).__name__
        if isinstance(self.coarse_step, Solver) and self.coarse_step.iterations:
            coarse = f"{coarse} {self.coarse_step.iterations}"
        return f"{self.iterations}/{adjoint.iterations} cycles, {coarse}, m = {self.coarsening}"


_OF_A_CYCLE = 8  # arrays of C-points per level, forward and adjoint
_F_POINTS = 2  # arrays of all states, where intervals are recomputed as one batch


def _intervals(level: tuple[int, int], workers: int) -> int:
    """Return the number of intervals of a level on the busiest worker."""
    steps, factor = level
    return math.ceil(math.ceil(steps / factor) / workers)


def _per_level(setting: Any) -> tuple:
    return setting if isinstance(setting, tuple) else (setting,)


def _at(settings: tuple, level: int) -> Any:
    return settings[min(level, len(settings) - 1)]
