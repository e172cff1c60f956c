"""The problem as the solvers receive it: a chain of layers, before any of them decides how to group it."""

import dataclasses
from collections.abc import Callable

from lp_jax._comm import Local, Workers
from lp_jax._level import Level, Operand, Transfer, grouped
from lp_jax._types import PyTree, Slices, SliceStep, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """``steps`` layers that follow each other, ``u[n+1] = step(u[n], slices[n], shared)``, ``u[0] = y0``.

    Attributes:
        step_on: the step on each level, ``step_on(level)(u, slice, shared) -> u_next``.
        slices: stacked operands, leaves ``(steps, ...)``.
        shared: operand of every step.
        y0: the state that enters.
        steps: number of layers that this worker holds.
        total: number of layers of all workers.
        differentiable: which leaves of ``slices`` have a gradient.
        looped: what ``interval_map="auto"`` means here: loop (True) or batch.
        comm: where the layers live.
    """

    step_on: Callable[[int], SliceStep]
    slices: Slices
    shared: PyTree
    y0: State
    steps: int
    total: int
    differentiable: tuple[bool, ...] = ()
    looped: bool = False
    comm: Workers = Local()

    def finest(self, factor: int, *, looped: bool = False, transfer: Transfer | None = None) -> Level:
        """The chain as a level of intervals of ``factor`` layers."""
        return Level.of(
            step=self.step_on(0),
            xs=self.slices,
            steps=self.steps,
            total=self.total,
            factor=factor,
            shared=self.shared,
            y0=self.y0,
            looped=looped,
            transfer=transfer,
            comm=self.comm,
        )

    def grouped(self, level: int, span: int) -> tuple[SliceStep, Operand]:
        """The layers in groups of ``span``, and the step on ``level`` through one of them."""
        return grouped(self.step_on(level), self.slices, self.steps, span, cut=self.comm.cuts(self.total, span))

    def interval(self, step: SliceStep, operands: Operand, shared: PyTree, y0: State) -> "Chain":
        """One group of layers as a chain of its own, for a solver that stands in for a coarse step."""
        slices = operands.x._replace(valid=operands.valid)

        def guarded(u: State, x: Slices, shared: PyTree) -> State:
            return step(u, Operand(x, x.valid), shared)

        steps = slices.index.shape[0]
        return Chain(
            step_on=lambda _: guarded,
            slices=slices,
            shared=shared,
            y0=y0,
            steps=steps,
            total=steps,
            looped=self.looped,
        )
