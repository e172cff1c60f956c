"""Turn a `Problem` into a `Program` and its `Arrays`: check it, place the layers, trace the step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._outer import has_few
from lp_jax._arrays._place import NO_MESH, automatic
from lp_jax._arrays._products import exchanged_over
from lp_jax._arrays._types import Arrays, CPoints, PyTree, Slices, State, StepKey
from lp_jax._choice._fastest import SWEEPS, Fastest, Layers, choose
from lp_jax._choice._footprint import footprint
from lp_jax._choice._processor import at_hand
from lp_jax._comms._comm import OneDevice, common_unit
from lp_jax._levels._layer import Hoisted, LayerStep, Signature, Traced, needs_its_trace, signature
from lp_jax._levels._result import DONE, SERIAL
from lp_jax._programs import _inputs
from lp_jax._programs._asked import asked
from lp_jax._programs._program import Program
from lp_jax._solvers._coupling import couplings, shares_weights
from lp_jax._solvers._elementwise import places
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Needs, Solver


def prepare(
    problem: _inputs.Network,
    solver: Solver | None,
    adjoint_solver: Solver | None,
    guess: str | CPoints,
    adjoint_guess: CPoints | None,
) -> tuple[Program, Arrays]:
    """Make the program and the arrays of a solve."""
    if asked.value.solvers is not None:
        (solver, adjoint_solver), guess, adjoint_guess = asked.value.solvers, "constant", None
    _inputs.solvers(optional=True, solver=solver, adjoint_solver=adjoint_solver)
    solver = named = solver or Fastest()
    found, piping = None, asked.value.piping
    if named.chooses and piping is not None:
        solver = adjoint_solver = Serial()
    elif named.chooses:
        ((solver, adjoint_default), _), found = default(problem, named.rtol)
        adjoint_solver = adjoint_default if adjoint_solver in (None, named) else adjoint_solver
    pair = _inputs.pair(solver, adjoint_solver)
    program, arrays = (found and _reused(*found, pair)) or trace(problem, pair)
    workers, start = program.workers, None
    layers, rows = workers.layers, workers.rows[0]
    solver, adjoint_solver = arrays.solver, arrays.adjoint_solver
    for each in (solver, adjoint_solver):
        _inputs.at_once(each, layers)
    if isinstance(guess, str):
        _check.one_of("guess", guess, ("constant", "zeros"), otherwise="or a trajectory")
    else:
        start = _inputs.trajectory("guess", guess, arrays.y0, -(-rows // program.stride))
        solver = solver.resolve(layers, warm=True)
    if adjoint_guess is not None:
        intervals = -(-rows // program.adjoint_stride)
        adjoint_guess = _inputs.trajectory("adjoint_guess", adjoint_guess, arrays.y0, intervals)
        adjoint_solver = adjoint_solver.resolve(layers, warm=True)
    exact = workers.size == 1 and solver.exact and adjoint_solver.exact
    kept = program.traced.recurrent and solver.keeps_states  # see `Serial`
    contracts = kept and workers.processor.contracts(program.traced.footprint)
    scan = exact and adjoint_guess is None and not contracts and piping is None
    relay = ""
    if solver.in_turn and adjoint_solver.in_turn and adjoint_guess is None:
        relay = program.steps_of_relay(solver, piping)
    counter = asked.value.counter
    watch = counter and _tree.varying(counter.counts, (arrays.slices, arrays.y0, arrays.shared))
    arrays = arrays._replace(
        solver=solver,
        adjoint_solver=adjoint_solver,
        guess=start,
        adjoint_guess=adjoint_guess,
        watch=watch,
    )
    done = SERIAL if named.chooses and solver.exact else DONE
    zeros = start is None and guess == "zeros"
    return dataclasses.replace(program, zeros=zeros, scan=scan, relay=relay, done=done), arrays


def default(
    problem: _inputs.Network, rtol: Any
) -> tuple[tuple[tuple[Solver, Solver], float], tuple[Program, Arrays]]:
    """The solvers that `Fastest` stands for and their seconds; and the program and arrays from which a layer's cost was read."""
    program, arrays = trace(problem, SWEEPS)
    workers, y, x = program.workers, arrays.y0, _tree.entry_like(arrays.slices)
    examples, in_place, numbers = 0, 0, sum(leaf.size for leaf in jax.tree.leaves(y))
    layer = program.chain(*arrays[:3]).step(0), y, x, arrays.shared
    recurrent = workers.processor.wide and workers.size == 1 and shares_weights(*layer)
    if recurrent:
        examples, in_place = couplings(*layer)
    at = Layers(
        footprint=program.traced.footprint,
        layers=workers.layers,
        workers=workers.size,
        processor=workers.processor,
        state=_tree.nbytes(y),
        examples=examples,
        numbers=numbers // max(1, examples),
        recurrent=recurrent,
        driven=any(map(_tree.inexact, jax.tree.leaves((arrays.slices.params, arrays.slices.data)))),
        in_place=in_place,
        places=places(*layer) if workers.processor.kernel_step and workers.size == 1 else 0,
    )
    return choose(at, rtol), (program, arrays)


