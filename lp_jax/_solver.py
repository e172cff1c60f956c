"""What every solver is: settings, and four small methods on a chain of layers."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from lp_jax import _tree
from lp_jax._chain import Chain
from lp_jax._iterate import iterate
from lp_jax._level import Advance, Level, Operand, Transfer
from lp_jax._path import Stop
from lp_jax._types import PyTree, State
from lp_jax._work import Held, Sizes, Uncounted, Work


class Solver(abc.ABC):
    """Solves a chain of layers, forward or adjoint, without knowing which.

    Subclasses are frozen, keyword-only dataclasses and pytrees: tolerances and weights are leaves, all else is
    structure. A solver with fixed effort also stands in for the coarse steps of `MGRIT` (`coarsen`).
    """

    rtol: Any = None
    atol: Any = None

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """Number of cycles, or their cap where there is a tolerance."""

    @property
    def keeps_states(self) -> bool:
        """Whether the forward solve leaves all states to the adjoint, or only one per stride."""
        return False

    def check(self) -> None:  # noqa: B027 (most have nothing to refuse)
        """Refuse settings that cannot solve a network, in words for the user."""

    def resolve(self, steps: int) -> "Solver":
        """The solver that this one comes down to for so many layers."""
        return self

    def for_adjoint(self) -> "Solver":
        """What solves the adjoint system, which is linear, where no other solver is named."""
        return self

    @abc.abstractmethod
    def stride(self, steps: int) -> int:
        """Number of layers between two states that the solver keeps, for a network of ``steps`` layers."""

    def unit(self, steps: int) -> int:
        """Number of layers that must live on one worker: the steps of the coarsest level, in layers."""
        return self.stride(steps)

    def transfers(self, steps: int) -> list[Transfer | None]:
        """How the state gets from each level to the next coarser one; None where it keeps its size."""
        return []

    @abc.abstractmethod
    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        """The levels that the solver works on, finest first."""

    @abc.abstractmethod
    def start(self, levels: Sequence[Level], guess: State | None) -> tuple[State, int]:
        """First C-points (leaves ``(intervals, ...)``), and how many of the iterations they cost."""

    @abc.abstractmethod
    def improve(self, levels: Sequence[Level], u: State) -> tuple[State, Any]:
        """One iteration on the C-points; also this worker's sum of squared residuals before its correction."""

    @abc.abstractmethod
    def finish(self, levels: Sequence[Level], u: State, advance: Advance | None) -> tuple[State, Any]:
        """The final sweep: last C-points, and what ``advance`` emitted at each step of the finest level."""

    def run(self, levels: Sequence[Level], guess: State | None = None) -> State:
        """C-points of the solution, with nothing measured."""
        u, _, _ = iterate(self, levels, guess)
        return self.finish(levels, u, None)[0]

    def coarsen(self, chain: Chain, level: int, span: int, *, looped: bool) -> dict[str, Any]:
        """This solver, run on the ``span`` layers of each interval, as the step of a coarse level.

        Args:
            chain: all layers.
            level: number of the coarse level.
            span: number of layers in an interval.
            looped: whether layers that do not depend on each other run one after another or as a batch.

        Returns:
            Fields of the `Level`: ``step``, ``xs`` and, where the step asks for states, ``anchor``.
        """
        self.require_fixed_effort()
        step, slices = chain.grouped(level, span)

        def solve_interval(u: State, xs: Operand, shared: PyTree) -> State:
            levels = self.discretize(chain.interval(step, xs, shared, u))
            return levels[0].exit(self.run(levels))

        return {"step": solve_interval, "xs": slices}

    @property
    def has_tolerance(self) -> bool:
        """Whether iterations end when a tolerance is met."""
        return self.rtol is not None or self.atol is not None

    def require_fixed_effort(self) -> None:
        """Refuse tolerances where the solver must be a function of the state."""
        if self.has_tolerance:
            raise ValueError(
                f"coarse_step={type(self).__name__}(...) got a tolerance, rtol={self.rtol}, atol={self.atol}; a coarse "
                "step must take a fixed effort to be a function of the state. Leave both out and set the iterations."
            )

    iteration_name: ClassVar[str] = "iteration"

    @property
    def exact(self) -> bool:
        """Whether the states are those of serial propagation, whatever the settings."""
        return False

    def with_effort(self, iterations: int) -> "Solver":
        """Return this solver with a fixed number of iterations and no tolerance.

        Raises:
            TypeError: for a solver without a field ``iterations``, which overrides this.
        """
        names = [field.name for field in dataclasses.fields(cast(Any, self))]
        if "iterations" not in names:
            raise TypeError(
                f"{type(self).__name__} has no field `iterations`; let its `with_effort` set the number of iterations."
            )
        without = {name: None for name in ("rtol", "atol") if name in names}
        return dataclasses.replace(cast(Any, self), iterations=iterations, **without)

    def summary(self) -> str:
        """Return a few words for titles and notes."""
        return counted(self.iterations, f"{type(self).__name__} {self.iteration_name}")

    def variants(self) -> "dict[str, Solver]":
        """Return the solvers, by name, that a picture of the gradient's error compares."""
        return {type(self).__name__: self}

    evaluates: ClassVar[str] = "batches"
    """How layers are evaluated where they run one after another: "batches", all of a sweep; "intervals"; or "series"."""

    def count(self, work: Work) -> None:
        """Record what a solve does, its last sweep and the gradient included.

        Raises:
            Uncounted: where the program is to be read instead, which is the default.
        """
        raise Uncounted

    def count_steps(self, work: Work, count: int, at_once: int) -> None:
        """Record ``count`` coarse steps, one after the other, each in ``at_once`` intervals of ``work.span`` layers.

        Raises:
            Uncounted: where the program is to be read instead, which is the default.
        """
        raise Uncounted

    @property
    def is_identity(self) -> bool:
        """Whether it does nothing as a coarse step, so that the coarse problem is a prefix sum."""
        return False

    def loops(self, looped: bool) -> bool:
        """Whether layers at once are evaluated one after another, given whether they are by default."""
        return looped

    def held(self, sizes: Sizes) -> Held:
        """Return what a training step with this solver holds: by default, what a sweep over all layers does."""
        if self.keeps_states:
            kept = sizes.mine * sizes.linearised
        else:
            kept = math.ceil(sizes.mine / self.stride(sizes.layers)) * sizes.state
        return Held(kept, _OF_A_SWEEP * sizes.mine * sizes.state)

    def grid(self, steps: int) -> list[tuple[int, int]]:
        """Return (steps, coarsening factor) of every level, finest first; the coarsest has factor 1."""
        return [(steps, 1)]

    def stops(self, steps: int, iterations: int) -> list[Stop]:
        """Return the path of ``iterations`` iterations through the levels; nothing where there is one level."""
        return []

    def describe(self, steps: int) -> tuple[str, str]:
        """Return a title and a note for a picture of a solve of ``steps`` layers."""
        return f"{steps} layers, {self.summary()}: no coarse level", ""

    def label(self, adjoint: "Solver") -> str:
        """Return a few words on this solver and its adjoint one, for the title of a plan."""
        if not self.has_tolerance:
            return self.summary()
        limit = f"{self.atol:.0e} absolute" if self.rtol is None else f"{self.rtol:.0e}"
        return f"{type(self).__name__} {self.iteration_name}s to {limit}"


_OF_A_SWEEP = 3  # arrays of all states: points, what was stepped, cotangents; increments add up on the way


def counted(number: int, what: str) -> str:
    """Return "1 sweep", "2 sweeps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def common_unit(solvers: Sequence[Solver], steps: int) -> int:
    """Number of layers that must live on one worker for all of these solvers of ``steps`` layers."""
    return math.lcm(*(solver.unit(steps) for solver in solvers))


def constant(level: Level, guess: State | None) -> State:
    """The guess, or ``y0`` at every C-point."""
    return _tree.repeat(level.y0, level.intervals) if guess is None else guess
