"""How the solves inside a gradient ended: counted by the cotangent of an array, without callbacks."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays._types import PyTree
from lp_jax._levels._result import DONE, RESULTS, SERIAL, ranked
from lp_jax._programs._asked import Captured, ResultCounter, asked, is_tracing


class Results(NamedTuple):
    """Outcome of the solves inside a gradient: the worst code of `lp_jax.RESULTS` in each direction; 0 is done as asked."""

    forward: jax.Array
    adjoint: jax.Array

    def warn(self) -> "Results":
        """Warn of solves that did not do what was asked or fell back, once for each line of code. Not under jit."""
        for direction, codes in self._asdict().items():
            code = int(ranked(jnp.max(ranked(codes))))
            if code not in (DONE, SERIAL):
                warnings.warn(f"{direction} solve: {RESULTS[code]}.", stacklevel=2)
        return self


def counts_of(forward: jax.Array, adjoint: jax.Array) -> jax.Array:
    """Count solves by their result codes: ``(2, len(RESULTS))``."""
    # Under vmap of a solve the codes are arrays; counts add up over them, and over all solves that share the array.
    codes = jnp.stack([forward.reshape(-1), adjoint.reshape(-1)])
    return jnp.sum(jax.nn.one_hot(codes, len(RESULTS), dtype=jnp.float32), axis=1)


@jax.custom_vjp
def count_ends(counts: jax.Array, result: jax.Array, y1: PyTree) -> PyTree:
    """Return ``y1``; the cotangent of ``counts`` counts a solve that JAX differentiates itself."""
    return y1


count_ends.defvjp(
    lambda counts, result, y1: (y1, result),
    # JAX differentiates the scan itself, so its adjoint ends as its forward pass did.
    lambda result, cotangent: (counts_of(result, result), None, cotangent),
)


def count_results(loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Add a first argument to ``loss``, whose cotangent counts how the solves inside end."""

    @functools.wraps(loss)
    def call(counts: jax.Array, *args: PyTree, **kwargs: PyTree) -> PyTree:
        def run(key: object) -> PyTree:
            counter = ResultCounter(counts, key)
            try:
                with asked(asked.value._replace(counter=counter)):
                    return loss(*args, **kwargs)
            finally:
                del counter.array  # caches may hold the counter longer than this trace

        # Without a key, compiled functions are shared between counters. That fails if a program that is being traced would close
        # over the array; then the loss is traced once more with a key of its own.
        with contextlib.suppress(Captured):
            return run(object() if is_tracing() else None)
        return run(object())

    return call


def value_and_grad(
    loss: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[PyTree, PyTree, Results]]:
    """``jax.value_and_grad`` that also returns how the solves inside ended, forward and adjoint.

    The arguments are those of ``jax.value_and_grad``. ``loss`` needs no change: it may call `solve`, `scan` or modules of
    `lp_jax.nn` anywhere, under jit, vmap or shard_map. The codes are outputs of the program, without callbacks, so that it
    can be exported and cached. Outside of jit, a ``loss`` that is jitted itself is compiled at every call: jit the function
    that is returned.

    Returns:
        A function that returns ``(value, gradient, results)``, value and gradient as ``jax.value_and_grad`` does.
        ``results.forward`` and ``results.adjoint`` are the worst codes of `lp_jax.RESULTS` of all solves that are differentiated;
        0 where there is none. ``results.warn()``, outside of jit, warns of those that did not do what was asked.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> def loss(weights, y):
        ...     step = lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y)
        ...     return lp_jax.solve(step, weights, y, solver=lp_jax.Picard(sweeps=1, rtol=1e-3)).y1
        >>> value, gradient, results = lp_jax.value_and_grad(loss)(jnp.ones(16), jnp.ones(()))
        >>> lp_jax.RESULTS[int(results.adjoint)].partition(" within")[0]
        'the residual norm did not come down to the tolerance'
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    shifted = (0, *(number + 1 if number >= 0 else number for number in numbers))
    # The counts are the first argument of `inner`, so the numbers of the user's arguments are shifted by one.
    inner = jax.value_and_grad(count_results(loss), shifted, has_aux)

    def call(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree, Results]:
        value, (counts, *gradients) = inner(
            jnp.zeros((2, len(RESULTS)), jnp.float32), *args, **kwargs
        )
        # A code is there if its count is positive. `ranked` orders codes by severity, and is its own inverse.
        worst = ranked(jnp.max(jnp.where(counts > 0, ranked(jnp.arange(len(RESULTS))), 0), axis=1))
        results = Results(forward=worst[0], adjoint=worst[1])
        return value, gradients[0] if isinstance(argnums, int) else tuple(gradients), results

    return call