def _reused(
    program: Program, arrays: Arrays, solvers: Sequence[Solver]
) -> tuple[Program, Arrays] | None:
    """A program traced for sweeps, for these solvers; None if layers must stay together, or others are evaluated."""
    n = program.workers.layers
    forward, adjoint = (solver.resolve(n) for solver in solvers)
    if any(solver.unit(n) != 1 or solver.needs(n) != Needs() for solver in (forward, adjoint)):
        return None
    return program, arrays._replace(solver=forward, adjoint_solver=adjoint)


def trace(
    problem: _inputs.Network, solvers: Sequence[Solver], *, inside: bool = False
) -> tuple[Program, Arrays]:
    """Place the layers, trace the step once per level of each solver, and hoist the values that it closes over.

    With ``inside``, every worker calls this by itself, with its own layers.
    """
    comm = problem.comm
    params, data, y0, shared = comm.adopt(
        (problem.params, problem.data, problem.y0, problem.shared)
    )
    # within a user's shard_map, its transpose is one sum of the whole gradient over devices
    params, data, y0, shared = _tree.varying((params, data, y0, shared), (params, data, y0, shared))
    workers = (comm.place_inside if inside else comm.place)(
        problem.layers, solvers, (params, data), (y0, shared)
    )
    steps, t0, t1 = workers.layers, problem.t0, problem.t1
    times = {name: t for name, t in (("t0", t0), ("t1", t1)) if not isinstance(t, jax.core.Tracer)}
    y0, shared = comm.compared(
        (y0, shared), {name: str(np.asarray(t).tolist()) for name, t in times.items()}
    )
    workers = dataclasses.replace(
        workers, processor=asked.value.processor or at_hand(comm.platform)
    )
    solvers = [solver.resolve(steps) for solver in solvers]
    traced_times = isinstance(t0, jax.core.Tracer) or isinstance(t1, jax.core.Tracer)
    if traced_times:
        t0, t1 = comm.replicate((t0, t1))
    t, dt = _inputs.times(t0, t1, steps, _tree.real_dtype(y0))
    numbers = [t, dt, jnp.arange(steps, dtype=jnp.int32)]
    if workers.rows[0] < steps:
        numbers = [lax.dynamic_slice_in_dim(x, workers.start(1), workers.rows[0]) for x in numbers]
    slices = Slices(params, data, *numbers)
    mask = jax.tree.map(_tree.inexact, slices)
    differentiable = tuple(jax.tree.leaves(mask._replace(t=traced_times, dt=traced_times)))

    x, tracing = _tree.entry_like(slices), _Tracing(problem, shared)
    needs = [solver.needs(steps) for solver in solvers]
    for need in needs:
        u = _tree.shape_of(lambda y: y, y0)
        for level, transfer in enumerate((None, *need.transfers)):
            u = u if transfer is None else _tree.shape_of(transfer[0], u)
            tracing.add(level, u, x)
    others: list[StepKey] = [0, *(other for need in needs for other in need.steps)]
    for which in others:
        tracing.add(which, _tree.shape_of(lambda y: y, y0), x)

    seen_by_all = shared, tuple(tracing.closed_over)
    weights = any(jax.tree.leaves(jax.tree.map(_tree.inexact, seen_by_all)))
    recurrent = weights and not any(jax.tree.leaves(mask.params))
    terms = (
        0 if recurrent else workers.processor.outer_terms
    )  # a scan adds up the gradient of shared weights
    traced = Traced(
        steps=tracing.steps(terms),
        layers=steps,
        differentiable=differentiable,
        recurrent=recurrent,
        footprint=footprint(tracing.programs[0], x, terms=terms),
    )
    slots, strides = (
        dataclasses.replace(
            workers.fit(common_unit(solvers, steps)), exchanged=exchanged_over(tracing.programs)
        ),
        [solver.stride(steps) for solver in solvers],
    )
    arrays = Arrays(slices, y0, seen_by_all, solver=solvers[0], adjoint_solver=solvers[-1])
    return Program(traced, slots, stride=strides[0], adjoint_stride=strides[-1]), arrays


