"""Line search: the length of a step along an optimizer's direction."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver

_Trial: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, PyTree]
"""Number of trials, the last one's length, whether it was good enough, and its trajectory."""


_PART = 1e-4  # of the slope's fall that is enough


class SearchResult(NamedTuple):
    """Result of a line search."""

    params: PyTree
    trajectory: PyTree  # of the last trial's solve
    trials: jax.Array
    stuck: jax.Array  # whether no trial was good enough; then params did not change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backtracking:
    """Shorten a step until the loss falls by a part of the fall that its slope predicts (Armijo's condition).

    Line searches of optax work in a training step, too. This one also sums the slope over MPI ranks, and returns the trajectory
    of its last trial, from which the next step of `one_shot` begins.

    Args:
        trials: largest number of step lengths to try: 1, 1/2, 1/4, ...
        solver: solver of the trials; None takes that of the step.

    Raises:
        ValueError: if ``trials`` is below 1.

    Example:
        >>> import optax
        >>> from lp_jax import train
        >>> optimizer = optax.chain(optax.scale_by_lbfgs(memory_size=20), optax.scale(-1.0))
        >>> line_search = train.Backtracking(trials=10)  # both for train.make_train_step, or train.one_shot

    Reference:
        Nocedal, Wright, "Numerical Optimization", 2nd ed., algorithm 3.1.
    """

    trials: int = 20
    solver: Solver | None = None

    def __post_init__(self) -> None:
        _check.integer("trials", self.trials, least=1)

    def along(
        self,
        direction: PyTree,
        params: PyTree,
        loss: jax.Array,
        slope: jax.Array,
        trajectory: PyTree,
        evaluate: Callable[[PyTree], tuple[jax.Array, PyTree]],
    ) -> SearchResult:
        """Search from ``params``, where the loss has this slope along ``direction``; ``evaluate`` returns loss and trajectory."""

        def at(length: jax.Array) -> PyTree:
            return optax.apply_updates(params, optax.tree.scale(length, direction))

        def unfinished(carry: _Trial) -> jax.Array:
            count, _, good, _ = carry
            return ~good & (count < self.trials)

        def body(carry: _Trial) -> _Trial:
            count, length, _, _ = carry
            length = jnp.where(count == 0, length, length / 2)
            value, trajectory = evaluate(at(length))
            return count + 1, length, value <= loss + _PART * length * slope, trajectory

        start = (jnp.int32(0), jnp.ones_like(loss), jnp.asarray(False), trajectory)
        count, length, good, trajectory = lax.while_loop(unfinished, body, start)
        length = jnp.where(good, length, jnp.zeros_like(length))
        return SearchResult(at(length), trajectory, count, ~good)
