"""A `Problem` as a program works on it: the step traced, what it closes over among the operands, the layers placed.

Everything static is one hashable `Traced`; everything else is an array in `Operands`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from lp_jax import _inputs, _tree
from lp_jax._at_once import Footprint, footprint, processor
from lp_jax._chain import Chain, guarded, pad_slices
from lp_jax._comm import OneDevice, Workers
from lp_jax._jacobians import mean_example, own_operands
from lp_jax._level import Level
from lp_jax._outer import FewTerms, has_few
from lp_jax._problem import Problem
from lp_jax._solver import Solver
from lp_jax._types import Layer, PyTree, Slices, State, Static, Step, Transfer


class Common(NamedTuple):
    """The arrays that every worker has. ``closed_over`` are the traced values that the step closes over."""

    y0: State
    shared: PyTree
    closed_over: tuple[jax.Array, ...]


class Operands(NamedTuple):
    """The arrays of a solve: those that are spread over the workers, and those that all of them have."""

    slices: Slices
    common: Common


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """The user's step on one level, as a function of (state, slice, (shared, closed-over values))."""

    step: Step
    level: int

    def __call__(self, u: State, x: Slices, shared: tuple[PyTree, Sequence[jax.Array]]) -> Any:
        params, common, data = _tree.with_fresh_keys((x.params, shared[0], x.data))
        return self.step(u, Layer(params, common, data, x.t, x.dt, x.index, Static(self.level)))


@dataclasses.dataclass(frozen=True, eq=False)
class HoistedStep:
    """The same for a step that closes over traced values: they become operands, so that they can be differentiated.

    ``custom_vjp`` refuses functions that close over tracers; a jaxpr whose constants are arguments closes over none.
    """

    jaxpr: jex_core.Jaxpr
    positions: tuple[int, ...]  # of its constants among the closed-over operands
    out_tree: Any

    def __call__(self, u: State, x: Slices, shared: tuple[PyTree, Sequence[jax.Array]]) -> Any:
        constants = [shared[1][i] for i in self.positions]
        call = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self.jaxpr, _tree.with_fresh_keys(constants)))
        return jax.tree.unflatten(self.out_tree, call(*jax.tree.leaves((u, x, shared[0]))))


Signature = tuple[Any, tuple]  # level, or another step of a solver's; and the shapes and dtypes of the state there


