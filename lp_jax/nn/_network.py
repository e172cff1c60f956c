"""Blocks of layers, with other layers between them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax._solution import Solution
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree, State

Pullback = Callable[[State], tuple[State, Stats]]


class Trunk(Protocol):
    """Layers that are solved layer-parallel, as `Classifier` holds them: `LayerParallel`, `GRU` or `Network`."""

    @property
    def solve(self) -> Callable[..., Solution]:
        """``solve(y, **options) -> solution`` propagates a state."""

    @property
    def solve_vjp(self) -> Callable[..., tuple[Solution, Pullback]]:
        """``solve_vjp(y, **options) -> (solution, pullback)``; ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)``."""


class Network(nnx.Module):
    """Layer-parallel blocks and plain layers, one after the other; a trunk like `LayerParallel`.

    A network whose state changes its shape, by pooling or by more channels, is a sequence of solves with transitions
    between them. So is a network with buffer layers: blocks with ``solver=Serial()`` before and after the blocks that are
    solved in parallel.

    Args:
        *parts: `LayerParallel` blocks, and modules or functions ``part(y) -> y``.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> rngs = nnx.Rngs(0)
        >>> block = lambda channels: nn.LayerParallel(lambda rngs: nn.ConvResidual(channels, rngs=rngs), 16, rngs=rngs)
        >>> trunk = nn.Network(block(4), nn.ConvTransition(4, 8, rngs=rngs), block(8))
        >>> trunk(jnp.ones((2, 8, 8, 4), "float32")).shape
        (2, 4, 4, 8)
    """

    def __init__(self, *parts: Any):
        self.parts = nnx.List(parts)

    def __call__(self, y: State, *, shared: PyTree = None, key: jax.Array | None = None) -> State:
        """Return the state after the last part, ``y1`` of `solve`."""
        return self.solve(y, shared=shared, key=key).y1

    def solve(
        self,
        y: State,
        *,
        shared: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> Solution:
        """Propagate ``y`` through all parts.

        Args:
            y: the state that enters the first part.
            shared: passed to every block, as for `LayerParallel.solve`.
            key: random key of this call; each block gets another key made from it.
            solver: solver of this call, forward and adjoint, in all blocks but those built with an exact solver
                (`Serial`).
            adjoint_solver: adjoint solver of this call.

        Returns:
            A `Solution` with the last state. Its residual norms are taken over all blocks, its result is the worst one,
            and its trajectory and aux are lists over the blocks.
        """
        solutions = []
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                y = part(y)
                continue
            options = _options(part, number, shared, key, solver, adjoint_solver)
            solutions.append(part.solve(y, **options))
            y = solutions[-1].y1
        return _combined_solution(y, solutions)

    def solve_vjp(
        self,
        y: State,
        *,
        shared: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> tuple[Solution, Pullback]:
        """Return what `solve` does and the pullback of the last state, with the stats of the adjoint solves.

        Running statistics are not updated.

        Args:
            y: as for `solve`, like all other arguments.
            shared: as for `solve`.
            key: as for `solve`.
            solver: as for `solve`.
            adjoint_solver: as for `solve`.

        Returns:
            The solution, and ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)``.
        """
        solutions, pullbacks = [], []
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                y, pull = jax.vjp(_pure(part), y)
                pullbacks.append(lambda ct, pull=pull: (pull(ct)[0], None))
                continue
            options = _options(part, number, shared, key, solver, adjoint_solver)
            solution, pull = part.solve_vjp(y, **options)
            y = solution.y1
            solutions.append(solution)
            pullbacks.append(pull)

        def pullback(cotangent: State) -> tuple[State, Stats]:
            stats = []
            for pull in reversed(pullbacks):
                cotangent, found = pull(cotangent)
                stats += [] if found is None else [found]
            return cotangent, _combined_stats(stats)

        return _combined_solution(y, solutions), pullback


def _pure(part: Any) -> Callable[[State], State]:
    """Return a part as a function that leaves the part unchanged."""
    if not isinstance(part, nnx.Module):
        function: Callable[[State], State] = part
        return function
    graphdef, state = nnx.split(part)
    values = nnx.to_pure_dict(state)
    return lambda y: nnx.merge(graphdef, values)(y)


def _options(
    part: Any,
    number: int,
    shared: PyTree,
    key: jax.Array | None,
    solver: Solver | None,
    adjoint_solver: Solver | None,
) -> dict[str, Any]:
    """Return the arguments of one block's solve."""
    options: dict[str, Any] = {"solver": solver, "adjoint_solver": adjoint_solver}
    if getattr(getattr(part, "solver", None), "exact", False):  # neither "auto" nor a Network is
        options = {}
    if shared is not None:
        options["shared"] = shared
    if key is not None:
        options["key"] = jax.random.fold_in(key, number)
    return options


def _combined_solution(y: State, solutions: Sequence[Solution]) -> Solution:
    return Solution(
        y,
        stats=_combined_stats([solution.stats for solution in solutions]),
        result=jnp.max(jnp.stack([solution.result for solution in solutions])),
        trajectory=[solution.trajectory for solution in solutions],
        aux=[solution.aux for solution in solutions],
    )


def _combined_stats(stats: Sequence[Stats]) -> Stats:
    """Return the largest number of iterations, and residual norms over all solves that made that many.

    A norm is NaN where that of one of these solves is.
    """
    length = max(len(s.residual_norms) for s in stats)
    norms = jnp.stack([jnp.pad(s.residual_norms, (0, length - len(s.residual_norms))) for s in stats])
    iterations = jnp.stack([s.iterations for s in stats])
    made = jnp.arange(length)[None] < iterations[:, None]
    total = jnp.sqrt(jnp.sum(jnp.where(made, norms, 0) ** 2, axis=0))
    return Stats(jnp.max(iterations), jnp.where(jnp.any(made, axis=0), total, jnp.nan))
