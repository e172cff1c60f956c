"""The program of a solve: serial propagation that JAX differentiates, or an iterative solve with an adjoint solve."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from lp_jax._arrays import _tree
from lp_jax._arrays._gradient import without_gradient
from lp_jax._arrays._jaxpr import has_rule, walk
from lp_jax._arrays._types import Arrays, CPoints, PyTree, Slices, State
from lp_jax._arrays._weak import weakly
from lp_jax._comms import _wire
from lp_jax._comms._workers import Workers
from lp_jax._levels._chain import Chain, pad_slices
from lp_jax._levels._layer import Traced
from lp_jax._levels._result import DONE, SERIAL, if_finite
from lp_jax._programs import _relay
from lp_jax._programs._adjoint import Forward, solve_adjoint
from lp_jax._programs._asked import report_stats
from lp_jax._programs._relay import AuxCotangents, Kept, Mapped
from lp_jax._programs._results import count_ends, counts_of
from lp_jax._solvers._serial import no_stats, propagate
from lp_jax._solvers._solver import Solver, Stats, iterate

# the state after the last layer and aux, both differentiable; and the rest of a `Solution`
Output = tuple[State, PyTree, tuple[Stats, CPoints]]

_NO_AXIS = (
    "In a gradient taken outside of a vmap, JAX does not know its axis name in a solve. Solve what "
    "the vmap makes of the layer: jax.grad(lp_jax.parallel(function with the vmap and "
    "jax.lax.scan)); or take solver=lp_jax.Serial()."
)
_TWICE = (
    "Reverse mode was applied twice to lp_jax.solve with a tolerance, whose number of iterations "
    "is known only when it has run. Take forward over reverse (jax.jvp of jax.grad, jax.hessian), "
    "or leave rtol and atol out."
)


# `jax.jit` caches by the identity of a function. Equal programs therefore have to share one object, which this dictionary
# finds by equality: keys and values are the same programs, in the order in which they were used.
_canonical: dict[Any, Any] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static about a solve, and the functions that run it. `Arrays` hold the rest.

    Its functions are jitted; on an MPI rank without layers inline, as jaxlib 0.11 and 0.12 fail at a call of only a token.
    """

    traced: Traced
    workers: Workers  # with slots for whole intervals of both solves
    stride: int  # number of layers between two C-points of the forward solve
    adjoint_stride: int  # the same of the adjoint solve
    zeros: bool = False  # whether both solves start from zeros
    scan: bool = False  # whether the solve is a ``lax.scan`` that JAX differentiates
    # the steps of a relay, if layers over several workers are propagated one after another
    relay: str = ""
    mapped: Mapped | None = None  # the microbatches, if `arrays` have some
    done: int = DONE  # result code of a solve that did what was asked

    def code_of(self, result: jax.Array) -> jax.Array:
        """The result code of a solve, which is `SERIAL` in the place of `DONE` where nothing else was tried."""
        return (
            result
            if self.done == DONE
            else jnp.where(result == DONE, self.done, result).astype(jnp.int32)
        )

    def __call__(self, arrays: Arrays) -> Output:
        """Solve by a scan that JAX differentiates, or by iterations whose gradient is an adjoint solve."""
        if self.scan:
            return self.canonical.propagate(arrays)

        # JAX must not differentiate through the iterations: the gradient is that of the limit, which the adjoint system gives.
        solve = jax.custom_vjp(functools.partial(self.canonical.forward, keep=False))

        def fwd(primals: PyTree) -> tuple[Output, PyTree]:
            # With symbolic zeros JAX passes each primal with a flag whether it is perturbed. Only the values matter here.
            arrays = custom_vjp_primal_tree_values(primals)
            (y1, aux, more), saved = self.canonical.forward(arrays, keep=True)
            if arrays.solver.has_tolerance:
                y1, aux = without_gradient((y1, aux), _TWICE)
            return (y1, aux, more), (arrays, saved, (y1, aux, more[0].result))

        def bwd(
            residuals: tuple[Arrays, Forward | Kept, PyTree], cotangents: Output
        ) -> tuple[Arrays]:
            arrays, saved, (y1, aux, result) = residuals
            y1_cotangent = jax.tree.map(_or_zeros, cotangents[0], y1)
            # A symbolic zero in the cotangent of aux means that the loss does not use that leaf, so its source is left out.
            seen = seen_of(aux, cotangents[1])
            try:
                gradient, stats = self.canonical.backward(arrays, saved, y1_cotangent, seen)
            # JAX raises NameError for an axis name that it does not know.
            except NameError as error:
                raise NameError(f"{error} {_NO_AXIS}") from error
            # A while loop has no reverse mode. These marks let a second reverse pass be refused with advice.
            if arrays.solver.has_tolerance or arrays.adjoint_solver.has_tolerance:
                gradient = without_gradient(gradient, _TWICE)
            # The results of both solves leave the backward pass as the cotangent of `watch`, because it has no other output.
            watch = None if arrays.watch is None else counts_of(result, stats.result)
            last, ended = gradient.adjoint_guess, None
            if arrays.ended is not None:
                # Within a user's shard_map they must vary over the same axes as the zeros.
                ended = _tree.varying((_tree.narrow(stats, arrays.ended[0]), last), arrays.ended)
            if arrays.adjoint_guess is None:
                last = None
            return (gradient._replace(adjoint_guess=last, watch=watch, ended=ended),)

        # Symbolic zeros tell which outputs the loss uses; without them all cotangents would be arrays of zeros.
        solve.defvjp(fwd, bwd, symbolic_zeros=True)
        return solve(arrays)

    def chain(self, slices: Slices, y0: State, shared: PyTree, *others: PyTree) -> Chain:
        """The chain of these layers, all of them or those of one worker. ``others`` are the other arrays of the solve."""
        # On MPI ranks every message is made to depend on all arrays of the solve; other workers ignore them.
        workers = self.workers.solving((slices, y0, shared, others))
        return Chain(
            traced=self.traced,
            slices=slices,
            shared=shared,
            y0=y0,
            workers=workers,
            padded=workers.padded,
        )

    def slots(self, slices: Slices) -> Slices:
        """Pad the layers that the caller passed to all slots."""
        return pad_slices(slices, self.workers.rows[1], self.workers.layers)

    @functools.cached_property
    def canonical(self) -> "Program":
        """The program equal to this one that was used before: JAX may have compiled its functions already.

        It goes when the step does. It has no strong reference to it, because a step closes over arrays.
        """

        def forget(_: object, programs: dict[Any, Any] = _canonical) -> None:
            programs.pop(itself(), None)

        # The dictionary holds the steps weakly. `forget` is called when a step is collected, and removes its programs.
        steps = tuple((which, weakly(step, forget)) for which, step in self.traced.steps)
        own = dataclasses.replace(self, traced=dataclasses.replace(self.traced, steps=steps))
        itself = weakref.ref(own)
        try:
            # Popping and setting again moves the program to the end.
            found = _canonical.pop(own, own)
        except TypeError:  # the step is not hashable
            return self
        _canonical[found] = found
        if len(_canonical) > 32:  # each has its compiled functions, some MB
            del _canonical[next(iter(_canonical))]
        return found

    @functools.cached_property
    def propagate(self) -> Callable[[Arrays], Output]:
        return self._jit(_scan)

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        return self._jit(_relay.forward if self.relay else _forward, static_argnames="keep")

    @functools.cached_property
    def backward(self) -> Callable[..., tuple[Arrays, Stats]]:
        return self._jit(_relay.backward if self.relay else _backward)

    def _jit(self, run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        # The jitted function holds a copy, because a reference from the program to itself would be a cycle.
        run = functools.partial(run, dataclasses.replace(self))
        hoisted = (each.jaxpr.eqns for _, step in self.traced.steps for _, each in step.hoisted)
        # A rule of the user's in a step that closes over traced values may do so, too, and then works in their trace only.
        if self.scan and any(has_rule(equation) for each in hoisted for equation in walk(each)):
            return run
        return jax.jit(run, inline=self.workers.rows[0] == 0, **options)


def _scan(program: Program, arrays: Arrays) -> Output:
    """Serial propagation."""
    solver, workers, stride = arrays.solver, program.workers, program.stride
    # `states` are those after the layers, ``(N, ...)``.
    y1, (states, aux) = propagate(
        program.chain(*arrays[:3]), None if solver.keeps_states else stride
    )
    # C-points are the states after every `stride` layers; the last one is that after the last layer.
    c_points = jax.tree.map(
        lambda x, y: jnp.concatenate([x[stride - 1 :: stride], y[None]]), states, y1
    )
    stats = no_stats(y1, program.done)
    if program.done == SERIAL:
        report_stats("forward", solver, workers.layers, stats)
    if arrays.watch is not None:
        y1 = count_ends(arrays.watch.astype(jnp.float32), stats.result, y1)
    return y1, aux, (stats, workers.trim(c_points, stride))


def _forward(program: Program, arrays: Arrays, *, keep: bool) -> Output | tuple[Output, Forward]:
    """The forward solve, with the arrays that the adjoint needs if ``keep``."""
    workers = program.workers

    def body(
        spread: tuple[Slices, CPoints | None], common: tuple[State, PyTree, Solver]
    ) -> tuple[tuple[Forward, PyTree], tuple[State, Stats]]:
        # `spread` are the arrays that each worker has a part of; `common` are the same on all workers.
        (slices, guess), (y0, shared, solver) = spread, common
        chain = program.chain(slices, y0, shared, guess, solver)
        levels = solver.discretize(chain)
        if program.zeros:
            # A zero guess is made here, as only the levels say how many C-points this worker has.
            guess = _tree.zeros_like(_tree.repeat(y0, levels[0].intervals))
        iterated, stats = iterate(solver, levels, guess)
        # The final sweep evaluates each layer once more. It is the place to linearise, and to take aux.
        keep_states = keep and solver.keeps_states
        layer, linearised = chain.step(0, aux=True), chain.linearised

        def advance(u: State, x: Slices, shared: PyTree) -> tuple[State, PyTree]:
            if keep_states:
                (u_next, aux), kept = linearised.evaluate(u, x, shared)
                return u_next, (u, kept, aux)
            u_next, aux = layer(u, x, shared)
            return u_next, (None, None, aux)

        # Without anything to emit a solver may leave out the final sweep.
        emits = keep_states or program.traced.steps[0][1].has_aux
        u, emitted = solver.finish(levels, iterated, advance if emits else None)
        states, linearisations, aux = (
            (None, None, None) if emitted is None else levels[0].merge(emitted)
        )
        # If the final sweep moved the C-points, the layers were evaluated at the states before it, so the adjoint needs those.
        swept = keep and not keep_states and iterated is not None and iterated is not u
        entered = levels[0].incoming(iterated) if swept else None
        y1 = levels[0].last(u)
        stats = stats._replace(result=program.code_of(if_finite(stats.result, y1)))
        return (Forward(u, entered, states, linearisations), aux), (y1, stats)

    spread = program.slots(arrays.slices), workers.pad(arrays.guess, program.stride)
    (saved, aux), (y1, stats) = workers.map(body)(spread, (arrays.y0, arrays.shared, arrays.solver))
    report_stats("forward", arrays.solver, workers.layers, stats)
    y1, aux = _wire.batched_alike((y1, workers.trim(aux)), arrays)
    out = y1, aux, (stats, workers.trim(saved.c_points, program.stride))
    return (out, saved) if keep else out


def _backward(
    program: Program,
    arrays: Arrays,
    saved: Forward,
    cotangent: State,
    seen: AuxCotangents,
) -> tuple[Arrays, Stats]:
    """The adjoint solve: the gradient and the stats.

    The ``adjoint_guess`` of the gradient holds the cotangents at which it ended, if somebody wants them.
    """
    solver, workers, stride = arrays.adjoint_solver, program.workers, program.adjoint_stride
    wanted = arrays.adjoint_guess is not None or arrays.ended is not None

    def body(
        spread: tuple[Slices, CPoints | None, Forward, AuxCotangents], common: PyTree
    ) -> tuple[PyTree, PyTree]:
        # `saved` is already in the slots of the workers, as the forward solve left it.
        (slices, guess, saved, seen), (y0, shared, solver, cotangent) = spread, common
        # `solve_adjoint` makes the zeros itself, as only its levels say how many C-points there are.
        start = "zeros" if guess is None and program.zeros else guess
        chain = program.chain(slices, y0, shared, guess, saved, seen, solver, cotangent)
        gradient, stats = solve_adjoint(
            chain, solver, saved, program.stride, cotangent, seen, start
        )
        ended = gradient.adjoint_guess if wanted else None
        return (gradient.slices, ended), (gradient.y0, gradient.shared, stats)

    spread = (
        program.slots(arrays.slices),
        workers.pad(arrays.adjoint_guess, stride),
        saved,
        workers.pad(seen),
    )
    (slices, ended), (y0, shared, stats) = workers.map(body)(
        spread, (arrays.y0, arrays.shared, solver, cotangent)
    )
    report_stats("adjoint", solver, workers.layers, stats)
    gradient = Arrays(workers.trim(slices), y0, shared, adjoint_guess=workers.trim(ended, stride))
    return gradient, stats._replace(result=program.code_of(stats.result))


def _or_zeros(cotangent: jax.Array | SymbolicZero, like: jax.Array) -> jax.Array:
    return jnp.zeros_like(like) if isinstance(cotangent, SymbolicZero) else cotangent


def seen_of(aux: PyTree, cotangents: PyTree) -> AuxCotangents:
    """Flatten ``cotangents``, a tree like ``aux``, for the adjoint solve."""
    if cotangents is None:
        return ()
    leaves, structure = jax.tree.flatten(aux)
    pairs = zip(
        leaves,
        structure.flatten_up_to(cotangents),  # type: ignore[attr-defined]
        strict=True,
    )
    seen = tuple(None if isinstance(a, SymbolicZero) else a for x, a in pairs if _tree.inexact(x))
    return seen if any(a is not None for a in seen) else ()
