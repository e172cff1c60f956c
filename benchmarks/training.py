"""Training steps with JAX: SGD with momentum, one per call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import compile_program

LEARNING_RATE, MOMENTUM = 0.01, 0.9


class Trainer:
    """Takes training steps, one per call.

    Args:
        loss: ``loss(network, *batch)``, and the last residual norm.
        network: the initial weights.
        batch: what the loss is taken of, the same in all steps.
        layers: the weights of a network that are compared.
        ahead: whether to compile ahead of the first call.

    Attributes:
        gradient: of those weights, at their initial values.
        facts: for the result.
    """

    def __init__(
        self,
        loss: Callable[..., tuple[jax.Array, jax.Array]],
        network: Any,
        batch: tuple[Any, ...],
        layers: Callable[[Any], Any],
        *,
        ahead: bool = True,
    ):
        def step(state: tuple[Any, Any], *batch: Any) -> Any:
            network, momentum = state
            values, gradient = jax.value_and_grad(loss, has_aux=True)(network, *batch)
            momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradient)
            return (jax.tree.map(lambda p, m: p - LEARNING_RATE * m, network, momentum), momentum), values

        self._state, self._batch = (network, jax.tree.map(jnp.zeros_like, network)), batch
        self._step, facts = compile_program(step, self._state, *batch, donate=(0,), ahead=ahead)
        _, (_, residual) = self()
        self.gradient = jax.tree.map(np.array, layers(self._state[1]))  # the first momentum is the gradient
        self.facts = facts | {"residual_norm": float(residual)}

    @property
    def program(self) -> str:
        """The compiled step as text, of one that was compiled ahead."""
        return str(self._step.as_text())  # type: ignore[attr-defined]

    def __call__(self) -> Any:
        """One step."""
        self._state, values = self._step(self._state, *self._batch)
        return self._state, values
