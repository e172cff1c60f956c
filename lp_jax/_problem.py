"""`Problem`: a network and the state that enters it, and the verbs on it: `solve`, `solve_vjp`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._gradient import reverse_only, without_gradient
from lp_jax._arrays._types import Arrays, CPoints, PyTree, Slices, Stacked, State, Step, Times
from lp_jax._comms import _wire
from lp_jax._comms._comm import Comm
from lp_jax._levels._level import Level
from lp_jax._programs import _inputs
from lp_jax._programs._asked import Piping, asked
from lp_jax._programs._program import Output, Program, seen_of
from lp_jax._programs._relay import Mapped
from lp_jax._programs._traced import Tracing, begin, prepare, trace
from lp_jax._solution import Solution
from lp_jax._solvers._serial import no_stats
from lp_jax._solvers._solver import Solver, Stats

SOLVED = "lp_jax.solve"  # scope of the operations of a solve


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the arguments of `solve`, whose shapes they have; see `solve_vjp`.

    ``adjoint_trajectory`` is no gradient but the cotangents at which the adjoint solve ended, a guess for the next one.
    """

    params: PyTree
    y0: State
    shared: PyTree
    data: PyTree
    adjoint_trajectory: CPoints | None = None


@_check.check_arguments
@dataclasses.dataclass(frozen=True, eq=False)
class Problem(_inputs.Network):
    """A deep network and the state that enters it, as one value: ``solve(step, params, y0, ...)`` is ``problem.solve(...)``.

    `plan`, `calibrate` and `hierarchy` take a problem; `scanned` and ``nn.LayerParallel.problem`` return one. Its arguments are
    those of `solve` that say what is solved. Shapes (`jax.ShapeDtypeStruct`) are enough to plan with.

    Raises:
        ValueError: for leaves of different lengths or none.
        TypeError: for an integer state, a step that is not a function, and a ``comm`` that is not a `Comm`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> round(float(problem.solve().y1), 2)
        2.7
        >>> problem.replace(y0=jnp.zeros(())).solve(solver=lp_jax.MGRIT()).y1
        Array(0., dtype=float32)
    """

    def replace(self, **changes: PyTree) -> "Problem":
        """Return this problem with some of its arguments changed."""
        return dataclasses.replace(self, **changes)

    def solve(
        self,
        *,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | CPoints = "constant",
        adjoint_guess: CPoints | None = None,
    ) -> Solution:
        """Return the `Solution`, as `lp_jax.solve` does; the arguments are the same."""
        # This checks the fields anew, and ``comm=None`` becomes the pipeline's workers, which were not known before.
        problem = self if asked.value.piping is None else self.replace()
        return solve_traced(begin(problem, solver, adjoint_solver), guess, adjoint_guess)

    def solve_vjp(
        self,
        *,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | CPoints = "constant",
        adjoint_guess: CPoints | None = None,
    ) -> tuple[Solution, Callable[..., tuple[Gradients, Stats]]]:
        """Return the `Solution` and its pullback, as `lp_jax.solve_vjp` does; the arguments are the same."""
        tracing = begin(self, solver, adjoint_solver)
        program, arrays = prepare(tracing, guess, adjoint_guess)
        # The pullback returns the cotangents at which the adjoint ended. A relay does not have them, but levels do.
        program = dataclasses.replace(program, relay="")
        solved = self.comm.adapt(program, arrays, functools.partial(_partitions, program, arrays))

        def run(
            own: tuple[Slices, State, PyTree], ended: PyTree
        ) -> tuple[tuple[State, list[jax.Array]], tuple[PyTree, PyTree]]:
            slices, y0, shared = own
            given = arrays._replace(slices=slices, y0=y0, shared=shared, ended=ended)
            with jax.named_scope(SOLVED):
                y1, aux, rest = solved(given)
            # Only the inexact leaves of aux have cotangents.
            return (y1, _tree.partition(aux)[0]), (aux, rest)

        own = arrays.slices, arrays.y0, arrays.shared
        ended = None if program.scan else _tree.varying(_ended(program, arrays), own)
        (y1, emitted), pull, (aux, (stats, trajectory)) = jax.vjp(run, own, ended, has_aux=True)

        def pullback(y1_cotangent: State, aux_cotangent: PyTree = None) -> tuple[Gradients, Stats]:
            seen = seen_of(aux, aux_cotangent) or [None] * len(emitted)
            # Within a user's shard_map cotangents must vary over the same axes as their primals.
            cotangent, seen = _tree.varying((y1_cotangent, seen), y1)
            # A symbolic zero says that the loss does not use this leaf, so the adjoint solve needs no source for it.
            of_aux = [
                ad.Zero(jax.typeof(x)) if a is None else _placed(a, x)
                for x, a in zip(emitted, seen, strict=True)
            ]
            (slices, y0, shared), ended = pull((jax.tree.map(_placed, cotangent, y1), of_aux))
            # An argument that is the same on all devices has one gradient, the sum over them.
            params, y0, shared, data = _tree.sum_like(
                (slices.params, y0, shared[0], slices.data),
                (self.params, self.y0, self.shared, self.data),
            )
            of_adjoint, last = no_stats(cotangent, program.done), None
            if ended is not None:
                # Gradients are floating-point numbers, so the stats come as such.
                of_adjoint, last = _tree.narrow(ended[0], of_adjoint), ended[1]
            return Gradients(params, y0, shared, data, last), of_adjoint

        return Solution(y1, stats, trajectory, aux), pullback


