"""Blocks of layers with other layers between them, and between an opening and a closing layer."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax._arrays._types import PyTree, State
from lp_jax._solution import Solution
from lp_jax._solvers._solver import Solver, Stats
from lp_jax.nn._solved import combined_stats

Pullback = Callable[[State], tuple[State, Stats]]


class Trunk(Protocol):
    """Layers that are solved layer-parallel, as `Classifier` holds them: `LayerParallel`, `GRU` or `Network`."""

    @property
    def solve(self) -> Callable[..., Solution]:
        """``solve(y, **options) -> solution`` propagates a state."""

    @property
    def solve_vjp(self) -> Callable[..., tuple[Solution, Pullback]]:
        """``solve_vjp(y, **options) -> (solution, pullback)``; ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)``."""


Part: TypeAlias = nnx.Module | Callable[[State], State]


class Network(nnx.Module):
    """Layer-parallel blocks and plain layers, one after the other; a trunk like `LayerParallel`.

    Use it for a state whose shape changes, by pooling or more channels; and for buffer layers, blocks with
    ``solver=Serial()`` before and after the parallel ones.

    Args:
        *parts: `LayerParallel` blocks, and modules or functions ``part(y) -> y``.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> rngs = nnx.Rngs(0)
        >>> block = lambda channels: nn.LayerParallel(lambda rngs: nn.ConvResidual(channels, rngs=rngs), 16, rngs=rngs)
        >>> trunk = nn.Network(block(4), nn.ConvTransition(4, 8, rngs=rngs), block(8))
        >>> model = nn.Classifier(nn.ConvOpening(1, 4, rngs=rngs), trunk, nn.PoolClosing((4, 4, 8), 10, rngs=rngs))
        >>> trunk(jnp.ones((2, 8, 8, 4), "float32")).shape, model(jnp.ones((2, 8, 8, 1), "float32")).shape
        ((2, 4, 4, 8), (2, 10))
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
        guess: str | list[State] = "constant",
        adjoint_guess: list[State] | None = None,
    ) -> Solution:
        """Propagate ``y`` through all parts, with the arguments of `LayerParallel.solve`.

        Every block gets ``shared``, and a random key of its own made from ``key``. The solvers of this call replace those of all
        blocks except blocks with an exact solver (`Serial`). The residual norms are over all blocks, the result is the worst one;
        guesses, trajectory and aux are lists over the blocks.
        """
        solutions: list[Solution] = []
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                y = part(y)
                continue
            options = _options(part, number, shared, key, solver, adjoint_solver)
            if guess != "constant":
                options["guess"] = guess if isinstance(guess, str) else guess[len(solutions)]
            if adjoint_guess is not None and not _exact(part):
                options["adjoint_guess"] = adjoint_guess[len(solutions)]
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
        """Return the solution of `solve`, and ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)`` of the last state.

        Running statistics are not updated.
        """
        solutions, pullbacks = [], []
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                y, pull = jax.vjp(lambda y, part=part: nnx.clone(part)(y), y)  # the part stays as it is
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
                cotangent, adjoint = pull(cotangent)
                stats += [] if adjoint is None else [adjoint]
            return cotangent, _combined_stats(stats)

        return _combined_solution(y, solutions), pullback


def _options(
    part: Part, number: int, shared: PyTree, key: jax.Array | None, solver: Solver | None, adjoint_solver: Solver | None
) -> dict[str, Any]:
    options: dict[str, Any] = {} if _exact(part) else {"solver": solver, "adjoint_solver": adjoint_solver}
    if shared is not None:
        options["shared"] = shared
    if key is not None:
        options["key"] = jax.random.fold_in(key, number)
    return options


def _exact(part: object) -> bool:
    return bool(getattr(getattr(part, "solver", None), "exact", False))  # None and a Network are not


def _combined_solution(y: State, solutions: Sequence[Solution]) -> Solution:
    return Solution(
        y,
        stats=_combined_stats([solution.stats for solution in solutions]),
        trajectory=[solution.trajectory for solution in solutions],
        aux=[solution.aux for solution in solutions],
    )


def _combined_stats(stats: Sequence[Stats]) -> Stats:
    length = max(len(s.residual_norms) for s in stats)
    padded = [s._replace(residual_norms=jnp.pad(s.residual_norms, (0, length - len(s.residual_norms)))) for s in stats]
    return combined_stats(jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded))


class Classifier(nnx.Module):
    """Network ``closing(trunk(opening(x)))`` from an input to logits; its trunk is solved layer-parallel.

    Args:
        opening: ``opening(x) -> y0``, a module or a function.
        trunk: the layers: `LayerParallel`, `GRU`, or a `Network` of several blocks.
        closing: ``closing(y1) -> logits``, a module or a function.
        context: ``context(x) -> shared``, passed to all layers of the trunk; a padding mask, for example.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> rngs = nnx.Rngs(0)
        >>> model = nn.Classifier(
        ...     nn.DenseOpening((8, 8, 1), 16, rngs=rngs),
        ...     nn.LayerParallel(lambda rngs: nn.DenseResidual(16, rngs=rngs), 32, rngs=rngs),
        ...     nn.DenseClosing((16,), 10, rngs=rngs),
        ... )
        >>> x = jnp.ones((4, 8, 8, 1), "float32")
        >>> model(x).shape
        (4, 10)
        >>> logits, solution = model.solve(x, solver=lp_jax.MGRIT(iterations=3))
        >>> solution.stats.residual_norms.shape
        (3,)
    """

    def __init__(
        self,
        opening: Callable[[PyTree], State],
        trunk: Trunk,
        closing: Callable[[State], jax.Array],
        *,
        context: Callable[[PyTree], PyTree] | None = None,
    ):
        self.opening = opening
        self.trunk = trunk
        self.closing = closing
        self.context = context

    def __call__(self, x: PyTree, *, data: PyTree = None, key: jax.Array | None = None) -> jax.Array:
        """Return the logits, the first result of `solve`."""
        return self.solve(x, data=data, key=key)[0]

    def context_of(self, x: PyTree) -> dict[str, PyTree]:
        """Return the arguments of the trunk's `solve` that depend on the inputs: ``shared``, or none."""
        return {} if self.context is None else {"shared": self.context(x)}

    def solve(
        self,
        x: PyTree,
        *,
        data: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: PyTree = None,
        adjoint_guess: PyTree = None,
    ) -> tuple[jax.Array, Solution]:
        """Return the logits of a batch of inputs and the solution of the trunk; arguments as for the trunk's ``solve``."""
        options = {"data": data, "key": key, "guess": guess, "adjoint_guess": adjoint_guess}
        options = {name: value for name, value in options.items() if value is not None}
        solution = self.trunk.solve(
            self.opening(x), **self.context_of(x), **options, solver=solver, adjoint_solver=adjoint_solver
        )
        return self.closing(solution.y1), solution
