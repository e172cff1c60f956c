"""Several blocks of layers, with other layers in between."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax._serial import Serial
from lp_jax._solution import Solution
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree, State

Pullback = Callable[[State], tuple[State, Stats]]


class Trunk(Protocol):
    """What `Classifier` and `Network` ask of layers that are solved for: `LayerParallel`, `GRU`, `Network`."""

    @property
    def solve(self) -> Callable[..., Solution]:
        """``solve(y, **options)``: propagate a state, and tell how the solve went."""

    @property
    def solve_vjp(self) -> Callable[..., tuple[Solution, Pullback]]:
        """`solve`, and ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)``."""


class Network(nnx.Module):
    """Blocks of layer-parallel layers and plain layers, one after the other; itself a trunk like `LayerParallel`.

    A network whose state changes its shape on the way, by pooling or by more channels, is a sequence of solves with
    transitions in between. So is one with buffer layers, which stay serial: blocks with ``solver=Serial()``, before and
    after those that are solved in parallel.

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
        """The state after the last part; ``y1`` of what `solve` returns."""
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
        """Propagate ``y`` through all parts and tell how the solves went.

        Args:
            y: the state that enters.
            shared: for every block, as for `LayerParallel.solve`.
            key: of this call; every block gets one of its own.
            solver: for this call, forward and adjoint, in all blocks but those that were built with `Serial`.
            adjoint_solver: for this call, for the adjoint alone.

        Returns:
            A `Solution` with the last state; its residual norms are taken over all blocks, its result is the worst, and
            trajectories and aux are lists over the blocks.
        """
        solutions = []
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                y = part(y)
                continue
            options = _options(part, number, shared, key, solver, adjoint_solver)
            solutions.append(part.solve(y, **options))
            y = solutions[-1].y1
        return _combined(y, solutions)

    def solve_vjp(
        self,
        y: State,
        *,
        shared: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> tuple[Solution, Pullback]:
        """`solve`, and the pullback of the last state that also tells how the adjoint solves converged.

        Running statistics are left as they are.

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
            return cotangent, _over_all(stats)

        return _combined(y, solutions), pullback


def _pure(part: Any) -> Callable[[State], State]:
    """A part as a function that changes nothing in it."""
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
    options: dict[str, Any] = {"solver": solver, "adjoint_solver": adjoint_solver}
    if isinstance(part.solver, Serial):
        options = {}
    if shared is not None:
        options["shared"] = shared
    if key is not None:
        options["key"] = jax.random.fold_in(key, number)
    return options


def _combined(y: State, solutions: Sequence[Solution]) -> Solution:
    return Solution(
        y,
        stats=_over_all([solution.stats for solution in solutions]),
        result=jnp.max(jnp.stack([solution.result for solution in solutions])),
        trajectory=[solution.trajectory for solution in solutions],
        aux=[solution.aux for solution in solutions],
    )


def _over_all(stats: Sequence[Stats]) -> Stats:
    """The most iterations, and residual norms over all solves that made so many; NaN where one of them is."""
    length = max(len(s.residual_norms) for s in stats)
    norms = jnp.stack([jnp.pad(s.residual_norms, (0, length - len(s.residual_norms))) for s in stats])
    iterations = jnp.stack([s.iterations for s in stats])
    made = jnp.arange(length)[None] < iterations[:, None]
    total = jnp.sqrt(jnp.sum(jnp.where(made, norms, 0) ** 2, axis=0))
    return Stats(jnp.max(iterations), jnp.where(jnp.any(made, axis=0), total, jnp.nan))
