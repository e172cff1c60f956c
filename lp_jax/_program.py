"""The programs of a solve: serial propagation that JAX differentiates, or an iterative solve with an adjoint of its own."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec

from lp_jax import _inputs, _tree
from lp_jax._adjoint import Forward, entered_in_final_sweep, solve_adjoint
from lp_jax._asked import asked, counts_of, tell
from lp_jax._chain import Chain
from lp_jax._comm import Workers
from lp_jax._gradient import reverse_only, without_gradient
from lp_jax._picard import or_default
from lp_jax._problem import Problem
from lp_jax._result import DONE, if_finite
from lp_jax._serial import propagate
from lp_jax._solver import Solver, Stats, iterate
from lp_jax._traced import Common, Operands, Traced, trace
from lp_jax._types import Advance, CPoints, PyTree, Slices, State

Output = tuple[State, PyTree, tuple[Stats, CPoints]]
"""The state after the last layer and aux, which are differentiable; and the rest of a `Solution`."""

Seen = tuple[jax.Array | None, ...]
"""Cotangents of the inexact leaves of aux, None for those that the loss does not see; empty if it sees none."""


class Arrays(NamedTuple):
    """Everything of a solve that is an array, and the two solvers, whose tolerances are."""

    operands: Operands
    solver: Solver
    adjoint_solver: Solver
    guess: CPoints | None
    adjoint_guess: CPoints | None
    watch: jax.Array | None = None  # whose cotangent is `counts_of` the solve


@dataclasses.dataclass(frozen=True)
class _Static:
    """Everything static about a solve: the key of its compiled program."""

    traced: Traced
    zeros: bool  # both solves start from zeros
    scan: bool  # this is a ``lax.scan`` that JAX differentiates

    def forward_workers(self, solver: Solver) -> Workers:
        """The workers, with slots for whole intervals of the forward solver."""
        return self.traced.workers.fit(solver.unit(self.traced.workers.layers))

    def adjoint_workers(self, arrays: Arrays) -> Workers:
        """The workers, with slots for whole intervals of the adjoint solver, and of the forward solver's finest level."""
        layers = self.traced.workers.layers
        return self.traced.workers.fit(math.lcm(arrays.solver.stride(layers), arrays.adjoint_solver.unit(layers)))


Pullback = Callable[[State, Seen], tuple[Operands, Stats, CPoints | None]]


class Program(NamedTuple):
    """What runs a solve.

    Attributes:
        traced: what is static about it.
        run: the solve, differentiable.
        vjp: the solve, and its pullback, which also gives the stats of the adjoint solve and where it ended.
    """

    traced: Traced
    run: Callable[[Arrays], Output]
    vjp: Callable[[Arrays], tuple[Output, Pullback]]


_FORWARD_MODE = (
    "Forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd) reached lp_jax.solve with an iterative solver, which has "
    "a gradient in reverse mode: take jax.grad, jax.vjp or jax.jacrev. Products with Hessians, jax.jvp of jax.grad, work, and "
    "so does jax.hessian. solver=lp_jax.Serial() is differentiated in both modes."
)
_TWICE = (
    "Reverse mode was applied twice to lp_jax.solve with a tolerance, whose number of iterations is known only when it has "
    "run. Take forward over reverse (jax.jvp of jax.grad, jax.hessian), or leave rtol and atol out."
)


