"""From the user's arguments to a chain: values that a step closes over, times, and what is refused.

Everything static about a solve is one hashable `Problem`; everything else is an array in `Operands`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from lp_jax import _inputs, _tree
from lp_jax._chain import Chain
from lp_jax._comm import Placement
from lp_jax._level import Level
from lp_jax._linear import Linearised
from lp_jax._solver import Solver
from lp_jax._types import Layer, PyTree, Slices, SliceStep, State, Step


class Operands(NamedTuple):
    """The arrays of a solve: those that are spread over the workers, and those that all of them have."""

    slices: Slices
    common: "Common"


class Common(NamedTuple):
    """What every worker has. ``closed_over`` are the traced values that the step closes over."""

    y0: State
    shared: PyTree
    closed_over: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """The user's step on one level, as a function of (state, slice, (shared, closed-over values))."""

    step: Step
    level: int

    def __call__(self, u: State, x: Slices, shared: tuple[PyTree, Sequence[jax.Array]]) -> Any:
        return self.step(u, Layer(x.params, shared[0], x.data, x.t, x.dt, x.index, self.level))


@dataclasses.dataclass(frozen=True, eq=False)
class HoistedStep:
    """The same for a step that closes over traced values: they become operands, so that they can be differentiated.

    ``custom_vjp`` refuses functions that close over tracers; a jaxpr with its constants as arguments is none.
    """

    jaxpr: jex_core.Jaxpr
    positions: tuple[int, ...]  # of its constants among the closed-over operands
    out_tree: Any

    def __call__(self, u: State, x: Slices, shared: tuple[PyTree, Sequence[jax.Array]]) -> Any:
        constants = [shared[1][i] for i in self.positions]
        call = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self.jaxpr, constants))
        return jax.tree.unflatten(self.out_tree, call(*jax.tree.leaves((u, x, shared[0]))))


Signature = tuple[int, tuple]  # level, and the shapes and dtypes of the state there


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about a solve.

    Attributes:
        table: the step for every level, and for every state where levels differ in size.
        placement: how many layers there are, and which of them this worker holds.
        differentiable: which leaves of the slices have a gradient: the inexact ones, times only where they are traced.
        has_aux: whether the step returns ``(y_next, aux)``.
        looped: what ``interval_map="auto"`` means here.
        recurrent: whether all that is differentiated in a step, its inputs aside, is shared: the weights of a recurrent
            network. Their gradient is then one contraction over all steps.
    """

    table: tuple[tuple[Signature, Callable], ...]
    placement: Placement
    differentiable: tuple[bool, ...]
    has_aux: bool
    looped: bool
    recurrent: bool

    def step_with_aux(self, level: int) -> Callable[[State, Slices, PyTree], tuple[State, PyTree]]:
        """The step on ``level``, returning ``(y_next, aux)``; aux is None for a step that has none."""
        table = dict(self.table)

        def call(u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
            out = table[level, signature(u)](u, x, shared)
            return out if self.has_aux else (out, None)

        return call

    def step(self, level: int) -> SliceStep:
        """The step on ``level``, aux dropped."""
        call = self.step_with_aux(level)
        return lambda u, x, shared: call(u, x, shared)[0]

    @property
    def linearised(self) -> Linearised:
        """A layer of the finest level, to be transposed."""
        return Linearised(self.step_with_aux(0), self.differentiable, weights=self.recurrent)

    @property
    def steps(self) -> int:
        """Number of layers, on all workers."""
        return self.placement.total

    def spread(self, slices: Slices) -> Slices:
        """The layers as they are spread over the workers."""
        return self.placement.pad(slices)._replace(valid=self.placement.valid())

    def chain(self, slices: Slices, common: Common) -> Chain:
        """The chain of this worker's layers."""
        padded = slices.valid is not None
        return Chain(
            step_on=self._inert if padded else self.step,
            slices=slices,
            shared=(common.shared, common.closed_over),
            y0=common.y0,
            steps=self.placement.steps,
            total=self.placement.total,
            differentiable=(*self.differentiable, False) if padded else self.differentiable,
            looped=self.looped,
            comm=self.placement.workers,
        )

    def _inert(self, level: int) -> SliceStep:
        """The step on ``level``, the identity on padding."""
        step = self.step(level)
        return lambda u, x, shared: _tree.where(x.valid, step(u, x._replace(valid=None), shared), u)


