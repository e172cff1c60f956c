"""What a training step does, before it is run: which batches of layers are evaluated one after another, and what is sent.

Counted as the solvers work, on the busiest of ``workers``; the tests compare it with the programs themselves.
"""

import collections
import dataclasses
import math
from typing import NamedTuple

from lp_jax._cycle import VISITS
from lp_jax._mgrit import MGRIT
from lp_jax._newton import Newton
from lp_jax._picard import Picard
from lp_jax._rediscretize import Rediscretize
from lp_jax._serial import Serial
from lp_jax._solver import Solver

KINDS = ("forward", "linearise", "adjoint", "gradient")


class Batch(NamedTuple):
    """Evaluations that need nothing of each other.

    Attributes:
        kind: "forward"; "linearise", a forward evaluation for the sake of its transpose; "adjoint", the transpose for the
            state; "gradient", that for the parameters; "newton", a Newton iteration with all that belongs to it: Jacobians, and
            the scan that solves with them.
        layers: how many.
    """

    kind: str
    layers: int


@dataclasses.dataclass
class Schedule:
    """A solve, or a training step.

    Attributes:
        batches: how often each batch is evaluated, one after the other.
        rows: of each kind, how many loops over layers that follow each other are started; counted in multigrid, where layers at
            once are evaluated one by one.
        states: messages of one state that are waited for, one after the other.
        reductions: sums and broadcasts over all workers.
    """

    batches: collections.Counter[Batch] = dataclasses.field(default_factory=collections.Counter)
    rows: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    states: int = 0
    reductions: int = 0

    def add(self, kind: str, count: int, layers: int, *, looped: bool, rows: int = 0) -> None:
        """``count`` batches of so many layers, or all of these one by one, in so many rows."""
        if count and layers:
            self.batches[Batch(kind, 1 if looped else layers)] += count * (layers if looped else 1)
            if looped and rows:
                self.rows[kind] += rows

    def __add__(self, other: "Schedule") -> "Schedule":
        return Schedule(
            self.batches + other.batches,
            self.rows + other.rows,
            self.states + other.states,
            self.reductions + other.reductions,
        )

    def work(self, *kinds: str) -> int:
        """Number of evaluations of these kinds (all by default)."""
        return sum(n * batch.layers for batch, n in self.batches.items() if batch.kind in (kinds or KINDS))

    def depth(self, *kinds: str) -> int:
        """Number of batches of these kinds (all by default)."""
        return sum(n for batch, n in self.batches.items() if batch.kind in (kinds or KINDS))


def training_step(
    solver: Solver, adjoint_solver: Solver, layers: int, *, workers: int = 1, looped: bool = False
) -> Schedule:
    """Value and gradient.

    Args:
        solver: of the forward solve.
        adjoint_solver: of the adjoint solve.
        layers: number of layers.
        workers: number of workers that the layers are spread over.
        looped: what ``interval_map="auto"`` means.

    Raises:
        NotImplementedError: for Newton's method within multigrid.
    """
    kept = solver.resolve(layers).keeps_states
    forward = solve(solver, layers, workers=workers, looped=looped, kept=kept)
    return forward + solve(adjoint_solver, layers, workers=workers, looped=looped, kept=kept, adjoint=True)


def solve(
    solver: Solver, layers: int, *, workers: int = 1, looped: bool = False, kept: bool = False, adjoint: bool = False
) -> Schedule:
    """A forward solve, or an adjoint one with the gradient that it gives.

    Args:
        solver: settings.
        layers: number of layers.
        workers: as for `training_step`.
        looped: as for `training_step`.
        kept: whether the forward solve leaves linearisations of all layers behind.
        adjoint: which of the two.
    """
    return _Solve(solver.resolve(layers), layers, workers, looped, kept, adjoint).count()


