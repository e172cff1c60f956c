"""Training steps, or gradients, with JAX: one per call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import compile_program
from benchmarks.networks import Network, Pair, Weights

LEARNING_RATE, MOMENTUM = 0.01, 0.9


class Trainer:
    """Takes steps of SGD with momentum, or (without ``updates``) the gradient only, one per call."""

    def __init__(
        self,
        loss: Callable[..., tuple[jax.Array, jax.Array]],
        weights: Weights,
        batch: tuple[Any, ...],
        *,
        updates: bool = True,
        ahead: bool = True,
    ):
        gradient_of = jax.value_and_grad(loss, has_aux=True)

        def step(state: Any, *batch: Any) -> Any:
            weights, momentum = state
            values, gradient = gradient_of(weights, *batch)
            momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradient)
            return (
                jax.tree.map(lambda p, m: p - LEARNING_RATE * m, weights, momentum),
                momentum,
            ), values

        def gradient(state: Any, *batch: Any) -> Any:
            values, slope = gradient_of(state, *batch)
            return (None, slope), values

        self._updates, self._batch = updates, batch
        self._state = (weights, jax.tree.map(jnp.zeros_like, weights)) if updates else weights
        function, donate = (step, (0,)) if updates else (gradient, ())
        self._step, facts = compile_program(
            function, self._state, *batch, donate=donate, ahead=ahead
        )
        (_, first), (_, residual) = self()  # the first momentum is the gradient
        self.gradient = jax.tree.map(np.array, first.layers)
        self.facts = facts | {"residual_norm": float(residual)}

    @property
    def program(self) -> str:
        """The compiled step as text, of one that was compiled ahead."""
        return str(self._step.as_text())  # type: ignore[attr-defined]

    def __call__(self) -> Any:
        made, values = self._step(self._state, *self._batch)
        if self._updates:
            self._state = made
        return made, values


def trainer(network: Network, solvers: Pair | None = None, **options: Any) -> Trainer:
    """Train a network on one device, by the library or, without solvers, by a scan."""
    weights, *batch = jax.tree.map(jnp.array, (network.weights, network.x, network.target))
    return Trainer(network.loss(solvers), weights, tuple(batch), **options)