def prepare(
    problem: Problem,
    solver: Solver | None,
    adjoint_solver: Solver | None,
    guess: str | CPoints,
    adjoint_guess: CPoints | None,
) -> tuple[Program, Arrays]:
    """Refuse what does not fit, trace the step, and find the program."""
    if asked.value.solvers is not None:
        (solver, adjoint_solver), guess, adjoint_guess = asked.value.solvers, "constant", None
    solver, adjoint_solver = or_default(solver, adjoint_solver)
    _inputs.solver("solver", solver)
    adjoint_solver = solver.for_adjoint() if adjoint_solver is None else adjoint_solver
    _inputs.solver("adjoint_solver", adjoint_solver)
    traced, operands = trace(problem, (solver, adjoint_solver))
    layers = traced.workers.layers
    solver, adjoint_solver = solver.resolve(layers), adjoint_solver.resolve(layers)
    intervals, of_adjoint = (-(-traced.workers.rows[0] // each.stride(layers)) for each in (solver, adjoint_solver))
    for each in (solver, adjoint_solver):
        _inputs.at_once(each, layers)
    guess = _inputs.guess(guess, operands.common.y0, intervals)
    if adjoint_guess is not None:
        adjoint_guess = _inputs.trajectory("adjoint_guess", adjoint_guess, operands.common.y0, of_adjoint)
        adjoint_solver = adjoint_solver.resolve(layers, warm=True)
    exact = traced.workers.size == 1 and solver.exact and adjoint_solver.exact
    scan = (
        adjoint_guess is None
        and exact
        and (not traced.workers.processor.launches or not (traced.recurrent and solver.keeps_states))
    )
    static = _Static(traced, isinstance(guess, str) and guess == "zeros", scan)
    watch = asked.value.watch and _tree.varying(asked.value.watch.counts, operands)
    if isinstance(guess, str):
        arrays = Arrays(operands, solver, adjoint_solver, None, adjoint_guess, watch)
    else:
        arrays = Arrays(operands, solver.resolve(layers, warm=True), adjoint_solver, guess, adjoint_guess, watch)
    try:
        return _program(static), arrays
    except TypeError:  # a step that cannot be hashed
        return _program.__wrapped__(static), arrays


@functools.lru_cache(maxsize=128)
def _program(static: _Static) -> Program:
    """The jitted functions of a solve. Compiling is JAX's to cache; this only keeps their identity."""
    return _scanned(static) if static.scan else _iterated(static)


def _scanned(static: _Static) -> Program:
    """Serial propagation, differentiated by JAX."""
    scan = jax.jit(functools.partial(_scan, static))

    def vjp(arrays: Arrays) -> tuple[Output, Pullback]:
        leaves, combine = _tree.partition(arrays.operands)

        def run(leaves: list[jax.Array]) -> tuple[tuple[State, list[jax.Array]], Output]:
            out = scan(arrays._replace(operands=combine(leaves)))
            return (out[0], _tree.partition(out[1])[0]), out

        (_, aux), pull, out = jax.vjp(run, leaves, has_aux=True)

        def pullback(cotangent: State, seen: Seen) -> tuple[Operands, Stats, None]:
            of_aux = _tree.zeros_like(aux) if not seen else list(map(_or_zeros, seen, aux))
            return combine(pull((cotangent, of_aux))[0], fill=None), _no_stats(cotangent), None

        return out, pullback

    return Program(static.traced, scan, vjp)


def _or_zeros(cotangent: Any, like: Any) -> jax.Array:
    return jnp.zeros_like(like) if cotangent is None or isinstance(cotangent, SymbolicZero) else cotangent


def _iterated(static: _Static) -> Program:
    """The forward solve, differentiated by the adjoint solve."""
    forward = jax.jit(functools.partial(_forward, static), static_argnames="keep")
    backward = jax.jit(functools.partial(_backward, static), static_argnames="keep")

    @jax.custom_vjp
    def solve(arrays: Arrays) -> Output:
        return forward(arrays, keep=False)[0]

    def run(arrays: Arrays) -> Output:
        return solve(arrays._replace(operands=reverse_only(arrays.operands, _FORWARD_MODE)))

    def fwd(primals: Any) -> tuple[Output, Any]:
        arrays = custom_vjp_primal_tree_values(primals)
        out, kept = forward(arrays, keep=True)
        return out, (arrays, kept, (out[0], out[1], out[2][0].result))

    def bwd(residuals: tuple[Arrays, Forward, tuple[State, PyTree, jax.Array]], cotangents: Output) -> tuple[Any]:
        arrays, kept, (y1, aux, result) = residuals
        y1_cotangent, keep = jax.tree.map(_or_zeros, cotangents[0], y1), arrays.adjoint_guess is not None
        operands, stats, trajectory = backward(arrays, kept, y1_cotangent, seen_of(aux, cotangents[1]), keep=keep)
        if arrays.solver.has_tolerance or arrays.adjoint_solver.has_tolerance:
            operands = without_gradient(operands, _TWICE)
        watch = None if arrays.watch is None else counts_of(result, stats.result)
        return (Arrays(operands, None, None, None, trajectory, watch),)  # type: ignore[arg-type]

    def vjp(arrays: Arrays) -> tuple[Output, Pullback]:
        out, kept = forward(arrays, keep=True)
        return out, functools.partial(backward, arrays, kept, keep=True)

    solve.defvjp(fwd, bwd, symbolic_zeros=True)
    return Program(static.traced, run, vjp)


def _scan(static: _Static, arrays: Arrays) -> Output:
    """Serial propagation."""
    solver, workers = arrays.solver, static.traced.workers
    stride = solver.stride(workers.layers)
    chain = static.traced.chain(*arrays.operands, workers)
    y1, (states, aux) = propagate(chain, None if solver.keeps_states else stride)
    kept = jax.tree.map(lambda x, y: jnp.concatenate([x[stride - 1 :: stride], y[None]]), states, y1)
    return y1, aux, (_no_stats(y1), workers.trim(kept, stride))


def _forward(static: _Static, arrays: Arrays, *, keep: bool) -> tuple[Output, Forward | None]:
    """The forward solve, and what it leaves for the adjoint."""
    traced, (slices, common) = static.traced, arrays.operands
    workers = static.forward_workers(arrays.solver)
    stride = arrays.solver.stride(workers.layers)

    def body(stacked: tuple[Slices, CPoints | None], others: tuple[Common, Solver]) -> tuple[Any, Any]:
        (slices, guess), (common, solver) = stacked, others
        chain = traced.chain(slices, common, workers)
        levels = solver.discretize(chain)
        if static.zeros:
            guess = _tree.zeros_like(_tree.repeat(chain.y0, levels[0].intervals))
        before, stats = iterate(solver, levels, guess)
        keep_states = keep and solver.keeps_states
        advance = _emit(chain, keep_states) if keep_states or traced.has_aux else None
        u, emitted = solver.finish(levels, before, advance)
        states, linearisations, aux = (None, None, None) if emitted is None else levels[0].merge(emitted)
        entered = entered_in_final_sweep(levels[0], before, u) if keep and not keep_states else None
        y1 = levels[0].last(u)
        stats = stats._replace(result=if_finite(stats.result, y1))
        return (Forward(u, entered, states, linearisations), aux), (y1, stats)

    stacked = traced.spread(slices, workers), workers.pad(arrays.guess, stride)
    (left, aux), (y1, stats) = workers.run(body, stacked, (common, arrays.solver))
    tell("forward", arrays.solver, workers.layers, stats)
    out = y1, workers.trim(aux), (stats, workers.trim(left.c_points, stride))
    return out, left if keep else None


def _backward(
    static: _Static, arrays: Arrays, left: Forward, cotangent: State, seen: Seen, *, keep: bool
) -> tuple[Operands, Stats, CPoints | None]:
    """The adjoint solve: the gradient, None in the place of leaves that are not differentiated; and where it ended."""
    traced, (slices, common) = static.traced, arrays.operands
    stride, of_adjoint = (each.stride(traced.workers.layers) for each in (arrays.solver, arrays.adjoint_solver))
    before, workers = static.forward_workers(arrays.solver), static.adjoint_workers(arrays)

    def body(
        stacked: tuple[Slices, Forward, Seen, CPoints | None], others: tuple[Common, Solver, State]
    ) -> tuple[Any, Any]:
        (slices, left, seen, guess), (common, solver, cotangent) = stacked, others
        chain = traced.chain(slices, common, workers)
        start = "zeros" if guess is None and static.zeros else guess
        gradient, lam, stats = solve_adjoint(chain, solver, left, stride, cotangent, seen, start)
        return (gradient.slices, lam if keep else None), (gradient.y0, gradient.shared, stats)

    if workers.rows != before.rows:
        spans = Forward(stride, stride, 1, 1)
        left = Forward(*(workers.pad(before.trim(x, span), span) for x, span in zip(left, spans, strict=True)))
    stacked = traced.spread(slices, workers), left, workers.pad(seen), workers.pad(arrays.adjoint_guess, of_adjoint)
    (slices, lam), (y0, shared, stats) = workers.run(body, stacked, (common, arrays.adjoint_solver, cotangent))
    tell("adjoint", arrays.adjoint_solver, workers.layers, stats)
    return Operands(workers.trim(slices), Common(y0, *shared)), stats, workers.trim(lam, of_adjoint)


def _emit(chain: Chain, keep_states: bool) -> Advance:
    """A step of the finest level that emits aux, and, if asked to, the state it got and what its transpose needs."""
    linearised = chain.linearised

    def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, Any]:
        if keep_states:
            u_next, aux, kept = linearised.evaluate(u, x, shared)
            return u_next, (u, kept, aux)
        u_next, aux = chain.call(0, u, x, shared)
        return u_next, (None, None, aux)

    return advance


def _no_stats(y1: State) -> Stats:
    norms = jnp.zeros((0,), _tree.real_dtype(y1, at_least=jnp.float32))
    return Stats(jnp.int32(0), norms, if_finite(jnp.int32(DONE), y1))


def partitions(program: Program, arrays: Arrays) -> Output:
    """Partitions of what a solve returns: the states as ``y0`` is, and so is aux of the shape of a state."""
    slices, common = arrays.operands

    def spec(x: jax.Array) -> PartitionSpec:
        sharding = jax.typeof(x).sharding
        return PartitionSpec() if sharding.mesh.empty else sharding.spec

    def one(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    like = {x.shape: spec(x) for x in jax.tree.leaves(common.y0)}
    operands = jax.tree.map(one, (common.y0, jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], one(x)), slices)))
    shared = jax.tree.map(one, (common.shared, common.closed_over))
    _, aux = jax.eval_shape(functools.partial(program.traced.call, 0), *operands, shared)
    nowhere: Any = PartitionSpec()
    return (
        jax.tree.map(spec, common.y0),
        jax.tree.map(lambda x: PartitionSpec(None, *like.get(x.shape, ())), aux),
        (Stats(nowhere, nowhere, nowhere), jax.tree.map(lambda x: PartitionSpec(None, *spec(x)), common.y0)),
    )


def seen_of(aux: PyTree, cotangents: PyTree) -> Seen:
    """``cotangents``, a tree like ``aux``, as the adjoint solve takes them."""
    if cotangents is None:
        return ()
    leaves, structure = jax.tree.flatten(aux)
    pairs = zip(leaves, structure.flatten_up_to(cotangents), strict=True)  # type: ignore[attr-defined]
    found = tuple(
        None if a is None or isinstance(a, SymbolicZero) else a
        for x, a in pairs
        if jnp.issubdtype(x.dtype, jnp.inexact)
    )
    return found if any(a is not None for a in found) else ()
