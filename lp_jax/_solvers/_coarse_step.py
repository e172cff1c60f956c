"""Coarse steps, which replace an interval's layers on a coarse level: their interface, and a plain function as one."""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from lp_jax._arrays import _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Layer, Points, PyTree, Slices, SliceStep, State, Transfer
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, identity
from lp_jax._levels._transfer import fit_transfer


class Coarse(NamedTuple):
    """The steps of a coarse level.

    Attributes:
        step: ``step(u, x, shared) -> u_next``, through one interval.
        xs: its operands, leaves ``(intervals, ...)``.
        linearise_at: puts the F-point states of the last relaxation into the operands; None where the step does not need them.
    """

    step: SliceStep
    xs: PyTree
    linearise_at: Callable[[PyTree, Points], PyTree] | None = None


def coarser(level: Level, coarse: Coarse, factor: int = 1, transfer: Transfer | None = None) -> Level:
    """The level whose steps are the intervals of ``level``, itself in intervals of ``factor`` steps."""
    y0 = level.y0 if level.transfer is None else level.transfer[0](level.y0)
    return dataclasses.replace(
        level,
        xs=coarse.xs if factor == 1 else _tree.split(coarse.xs, factor),
        step=coarse.step,
        y0=y0,
        steps=level.intervals,
        factor=factor,
        number=level.number + 1,
        span=level.interval_span,
        at_once=max(1, level.at_once // level.factor),
        unroll=1,
        transfer=fit_transfer(transfer, y0),
        linearise_at=coarse.linearise_at,
    )


class CoarseStep(abc.ABC):
    """A step of a coarse level of `MGRIT`; it replaces the layers of an interval.

    Example:
        The first layer of each interval, with its own dt:

        >>> import dataclasses, jax, jax.numpy as jnp, lp_jax
        >>> @lp_jax.register()
        ... @dataclasses.dataclass(frozen=True)
        ... class First(lp_jax.CoarseStep):
        ...     def coarsen(self, chain, level, span, *, at_once):
        ...         return lp_jax.Coarse(chain.step(level), jax.tree.map(lambda x: x[::span], chain.slices))
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> solver = lp_jax.MGRIT(coarsening=4, iterations=16, coarse_step=First())  # exact after as many cycles as intervals
        >>> bool(jnp.allclose(problem.solve(solver=solver).y1, problem.solve(solver=lp_jax.Serial()).y1))
        True
    """

    @property
    def stretches_dt(self) -> bool:
        """Whether one step with a longer dt replaces several layers, so that the step must use its dt."""
        return False

    @abc.abstractmethod
    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        """Make the steps of a coarse level.

        Args:
            chain: all layers.
            level: number of the coarse level.
            span: number of layers in an interval.
            at_once: number of layers that are evaluated at once, where they do not depend on each other.
        """


@register()
@dataclasses.dataclass(frozen=True)
class Identity(CoarseStep):
    """The identity as coarse step: the coarse problem is a prefix sum, with no sequential part.

    Example:
        >>> import lp_jax
        >>> lp_jax.MGRIT(coarse_step=lp_jax.Identity()).coarse_step
        Identity()
    """

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        return Coarse(identity, _tree.split(chain.slices, span))


@register()
@dataclasses.dataclass(frozen=True)
class PerInterval(CoarseStep):
    """A plain function ``f(step, y, layers) -> y`` as a coarse step.

    Args:
        function: ``layers`` is a `Layer` whose leaves have the interval's layers as leading axis; ``shared`` and
            ``level`` are None there. ``step(y, layer)`` is the user's own step, which sees both.
    """

    function: Callable[[Callable[[State, Layer], State], State, Layer], State]

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        step = chain.step(level)

        def through(u: State, x: Slices, shared: PyTree) -> State:
            def one(y: State, layer: Layer) -> State:
                return step(y, Slices(layer.params, layer.data, layer.t, layer.dt, layer.index), shared)

            return self.function(one, u, Layer(x.params, None, x.data, x.t, x.dt, x.index, None))  # type: ignore[arg-type]

        return Coarse(through, _tree.split(chain.slices, span))
