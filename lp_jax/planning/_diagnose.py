"""Diagnose convergence: two numbers of a chain of layers, and solvers rehearsed on a few examples."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree, Slices, State
from lp_jax._levels._result import DONE
from lp_jax._problem import Problem
from lp_jax._programs._traced import trace
from lp_jax._solvers._default import Pair
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard
from lp_jax.planning._candidates import as_pair
from lp_jax.planning._deadline import Deadline
from lp_jax.planning._measure import arrays, compile_fast, examples_of, few, small, solving
from lp_jax.planning._words import align, code, numbered, where_it_pays


class Rehearsal(NamedTuple):
    """Iterations of a pair of solvers on a few examples, until their tolerance was met or they gave up, and result codes."""

    solver: Solver
    adjoint_solver: Solver
    iterations: int
    adjoint_iterations: int
    result: int
    adjoint_result: int

    @property
    def converges(self) -> bool:
        """Whether both tolerances were met."""
        return self.result == self.adjoint_result == DONE


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """How a chain of layers behaves, and how many iterations solvers take on it. ``print(diagnosis)`` shows a table.

    Attributes:
        layers: number of layers.
        examples: number of examples that were used.
        lipschitz: Lipschitz constant of the right-hand side times T: the sum over the layers of the 2-norm of ``J - I``, J the
            Jacobian of a layer at the states of a forward pass. Sweeps contract by ``lipschitz / s`` or better in sweep s.
        lyapunov: largest Lyapunov exponent, per layer: a disturbance grows by ``exp(lyapunov)`` from one layer to the next, on
            average. Below zero, layers forget.
        rehearsals: iterations of each pair of solvers, and how they ended.
        left_out: solvers that were not rehearsed for lack of time.
    """

    layers: int
    examples: int
    lipschitz: float
    lyapunov: float
    rehearsals: tuple[Rehearsal, ...]
    left_out: tuple[Solver, ...] = ()

    @property
    def growth(self) -> float:
        """Factor by which a disturbance grows on its way through all layers."""
        return math.exp(min(self.lyapunov * self.layers, _LARGEST))

    @property
    def behaviour(self) -> str:
        """One sentence: the chain forgets a small disturbance, keeps it (a factor of 0.1 to 10) or amplifies it."""
        kind = "forgets" if self.growth <= 0.1 else "keeps disturbances" if self.growth <= 10 else "amplifies"
        growth = f"{self.growth:.1f}" if 0.1 <= self.growth < 100 else f"{self.growth:.1e}"
        return f"This chain {kind}: a disturbance is {growth} times as large after the last layer."

    @property
    def verdict(self) -> str:
        """The behaviour, and which rehearsed solvers converge."""
        sentences = [self.behaviour]
        good = [f"{type(r.solver).__name__}{where_it_pays(r.solver)}" for r in self.rehearsals if r.converges]
        bad = [type(r.solver).__name__ for r in self.rehearsals if not r.converges]
        if good:
            sentences.append(f"Converges: {', '.join(good)}." + (f" Does not: {', '.join(bad)}." if bad else ""))
        elif bad:
            sentences.append(f"No rehearsed solver converges{'' if self.left_out else ': take Serial()'}.")
        if self.left_out:
            names = ", ".join(type(solver).__name__ for solver in self.left_out)
            sentences.append(f"Left out for lack of time: {names}.")
        return " ".join(sentences)

    def __str__(self) -> str:
        lines = [
            f"{self.layers} layers, measured on {numbered(self.examples, 'example')}",
            "",
            f"  Lipschitz constant x T  {self.lipschitz:.3g}",
            f"  Lyapunov exponent       {self.lyapunov:+.2g} a layer",
        ]
        if self.rehearsals:
            rows: list[tuple[str, ...]] = [("forward", "adjoint", "solver")]
            for r in self.rehearsals:
                ways = (r.iterations, r.result), (r.adjoint_iterations, r.adjoint_result)
                taken = (str(iterations) if result == DONE else "-" for iterations, result in ways)
                rows.append((*taken, code(r.solver)))
            lines += ["", *(f"  {line}" for line in align(rows))]
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__


_LARGEST = 700.0  # of an exponent


def diagnose(
    problem: Problem,
    *,
    cotangent: State | None = None,
    examples: int = 4,
    solvers: Sequence[Solver | Pair] | None = None,
    seconds: float = 10.0,
) -> Diagnosis:
    """Estimate how fast solvers converge on a network, before it is solved or trained.

    Two numbers come from one trajectory of a few examples. The Lipschitz constant times T comes from power iteration with
    Jacobian-vector products. The largest Lyapunov exponent comes from propagating a cotangent, which grows as a tangent does.
    The number of iterations comes from a rehearsal: each solver runs to its tolerance on these examples, forward and adjoint.

    Args:
        problem: the network, and a typical batch.
        cotangent: cotangent of the last state, as a loss gives it; None takes the last state, as a sum of squares gives it.
        examples: number of examples that are used, along the first axis of the state. All of them where the step does not
            take fewer.
        solvers: solvers to rehearse, or pairs (solver, adjoint solver). None means sweeps, cycles of two levels and, where an
            example's state has at most 256 numbers, Newton's method, each to a residual of 1e-3, in the adjoint 1e-2, of the
            first one, with at most 32 iterations. With an empty list nothing is rehearsed; this takes a second.
        seconds: time after which no rehearsal starts. One that has begun is finished, its compilation included. The two numbers
            are always computed. The text names the solvers left out.

    Returns:
        The `Diagnosis`.

    Raises:
        TypeError: if ``problem`` is not a `Problem`.
        ValueError: for less than one example.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.ones((64, 4, 4)) / 8, jnp.ones((8, 4)))
        >>> diagnosis = planning.diagnose(problem, solvers=[lp_jax.Picard(sweeps=32, rtol=1e-3)])
        >>> diagnosis.rehearsals[0].converges, diagnosis.lipschitz < 1
        (True, True)

    References:
        Gander, "50 years of time parallel time integration", 2015, for sweeps; Gonzalez et al., "Predictability enables
        parallelization of nonlinear state space models", 2025, for the Lyapunov exponent.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a lp_jax.Problem(step, params, y0); got {type(problem).__name__}.")
    _check.integer("examples", examples, least=1)
    deadline = Deadline(seconds)
    problem = few(problem.replace(comm=None), examples)
    if cotangent is not None:
        cotangent = jax.tree.map(lambda x, y: x[: len(y)] if jnp.ndim(y) else x, cotangent, problem.y0)
    pairs = _usual(problem) if solvers is None else list(map(as_pair, solvers))
    lipschitz, lyapunov = _numbers(problem)
    rehearsals = [_rehearse(problem, cotangent, *pair) for pair in pairs if deadline.allows()]
    left_out = tuple(solver for solver, _ in pairs[len(rehearsals) :])
    return Diagnosis(problem.layers, examples_of(problem.y0), lipschitz, lyapunov, tuple(rehearsals), left_out)