def _placed(x: jax.Array, like: jax.Array) -> jax.Array:
    """Put ``x`` on the devices of ``like``, if that is spread over explicit axes of a mesh; otherwise return ``x``."""
    if not _tree.explicit(like):
        return x
    if isinstance(like, jax.core.Tracer):
        return jax.sharding.reshard(x, jax.typeof(like).sharding)
    return jax.device_put(x, like.sharding)


def _ended(program: Program, arrays: Arrays) -> tuple[Stats, CPoints]:
    """Zeros like the stats of the adjoint solve, as floating-point numbers, and like its C-points."""
    y0, dtype = arrays.y0, _tree.wide_dtype(arrays.y0)
    none = jnp.zeros((), dtype)
    intervals = -(-program.workers.rows[0] // program.adjoint_stride)
    norms = jnp.zeros((arrays.adjoint_solver.iterations,), dtype)
    return Stats(none, norms, none), _tree.zeros_like(_tree.repeat(y0, intervals))


def solve_traced(
    tracing: Tracing, guess: str | CPoints = "constant", adjoint_guess: CPoints | None = None
) -> Solution:
    """Solve the problem of a ``tracing`` by its solvers, as `Problem.solve` does."""
    piping, comm = asked.value.piping, tracing.problem.comm
    program, arrays = prepare(tracing, guess, adjoint_guess)
    if not program.scan:
        # A custom_vjp has no forward derivative. This mark gives its own error for it, with advice.
        arrays = reverse_only(arrays, _FORWARD_MODE)
    # Partitions take a trace of the layer, so they are computed only if types hold them.
    solved = comm.adapt(program, arrays, functools.partial(_partitions, program, arrays))
    if piping is not None and program.relay:
        solved = functools.partial(_in_pipeline, comm, piping, program, solved)
    # `parallel` recognises operations of a solve by this scope, and leaves them as they are.
    with jax.named_scope(SOLVED):
        y1, aux, (stats, trajectory) = solved(arrays)
    return Solution(y1, jax.lax.stop_gradient(stats), without_gradient(trajectory, _RESTART), aux)


@_check.check_arguments
def solve(
    step: Step,
    params: Stacked,
    y0: State,
    *,
    shared: PyTree = None,
    data: Stacked = None,
    t0: Times = 0.0,
    t1: Times = 1.0,
    steps: int | None = None,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    guess: str | CPoints = "constant",
    adjoint_guess: CPoints | None = None,
    comm: Comm | None = None,
    has_aux: bool = False,
) -> Solution:
    """Propagate ``y0`` through N layers: all at once by an iterative solver, and so are the gradients, or one after another.

    Solves ``u[n+1] = step(u[n], layer n)``, ``u[0] = y0`` and returns ``u[N]``. At convergence this is the state that
    ``lax.scan`` gives, and ``jax.grad`` of it is the gradient of the scan: the adjoint system
    ``lam[n] = (dPhi_n/du)^T lam[n+1]`` is solved by the same method. Works under jit, vmap and grad.

    Args:
        step: ``step(y, layer) -> y_next``, a pure function. ``y_next`` has the structure, shapes and dtypes of ``y``, a pytree;
            ``layer`` is a `Layer`. It may close over arrays, traced and differentiated ones too.
        params: parameters of the layers; leaves ``(N, ...)``. Differentiated.
        y0: the state entering layer 0, a pytree of floating-point or complex arrays. Differentiated.
        shared: operands of every layer, seen as ``layer.shared``, not stacked. Differentiated; gradients are summed over layers.
        data: per-layer inputs, dropout keys, masks; leaves ``(N, ...)``, seen as ``layer.data``. Floating-point leaves are
            differentiated.
        t0: time at which layer 0 starts, in units of your choice.
        t1: time at which the last layer ends; layer n spans ``[t0 + n h, t0 + (n+1) h]``, ``h = (t1 - t0) / N``. Or an
            array of N + 1 increasing times (then ``t0`` is not used). Differentiated where it is a JAX value.
        steps: N, for a network without ``params`` and ``data``; ``layer.data`` is then the number of the layer.
        solver: `Picard`, `MGRIT`, `Newton` or `Serial`. None is for any network: the method that is predicted to be fastest by
            the cost of a layer on the device (`planning.default` says which). Sweeps end at a tolerance of 1e-3, those of the
            adjoint at 1e-2. If they have cost as much as serial propagation by then, the layers run one after another instead.
            None is short for ``Fastest(rtol=1e-3)``, whose ``rtol`` sets these tolerances; ``Fastest(rtol=None)`` takes only
            exact methods.
        adjoint_solver: the same for the adjoint system; None means the settings of ``solver`` (and a single iteration of
            `Newton`, as that system is linear). `Fastest` chooses both, and is no adjoint solver of another one.
        guess: where the first iteration starts: "constant" (``y0`` at every point) or "zeros", both of which `MGRIT` ignores
            where its first iteration is a cascade; or states at the level-0 C-points after point 0, leaves
            ``(ceil(N / m), ...)``, such as ``Solution.trajectory`` of an earlier call. `MGRIT` then starts with a cycle. With
            "zeros" the adjoint solve starts from zeros, too.
        adjoint_guess: where the adjoint solve starts: ``gradients.adjoint_trajectory`` of an earlier `solve_vjp`; None is the
            solver's own start. ``jax.grad`` returns for this argument the trajectory at which the adjoint solve *ended*.
        comm: where the layers live: on one device (None), over a mesh (`MeshComm`) or over MPI ranks (`MPIComm`).
        has_aux: whether ``step`` returns ``(y_next, aux)``.

    Returns:
        A `Solution`. Gradients flow through ``y1`` and ``aux``.

    Raises:
        ValueError: for lengths, times, guesses or settings that do not fit, at trace time.
        TypeError: for a step that changes its state's structure, shapes or dtypes, and for integer states.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params + 1)
        >>> loss = lambda params: jnp.sum(lp_jax.solve(step, params, jnp.zeros(8)).y1 ** 2)
        >>> value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.zeros((64, 8, 8)))
        >>> round(float(value), 2)
        4.64

    References:
        Guenther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel training of deep residual neural networks", SIAM J.
        Math. Data Sci. 2 (2020).
    """
    problem = Problem(
        step,
        params,
        y0,
        shared=shared,
        data=data,
        t0=t0,
        t1=t1,
        steps=steps,
        comm=comm,  # type: ignore[arg-type]
        has_aux=has_aux,
    )
    return solve_traced(begin(problem, solver, adjoint_solver), guess, adjoint_guess)


@_check.check_arguments
def solve_vjp(
    step: Step,
    params: Stacked,
    y0: State,
    *,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    guess: str | CPoints = "constant",
    adjoint_guess: CPoints | None = None,
    **problem: PyTree,
) -> tuple[Solution, Callable[..., tuple[Gradients, Stats]]]:
    """`solve`, with its arguments, and the pullback of ``y1`` and ``aux`` that also returns the adjoint solve's stats.

    Returns:
        The solution, and ``pullback(y1_cotangent, aux_cotangent=None) -> (gradients, adjoint_stats)``. ``aux_cotangent`` is a
        tree like ``aux``; None, as a whole or for a leaf, is zero. ``gradients`` has the fields ``params``, ``y0``, ``shared``
        and ``data``, equal to ``jax.grad`` through `solve`, with ``float0`` zeros for integers and keys; and
        ``adjoint_trajectory``, the gradients with respect to the states that enter the intervals of the adjoint solver, leaves
        ``(ceil(N / m), ...)``: an ``adjoint_guess`` for the next solve, None where JAX differentiates a scan (`Serial` on one
        device). Values that ``step`` closes over get no gradient here.

    Raises:
        ValueError: as `solve`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.MGRIT(coarsening=2, iterations=3)
        >>> solution, pullback = lp_jax.solve_vjp(step, jnp.ones(8), jnp.ones(()), solver=solver)
        >>> gradients, adjoint_stats = pullback(jnp.ones(()))
        >>> gradients.params.shape, adjoint_stats.residual_norms.shape
        ((8,), (3,))
    """
    whole = Problem(step, params, y0, **problem)
    return whole.solve_vjp(
        solver=solver, adjoint_solver=adjoint_solver, guess=guess, adjoint_guess=adjoint_guess
    )


def hierarchy(problem: Problem, solver: Solver) -> tuple[Level, ...]:
    """Return the levels that a solve works on.

    Args:
        problem: with `MPIComm`, or `MeshComm` inside a ``jax.shard_map`` over its axis (``check_vma=False``), each worker passes
            its own layers, whole intervals of them, and gets its part of the levels. ``aux`` is left out.
        solver: defines the coarsening and the coarse steps.

    Returns:
        The levels, finest first.

    Raises:
        ValueError: for a `MeshComm` outside of a ``jax.shard_map``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> levels = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(levels=3, coarsening=4))
        >>> u = lp_jax.multigrid.cascade(levels)
        >>> [level.steps for level in levels], u.shape, lp_jax.multigrid.prolong(levels[0], u).shape
        ([64, 16, 4], (16,), (16,))
    """
    _inputs.solvers(solver)
    # Every worker calls the pieces of a cycle by itself, with its own layers.
    program, arrays = trace(problem, (solver,), inside=True)
    resolved: Solver = arrays.solver
    return resolved.discretize(
        program.chain(program.slots(arrays.slices), arrays.y0, arrays.shared)
    )


def _in_pipeline(
    comm: Comm, piping: Piping, program: Program, alone: Callable[[Arrays], Output], arrays: Arrays
) -> Output:
    """Solve for one microbatch, which ``jax.vmap`` over all of them makes a pipeline."""
    # The rule of `custom_vmap` sees all microbatches at once, and which arrays differ between them.
    solved = jax.custom_batching.custom_vmap(alone)

    @solved.def_vmap
    def together(size: int, batched: list[Arrays], arrays: Arrays) -> tuple[Output, Output]:
        slices, shared = (
            tuple(jax.tree.leaves(tree)) for tree in (batched[0].slices, batched[0].shared)
        )
        mapped = Mapped(slices, shared, piping.checkpoint)
        own = dataclasses.replace(program, mapped=mapped)

        def specs() -> Output:
            # Partitions are those of one microbatch, with an axis for the microbatches in front.
            one = jax.tree.map(lambda x, each: x[0] if each else x, arrays, batched[0])
            return jax.tree.map(lambda spec: PartitionSpec(None, *spec), _partitions(program, one))

        # The solve within must not become a pipeline again.
        with asked(asked.value._replace(piping=None)):
            out = comm.adapt(own, arrays, specs)(arrays)
        return out, jax.tree.map(lambda _: True, out)

    # the state of every microbatch is its own, or JAX would solve outside of the pipeline
    return solved(arrays._replace(y0=_wire.depend(arrays.y0, piping.number)))


def _partitions(program: Program, arrays: Arrays) -> Output:
    """Partitions of the outputs of a solve. States, and aux of a state's shape, have the partitions of ``y0``."""
    # An aux of the state's shape is likely spread like the state.
    like = {x.shape: _spec(x) for x in jax.tree.leaves(arrays.y0)}
    layer = program.chain(*arrays[:3]).step(0, aux=True)
    aux = jax.eval_shape(
        lambda slices, y0, shared: layer(y0, _tree.at(slices, 0), shared)[1],
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays[:3]),
    )
    nowhere: PyTree = PartitionSpec()
    return (
        jax.tree.map(_spec, arrays.y0),
        jax.tree.map(lambda x: PartitionSpec(None, *like.get(x.shape, ())), aux),
        (
            Stats(nowhere, nowhere, nowhere),
            jax.tree.map(lambda x: PartitionSpec(None, *_spec(x)), arrays.y0),
        ),
    )


def _spec(x: jax.Array) -> PartitionSpec:
    sharding = jax.typeof(x).sharding
    return PartitionSpec() if sharding.mesh.empty else sharding.spec


_FORWARD_MODE = (
    "Forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd) reached lp_jax.solve with "
    "an iterative solver, which has a gradient in reverse mode: take jax.grad, jax.vjp or "
    "jax.jacrev. Products with Hessians, jax.jvp of jax.grad, work, and so does jax.hessian. "
    "solver=lp_jax.Serial() is differentiated in both modes."
)
_RESTART = (
    "Solution.trajectory is a restart value and has no gradient; the loss depends on it. To "
    "differentiate states, let the step return them as aux: `return y, y` with has_aux=True, and "
    "read Solution.aux. To start another solve from it, pass "
    "jax.lax.stop_gradient(solution.trajectory)."
)
