"""The one verb."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import _inputs, _tree
from lp_jax._adjoint import Checkpoints, solve_adjoint
from lp_jax._iterate import Stats, iterate
from lp_jax._level import Advance, Operand
from lp_jax._mgrit import MGRIT
from lp_jax._problem import Common, Operands, Problem, prepare
from lp_jax._serial import Serial, propagate
from lp_jax._solution import Solution, result_code
from lp_jax._solver import Solver
from lp_jax._types import PyTree, Slices, State, Step


class Gradients(NamedTuple):
    """What the pullback of `solve_vjp` returns: gradients of the loss, shaped like the arguments of `solve`.

    Leaves that cannot be differentiated (integers, keys) hold ``float0`` zeros, as ``jax.vjp`` gives them.
    """

    params: PyTree
    y0: State
    shared: PyTree
    data: PyTree


def solve(
    step: Step,
    params: PyTree,
    y0: State,
    *,
    shared: PyTree = None,
    data: PyTree = None,
    t0: Any = 0.0,
    t1: Any = 1.0,
    solver: Solver = MGRIT(),
    adjoint_solver: Solver | None = None,
    guess: str | State = "constant",
    comm: Any = None,
    has_aux: bool = False,
) -> Solution:
    """Propagate ``y0`` through N layers, all of them at once, and differentiate likewise.

    Solves ``u[n+1] = step(u[n], layer n)``, ``u[0] = y0`` and returns ``u[N]``. At convergence this is the state that
    ``lax.scan`` gives, and ``jax.grad`` of it is the gradient of the scan: the adjoint system
    ``lam[n] = (dPhi_n/du)^T lam[n+1]`` is solved by the same method with ``adjoint_solver``'s settings. Works under jit,
    vmap and grad. A pure function: nothing is remembered between calls.

    Args:
        step: ``step(y, layer) -> y_next``, a pure function like the body of a ``lax.scan`` over layers. ``y`` is a pytree,
            ``y_next`` has its structure, shapes and dtypes; ``layer`` is a `Layer`. It may close over arrays, traced and
            differentiated ones too.
        params: parameters of the layers; leaves ``(N, ...)``. Differentiated.
        y0: the state entering layer 0, a pytree of floating-point or complex arrays. Differentiated.
        shared: what every layer sees as ``layer.shared``, not stacked. Differentiated; gradients are summed over layers.
        data: per-layer inputs, dropout keys, masks; leaves ``(N, ...)``, seen as ``layer.data``. Floating-point leaves are
            differentiated.
        t0: time at which layer 0 starts, in units of your choice.
        t1: time at which the last layer ends; layer n spans ``[t0 + n h, t0 + (n+1) h]``, ``h = (t1 - t0) / N``. Or an
            array of N + 1 increasing times (then ``t0`` is not used). Differentiated where it is a JAX value.
        solver: `MGRIT`, `Picard`, `Newton` or `Serial`.
        adjoint_solver: the same for the adjoint system; None means the settings of ``solver`` (and a single iteration of
            `Newton`, as that system is linear).
        guess: where the first down-cycle is not skipped: "constant" (``y0`` at every point), "zeros", or a trajectory:
            states at the level-0 C-points after point 0, leaves ``(ceil(N / m), ...)``, for example
            ``Solution.trajectory`` of an earlier call. The adjoint solve takes the constant for a trajectory.
        comm: where the layers live: None is one device; `MeshComm` spreads them over an axis of a device mesh, `MPIComm` over
            MPI ranks, each of which passes its own layers (`layer_slices`).
        has_aux: whether ``step`` returns ``(y_next, aux)``.

    Returns:
        A `Solution`. Gradients flow through ``y1`` alone.

    Raises:
        ValueError: for lengths, times, guesses or settings that do not fit, at trace time.
        TypeError: for a step that changes its state's structure, shapes or dtypes, and for integer states.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> def step(y, layer):
        ...     w, b = layer.params
        ...     return y + layer.dt * jnp.tanh(y @ w + b)
        >>> params = (jnp.zeros((64, 8, 8)), jnp.ones((64, 8)))
        >>> loss = lambda params: jnp.sum(lp_jax.solve(step, params, jnp.zeros(8)).y1 ** 2)
        >>> value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        >>> round(float(value), 2)
        4.64

    References:
        Guenther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel training of deep residual neural networks", SIAM J.
        Math. Data Sci. 2 (2020).
    """
    spec, arrays = _prepare(step, params, y0, shared, data, t0, t1, solver, adjoint_solver, guess, comm, has_aux)
    y1, rest = _program(spec).run(*arrays)
    return Solution(y1, **jax.lax.stop_gradient(rest))


def solve_vjp(
    step: Step, params: PyTree, y0: State, **arguments: Any
) -> tuple[Solution, Callable[[State], tuple[Gradients, Stats]]]:
    """`solve`, and the pullback of ``y1`` that also tells how the adjoint solve converged.

    Args:
        step: as for `solve`, like all other arguments.
        params: as for `solve`.
        y0: as for `solve`.
        **arguments: as for `solve`.

    Returns:
        The solution, and ``pullback(y1_cotangent) -> (gradients, adjoint_stats)``, with `Gradients` exactly those that
        ``jax.grad`` through `solve` gives. Values that ``step`` closes over get no gradient here.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> solver = lp_jax.MGRIT(coarsening=2, iterations=3)
        >>> solution, pullback = lp_jax.solve_vjp(step, jnp.ones(8), jnp.ones(()), solver=solver)
        >>> gradients, adjoint_stats = pullback(jnp.ones(()))
        >>> adjoint_stats.residual_norms.shape
        (3,)
    """
    defaults = {name: p.default for name, p in _SIGNATURE.items() if p.kind is p.KEYWORD_ONLY}
    if unknown := arguments.keys() - defaults:
        raise TypeError(f"solve_vjp got an unexpected argument {sorted(unknown)[0]!r}; it takes those of solve.")
    spec, (differentiable, other) = _prepare(step, params, y0, **(defaults | arguments))
    program = _program(spec)
    (y1, rest), pull = program.vjp(differentiable, other)

    def pullback(y1_cotangent: State) -> tuple[Gradients, Stats]:
        cotangents, stats = pull(y1_cotangent)
        operands = spec.operands(cotangents, [_float0(x) for x in other.leaves])
        slices, common = operands
        return Gradients(slices.params, common.y0, common.shared, slices.data), stats

    return Solution(y1, **rest), pullback


Output = tuple[State, dict[str, Any]]


class _Other(NamedTuple):
    """Operands that are not differentiated."""

    leaves: list[jax.Array]
    solver: Solver
    adjoint_solver: Solver
    guess: State | None


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Everything static about a solve: the key of its compiled program."""

    problem: Problem
    structure: Any
    differentiable: tuple[bool, ...]
    guess: str

    def operands(self, differentiable: Sequence[Any], other: Sequence[Any]) -> Operands:
        d, o = iter(differentiable), iter(other)
        return self.structure.unflatten([next(d) if mask else next(o) for mask in self.differentiable])


