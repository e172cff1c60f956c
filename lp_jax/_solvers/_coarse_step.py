"""Coarse steps, which replace an interval's layers on a coarse level: their interface, and those that are no solvers."""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._types import Layer, Points, PyTree, Slices, SliceStep, Stacked, State, Transfer
from lp_jax._comms._workers import select
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, identity


class Coarse(NamedTuple):
    """The steps of a coarse level."""

    step: SliceStep  # ``step(u, x, shared) -> u_next``, through one interval
    xs: PyTree  # its operands, leaves ``(intervals, ...)``
    # ``with_states(xs, states) -> xs``: puts the states that entered the interval's layers in the last relaxation into ``xs``
    with_states: Callable[[PyTree, Points], PyTree] | None = None


def coarser(
    level: Level, coarse: Coarse, factor: int = 1, transfer: Transfer | None = None
) -> Level:
    """The level whose steps are the intervals of ``level``, itself in intervals of ``factor`` steps."""
    y0 = level.y0 if level.transfer is None else level.transfer[0](level.y0)
    return dataclasses.replace(
        level,
        xs=coarse.xs if factor == 1 else _tree.split(coarse.xs, factor),
        step=coarse.step,
        y0=y0,
        factor=factor,
        number=level.number + 1,
        span=level.interval_span,
        # A coarse step may evaluate all layers of its interval at once.
        at_once=max(1, level.at_once // level.factor),
        unroll=1,
        transfer=transfer,
        with_states=coarse.with_states,
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

    @property
    def summary(self) -> str:
        """A few words on it, for titles and notes; by default the name of its class."""
        return type(self).__name__

    @abc.abstractmethod
    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        """Make the steps of a coarse ``level`` of all layers, the ``chain``, in intervals of ``span`` of them.

        Layers that do not depend on each other are evaluated ``at_once`` at a time.
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

    summary = "the identity"

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        return Coarse(identity, _tree.split(chain.slices, span))


@register()
@dataclasses.dataclass(frozen=True)
class PerInterval(CoarseStep):
    """A function ``f(step, y, layers) -> y`` as in `MGRIT`; only ``step`` sees ``shared`` and ``level``."""

    function: Callable[[Callable[[State, Layer], State], State, Layer], State]

    @property
    def summary(self) -> str:
        return f"the function {getattr(self.function, '__name__', self.function)}"

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        step = chain.step(level)

        def through(u: State, x: Slices, shared: PyTree) -> State:
            return self.function(
                lambda y, layer: step(
                    y, Slices(layer.params, layer.data, layer.t, layer.dt, layer.index), shared
                ),
                u,
                Layer(x.params, None, x.data, x.t, x.dt, x.index, None),  # type: ignore[arg-type]
            )

        return Coarse(through, _tree.split(chain.slices, span))


@register()
@dataclasses.dataclass(frozen=True)
class Rediscretize(CoarseStep):
    """The field's standard coarse step: the user's own step, once per interval, with the interval's whole dt.

    It needs a step that is a one-step method of an ODE, so that dt can be stretched, and costs one evaluation.

    Args:
        params: parameters of the coarse step. "inject": those of the interval's first layer; "mean": the mean over its
            layers; or a pure function of the interval's stacked parameters (leaves ``(k, ...)``, k the number of fine
            layers) that returns one layer's. Per-layer ``data`` follow the same rule: injected, or averaged where they
            are floating point; a function applies to parameters only and data are injected.

    Raises:
        ValueError: for an unknown ``params``.

    Example:
        >>> import lp_jax
        >>> lp_jax.MGRIT(coarse_step=lp_jax.Rediscretize(params="mean")).coarse_step
        Rediscretize(params='mean')
    """

    params: str | Callable[[PyTree], PyTree] = "inject"
    stretches_dt = True

    def __post_init__(self) -> None:
        if not callable(self.params):
            _check.one_of("params", self.params, ("inject", "mean"), otherwise="or a function")

    @property
    def summary(self) -> str:
        rule = self.params if isinstance(self.params, str) else "a function"
        return f"the layer with the interval's dt, parameters by {rule}"

    def coarsen(self, chain: Chain, level: int, span: int, *, at_once: int) -> Coarse:
        slices, weights = chain.slices, None
        if self.params == "mean":  # without padding
            # Slots beyond the last layer have weight 0.
            groups = _tree.split((slices.index < chain.layers).astype(slices.dt.dtype), span)
            weights = groups / jnp.maximum(1, jnp.sum(groups, axis=1, keepdims=True))

        def one(x: jax.Array) -> jax.Array:
            if weights is None or not _tree.inexact(x):
                return x[::span]
            # a product, as XLA's sum over such an axis is slow on a CPU
            return jnp.einsum(
                "gs,gs...->g...", weights.astype(x.dtype), _tree.split(x, span), precision="highest"
            )

        # A coarse layer uses the key of a fine one again, which `jax_debug_key_reuse` would report.
        params, data = _tree.with_fresh_keys((slices.params, slices.data))
        rule = self.params if jax.tree.leaves(params) else "inject"
        coarse = Slices(
            params=_of_intervals(rule, params, chain, span)
            if callable(rule)
            else jax.tree.map(one, params),
            data=jax.tree.map(one, data),
            t=slices.t[::span],
            # The coarse step covers the time of the whole interval; padding has dt = 0.
            dt=jnp.sum(_tree.split(slices.dt, span), axis=1),
            index=slices.index[::span],
        )
        return Coarse(chain.step(level), coarse)


def _of_intervals(
    rule: Callable[[PyTree], PyTree], params: Stacked, chain: Chain, span: int
) -> Stacked:
    """Apply ``rule`` to every interval, without padding where the last interval is short."""
    values = jax.vmap(rule)(_tree.split(params, span))
    if chain.total % span == 0 or chain.steps == 0:
        return values
    # `at` is the position of the last layer on the worker that has it; the shapes of a short interval are static.
    here, at = chain.workers.end(1, chain.steps)
    last = at // span
    short = rule(_tree.at(params, slice(last * span, at + 1)))
    return _tree.put(values, select(here, short, _tree.take(values, last)), last)


def rediscretize(
    level: Level, params: str | Callable[[PyTree], PyTree] | CoarseStep = "inject", factor: int = 1
) -> Level:
    """Return the next coarser level: ``Phi'_j(u) = Phi(u; params_j, t_j, m dt)``, one layer in the place of each interval.

    Args:
        level: a level of the layers, not of an adjoint.
        params: parameters of the coarse layers, as for `Rediscretize`; or another coarse step, as ``MGRIT.coarse_step`` takes it.
        factor: coarsening factor of the new level, 1 for the coarsest.

    Raises:
        ValueError: for an adjoint level, and for unknown ``params``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import multigrid
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, _ = multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> multigrid.rediscretize(fine, "mean").steps, multigrid.rediscretize(fine, lp_jax.Picard(sweeps=2)).steps
        (16, 16)
    """
    if level.chain is None:
        raise ValueError(
            "rediscretize got an adjoint level. The coarse levels of an adjoint are those that a "
            "cycle is given."
        )
    coarse_step = params if isinstance(params, CoarseStep) else Rediscretize(params)
    steps = coarse_step.coarsen(
        level.chain, level.number + 1, level.interval_span, at_once=level.at_once
    )
    return coarser(level, steps, factor)
