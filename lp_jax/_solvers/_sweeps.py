"""Sweeps over all layers at once: the fields, the state and the plain sweep of `Picard`, `Secant` and `Windowed`."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import batched, chunk, in_chunks
from lp_jax._arrays._types import Advance, CPoints, Points, PyTree, Scalar, State
from lp_jax._levels._level import Level, sum_of_squares
from lp_jax._levels._sweep import single, sweep
from lp_jax._solvers._solver import Solver, Start, constant


class Swept(NamedTuple):
    """State of the sweeps: the states that enter the layers, ``(n, ...)``, and the one that leaves this worker's last layer.

    Sums of increments are these states, so that nothing is shifted by a layer between two sweeps.
    """

    entering: Points
    last: State

    def points(self, level: Level) -> Points:
        """The states that leave the layers."""
        return _tree.push(self.entering, self.last, reverse=not level.reverse)


def from_points(level: Level, points: Points) -> Swept:
    """Make the state of the sweeps from the states that leave the layers."""
    edge = 0 if level.reverse else -1
    last = jax.tree.map(lambda x, y: x[edge] if x.shape[0] else y, points, level.y0)
    return Swept(level.incoming(points), last)


def begin(level: Level, guess: CPoints | None) -> Swept:
    """Start at a guess, or at ``y0`` everywhere."""
    return Swept(constant(level, None), level.y0) if guess is None else from_points(level, guess)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweeps(Solver):
    """A solver whose iterations are sweeps over all layers; `Picard` has the meaning of the fields."""

    sweeps: int = 2
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    storage: str = "all"
    at_once: int | float | str = "auto"

    def __post_init__(self) -> None:
        if self.sweeps == 0:
            raise ValueError("sweeps must be at least 1; got 0. A coarse step that does nothing is Identity().")
        _check.integer("sweeps", self.sweeps, least=1)
        _check.one_of("storage", self.storage, ("states", "all"))
        _check.at_once(self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)

    @property
    def iterations(self) -> int:
        return self.sweeps

    @property
    def keeps_states(self) -> bool:
        return self.storage == "all"

    @abc.abstractmethod
    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        """Return the start of the sweeps."""

    def improve(self, levels: Sequence[Level], state: Any) -> tuple[Any, Scalar]:
        level = levels[0]
        if chunk(level.steps, level.at_once) < level.steps:
            return _by_chunks(level, state)
        stepped, _ = sweep(level, state.entering)
        increments = _tree.sub(stepped, state.entering)
        swept = Swept(*level.workers.prefix_sums(increments, level.y0, reverse=level.reverse))
        return swept, sum_of_squares(level, _tree.sub(stepped, state.points(level)))

    def c_points(self, levels: Sequence[Level], state: Any) -> CPoints:
        return state.points(levels[0])

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, PyTree]:
        return u, None if advance is None else sweep(levels[0], levels[0].incoming(u), advance=advance)[1]


def _by_chunks(level: Level, u: Swept) -> tuple[Swept, Scalar]:
    """`Sweeps.improve` over ``level.at_once`` layers at a time.

    It adds up increments and squares residuals on the way: the states of all layers pass through memory once, not four
    times. A layer's residual is known once the state that enters the next layer is.
    """
    first, dtype = level.workers.active == 1, _tree.real_dtype(level.y0, at_least=jnp.float32)
    size = chunk(level.steps, level.at_once)
    stepped_from = batched(single(level), size)

    def square(total: jax.Array, before: jax.Array, stepped: jax.Array, entering: jax.Array) -> jax.Array:
        """Squares of the state after each layer's predecessor, minus the state that enters the layer."""
        left = _tree.push(stepped, before, reverse=level.reverse)
        size = jnp.abs(left - entering).astype(dtype)
        squares = jnp.square(size if level.unit is None else size * (1 / level.unit).astype(dtype))
        return total + _tree.pad_zeros(squares, len(total) - len(left))

    def layers(
        carry: tuple[State, State, State], operands: tuple[State, PyTree]
    ) -> tuple[tuple[State, State, State], State]:
        total, squares, before = carry
        stepped, _ = stepped_from(*operands)
        squares = jax.tree.map(square, squares, before, stepped, operands[0])
        entering, total = _tree.prefix_sums(_tree.sub(stepped, operands[0]), total, reverse=level.reverse)
        return (total, squares, _tree.take(stepped, 0 if level.reverse else -1)), entering

    start = _tree.wide(level.y0 if first else _tree.zeros_like(level.y0))
    squares = _tree.zeros_like(_tree.repeat(start, size), dtype)  # of each number; they are summed once, at the end
    entered = _tree.take(u.entering, -1 if level.reverse else 0)
    operands = u.entering, (level.xs, level.rhs)
    carry = start, squares, entered
    (total, squares, stepped), entering = in_chunks(layers, carry, operands, size, reverse=level.reverse)
    summed = jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, squares))
    summed += sum_of_squares(level, _tree.sub(stepped, u.last)).astype(dtype)
    if not first:
        before = _tree.add(_tree.wide(level.y0), level.workers.exclusive_scan(total, reverse=level.reverse))
        entering = _tree.narrow(jax.tree.map(lambda x, y: x + y[None], _tree.wide(entering), before), entering)
        total = _tree.add(total, before)
    return Swept(entering, _tree.narrow(total, level.y0)), summed
