"""Blocks of layers with other layers between them, and between an opening and a closing layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lp_jax import Solution, Solver, Stats
from lp_jax._arrays._types import PyTree, State
from lp_jax.nn._solved import Solved, combined_stats

Pullback = Callable[[State], tuple[State, Stats]]


class Network(nnx.Module):
    """Layer-parallel blocks and plain layers, one after the other; a trunk like `LayerParallel`.

    Its parts are `LayerParallel` blocks, and modules or functions ``part(y) -> y``. Use it for a state whose shape changes, by
    pooling or more channels; and for buffer layers, blocks with ``solver=Serial()`` before and after the parallel ones.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> rngs = nnx.Rngs(0)
        >>> block = lambda channels: nn.LayerParallel(lambda rngs: nn.ConvResidual(channels, rngs=rngs), 16, rngs=rngs)
        >>> trunk = nn.Network(block(4), nn.ConvTransition(4, 8, rngs=rngs), block(8))
        >>> model = nn.Classifier(nn.ConvOpening(1, 4, rngs=rngs), trunk, nn.PoolClosing((4, 4, 8), 10, rngs=rngs))
        >>> model(jnp.ones((2, 8, 8, 1), "float32")).shape
        (2, 10)
    """

    def __init__(self, *parts: Any):
        self.parts = nnx.List(parts)

    def __call__(self, y: State, **options: Any) -> State:
        """Return the state after the last part, ``y1`` of `solve`."""
        return self.solve(y, **options).y1

    def solve(
        self,
        y: State,
        *,
        guess: str | list[State] = "constant",
        adjoint_guess: list[State] | None = None,
        **options: Any,
    ) -> Solution:
        """Propagate ``y`` through all parts, with the options of `LayerParallel.solve` except ``data``.

        Every block gets ``shared``, and a random key of its own made from ``key``. The solvers of this call replace those of all
        blocks except blocks with an exact solver (`Serial`). The residual norms are over all blocks, the result is the worst one;
        guesses, trajectory and aux are lists over the blocks.
        """
        solutions: list[Solution] = []
        for part, given in self._parts(**options):
            if given is None:
                y = part(y)
                continue
            if guess != "constant":
                given["guess"] = guess if isinstance(guess, str) else guess[len(solutions)]
            # A block with an exact solver has no use for a guess of the adjoint trajectory.
            if adjoint_guess is not None and "solver" in given:
                given["adjoint_guess"] = adjoint_guess[len(solutions)]
            solutions.append(part.solve(y, **given))
            y = solutions[-1].y1
        return _combined(y, solutions)

    def solve_vjp(self, y: State, **options: Any) -> tuple[Solution, Pullback]:
        """`LayerParallel.solve_vjp` for all parts."""
        solutions = []
        pullbacks: list[Callable[[State], Sequence[Any]]] = []  # to (cotangent, stats of a block)
        for part, given in self._parts(**options):
            if given is None:
                # a copy is called, so that the part stays as it is
                y, pull = jax.vjp(lambda y, part=part: nnx.clone(part)(y), y)
            else:
                solution, pull = part.solve_vjp(y, **given)
                y = solution.y1
                solutions.append(solution)
            pullbacks.append(pull)

        def pullback(cotangent: State) -> tuple[State, Stats]:
            stats = []
            # The chain rule goes through the parts backwards. A plain layer returns a cotangent only, a block also its stats.
            for pull in reversed(pullbacks):
                cotangent, *adjoint = pull(cotangent)
                stats += adjoint
            return cotangent, _combined_stats(stats)

        return _combined(y, solutions), pullback

    def _parts(
        self,
        shared: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Yield each part with the options of its solve; None for a plain layer."""
        for number, part in enumerate(self.parts):
            if not hasattr(part, "solve"):
                yield part, None
                continue
            own = getattr(part, "solver", None)  # of a Network there is none
            exact = own is not None and own.exact
            options = {} if exact else {"solver": solver, "adjoint_solver": adjoint_solver}
            options |= {} if shared is None else {"shared": shared}
            yield part, options | ({} if key is None else {"key": jax.random.fold_in(key, number)})


def _combined(y: State, solutions: Sequence[Solution]) -> Solution:
    """Return the solution of a network whose blocks have these solutions."""
    return Solution(
        y,
        stats=_combined_stats([solution.stats for solution in solutions]),
        trajectory=[solution.trajectory for solution in solutions],
        aux=[solution.aux for solution in solutions],
    )


def _combined_stats(stats: Sequence[Stats]) -> Stats:
    """Return the stats of several solves as those of one; shorter histories of residuals are padded."""
    length = max(len(s.residual_norms) for s in stats)
    # Blocks may have different numbers of iterations; only arrays of one shape can be stacked.
    padded = [
        s._replace(residual_norms=jnp.pad(s.residual_norms, (0, length - len(s.residual_norms))))
        for s in stats
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)
    return combined_stats(
        stacked,
        add=lambda tree: jax.tree.map(lambda x: jnp.sum(x, axis=0), tree),
        largest=lambda tree: jax.tree.map(lambda x: jnp.max(x, axis=0), tree),
    )


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
        >>> logits, solution = model.solve(jnp.ones((4, 8, 8, 1), "float32"), solver=lp_jax.MGRIT(iterations=3))
        >>> logits.shape, solution.stats.residual_norms.shape
        ((4, 10), (3,))
    """

    def __init__(
        self,
        opening: Callable[[PyTree], State],
        trunk: Solved | Network,
        closing: Callable[[State], jax.Array],
        *,
        context: Callable[[PyTree], PyTree] | None = None,
    ):
        self.opening = opening
        self.trunk = trunk
        self.closing = closing
        self.context = context

    def __call__(self, x: PyTree, **options: Any) -> jax.Array:
        """Return the logits, the first result of `solve`."""
        return self.solve(x, **options)[0]

    def context_of(self, x: PyTree) -> dict[str, PyTree]:
        """Return the arguments of the trunk's `solve` that depend on the inputs: ``shared``, or none."""
        return {} if self.context is None else {"shared": self.context(x)}

    def solve(self, x: PyTree, **options: Any) -> tuple[jax.Array, Solution]:
        """Return the logits of a batch of inputs and the solution of the trunk; options of the trunk's ``solve``, or None."""
        options = {name: value for name, value in options.items() if value is not None}
        solution = self.trunk.solve(self.opening(x), **self.context_of(x), **options)
        return self.closing(solution.y1), solution