_MOST = 32  # iterations, as of the default solver


def _usual(problem: Problem) -> list[Pair]:
    """Sweeps, cycles and, for small states, Newton's method; with fewer iterations than layers, so that none is exact."""
    most = max(1, min(_MOST, problem.layers - 1))
    solvers: list[Picard | MGRIT] = [
        Picard(sweeps=most, rtol=1e-3, fallback=True),
        MGRIT(iterations=most, rtol=1e-3, fallback=True),
    ]
    pairs: list[Pair] = [(s, dataclasses.replace(s, rtol=1e-2)) for s in solvers]
    if small(problem.y0):  # a residual of Newton's method may rise on the way: it does not give up
        pairs.append((Newton(iterations=most, rtol=1e-3, batch_axes=1), Newton(iterations=1, batch_axes=1)))
    return pairs


def _numbers(problem: Problem) -> tuple[float, float]:
    """Lipschitz constant times T, and the largest Lyapunov exponent per layer."""

    @functools.partial(jax.jit, compiler_options=compile_fast())
    def along(arrays: dict[str, PyTree]) -> tuple[jax.Array, jax.Array]:
        program, operands = trace(problem.replace(**arrays), (Serial(),))
        chain = program.chain(*operands[:3])
        step, shared = chain.step(0), chain.shared

        def transposed(y: State, x: Slices) -> Callable[[State], State]:
            """The transposed Jacobian; a step with a custom derivative may have no forward mode."""
            pull = jax.vjp(lambda y: step(y, x, shared), y)[1]
            return lambda w: pull(w)[0]

        def grow(w: State, at: tuple[State, Slices]) -> tuple[State, jax.Array]:
            return _normal(transposed(*at)(w))

        def norm(y: State, x: Slices, w: State) -> jax.Array:
            """2-norm of J - I, by power iteration."""
            pull = transposed(y, x)
            push = jax.linear_transpose(pull, w)

            def turn(_: jax.Array, at: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
                v, size = _normal(_tree.sub(pull(at[0]), at[0]))
                return _normal(_tree.sub(push(v)[0], v))[0], size

            return lax.fori_loop(0, _ROUNDS, turn, (w, _tree.norm(w)))[1]

        _, entering = lax.scan(lambda y, x: (step(y, x, shared), y), chain.y0, chain.slices)
        start, _ = _normal(_noise(chain.y0))
        sizes = lax.scan(grow, start, (entering, chain.slices), reverse=True)[1]
        norms = jax.vmap(norm, (0, 0, None))(entering, chain.slices, start)
        return jnp.sum(norms), jnp.mean(jnp.log(sizes))

    lipschitz, lyapunov = along(arrays(problem))
    return float(lipschitz), float(lyapunov)


_ROUNDS = 10


def _normal(v: State) -> tuple[State, jax.Array]:
    """A state divided by its norm, and the norm."""
    size = _tree.norm(v)
    size = jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    return jax.tree.map(lambda x: x / size.astype(jnp.finfo(x.dtype).dtype), v), size


def _noise(like: State) -> State:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        structure, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


def _rehearse(problem: Problem, cotangent: State | None, solver: Solver, adjoint_solver: Solver) -> Rehearsal:
    """Run both solvers on these examples, to their tolerances."""
    _, stats, adjoint = solving(problem, fast=True)(solver, adjoint_solver, cotangent)
    reached = map(int, (stats.iterations, adjoint.iterations, stats.result, adjoint.result))
    return Rehearsal(solver, adjoint_solver, *reached)
