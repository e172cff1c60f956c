"""The problem as the solvers receive it: a chain of layers, before any of them decides how to group it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import Footprint
from lp_jax._arrays._types import Advance, PyTree, Slices, SliceStep, Stacked, State, Transfer
from lp_jax._comms._workers import Local, Workers
from lp_jax._levels._level import Level
from lp_jax._levels._linear import Linearised


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers that follow each other, ``u[n+1] = step(u[n], slices[n], shared)``, ``u[0] = y0``.

    Attributes:
        layer: ``layer(level)`` is the layer on a level, ``(u, x, shared) -> (u_next, aux)``; in the place of a level may stand
            another of the user's steps. It is the identity on slices that only pad.
        slices: stacked operands of this worker's layers. Padding has index >= ``layers``.
        shared: operand of every step.
        y0: the state that enters.
        layers: number of layers of the whole network.
        padded: whether layers check for slices that only pad.
        workers: where the layers live.
        differentiable: which leaves of ``slices`` have a gradient.
        recurrent: whether all other leaves that have one are in ``shared``: the weights of a recurrent network.
        footprint: what a layer costs and holds.
        alone: whether a layer takes a single example, too.
    """

    layer: Callable[[Any], Advance]
    slices: Slices
    shared: PyTree
    y0: State
    layers: int
    padded: bool
    workers: Workers
    differentiable: tuple[bool, ...] = ()
    recurrent: bool = False
    footprint: Footprint = Footprint(0, 0, 0.0)
    alone: bool = False

    def at_once(self, setting: int | float | str) -> int:
        """How many layers a solver with this setting evaluates at once, on each worker."""
        if setting == "auto":
            return self.workers.processor.at_once(self.footprint, self.steps)
        return max(1, int(min(cast(float, setting), self.steps)))

    @property
    def total(self) -> int:
        """Number of layers of the chain, of all workers."""
        return self.workers.layers

    @property
    def steps(self) -> int:
        """Number of slices on this worker."""
        return self.slices.index.shape[0]

    def step(self, level: "int | Callable") -> SliceStep:
        """The layer on ``level``, or as another of the user's steps, aux dropped."""
        layer = self.layer(level)
        return lambda u, x, shared: layer(u, x, shared)[0]

    def emitting(self, seen: Sequence[bool]) -> Advance:
        """The layer on the finest level, emitting those inexact leaves of aux that are ``seen``."""
        layer = self.layer(0)

        def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, list[jax.Array]]:
            u_next, aux = layer(u, x, shared)
            leaves, _ = _tree.partition(jax.tree.map(jnp.asarray, aux) if seen else None)
            return u_next, [leaf for leaf, wanted in zip(leaves, seen, strict=True) if wanted]

        return advance

    @property
    def linearised(self) -> Linearised:
        """A layer of the finest level, to be transposed."""
        return Linearised(self.layer(0), self.differentiable, weights=self.recurrent)

    def finest(self, factor: int, *, at_once: int, transfer: Transfer | None = None) -> Level:
        """The chain as a level of intervals of ``factor`` layers."""
        return Level(
            xs=self.slices if factor == 1 else _tree.split(self.slices, factor),
            shared=self.shared,
            y0=self.y0,
            step=self.step(0),
            steps=self.steps,
            factor=factor,
            workers=self.workers,
            at_once=at_once,
            transfer=transfer,
            alone=self.alone,
        )

    def interval(self, level: int, slices: Slices, shared: PyTree, y0: State, unit: int) -> "Chain":
        """The layers of one interval as a chain of its own, for a solver that works in units of ``unit`` layers."""
        layers = slices.index.shape[0]
        workers = Local(layers=layers, held=(layers,), processor=self.workers.processor).fit(unit)
        layer = self.layer(level)
        if workers.padded and not self.padded:
            layer = guarded(layer, self.layers)
        return Chain(
            layer=lambda _: layer,
            slices=pad_slices(slices, workers.held[0], self.layers),
            shared=shared,
            y0=y0,
            layers=self.layers,
            padded=self.padded or workers.padded,
            workers=workers,
            footprint=self.footprint,
        )


def guarded(layer: Advance, layers: int) -> Advance:
    """``layer``, as the identity on what only pads: slices whose index is not below the number of layers."""

    def guard(u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
        u_next, aux = layer(u, x, shared)
        return _tree.where(x.index < layers, u_next, u), aux

    return guard


def pad_slices(slices: Slices, n: int, layers: int) -> Slices:
    """``n`` slices; those added to the given ones are inert, as their index is the number of layers."""
    given: int = slices.index.shape[0]
    if n == given:
        return slices

    def rest(x: jax.Array, value: Any) -> Stacked:
        return jnp.concatenate([x, jnp.full((n - given,), value, x.dtype)])

    padded: Slices = _tree.resize(slices, n)
    return padded._replace(index=rest(slices.index, layers), dt=rest(slices.dt, 0))