class _Tracing:
    """The traced steps of a problem, and the values that they close over."""

    def __init__(self, problem: _inputs.Network, shared: PyTree) -> None:
        self.problem, self.shared = problem, shared
        self.closed_over: list[jax.Array] = []
        self.programs: list[core.Jaxpr] = []
        self._table: dict[StepKey, dict[Signature, tuple[LayerStep, Hoisted | None]]] = {}

    def add(self, which: StepKey, u: State, x: Slices) -> None:
        """Trace a step for a state, unless that was done."""
        table = self._table.setdefault(which, {})
        step, level = (self.problem.step, which) if isinstance(which, int) else (which, 0)
        if signature(u) not in table:
            table[signature(u)] = self._trace(LayerStep(step, level, self.problem.has_aux), u, x)

    def steps(self, terms: int) -> tuple[tuple[StepKey, LayerStep], ...]:
        """The layer on each level, and other steps by themselves."""
        few = terms if any(has_few(program, terms) for program in self.programs) else 0
        steps = []
        for which, table in self._table.items():
            hoisted = tuple(
                (of, program) for of, (_, program) in table.items() if program is not None
            )
            step = next(iter(table.values()))[0]
            steps.append((which, dataclasses.replace(step, terms=few, hoisted=hoisted)))
        return tuple(steps)

    def _trace(self, step: LayerStep, u: State, x: Slices) -> tuple[LayerStep, Hoisted | None]:
        problem, shared = self.problem, self.shared

        @functools.wraps(step.step)  # errors of JAX name the user's function
        def call(u: State, x: Slices, shared: PyTree) -> PyTree:
            return step(u, x, shared)

        try:
            closed, out = jax.make_jaxpr(call, return_shape=True)(u, x, shared)
        except Exception as error:
            if _takes_exchanged(step, u, x, shared):
                raise TypeError(
                    "params and y0 seem to be exchanged: the step works the other way round. The stacked parameters come "
                    "first: solve(step, params, y0)."
                ) from error
            error.add_note(_inputs.note_on_call(step.step, u, x.params))
            if step.step is not problem.step:
                raise TypeError(
                    f"jacobian_of={step.step!r} cannot be called as the step is, (y, layer). Give it the form of the step; a "
                    "scan's body belongs to lp_jax.scan(..., solver=Newton(jacobian_of=body))."
                ) from error
            raise
        home = jax.sharding.get_abstract_mesh()
        types = *closed.in_avals, *map(jax.typeof, closed.consts)
        meshes = home, *(array.sharding.mesh for array in types)
        explicit = problem.comm != OneDevice() and any(mesh.explicit_axes for mesh in meshes)
        if explicit:
            closed, home = automatic(closed), NO_MESH
        self.programs.append(closed.jaxpr)
        _inputs.step_output(out, u, problem.has_aux)
        step = dataclasses.replace(step, structure=jax.tree.structure(out), home=home)
        if not explicit and not any(isinstance(c, jax.core.Tracer) for c in closed.consts):
            return dataclasses.replace(step, retraced=needs_its_trace(closed, u, x, shared)), None
        positions = []
        for constant in closed.consts:
            known = [i for i, c in enumerate(self.closed_over) if c is constant]
            positions.append(known[0] if known else len(self.closed_over))
            if not known:
                self.closed_over.append(constant)
        return step, Hoisted(closed.jaxpr, tuple(positions))


def _takes_exchanged(step: LayerStep, u: State, x: Slices, shared: PyTree) -> bool:
    """Whether a step that failed accepts a slice of the state as parameters, and the parameters as state."""
    try:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), u)
        return _inputs.alike(
            x.params, jax.eval_shape(step, x.params, x._replace(params=params), shared)
        )
    except Exception:
        return False