@dataclasses.dataclass(frozen=True)
class Traced:
    """What is static about a solve.

    Attributes:
        table: the step for every level, and for every state where levels differ in size; with the structure of its output.
        workers: how many layers there are, and which of them each worker holds.
        differentiable: which leaves of the slices have a gradient: the inexact ones, times only where they are traced.
        padded: whether a worker may hold slots beyond the last layer in either solve.
        has_aux: whether the step returns ``(y_next, aux)``.
        recurrent: whether all that is differentiated in a step, its inputs aside, is shared: the weights of a recurrent
            network. Their gradient is then one contraction over all steps.
        footprint: what a layer costs and holds.
        alone: whether the table has the step for a single example, too, for a solver that averages examples.
    """

    table: tuple[tuple[Signature, tuple[Callable, Any]], ...]
    workers: Workers
    differentiable: tuple[bool, ...]
    padded: bool
    has_aux: bool
    recurrent: bool
    footprint: Footprint
    alone: bool

    def call(self, level: Any, u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
        """The step on ``level``, or another one, returning ``(y_next, aux)``; aux is None for a step that has none."""
        step, structure = dict(self.table)[level, signature(u)]
        out = step(u, x, shared)
        _inputs.same_output(out, structure)
        return out if self.has_aux else (out, None)

    def spread(self, slices: Slices, workers: Workers) -> Slices:
        """The layers with all slots of ``workers``."""
        return pad_slices(slices, workers.rows[1], workers.layers)

    def chain(self, slices: Slices, common: Common, workers: Workers) -> Chain:
        """The chain of this worker's layers."""
        return Chain(
            call=guarded(self.call, workers.layers) if self.padded else self.call,
            slices=slices,
            shared=(common.shared, common.closed_over),
            y0=common.y0,
            layers=workers.layers,
            padded=self.padded,
            workers=workers,
            differentiable=self.differentiable,
            recurrent=self.recurrent,
            footprint=self.footprint,
            alone=self.alone,
        )


def signature(u: State) -> tuple:
    """Shapes and dtypes of a state, hashable."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(u))


def trace(problem: Problem, solvers: Sequence[Solver]) -> tuple[Traced, Operands]:
    """Place the layers, trace the step once per level of each solver, and hoist what it closes over."""
    comm = problem.comm or OneDevice()
    params, data, y0, shared = comm.adopt((problem.params, problem.data, problem.y0, problem.shared))
    workers = comm.place(problem.layers, solvers, (params, data), (y0, shared))
    workers = dataclasses.replace(workers, processor=processor(comm.platform))
    steps, t0, t1 = workers.layers, problem.t0, problem.t1
    traced_times = isinstance(t0, jax.core.Tracer) or isinstance(t1, jax.core.Tracer)
    if traced_times:
        t0, t1 = comm.replicate((t0, t1))
    t, dt = _inputs.times(t0, t1, steps, _tree.real_dtype(y0))
    first = 0 if workers.rows[0] == steps else workers.start(1)
    t, dt, index = (x[first : first + workers.rows[0]] for x in (t, dt, jnp.arange(steps, dtype=jnp.int32)))
    slices = Slices(params, data, t, dt, index)
    mask = jax.tree.map(_is_inexact, slices)
    differentiable = tuple(jax.tree.leaves(mask._replace(t=traced_times, dt=traced_times)))
    closed_over: list[jax.Array] = []
    table: dict[Signature, tuple[Callable, Any]] = {}
    programs: list[jex_core.Jaxpr] = []
    x = _tree.entry_like(slices)
    needs = [solver.resolve(steps).needs(steps) for solver in solvers]
    for need in needs:
        for level, u in enumerate(_states_on_levels(need.transfers, y0)):
            key = (level, signature(u))
            if key not in table:
                step = LayerStep(problem.step, level)
                table[key] = _trace(step, u, x, shared, problem, closed_over, programs)
    whole, others = (jax.eval_shape(lambda y: y, y0), x), [other for need in needs for other in need.steps]
    alone, axes = None, max(need.averaged_axes for need in needs)
    if axes:
        alone = _single_example(problem, y0, x, shared, axes)
    for which, other in [(0, problem.step), *((other, other) for other in others)]:
        for u, own in filter(None, (whole, alone)):
            if (which, signature(u)) not in table:
                step = LayerStep(other, 0)
                table[which, signature(u)] = _trace(step, u, own, shared, problem, closed_over, programs)
    terms = workers.processor.terms
    if any(has_few(program, terms) for program in programs):  # a level may have states of other sizes
        table = {key: (FewTerms(step, terms), structure) for key, (step, structure) in table.items()}
    common = Common(y0, shared, tuple(closed_over))
    weights = any(jax.tree.leaves(jax.tree.map(_is_inexact, (common.shared, common.closed_over))))
    traced = Traced(
        table=tuple(table.items()),
        workers=workers,
        differentiable=differentiable,
        padded=any(workers.fit(solver.resolve(steps).unit(steps)).padded for solver in solvers),
        has_aux=problem.has_aux,
        recurrent=weights and not any(jax.tree.leaves(mask.params)),
        footprint=footprint(programs[0], x, terms=terms),
        alone=alone is not None,
    )
    return traced, Operands(slices, common)


def _single_example(problem: Problem, y0: State, x: Slices, shared: PyTree, axes: int) -> tuple[State, Slices] | None:
    """State and slice of a batch of one, if the step takes that: it may know the batch's size, or close over arrays of it."""

    def call(u: State, x: Slices) -> State:
        out = LayerStep(problem.step, 0)(u, x, (shared, ()))
        return out[0] if problem.has_aux else out

    one = functools.partial(jax.eval_shape, functools.partial(mean_example, axes=axes, alone=True))
    u = jax.eval_shape(lambda y: y, y0)
    if len({leaf.shape[:axes] for leaf in jax.tree.leaves(u)}) > 1:
        return None  # refused by the solver
    own = own_operands(call, u, x, jax.tree.leaves(u)[0].shape[:axes])
    u, x = jax.tree.map(one, u), jax.tree.map(lambda leaf, own: one(leaf) if own else leaf, x, own)
    try:
        out = jax.eval_shape(call, u, x)
    except Exception:
        return None
    return (u, x) if signature(out) == signature(u) else None


def _is_inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _states_on_levels(transfers: Sequence[Transfer | None], y0: State) -> list[State]:
    states = [jax.eval_shape(lambda y: y, y0)]
    for transfer in transfers:
        states.append(states[-1] if transfer is None else jax.eval_shape(transfer[0], states[-1]))
    return states


def _trace(
    step: LayerStep,
    u: State,
    x: Slices,
    shared: PyTree,
    problem: Problem,
    closed_over: list[jax.Array],
    programs: list[jex_core.Jaxpr],
) -> tuple[Callable, Any]:
    @functools.wraps(step.step)  # errors of JAX name the user's function
    def call(u: State, x: Slices, shared: Any) -> Any:
        return step(u, x, shared)

    try:
        closed, out = jax.make_jaxpr(call, return_shape=True)(u, x, (shared, ()))
    except Exception as error:
        if _exchanged(step, u, x, shared):
            raise TypeError(
                "params and y0 seem to be exchanged: the step works the other way round. The stacked parameters come first: "
                "solve(step, params, y0)."
            ) from error
        error.add_note(_inputs.called(step.step, u, x.params))
        raise
    programs.append(closed.jaxpr)
    _inputs.step_output(out, u, problem.has_aux)
    if problem.comm is not None:
        _inputs.closed_over(closed.consts)
    if not any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        return step, jax.tree.structure(out)
    positions = []
    for constant in closed.consts:
        known = [i for i, c in enumerate(closed_over) if c is constant]
        positions.append(known[0] if known else len(closed_over))
        if not known:
            closed_over.append(constant)
    return HoistedStep(closed.jaxpr, tuple(positions), jax.tree.structure(out)), jax.tree.structure(out)


def _exchanged(step: LayerStep, u: State, x: Slices, shared: PyTree) -> bool:
    """Whether a step that failed would take a slice of the state for its parameters, and the parameters for its state."""
    try:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), u)
        return _inputs.alike(x.params, jax.eval_shape(step, x.params, x._replace(params=params), (shared, ())))
    except Exception:
        return False


def hierarchy(problem: Problem, solver: Solver) -> tuple[Level, ...]:
    """Return the levels that `solve` works on, to build cycles by hand from `f_relax`, `c_relax`, `residual`, ...

    Args:
        problem: what is solved; without aux, on one device.
        solver: gives the coarsening and the coarse steps.

    Returns:
        The levels, finest first.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> problem = lp_jax.Problem(step, jnp.ones(64), jnp.ones(()))
        >>> solver = lp_jax.MGRIT(levels=3, coarsening=4, coarse_step=lp_jax.Rediscretize())
        >>> levels = lp_jax.hierarchy(problem, solver)
        >>> [level.steps for level in levels]
        [64, 16, 4]
        >>> u, residual_norm = lp_jax.cycle(solver, levels, lp_jax.cascade(solver, levels))
        >>> u.shape
        (16,)
    """
    _inputs.solver("solver", solver)
    traced, (slices, common) = trace(dataclasses.replace(problem, comm=None), (solver,))
    solver = solver.resolve(traced.workers.layers)
    workers = traced.workers.fit(solver.unit(traced.workers.layers))
    return solver.discretize(traced.chain(traced.spread(slices, workers), common, workers))
