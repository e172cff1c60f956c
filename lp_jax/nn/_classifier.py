"""A network of opening layer, trunk and closing layer."""

from collections.abc import Callable

import jax
from flax import nnx

from lp_jax._solution import Solution
from lp_jax._solver import Solver
from lp_jax._types import PyTree, State
from lp_jax.nn._network import Trunk


class Classifier(nnx.Module):
    """Network ``closing(trunk(opening(x)))`` from an input to logits; its trunk is solved layer-parallel.

    Args:
        opening: ``opening(x) -> y0``, a module or a function.
        trunk: the layers: `LayerParallel`, `GRU`, or a `Network` of several blocks.
        closing: ``closing(y1) -> logits``, a module or a function.
        context: ``context(x) -> shared``, passed to all layers of the trunk; a padding mask, for example. None if the
            layers share nothing.

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
        >>> model(jnp.ones((4, 8, 8, 1), "float32")).shape
        (4, 10)
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
    ) -> tuple[jax.Array, Solution]:
        """Return the logits and the solution of the trunk.

        Args:
            x: a batch of inputs, as ``opening`` takes them.
            data: per-layer inputs of the trunk, leaves ``(num_layers, ...)``.
            key: one random key for this call, as for `LayerParallel.solve`.
            solver: solver of this call, forward and adjoint, instead of the trunk's.
            adjoint_solver: adjoint solver of this call.

        Returns:
            ``(logits, solution)``.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> from flax import nnx
            >>> from lp_jax import nn
            >>> rngs = nnx.Rngs(0)
            >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(16, rngs=rngs), 32, rngs=rngs)
            >>> model = nn.Classifier(lambda x: x, trunk, nn.DenseClosing((16,), 10, rngs=rngs))
            >>> logits, solution = model.solve(jnp.ones((4, 16), "float32"), solver=lp_jax.MGRIT(iterations=3))
            >>> solution.stats.residual_norms.shape
            (3,)
        """
        given = {name: value for name, value in (("data", data), ("key", key)) if value is not None}
        solution = self.trunk.solve(
            self.opening(x), **self.context_of(x), **given, solver=solver, adjoint_solver=adjoint_solver
        )
        return self.closing(solution.y1), solution