def _prepare(
    step: Step,
    params: PyTree,
    y0: State,
    shared: PyTree,
    data: PyTree,
    t0: Any,
    t1: Any,
    solver: Solver,
    adjoint_solver: Solver | None,
    guess: Any,
    comm: Any,
    has_aux: bool,
) -> tuple[_Spec, tuple[list[jax.Array], _Other]]:
    _inputs.solver("solver", solver)
    adjoint_solver = solver.for_adjoint() if adjoint_solver is None else adjoint_solver
    _inputs.solver("adjoint_solver", adjoint_solver)
    problem, operands = prepare(
        step,
        params,
        y0,
        shared=shared,
        data=data,
        t0=t0,
        t1=t1,
        has_aux=has_aux,
        comm=comm,
        solvers=(solver, adjoint_solver),
    )
    intervals = -(-operands.slices.index.shape[0] // solver.stride(problem.steps))
    guess = _inputs.guess(guess, operands.common.y0, intervals)
    given, kind = (None, guess) if isinstance(guess, str) else (guess, "constant")
    leaves, structure = jax.tree.flatten(operands)
    inexact = jax.tree.map(lambda x: bool(jnp.issubdtype(x.dtype, jnp.inexact)), operands)
    slices = jax.tree.unflatten(jax.tree.structure(operands.slices), problem.differentiable)
    mask = tuple(jax.tree.leaves(inexact._replace(slices=slices)))
    differentiable = [x for x, m in zip(leaves, mask, strict=True) if m]
    other = _Other([x for x, m in zip(leaves, mask, strict=True) if not m], solver, adjoint_solver, given)
    return _Spec(problem, structure, mask, kind), (differentiable, other)


class _Program(NamedTuple):
    run: Callable  # differentiable
    vjp: Callable  # with the adjoint's stats


def _program(spec: _Spec) -> _Program:
    try:
        return _cached_program(spec)
    except TypeError:  # a step that cannot be hashed
        return _build(spec)


@functools.lru_cache(maxsize=128)
def _cached_program(spec: _Spec) -> _Program:
    return _build(spec)


def _build(spec: _Spec) -> _Program:
    """The jitted functions of a solve. Compiling is JAX's to cache; this only keeps their identity."""
    forward = jax.jit(functools.partial(_forward, spec), static_argnames="keep")
    backward = jax.jit(functools.partial(_backward, spec))

    @jax.custom_vjp
    def iterated(differentiable: list[jax.Array], other: _Other) -> Output:
        return forward(differentiable, other, keep=False)[0]

    def fwd(differentiable: list[jax.Array], other: _Other) -> tuple[Output, Any]:
        out, checkpoints = forward(differentiable, other, keep=True)
        return out, (differentiable, other, checkpoints)

    def bwd(residuals: Any, cotangents: Output) -> tuple[Any, None]:
        return backward(*residuals, cotangents[0])[0], None

    iterated.defvjp(fwd, bwd)
    serial = jax.jit(functools.partial(_serial, spec))

    def run(differentiable: list[jax.Array], other: _Other) -> Output:
        return (serial if _is_scan(spec, other) else iterated)(differentiable, other)

    def vjp(differentiable: list[jax.Array], other: _Other) -> tuple[Output, Callable[[State], Any]]:
        if _is_scan(spec, other):
            y1, pull, rest = jax.vjp(lambda d: serial(d, other), differentiable, has_aux=True)
            return (y1, rest), lambda ct: (pull(ct)[0], _no_stats(ct))
        out, checkpoints = forward(differentiable, other, keep=True)
        return out, functools.partial(backward, differentiable, other, checkpoints)

    return _Program(run, vjp)


def _is_scan(spec: _Spec, other: _Other) -> bool:
    """Whether this is a ``lax.scan`` that JAX differentiates."""
    solvers = [solver.resolve(spec.problem.steps) for solver in (other.solver, other.adjoint_solver)]
    if spec.problem.placement.workers.size > 1 or not all(isinstance(solver, Serial) for solver in solvers):
        return False
    return spec.problem.looped or not (spec.problem.recurrent and solvers[0].keeps_states)


def _serial(spec: _Spec, differentiable: list[jax.Array], other: _Other) -> Output:
    operands = spec.operands(differentiable, other.leaves)
    chain = spec.problem.chain(*operands)
    solver = other.solver.resolve(chain.steps)
    assert isinstance(solver, Serial)
    y1, (states, aux) = propagate(chain, spec.problem.step_with_aux(0), solver.checkpoint_every)
    stride = solver.stride(chain.steps)
    kept = jax.tree.map(lambda x, y: jnp.concatenate([x[stride - 1 :: stride], y[None]]), states, y1)
    trajectory = jax.tree.map(lambda x: x[: -(-chain.steps // stride)], kept)
    return y1, _rest(y1, trajectory, aux, _no_stats(y1), jnp.asarray(True))


def _forward(
    spec: _Spec, differentiable: list[jax.Array], other: _Other, *, keep: bool
) -> tuple[Output, Checkpoints | None]:
    operands = spec.operands(differentiable, other.leaves)
    problem, placement = spec.problem, spec.problem.placement
    stride = other.solver.resolve(problem.steps).stride(problem.steps)

    def body(lists: tuple[Slices, State | None], others: tuple[Common, Solver]) -> tuple[Any, Any]:
        (slices, guess), (common, solver) = lists, others
        chain = problem.chain(slices, common)
        solver = solver.resolve(chain.total)
        levels = solver.discretize(chain)
        if guess is None and spec.guess == "zeros":
            guess = _tree.zeros_like(_tree.repeat(chain.y0, levels[0].intervals))
        before, stats, met = iterate(solver, levels, guess)
        keep_states = keep and solver.keeps_states
        advance = _emit(problem, keep_states) if keep_states or problem.has_aux else None
        u, emitted = solver.finish(levels, before, advance)
        states, kept, aux = (None, None, None) if emitted is None else levels[0].merge(emitted)
        swept_from = before if keep and not keep_states and before is not u else None
        return (Checkpoints(u, swept_from, states, kept), aux), (levels[0].exit(u), stats, met)

    guess = None if other.guess is None else placement.pad(other.guess, stride)
    lists = (problem.spread(operands.slices), guess)
    (checkpoints, aux), (y1, stats, met) = placement.run(body, lists, (operands.common, other.solver))
    trajectory = placement.trim(checkpoints.c_points, stride)
    out = (y1, _rest(y1, trajectory, placement.trim(aux), stats, met))
    return out, checkpoints if keep else None


def _backward(
    spec: _Spec, differentiable: list[jax.Array], other: _Other, checkpoints: Checkpoints, cotangent: State
) -> tuple[list[jax.Array], Stats]:
    operands = spec.operands(differentiable, other.leaves)
    problem = spec.problem
    stride = other.solver.resolve(problem.steps).stride(problem.steps)

    def body(lists: tuple[Slices, Checkpoints], others: tuple[Common, Solver, State]) -> tuple[Any, Any]:
        (slices, checkpoints), (common, solver, cotangent) = lists, others
        chain = problem.chain(slices, common)
        solver = solver.resolve(chain.total)
        gradient, stats, _ = solve_adjoint(
            chain, solver, checkpoints, stride, cotangent, spec.guess, problem.linearised
        )
        return gradient.slices, (gradient.y0, gradient.shared, stats)

    slices, (y0, shared, stats) = problem.placement.run(
        body,
        (problem.spread(operands.slices), checkpoints),
        (operands.common, other.adjoint_solver, cotangent),
    )
    return jax.tree.leaves(Operands(problem.placement.trim(slices), Common(y0, *shared))), stats


def _emit(problem: Problem, keep_states: bool) -> Advance:
    """A step of the finest level that emits aux, and, if asked to, the state it got and what its transpose needs."""

    def advance(u: State, operand: Operand, shared: PyTree) -> tuple[State, Any]:
        x = operand.x._replace(valid=None)
        if keep_states:
            u_next, aux, kept = problem.linearised.evaluate(u, x, shared)
        else:
            (u_next, aux), kept = problem.step_with_aux(0)(u, x, shared), None
        for valid in (operand.valid, operand.x.valid):
            if valid is not None:
                u_next = _tree.where(valid, u_next, u)
        return u_next, (u if keep_states else None, kept, aux)

    return advance


def _rest(y1: State, trajectory: State, aux: PyTree, stats: Stats, met: jax.Array) -> dict[str, Any]:
    return {"stats": stats, "result": result_code(y1, stats, met), "trajectory": trajectory, "aux": aux}


def _no_stats(y1: State) -> Stats:
    return Stats(jnp.int32(0), jnp.zeros((0,), _tree.real_dtype(y1, at_least=jnp.float32)))


def _float0(x: jax.Array) -> np.ndarray:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


_SIGNATURE = inspect.signature(solve).parameters