@dataclasses.dataclass
class _Solve:
    """One solve, as it is counted. Fields as for `solve`."""

    solver: Solver
    layers: int
    workers: int
    looped: bool
    kept: bool
    adjoint: bool
    schedule: Schedule = dataclasses.field(default_factory=Schedule)

    def count(self) -> Schedule:
        """Of the solve, the final sweep, and in an adjoint solve the gradient."""
        {Serial: self._serial, Picard: self._picard, Newton: self._newton, MGRIT: self._mgrit}[type(self.solver)]()
        if self.workers > 1:
            self.schedule.reductions += 2  # the last state, and the residual norms
        return self.schedule

    def _evaluate(
        self, count: int, layers: int, *, looped: bool, rows: int = 0, fine: bool = True, gradient: bool = False
    ) -> None:
        """Steps of a level whose evaluations are layers'; of the finest level, what is kept need not be linearised."""
        kinds = ["adjoint"] if self.adjoint else ["forward"]
        if self.adjoint and not (fine and self.kept):
            kinds.append("linearise")
        if self.adjoint and gradient:
            kinds.append("gradient")
        for kind in kinds:  # a layer is linearised and transposed in one loop
            self.schedule.add(kind, count, layers, looped=looped, rows=0 if kind == "linearise" else rows)

    def _serial(self) -> None:
        assert isinstance(self.solver, Serial)
        self._evaluate(self.layers, 1, looped=True, gradient=True)
        if self.workers > 1:
            self.schedule.states += self.workers - 1

    def _picard(self) -> None:
        assert isinstance(self.solver, Picard)
        sweeps, mine, hops = self.solver.sweeps, -(-self.layers // self.workers), prefix_messages(self.workers)
        if self.solver.windows > 1:
            span = self.solver.unit(self.layers)
            self._evaluate(-(-self.layers // span) * (sweeps - 1), span, looped=self.looped)
            self._sent(self.workers - 1)
            sweeps = 1
        self._evaluate(sweeps, mine, looped=self.looped)
        self._sent(sweeps * (1 + hops) + (self.adjoint or self.kept))
        self._last(mine)

    def _last(self, mine: int) -> None:
        """The final sweep of a solver that has a state after every layer: what is kept for the adjoint, or the gradient."""
        if self.adjoint and not self.kept:
            self.schedule.add("linearise", 1, mine, looped=self.looped)
        if self.adjoint:
            self.schedule.add("gradient", 1, mine, looped=self.looped)
        elif self.kept:
            self.schedule.add("forward", 1, mine, looped=self.looped)

    def _newton(self) -> None:
        assert isinstance(self.solver, Newton)
        mine, relaxations = -(-self.layers // self.workers), min(self.solver.relaxations, self.layers)
        self._evaluate(relaxations, mine, looped=self.looped)
        self.schedule.add("newton", self.solver.iterations, mine, looped=self.looped)
        prefix = 1 + prefix_messages(self.workers)
        self._sent(relaxations + self.solver.iterations * prefix + (self.adjoint or self.kept))
        self._last(mine)

    def _mgrit(self) -> None:
        assert isinstance(self.solver, MGRIT)
        plan = self.solver.grid(self.layers)
        for number in range(self.solver.iterations):
            self._cycle(plan, 0, self.solver.cycle, cascade=self.solver.skip_downcycle and number == 0)
        fine, factor = self._intervals(plan, 0), plan[0][1]
        self._evaluate(factor, fine, looped=self._loops, rows=fine, gradient=True)
        self._sent(1)
        if self.adjoint and not self.kept:  # states at F-points
            self.schedule.add("forward", factor - 1, fine, looped=self._loops, rows=fine)

    @property
    def _loops(self) -> bool:
        assert isinstance(self.solver, MGRIT)
        return self.looped if self.solver.interval_map == "auto" else self.solver.interval_map == "loop"

    def _intervals(self, plan: list[tuple[int, int]], level: int) -> int:
        """Intervals of a level on one worker."""
        steps, factor = plan[level]
        return math.ceil(math.ceil(steps / factor) / self.workers)

    def _steps(self, plan: list[tuple[int, int]], level: int, count: int, at_once: int) -> None:
        """``count`` steps of a level, one after the other, each at so many places."""
        assert isinstance(self.solver, MGRIT)
        if level == 0:
            self._evaluate(count, at_once, looped=self._loops, rows=at_once)
            if self.adjoint and not self.kept and self._loops:  # states at F-points, in every sweep
                self.schedule.add("forward", count - 1, at_once, looped=True, rows=at_once)
            return
        coarse, span = self.solver.coarse_step, math.prod(factor for _, factor in plan[:level])
        if isinstance(coarse, Rediscretize):
            self._evaluate(count, at_once, looped=self._loops, rows=at_once, fine=False)
        elif isinstance(coarse, Picard):
            count *= coarse.sweeps
            self._evaluate(count, at_once * span, looped=self._loops, rows=count * at_once, fine=False)
        elif isinstance(coarse, Serial):
            self._evaluate(count * span, at_once, looped=self._loops, rows=count * at_once, fine=False)
        else:
            raise NotImplementedError(f"{type(coarse).__name__} as a coarse step is not counted.")

    def _coarsest(self, plan: list[tuple[int, int]]) -> None:
        assert isinstance(self.solver, MGRIT)
        steps, level = plan[-1][0], len(plan) - 1
        coarse = self.solver.coarse_step
        if isinstance(coarse, Picard) and coarse.sweeps == 0:
            self._sent(prefix_messages(self.workers))
        elif isinstance(self.solver.coarsest, Serial):
            self._steps(plan, level, steps, 1)
            self._sent(self.workers - 1)
        elif isinstance(self.solver.coarsest, Picard):
            sweeps = self.solver.coarsest.sweeps
            self._steps(plan, level, sweeps, -(-steps // self.workers))
            self._sent(sweeps * (1 + prefix_messages(self.workers)))
        else:
            raise NotImplementedError("Newton's method is not counted within multigrid.")

    def _cycle(self, plan: list[tuple[int, int]], level: int, kind: str, *, cascade: bool) -> None:
        """A cycle from ``level`` down and up again; a cascade has no way down. Ends before F-points are interpolated."""
        assert isinstance(self.solver, MGRIT)
        here, factor = self._intervals(plan, level), plan[level][1]
        if not cascade:
            sweeps = self.solver.c_relaxations(level) + 1
            for _ in range(sweeps):
                self._steps(plan, level, factor, here)
            self._sent(sweeps)
            self._steps(plan, level + 1, 1, here)
        if level + 1 == len(plan) - 1:
            self._coarsest(plan)
        else:
            visits = VISITS[kind]
            for number, visit in enumerate(visits):
                self._cycle(plan, level + 1, visit, cascade=cascade and number == 0)
            self._steps(plan, level + 1, plan[level + 1][1] - 1, self._intervals(plan, level + 1))
            self._sent(1)

    def _sent(self, states: int) -> None:
        if self.workers > 1:
            self.schedule.states += states


def prefix_messages(workers: int) -> int:
    """Messages of a prefix sum over workers, one after the other."""
    return 0 if workers == 1 else 1 + max(0, workers - 2).bit_length()
