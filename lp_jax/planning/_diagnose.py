"""Diagnose convergence: two numbers of a chain of layers, and solvers rehearsed on a few examples."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import Slices, State
from lp_jax._choice._fastest import _LAST as LAST, Pair
from lp_jax._levels._result import DONE
from lp_jax._problem import Problem, hierarchy
from lp_jax._programs._traced import Tracing
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard
from lp_jax.planning._measure import (
    Deadline,
    announce,
    as_pair,
    examples_of,
    few,
    jitted,
    require,
    small,
    solved,
)
from lp_jax.planning._words import align, code, numbered

_LARGEST = 700.0  # of an exponent
_MOST = 32  # iterations, as of the default solver
_ROUNDS = 10  # of power iteration


Measured = tuple[State, jax.Array]
"""A state of norm 1, and the norm that it had."""


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

    @property
    def sweeps(self) -> int:
        """Evaluations of all layers that a training step makes, if an iteration makes one."""
        return self.iterations + self.adjoint_iterations + LAST


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """How a chain of layers behaves, and how many iterations solvers take on it. ``print(diagnosis)`` shows a table.

    Attributes:
        layers: number of layers.
        examples: number of examples that were used.
        lipschitz: Lipschitz constant of the right-hand side times T: the sum over the layers of the 2-norm of ``J - I``, J the
            Jacobian of a layer at the states of a forward pass. Sweeps contract by ``lipschitz / s`` or better in sweep s.
        lyapunov: largest Lyapunov exponent, per layer: a disturbance grows by ``exp(lyapunov)`` from one layer to the next, on
            average over layers that are no resets. Below zero, layers forget.
        resets: number of layers that leave nothing of a disturbance, like the first step of a packed sequence.
        sweep: seconds in which the device is predicted to evaluate all layers at once.
        serial: seconds in which it is predicted to propagate serially, forward and back.
        rehearsals: iterations of each pair of solvers, and how they ended.
        left_out: names of the solvers that were not rehearsed for lack of time.
    """

    layers: int
    examples: int
    lipschitz: float
    lyapunov: float
    resets: int
    sweep: float
    serial: float
    rehearsals: tuple[Rehearsal, ...]
    left_out: tuple[str, ...] = ()

    @property
    def growth(self) -> float:
        """Factor by which a disturbance grows on its way through all layers, or from one reset to the next."""
        return math.exp(min(self.lyapunov * self.layers / (self.resets + 1), _LARGEST))

    @property
    def answer(self) -> str:
        """Whether a rehearsed solver converges and is predicted to be faster than `Serial`, in one line.

        Its iterations and the evaluations around them are counted as evaluations of all layers, sweeps, and so is the time of
        `Serial`. Iterations of multigrid and Newton's method take more than that, so that a no is certain and a yes is not.
        """
        tried = [r for r in self.rehearsals if r.converges]
        if not tried:
            return "no: none converges" if self.rehearsals else "unknown: no solver was rehearsed"
        best = min(tried, key=lambda r: r.sweeps)
        word = "yes" if best.sweeps * self.sweep <= self.serial else "no"
        name = type(best.solver).__name__
        sweeps = self.serial / self.sweep
        return (
            f"{word}: {name} takes at least {best.sweeps} sweeps, Serial() the time of {sweeps:.1f}"
        )

    @property
    def verdict(self) -> str:
        """Whether the chain forgets a small disturbance, keeps it or amplifies it, and which solvers converge.

        It keeps a disturbance that grows by a factor of 0.1 to 10.
        """
        kind = (
            "forgets"
            if self.growth <= 0.1
            else "keeps disturbances"
            if self.growth <= 10
            else "amplifies"
        )
        growth = f"{self.growth:.1f}" if 0.1 <= self.growth < 100 else f"{self.growth:.1e}"
        end = "before the next reset" if self.resets else "after the last layer"
        good = [r for r in self.rehearsals if r.converges]
        bad = [r for r in self.rehearsals if not r.converges]
        slow = [r for r in good if r.sweeps * self.sweep > self.serial]
        sentences = [f"This chain {kind}: a disturbance is {growth} times as large {end}."]
        for said, which in (
            ("Converges", good),
            ("Does not converge", bad),
            ("Predicted not to be faster than Serial() here", slow),
        ):
            if which:
                names = ", ".join(type(r.solver).__name__ for r in which)
                sentences.append(f"{said}: {names}.")
        if self.left_out:
            sentences.append(f"Left out for lack of time: {', '.join(self.left_out)}.")
        if self.rehearsals and slow == good:
            sentences.append("Take Serial().")
        return " ".join(sentences)

    def __str__(self) -> str:
        lines = [
            self.answer,
            "",
            f"{self.layers} layers, measured on {numbered(self.examples, 'example')}",
            "",
            f"  Lipschitz constant x T  {self.lipschitz:.3g}",
            f"  Lyapunov exponent       {self.lyapunov:+.2g} a layer",
            f"  Resets                  {self.resets}",
            f"  Predicted               {1e3 * self.sweep:.2g} ms for a sweep, "
            f"{1e3 * self.serial:.2g} ms for Serial()",
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


def diagnose(
    problem: Problem,
    *,
    cotangent: State | None = None,
    examples: int = 4,
    solvers: Sequence[Solver | Pair] | None = None,
    seconds: float = 60.0,
) -> Diagnosis:
    """Estimate how fast solvers converge on a network, before it is solved or trained.

    Two numbers come from one trajectory of a few examples: the Lipschitz constant times T by power iteration, the largest
    Lyapunov exponent by propagating a cotangent, which grows as a tangent does. The number of iterations comes from a rehearsal:
    each solver runs to its tolerance on these examples, forward and adjoint. The times are predicted from the shapes of the whole
    batch, for the devices at hand or those of `planning.assume`.

    Args:
        problem: the network, and a typical batch.
        cotangent: cotangent of the last state, as for `plan`.
        examples: number of examples that are used; all of them where the step does not take fewer.
        solvers: solvers to rehearse, or pairs (solver, adjoint solver). None means sweeps, cycles of two levels and, where an
            example's state has at most 256 numbers, Newton's method, each to a residual of 1e-3, in the adjoint 1e-2, of the
            first one, with at most 32 iterations. With an empty list nothing is rehearsed.
        seconds: time after which no rehearsal starts. One starts only if the longest step so far would end in time, and one that
            has begun is finished. A line on standard error says this time first, and the diagnosis names what was left out.

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
    require(problem)
    _check.integer("examples", examples, least=1)
    pairs = _rehearsed(problem) if solvers is None else list(map(as_pair, solvers))
    announce("diagnose", seconds)
    deadline = Deadline(seconds)
    size = problem.comm.size
    problem = problem.replace(comm=None)
    tracing = Tracing(problem, (Serial(),))
    processor, layer = tracing.workers.processor, tracing.footprint
    sweep = processor.batch(layer, math.ceil(problem.layers / size))
    serial = sum(processor.serial(layer, problem.layers))
    problem = few(problem, examples)
    if cotangent is not None:
        cotangent = jax.tree.map(
            lambda x, y: x[: len(y)] if jnp.ndim(y) else x, cotangent, problem.y0
        )
    numbers = _numbers(problem)
    rehearsals = []
    for pair in pairs:
        if deadline.allows(type(pair[0]).__name__):
            _, stats, adjoint = jitted(solved, problem, fast=True)(*pair, cotangent)
            reached = map(int, (stats.iterations, adjoint.iterations, stats.result, adjoint.result))
            rehearsals.append(Rehearsal(*pair, *reached))
    return Diagnosis(
        problem.layers,
        examples_of(problem.y0),
        *numbers,
        sweep,
        serial,
        tuple(rehearsals),
        tuple(deadline.left_out),
    )


