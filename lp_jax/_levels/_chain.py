"""The problem as the solvers receive it: a chain of layers, not yet grouped into intervals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import Footprint
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Advance, PyTree, Slices, SliceStep, Stacked, State, Transfer, Which
from lp_jax._comms._workers import Local, Workers
from lp_jax._levels._level import Level
from lp_jax._levels._linear import Linearised


@register("slices", "shared", "y0")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers that follow each other, ``u[n+1] = step(u[n], slices[n], shared)``, ``u[0] = y0``.

    Attributes:
        layer: ``layer(which)`` is the layer on a level, or another of the user's steps, as ``(u, x, shared) -> (u_next, aux)``.
            It is the identity on padding.
        slices: stacked operands of this worker's layers. Padding has index >= ``layers``.
        shared: operand of every step.
        y0: the state that enters.
        layers: number of layers of the whole network.
        padded: whether layers check for padding.
        workers: where the layers live.
        differentiable: which leaves of ``slices`` have a gradient.
        recurrent: whether all other differentiable leaves are in ``shared``: the weights of a recurrent network.
        footprint: cost and memory of a layer.
        single_example: whether a layer also takes a single example.
    """

    layer: Callable[[Which], Advance]
    slices: Slices
    shared: PyTree
    y0: State
    layers: int
    padded: bool
    workers: Workers
    differentiable: tuple[bool, ...] = ()
    recurrent: bool = False
    footprint: Footprint = Footprint(0, 0, 0.0)
    single_example: bool = False

    def at_once(self, setting: int | float | str) -> int:
        """Number of layers that a solver with this setting evaluates at once, on each worker."""
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

    def step(self, which: Which) -> SliceStep:
        """The layer on a level, or another of the user's steps, without aux."""
        layer = self.layer(which)
        return lambda u, x, shared: layer(u, x, shared)[0]

    def emitting(self, seen: Sequence[bool]) -> Advance:
        """The layer on the finest level. It emits the inexact leaves of aux that are ``seen``."""
        layer = self.layer(0)

        def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, list[jax.Array]]:
            u_next, aux = layer(u, x, shared)
            leaves, _ = _tree.partition(jax.tree.map(jnp.asarray, aux) if seen else None)
            return u_next, [leaf for leaf, wanted in zip(leaves, seen, strict=True) if wanted]

        return advance

    @property
    def linearised(self) -> Linearised:
        """The layer of the finest level, linearised."""
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
            unroll=self.workers.processor.serial_unroll(self.footprint),
            transfer=transfer,
            single_example=self.single_example,
            chain=self,
        )

    def interval(self, level: int, slices: Slices, shared: PyTree, y0: State, unit: int) -> "Chain":
        """The layers of one interval as a chain of its own, for a solver that works in units of ``unit`` layers."""
        layers = slices.index.shape[0]
        workers = Local(layers=layers, held=(layers,), processor=self.workers.processor).fit(unit)
        layer = self.layer(level)
        if workers.padded and not self.padded:
            layer = skip_padding(layer, self.layers)
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


def skip_padding(layer: Advance, layers: int) -> Advance:
    """Make ``layer`` the identity on padding, slices with an index >= ``layers``."""

    def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
        u_next, aux = layer(u, x, shared)
        return _tree.where(x.index < layers, u_next, u), aux

    return advance


def pad_slices(slices: Slices, n: int, layers: int) -> Slices:
    """Pad to ``n`` slices; the new ones are inert, as their index is the number of layers."""
    length: int = slices.index.shape[0]
    if n == length:
        return slices

    def extend(x: jax.Array, value: int) -> Stacked:
        return jnp.concatenate([x, jnp.full((n - length,), value, x.dtype)])

    padded: Slices = _tree.resize(slices, n)
    return padded._replace(index=extend(slices.index, layers), dt=extend(slices.dt, 0))