def signature(u: State) -> tuple:
    """Shapes and dtypes of a state, hashable."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(u))


def prepare(
    step: Step,
    params: PyTree,
    y0: State,
    *,
    shared: PyTree,
    data: PyTree,
    t0: Any,
    t1: Any,
    has_aux: bool,
    comm: Any,
    solvers: Sequence[Solver],
) -> tuple[Problem, Operands]:
    """Check the arguments of `solve`, trace the step once per level, and hoist what it closes over."""
    y0 = _inputs.state(y0)
    _inputs.comm(comm)
    given = _inputs.number_of_layers(params, data, alone=comm is None)
    placement = Placement(total=given, steps=given)
    if comm is not None:
        params, data, y0, shared = comm.adopt(jax.tree.map(jnp.asarray, (params, data, y0, shared)))
        placement = comm.place(given, solvers, (params, data), (y0, shared))
    steps = placement.total
    traced_times = isinstance(t0, jax.core.Tracer) or isinstance(t1, jax.core.Tracer)
    if traced_times:
        t0, t1 = placement.shared((t0, t1))
    t, dt = _inputs.times(t0, t1, steps, _tree.real_dtype(y0))
    slices = Slices(
        params=jax.tree.map(jnp.asarray, params),
        data=jax.tree.map(jnp.asarray, data),
        t=placement.share(t),
        dt=placement.share(dt),
        index=placement.share(jnp.arange(steps, dtype=jnp.int32)),
    )
    shared = jax.tree.map(jnp.asarray, shared)
    mask = jax.tree.map(_is_inexact, slices)
    differentiable = tuple(jax.tree.leaves(mask._replace(t=traced_times, dt=traced_times)))
    closed_over: list[jax.Array] = []
    table: dict[Signature, Callable] = {}
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), slices)
    for solver in solvers:
        for level, u in enumerate(_states_on_levels(solver, steps, y0)):
            key = (level, signature(u))
            if key not in table:
                table[key] = _trace(LayerStep(step, level), u, x, shared, has_aux, closed_over)
    looped = jax.default_backend() == "cpu"
    common = Common(y0, shared, tuple(closed_over))
    weights = any(jax.tree.leaves(jax.tree.map(_is_inexact, (common.shared, common.closed_over))))
    recurrent = weights and not any(jax.tree.leaves(mask.params))
    problem = Problem(tuple(table.items()), placement, differentiable, has_aux, looped, recurrent)
    return problem, Operands(slices, common)


def _is_inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _states_on_levels(solver: Solver, steps: int, y0: State) -> list[State]:
    states = [jax.eval_shape(lambda y: y, y0)]
    for transfer in solver.transfers(steps):
        states.append(states[-1] if transfer is None else jax.eval_shape(transfer[0], states[-1]))
    return states


def _trace(
    step: LayerStep, u: State, x: Slices, shared: PyTree, has_aux: bool, closed_over: list[jax.Array]
) -> LayerStep | HoistedStep:
    closed, out = jax.make_jaxpr(step, return_shape=True)(u, x, (shared, ()))
    _inputs.step_output(out, u, has_aux)
    if not any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        return step
    positions = []
    for constant in closed.consts:
        known = [i for i, c in enumerate(closed_over) if c is constant]
        positions.append(known[0] if known else len(closed_over))
        if not known:
            closed_over.append(constant)
    return HoistedStep(closed.jaxpr, tuple(positions), jax.tree.structure(out))


def hierarchy(
    step: Step,
    params: PyTree,
    y0: State,
    *,
    shared: PyTree = None,
    data: PyTree = None,
    t0: Any = 0.0,
    t1: Any = 1.0,
    solver: Solver,
) -> tuple[Level, ...]:
    """The levels that `solve` works on, for building cycles by hand from `f_relax`, `c_relax`, `residual`, ...

    Args:
        step: as for `solve`, like all other arguments; without aux.
        params: as for `solve`.
        y0: as for `solve`.
        shared: as for `solve`.
        data: as for `solve`.
        t0: as for `solve`.
        t1: as for `solve`.
        solver: gives the coarsening and the coarse steps.

    Returns:
        The levels, finest first.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.MGRIT(levels=3, coarsening=4, coarse_step=lp_jax.Rediscretize())
        >>> levels = lp_jax.hierarchy(step, jnp.ones(64), jnp.ones(()), solver=solver)
        >>> [level.steps for level in levels]
        [64, 16, 4]
        >>> u, residual_norm = lp_jax.cycle(solver, levels, lp_jax.cascade(solver, levels))
        >>> u.shape
        (16,)
    """
    _inputs.solver("solver", solver)
    problem, operands = prepare(
        step, params, y0, shared=shared, data=data, t0=t0, t1=t1, has_aux=False, comm=None, solvers=(solver,)
    )
    return solver.resolve(problem.steps).discretize(problem.chain(*operands))
