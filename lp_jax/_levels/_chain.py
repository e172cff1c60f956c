"""The problem as the solvers receive it: a chain of layers, not yet grouped into intervals."""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._types import PyTree, Slices, State, StepKey, Transfer
from lp_jax._comms._workers import Local, Workers
from lp_jax._levels._layer import Linearised, Traced
from lp_jax._levels._level import Level


@register("slices", "shared", "y0")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers that follow each other, ``u[n+1] = step(u[n], slices[n], shared)``, ``u[0] = y0``."""

    traced: Traced  # the layers of the whole network, without their operands
    slices: Slices  # stacked operands of this worker's layers; padding has an index >= ``layers``
    shared: PyTree
    y0: State
    workers: Workers
    padded: bool  # whether layers check for padding, on which they are the identity
    # of the chain of one interval the level whose coarse step it is, as its layers are that level's; None for the whole network
    level: int | None = None

    def at_once(self, setting: int | float | str, least: int = 1) -> int:
        """Number of layers that a solver with this setting evaluates at once on each worker. A number is raised to ``least``."""
        # In a batch JAX draws other random numbers from some kinds of keys, so layers that use them are evaluated one by one.
        if self.traced.footprint.alone:
            return 1
        if setting == "auto":
            return self.workers.processor.at_once(self.traced.footprint, self.steps)
        return max(least, int(min(cast(float, setting), self.steps)))

    @property
    def layers(self) -> int:
        """Number of layers of the whole network."""
        return self.traced.layers

    @property
    def total(self) -> int:
        """Number of layers of the chain, of all workers."""
        return self.workers.layers

    @property
    def steps(self) -> int:
        """Number of slices on this worker."""
        return self.slices.index.shape[0]

    def step(
        self, which: StepKey, *, aux: bool = False, in_turn: bool = False
    ) -> Callable[..., PyTree]:
        """The layer on a level, or another of the user's steps; with aux it returns ``(u_next, aux)``.

        On the chain of an interval it is always the layer on that interval's level. ``in_turn`` says that layers are evaluated
        one after another, never in a batch.
        """
        step = dict(self.traced.steps)[which if self.level is None else self.level]
        layers = self.layers if self.padded else None
        return functools.partial(step.evaluate, aux=aux, in_turn=in_turn, layers=layers)

    @property
    def linearised(self) -> Linearised:
        """The layer of the finest level, linearised."""
        return Linearised(
            self.step(0, aux=True), self.traced.differentiable, weights=self.traced.recurrent
        )

    def finest(self, factor: int, *, at_once: int, transfer: Transfer | None = None) -> Level:
        """The chain as a level of intervals of ``factor`` layers."""
        return Level(
            xs=self.slices if factor == 1 else _tree.split(self.slices, factor),
            shared=self.shared,
            y0=self.y0,
            step=self.step(0),
            factor=factor,
            workers=self.workers,
            at_once=at_once,
            unroll=self.workers.processor.serial_unroll(self.traced.footprint),
            transfer=transfer,
            chain=self,
        )

    def interval(self, level: int, slices: Slices, shared: PyTree, y0: State, unit: int) -> "Chain":
        """The layers of one interval as a chain of its own, for a solver that works in units of ``unit`` layers."""
        layers = slices.index.shape[0]
        workers = Local(layers=layers, held=(layers,), processor=self.workers.processor).fit(unit)
        # The interval itself may end with padding of the network.
        padded = self.padded or workers.padded
        slices = pad_slices(slices, workers.held[0], self.layers)
        return dataclasses.replace(
            self, slices=slices, shared=shared, y0=y0, workers=workers, padded=padded, level=level
        )


def pad_slices(slices: Slices, n: int, layers: int) -> Slices:
    """Pad to ``n`` slices. A step passes the state on unchanged where the index is at least ``layers``, as in the new ones."""
    length: int = slices.index.shape[0]
    if n == length:
        return slices

    padded: Slices = _tree.resize(slices, n)
    # `resize` repeats the last slice, whose index and dt do not mark padding.
    more = jnp.arange(layers, layers + n - length, dtype=jnp.int32)
    dt = jnp.concatenate([slices.dt, jnp.zeros_like(more, slices.dt.dtype)])
    return padded._replace(index=jnp.concatenate([slices.index, more]), dt=dt)
