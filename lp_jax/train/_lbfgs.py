"""L-BFGS and a line search for parameters that are spread over processes."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lp_jax import Solver
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree
from lp_jax.train._ranks import Ranks, total


class LBFGSState(NamedTuple):
    """The memory of L-BFGS: parameters and gradient of the last update, and the last steps and changes of the gradient."""

    updates: jax.Array  # their number
    params: PyTree
    gradient: PyTree
    steps: PyTree  # leaves (*parameter, memory_size), newest first
    changes: PyTree


def scale_by_lbfgs(
    memory_size: int = 10, *, ranks: Ranks | None = None
) -> optax.GradientTransformation:
    """`optax.scale_by_lbfgs` for parameters that are split over processes.

    L-BFGS needs inner products of whole vectors. Optax sums over the parameters of one process, and its sum cannot be replaced.
    Here one message sums all inner products of an update, and the direction's coefficients depend on them only. The result is
    that of optax, to rounding. Use it for runs whose checkpoints move between ranks and one device or a mesh.

    ``memory_size`` is the number of steps that are kept; ``ranks`` as for `make_train_step`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from lp_jax import train
        >>> optimizer = optax.chain(train.scale_by_lbfgs(20), optax.scale(-1.0))  # on MPI ranks with ranks=
        >>> params = {"trunk": jnp.ones(8)}
        >>> line_search = train.Backtracking(trials=10)  # both for train.make_train_step, or train.one_shot
        >>> updates, state = optimizer.update({"trunk": 2 * params["trunk"]}, optimizer.init(params), params)
        >>> round(float(jnp.linalg.norm(updates["trunk"])), 5)  # the first step has length 1 at most
        1.0

    Reference:
        Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014, algorithm 3.
    """
    _check.integer("memory_size", memory_size, least=1)

    def init(params: PyTree) -> LBFGSState:
        zeros = optax.tree.zeros_like(params)
        memory = jax.tree.map(lambda x: jnp.zeros((*x.shape, memory_size), x.dtype), params)
        return LBFGSState(jnp.int32(0), zeros, zeros, memory, memory)

    def update(
        gradient: PyTree, state: LBFGSState, params: PyTree = None
    ) -> tuple[PyTree, LBFGSState]:
        def remember(memory: jax.Array, now: jax.Array, last: jax.Array) -> jax.Array:
            # The first update has no predecessor; a pair of zeros has curvature 0, and `inverse` gives it weight 0.
            newest = jnp.where(state.updates > 0, now - last, jnp.zeros_like(now))
            return jnp.concatenate([newest[..., None], memory[..., :-1]], axis=-1)

        def products(vectors: jax.Array) -> jax.Array:
            flat = vectors.reshape(-1, vectors.shape[-1])
            # Accelerators multiply with fewer bits by default, which would spoil curvatures that are small differences.
            return jnp.matmul(flat.T, flat, precision=lax.Precision.HIGHEST)

        steps = jax.tree.map(remember, state.steps, params, state.params)
        changes = jax.tree.map(remember, state.changes, gradient, state.gradient)
        vectors = jax.tree.map(
            lambda s, y, g: jnp.concatenate([s, y, g[..., None]], axis=-1), steps, changes, gradient
        )
        # The direction is a combination of steps, changes and the gradient. Its 2m + 1 coefficients depend on the matrix of
        # inner products, (2m + 1, 2m + 1), whose entries the ranks add.
        coefficients = _coefficients(total(ranks, jax.tree.map(products, vectors)), state.updates)
        direction = jax.tree.map(lambda x: x @ coefficients.astype(x.dtype), vectors)
        return direction, LBFGSState(state.updates + 1, params, gradient, steps, changes)

    return optax.GradientTransformation(init, update)


def _coefficients(products: jax.Array, updates: jax.Array) -> jax.Array:
    """Return the direction's coefficients by the two loops of L-BFGS; ``products`` of steps, changes and the gradient."""

    def inverse(x: jax.Array, otherwise: float) -> jax.Array:
        return jnp.where(x == 0, otherwise, 1 / jnp.where(x == 0, jnp.ones_like(x), x))

    memory = len(products) // 2
    pairs = jnp.arange(memory)
    curvatures = jnp.diagonal(products, memory)[:memory]  # of step and change
    weights = inverse(curvatures, 0.0)
    # Without curvature there is no length, so the first step is scaled to length 1 at most, as optax does.
    first = jnp.minimum(1.0, inverse(jnp.sqrt(products[-1, -1]), 1.0))
    change = products[memory, memory]  # squared
    # Afterwards the first Hessian is s.y / y.y of the newest pair (Nocedal, Wright, equation 7.20).
    scale = jnp.where(
        updates > 0, jnp.where(change == 0, 1.0, curvatures[0] * inverse(change, 1.0)), first
    )

    def newest_first(c: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        along = weights[pair] * (products[pair] @ c)
        return c.at[memory + pair].add(-along), along

    def oldest_first(c: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        pair, along = each
        return c.at[pair].add(along - weights[pair] * (products[memory + pair] @ c)), None

    # Vectors are represented by their coefficients: the gradient is the last unit vector.
    c = jnp.zeros_like(products[0]).at[-1].set(1)
    c, along = _tree.scan(newest_first, c, pairs)
    return _tree.scan(oldest_first, scale * c, (pairs, along), reverse=True)[0]


Trial = tuple[jax.Array, jax.Array, jax.Array, PyTree]
"""The number of trials, the length of the last one, whether it was good enough, and its trajectory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backtracking:
    """Shorten a step until the loss falls by a part of the fall that its slope predicts (Armijo's condition).

    Line searches of optax work in a training step, too. This one also sums the slope over MPI ranks, and returns the trajectory
    of its last trial, from which the next step of `one_shot` begins.

    Args:
        trials: largest number of step lengths to try: 1, 1/2, 1/4, ...
        solver: solver of the trials; None takes that of the step.

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
        evaluate: Callable[[PyTree], tuple[jax.Array, PyTree]],
        trajectory: PyTree = None,
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        """Search from ``params``, where the loss has this slope along ``direction``; ``evaluate`` returns loss and trajectory.

        Returns the parameters, the trajectory of the last trial, the number of trials, and whether none was good enough: then
        the parameters did not change.
        """

        def at(length: jax.Array) -> PyTree:
            return optax.apply_updates(params, optax.tree.scale(length, direction))

        def body(carry: Trial) -> Trial:
            count, length, _, _ = carry
            length = jnp.where(count == 0, length, length / 2)
            value, trajectory = evaluate(at(length))
            return count + 1, length, value <= loss + 1e-4 * length * slope, trajectory

        start = (jnp.int32(0), jnp.ones_like(loss), jnp.asarray(False), trajectory)
        count, length, good, trajectory = _tree.while_loop(
            lambda c: ~c[2] & (c[0] < self.trials), body, start
        )
        # A length of zero leaves the parameters bit for bit as they were.
        return at(jnp.where(good, length, jnp.zeros_like(length))), trajectory, count, ~good
