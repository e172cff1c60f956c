"""Turn a `Problem` into a `Program` and its `Arrays`: check it, place the layers, trace the step."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._jaxpr import closes_over_tracers, exchanged_over
from lp_jax._arrays._outer import has_few
from lp_jax._arrays._place import NO_MESH, automatic
from lp_jax._arrays._types import Arrays, CPoints, PyTree, Slices, State, StepKey
from lp_jax._choice._fastest import SWEEPS, Fastest, Layers, Pair, choose
from lp_jax._choice._footprint import footprint
from lp_jax._choice._processor import at_hand
from lp_jax._comms._comm import OneDevice, Operands, common_unit
from lp_jax._levels._layer import Hoisted, LayerStep, Signature, Traced, needs_its_trace, signature
from lp_jax._levels._result import DONE, SERIAL
from lp_jax._programs import _inputs
from lp_jax._programs._asked import asked
from lp_jax._programs._program import Program
from lp_jax._programs._relay import LAYERS, WHOLE
from lp_jax._solvers._coupling import couplings, shares_weights
from lp_jax._solvers._elementwise import places
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver


def begin(
    problem: _inputs.Network, solver: Solver | None, adjoint_solver: Solver | None
) -> "Tracing":
    """Place and trace a problem for these solvers; around a probe of a plan, for those of the probe."""
    solver, adjoint_solver = asked.value.solvers or (solver, adjoint_solver)
    solver = Fastest() if solver is None else solver
    return Tracing(problem, _inputs.pair(solver, adjoint_solver))


def prepare(
    tracing: "Tracing", guess: str | CPoints, adjoint_guess: CPoints | None
) -> tuple[Program, Arrays]:
    """Make the program and the arrays of a solve by the solvers of ``tracing``."""
    # A guess for other solvers does not fit those of a probe.
    if asked.value.solvers is not None:
        guess, adjoint_guess = "constant", None
    # `named` is the solver that the caller asked for, and `solver` the one that is run.
    (named, adjoint_solver), piping = tracing.solvers, asked.value.piping
    solver = named
    if named.chooses:
        # A pipeline takes microbatches through the layers one after another. Elsewhere the cost of the layer decides.
        solver, adjoint = tracing.chosen[0] if piping is None else (Serial(), Serial())
        if adjoint_solver.chooses or piping is not None:
            adjoint_solver = adjoint
    program, arrays = tracing.program((solver, adjoint_solver))
    workers, start = program.workers, None
    layers, rows = workers.layers, workers.rows[0]
    # These are resolved for this number of layers.
    solver, adjoint_solver = arrays.solver, arrays.adjoint_solver
    for each in (solver, adjoint_solver):
        _inputs.at_once(each, layers)
    if isinstance(guess, str):
        _check.one_of("guess", guess, ("constant", "zeros"), otherwise="or a trajectory")
    else:
        # On MPI ranks a guess has the C-points of this rank's layers only.
        start = _inputs.trajectory("guess", guess, arrays.y0, -(-rows // program.stride))
        solver = solver.resolve(layers, warm=True)
    if adjoint_guess is not None:
        intervals = -(-rows // program.adjoint_stride)
        adjoint_guess = _inputs.trajectory("adjoint_guess", adjoint_guess, arrays.y0, intervals)
        adjoint_solver = adjoint_solver.resolve(layers, warm=True)
    # Two exact solvers on one device are one scan that JAX differentiates, unless the weights' gradient is cheaper as one
    # contraction over all steps, or the caller gave a guess for the adjoint.
    exact = workers.size == 1 and solver.exact and adjoint_solver.exact
    kept = program.traced.recurrent and solver.keeps_states  # see `Serial`
    contracts = kept and workers.processor.contracts(program.traced.footprint)
    scan = exact and adjoint_guess is None and not contracts and piping is None
    relay = ""
    # Layers one after another over several workers need no C-points and no adjoint levels: a relay is enough.
    if solver.in_turn and adjoint_solver.in_turn and adjoint_guess is None:
        if piping is not None:
            relay = WHOLE if piping.checkpoint else LAYERS
        elif workers.size > 1 and solver.keeps_states:
            relay = LAYERS if workers.processor.two_passes(program.traced.footprint) else WHOLE
    counter = asked.value.counter
    # Within a user's shard_map the counts must vary over the same axes as the arrays of the solve, because their cotangent does.
    watch = counter and _tree.varying(counter.counts, (arrays.slices, arrays.y0, arrays.shared))
    arrays = arrays._replace(
        solver=solver,
        adjoint_solver=adjoint_solver,
        guess=start,
        adjoint_guess=adjoint_guess,
        watch=watch,
    )
    program = dataclasses.replace(
        program,
        zeros=start is None and guess == "zeros",
        scan=scan,
        relay=relay,
        # `SERIAL` tells users that the default found nothing faster than serial propagation.
        done=SERIAL if named.chooses and solver.exact else DONE,
    )
    return program, arrays


def trace(
    problem: _inputs.Network, solvers: Sequence[Solver], *, inside: bool = False
) -> tuple[Program, Arrays]:
    """Make the program of these solvers; with ``inside``, every worker calls this by itself, with its own layers."""
    return Tracing(problem, solvers, inside=inside).program(solvers)


class Tracing:
    """A problem on its workers, its steps as far as they were traced, and the traced values that they close over.

    The layer is traced at once, because the default is chosen by its cost. `program` traces what else its solvers evaluate, so
    that nothing is placed or traced twice for solvers that are chosen later.
    """

    def __init__(
        self, problem: _inputs.Network, solvers: Sequence[Solver], *, inside: bool = False
    ) -> None:
        comm, t0, t1 = problem.comm, problem.t0, problem.t1
        arrays = comm.adopt((problem.params, problem.data, problem.y0, problem.shared))
        # within a user's shard_map, its transpose is one sum of the whole gradient over devices
        params, data, y0, shared = _tree.varying(arrays, arrays)
        times = {"t0": t0, "t1": t1}
        # Times that are tracers have no numbers to compare between workers.
        known = {
            name: str(np.asarray(t).tolist())
            for name, t in times.items()
            if not isinstance(t, jax.core.Tracer)
        }
        operands = Operands((params, data), (y0, shared), known)
        workers = comm.place(problem.layers, solvers, operands, inside)
        y0, shared = comm.compared((y0, shared))
        traced_times = len(known) < len(times)
        # Every rank computes with the times of its own layers, so the gradient for t0 and t1 is a sum over ranks.
        if traced_times:
            t0, t1 = comm.replicate((t0, t1))
        steps, rows = workers.layers, workers.rows[0]
        numbers = [
            *_inputs.times(t0, t1, steps, _tree.real_dtype(y0)),
            jnp.arange(steps, dtype=jnp.int32),
        ]
        # A rank holds `rows` of the layers only; its times and indices are a slice of those of the whole network.
        if rows < steps:
            numbers = [lax.dynamic_slice_in_dim(x, workers.start(1), rows) for x in numbers]
        self.slices = Slices(params, data, *numbers)
        mask = jax.tree.map(_tree.inexact, self.slices)
        # Times that are not traced get no gradient; this spares their cotangents in every layer.
        self.differentiable = tuple(jax.tree.leaves(mask._replace(t=traced_times, dt=traced_times)))
        self.problem, self.solvers, self.y0, self.shared = problem, solvers, y0, shared
        self.u, self.x = _tree.shape_of(lambda y: y, y0), _tree.entry_like(self.slices)
        self.closed_over: list[jax.Array] = []
        self.programs: list[core.Jaxpr] = []
        self._table: dict[StepKey, dict[Signature, tuple[LayerStep, Hoisted | None]]] = {}
        # The layer on the finest level. Its program gives the cost on which the choice of a default rests.
        self._add(0, self.u)

        processor = asked.value.processor or at_hand(comm.platform, comm.kind)
        self.workers = dataclasses.replace(workers, processor=processor)
        # A network is recurrent if no layer has weights of its own and some are shared, as an argument or as captured tracers.
        weights = any(map(_tree.inexact, jax.tree.leaves((shared, self.closed_over))))
        self.recurrent = weights and not any(jax.tree.leaves(mask.params))
        # a scan adds up the gradient of shared weights
        self.terms = 0 if self.recurrent else processor.outer_terms
        self.footprint = footprint(self.programs[0], self.x, terms=self.terms)

    @functools.cached_property
    def chosen(self) -> tuple[Pair, float]:
        """The solvers that the forward solver, a `Fastest`, stands for, and their seconds."""
        # Any solvers do: only the step as a program is wanted, to see what it couples.
        program, arrays = self.program(SWEEPS)
        workers, y, x = self.workers, self.y0, self.x
        examples, in_place, numbers = 0, 0, sum(leaf.size for leaf in jax.tree.leaves(y))
        # Couplings within the state matter only to the choice for a recurrent network on one accelerator.
        layer = program.chain(*arrays[:3]).step(0), y, x, arrays.shared
        recurrent = workers.processor.wide and workers.size == 1 and shares_weights(*layer)
        if recurrent:
            examples, in_place = couplings(*layer)
        at = Layers(
            footprint=self.footprint,
            layers=workers.layers,
            workers=workers.size,
            processor=workers.processor,
            state=_tree.nbytes(y),
            examples=examples,
            numbers=numbers // max(1, examples),
            recurrent=recurrent,
            driven=any(map(_tree.inexact, jax.tree.leaves((x.params, x.data)))),
            in_place=in_place,
            places=places(*layer) if workers.processor.kernel_step and workers.size == 1 else 0,
        )
        fastest: Any = self.solvers[0]
        return choose(at, fastest.rtol)

    def program(self, solvers: Sequence[Solver]) -> tuple[Program, Arrays]:
        """The program of these solvers, and its arrays. A step is traced once per level and kind of state."""
        steps = self.workers.layers
        solvers = [solver.resolve(steps) for solver in solvers]
        needs = [solver.needs(steps) for solver in solvers]
        for need in needs:
            u = self.u
            for level, transfer in enumerate((None, *need.transfers)):
                u = u if transfer is None else _tree.shape_of(transfer[0], u)
                # Spatial restriction changes the shape of the state, for which the step needs another trace.
                self._add(level, u)
        for need in needs:
            for other in need.steps:
                self._add(other, self.u)

        # Gradients of weights as sums of a few outer products need a special evaluation of the step's program.
        few = any(has_few(program, self.terms) for program in self.programs)
        traced = Traced(
            steps=tuple(self._steps(self.terms if few else 0)),
            layers=steps,
            differentiable=self.differentiable,
            recurrent=self.recurrent,
            footprint=self.footprint,
        )
        workers = dataclasses.replace(
            self.workers.fit(common_unit(solvers, steps)),
            exchanged=exchanged_over(self.programs),
        )
        forward, adjoint = solvers[0], solvers[-1]
        # Tracers that the step closes over become shared operands, because a custom_vjp cannot close over them.
        seen_by_all = self.shared, tuple(self.closed_over)
        arrays = Arrays(self.slices, self.y0, seen_by_all, solver=forward, adjoint_solver=adjoint)
        return Program(traced, workers, forward.stride(steps), adjoint.stride(steps)), arrays

    def _steps(self, terms: int) -> Iterator[tuple[StepKey, LayerStep]]:
        """The layer on each level, and other steps by themselves."""
        for which, table in self._table.items():
            hoisted = ((of, program) for of, (_, program) in table.items() if program is not None)
            steps = [step for step, _ in table.values()]
            # For another shape of the state the step may call other functions.
            retraced = any(step.retraced for step in steps)
            own = dataclasses.replace(steps[0], terms=terms, hoisted=tuple(hoisted))
            yield which, dataclasses.replace(own, retraced=retraced)

    def _add(self, which: StepKey, u: State) -> None:
        """Trace a step for a state, unless that was done."""
        table = self._table.setdefault(which, {})
        step, level = (self.problem.step, which) if isinstance(which, int) else (which, 0)
        if signature(u) not in table:
            table[signature(u)] = self._trace(LayerStep(step, level, self.problem.has_aux), u)

    def _trace(self, step: LayerStep, u: State) -> tuple[LayerStep, Hoisted | None]:
        problem, x, shared = self.problem, self.x, self.shared

        @functools.wraps(step.step)  # errors of JAX name the user's function
        def call(u: State, x: Slices, shared: PyTree) -> PyTree:
            return step(u, x, shared)

        try:
            # `consts` of the program are the arrays that the step closes over.
            closed, out = jax.make_jaxpr(call, return_shape=True)(u, x, shared)
        except Exception as error:
            # The user may have exchanged params and y0, so a failing step is tried the other way round.
            if _takes_exchanged(step, u, x, shared):
                raise TypeError(
                    "params and y0 seem to be exchanged: the step works the other way round. The "
                    "stacked parameters come first: solve(step, params, y0)."
                ) from error
            error.add_note(_inputs.note_on_call(step.step, u, x.params))
            if step.step is not problem.step:
                raise TypeError(
                    f"jacobian_of={step.step!r} cannot be called as the step is, (y, layer). Give "
                    f"it the form of the step; a "
                    "scan's body belongs to lp_jax.scan(..., solver=Newton(jacobian_of=body))."
                ) from error
            raise
        problem.comm.check_step(closed.jaxpr)
        home = jax.sharding.get_abstract_mesh()
        types = *closed.in_avals, *map(jax.typeof, closed.consts)
        meshes = home, *(array.sharding.mesh for array in types)
        # Explicit axes of a mesh are automatic within a solve over several workers, so the program of the step has to be, too.
        explicit = problem.comm != OneDevice() and any(mesh.explicit_axes for mesh in meshes)
        if explicit:
            closed, home = automatic(closed), NO_MESH
        self.programs.append(closed.jaxpr)
        _inputs.step_output(out, u, problem.has_aux)
        step = dataclasses.replace(step, structure=jax.tree.structure(out), home=home)
        # Without tracers the step can be called as it is, and JAX's caches serve later solves with it.
        if not explicit and not closes_over_tracers(closed):
            return dataclasses.replace(step, retraced=needs_its_trace(closed, u, x, shared)), None
        positions = []
        for constant in closed.consts:
            # The same array, captured by several steps, is one operand.
            known = [i for i, c in enumerate(self.closed_over) if c is constant]
            positions.append(known[0] if known else len(self.closed_over))
            if not known:
                self.closed_over.append(constant)
        return step, Hoisted(closed.jaxpr, tuple(positions))


def _takes_exchanged(step: LayerStep, u: State, x: Slices, shared: PyTree) -> bool:
    """Whether a step that failed accepts a slice of the state as parameters, and the parameters as state."""
    try:
        # If the two are exchanged, `u` is the stack of parameters, and an entry of it belongs to one layer.
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), u)
        return _inputs.alike(
            x.params, jax.eval_shape(step, x.params, x._replace(params=params), shared)
        )
    except Exception:
        return False
