"""`parallel` for functions of NNX modules: what they change in their modules reaches the caller."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from lp_jax import _parallel
from lp_jax._arrays._types import PyTree


def parallel(f: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
    """`lp_jax.parallel` for a function whose arguments hold NNX modules, as ``nnx.jit`` is ``jax.jit`` for such.

    Batch statistics, counters, sown values and random streams that ``f`` changes are changed in the caller's modules. A scan
    whose carry is such a state is solved as any other.

    Args:
        f: a function of modules and arrays.
        options: of `lp_jax.parallel`: ``solver``, ``adjoint_solver``, ``comm``, ``where``.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 16))
        >>> def loss(layers, x):
        ...     step = nnx.scan(lambda x, layer: x + 0.1 * nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        ...     return jnp.mean(step(x, layers) ** 2)
        >>> value, gradient = nnx.value_and_grad(nn.parallel(loss, solver=lp_jax.Picard(sweeps=4)))(layers, jnp.ones((2, 4)))
        >>> gradient["kernel"].shape
        (16, 4, 4)
    """

    @functools.wraps(f)
    def solved(*args: PyTree, **kwargs: PyTree) -> PyTree:
        graphdef, state = nnx.split((args, kwargs))
        made: list[nnx.GraphDef] = []

        def pure(state: nnx.State) -> list[PyTree]:
            given = nnx.merge(graphdef, state)
            out = f(*given[0], **given[1])
            structure, *states = nnx.split((given, out), nnx.Variable, ...)
            made.append(structure)
            return states

        states = _parallel.parallel(pure, **options)(state)
        given, out = nnx.merge(made[-1], *states)
        nnx.update((args, kwargs), nnx.state(given, nnx.Variable))
        return out

    return solved