def _rehearsed(problem: Problem) -> list[Pair]:
    """Return the pairs that are rehearsed by default, with fewer iterations than layers, so that none is exact."""
    most = max(1, min(_MOST, problem.layers - 1))
    both = (
        Picard(sweeps=most, rtol=1e-3, fallback=True),
        MGRIT(iterations=most, rtol=1e-3, fallback=True),
    )
    pairs: list[Pair] = [(solver, dataclasses.replace(solver, rtol=1e-2)) for solver in both]
    if small(problem.y0):
        # A residual of Newton's method may rise on the way, so it does not give up.
        newton = Newton(iterations=most, rtol=1e-3, batch_axes=1)
        pairs.append((newton, dataclasses.replace(newton, iterations=1, rtol=None)))
    return pairs


def _numbers(problem: Problem) -> tuple[float, float, int]:
    """Return the Lipschitz constant times T, the largest Lyapunov exponent per layer, and the number of resets."""

    def along(problem: Problem) -> tuple[jax.Array, ...]:
        (level,) = hierarchy(problem, Picard())
        step, shared = level.step, level.shared

        def transposed(y: State, x: Slices) -> Callable[[State], State]:
            # A custom derivative may have no forward mode, so that the transpose is taken.
            _, pull = jax.vjp(lambda y: step(y, x, shared), y)
            return lambda w: pull(w)[0]

        def norm(y: State, x: Slices, w: State) -> jax.Array:
            """Return the 2-norm of J - I, by power iteration."""
            pull = transposed(y, x)
            # J is the transpose of its transpose, which needs no derivative in forward mode.
            push = jax.linear_transpose(pull, w)

            def turn(w: State, _: None) -> Measured:
                # Power iteration on (J - I)(J - I)^T: the norm after one half of a turn tends to the largest singular value.
                v, size = _normal(_tree.sub(pull(w), w))
                return _normal(_tree.sub(push(v)[0], v))[0], size

            return _tree.scan(turn, w, length=_ROUNDS)[1][-1]

        _, entering = _tree.scan(lambda y, x: (step(y, x, shared), y), level.y0, level.xs)
        leaves, structure = jax.tree.flatten(level.y0)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        start, _ = _normal(jax.tree.unflatten(structure, drawn))
        layers = entering, level.xs

        def back(w: State, at: tuple[State, Slices]) -> Measured:
            w, size = _normal(transposed(*at)(w))
            # After a reset nothing is left to follow, so a new random disturbance starts.
            return _tree.where(size > _reset(size), w, start), size

        sizes = _tree.scan(back, start, layers, reverse=True)[1]
        stays = sizes > _reset(sizes)
        # The Lyapunov exponent is the mean logarithm of the growth in a layer;
        # resets, with a logarithm near minus infinity, are left out.
        growth = jnp.mean(jnp.log(sizes), where=stays | ~jnp.any(stays))
        return jnp.sum(jax.vmap(norm, (0, 0, None))(*layers, start)), growth, jnp.sum(~stays)

    lipschitz, lyapunov, resets = jitted(along, problem, fast=True)()
    return float(lipschitz), float(lyapunov), int(resets)


def _reset(size: jax.Array) -> float:
    """Return the largest growth in a layer that leaves nothing of a disturbance but rounding."""
    return float(jnp.finfo(size.dtype).eps)


def _normal(v: State) -> Measured:
    """Return a state divided by its norm, and the norm."""
    size = jnp.sqrt(_tree.sum_of_squares(v))
    size = jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    return jax.tree.map(lambda x: x / size.astype(jnp.finfo(x.dtype).dtype), v), size
