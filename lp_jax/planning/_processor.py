"""Measure the numbers of a device by which the default chooses, and use them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays._at_once import Processor, processor
from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import default_platform
from lp_jax._problem import Problem
from lp_jax._programs import _traced
from lp_jax._programs._asked import asked
from lp_jax._solvers._solver import Solver
from lp_jax.planning._measure import arrays, seconds

_LAYERS, _WIDTH = 2048, 16
_LEAST, _MOST, _LONG = 512, 8192, 2e-3  # size of the arrays, and seconds that are long beside the start of a call


def measure_processor() -> Processor:
    """Measure the device that JAX computes on: the start of a kernel, products, and memory. It takes some seconds.

    The other numbers are those known of its kind.

    Example:
        >>> from lp_jax import planning
        >>> here = planning.measure_processor()
        >>> with planning.assume(here):
        ...     pass  # solves that are traced here go by what was measured
    """
    known = processor(default_platform(), jax.devices(default_platform())[0].device_kind)
    weights, y = jnp.zeros((_LAYERS, _WIDTH, _WIDTH), jnp.float32), jnp.zeros((_WIDTH, _WIDTH), jnp.float32)
    propagate = jax.jit(
        lambda w, y: lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), y, w, unroll=known.partial_unroll)[0]
    )
    in_turn = _median(functools.partial(propagate, weights, y))
    kernels = 3  # of a layer with a product
    return dataclasses.replace(
        known,
        kernel=in_turn / _LAYERS / kernels,
        flops=_rate(jax.jit(jnp.matmul), lambda n: (n, n), lambda n: 2 * n**3),
        bandwidth=_rate(
            jax.jit(jnp.add), lambda n: (n * n, 16), lambda n: 2 * 16 * n * n * 4
        ),  # read once, written once
    )


def _rate(call: Callable[..., jax.Array], shape: Callable[[int], tuple[int, int]], work: Callable[[int], int]) -> float:
    """Work per second of ``call(x, x)``, with arrays so large that the start of the call does not count."""
    size = _LEAST
    while True:
        x = jnp.ones(shape(size), jnp.float32)
        taken = _median(functools.partial(call, x, x))
        if taken > _LONG or size == _MOST:
            return work(size) / taken
        size *= 2


def _median(call: Callable[[], jax.Array]) -> float:
    return seconds([call], samples=5)[0]


class Default(NamedTuple):
    """Solvers, and predicted seconds of value and gradient."""

    solver: Solver
    adjoint_solver: Solver
    seconds: float


def default(problem: Problem) -> Default:
    """Return the solvers that ``solver=None`` stands for, from shapes only. Within `assume`, for another device.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jax.ShapeDtypeStruct((512, 64, 64), "float32"), jnp.zeros((32, 64), "float32"))
        >>> with planning.assume(planning.processor("gpu", "H200")):
        ...     print(planning.code(planning.default(problem).solver))
        Picard(sweeps=32, rtol=0.001, fallback=True)
    """
    found: list[Default] = []

    def look(arrays: dict[str, PyTree]) -> None:
        pair, seconds = _traced.default(problem.replace(**arrays))[0]
        found.append(Default(*pair, seconds))

    jax.eval_shape(look, arrays(problem))
    return found[0]


@contextlib.contextmanager
def assume(numbers: Processor) -> Iterator[None]:
    """Let the default choose by these numbers in solves that are traced in the ``with`` block, on any device.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> with planning.assume(planning.processor("gpu", "H200")):
        ...     solution = lp_jax.solve(step, jnp.ones((4096, 4, 4)), jnp.ones((8, 4)))
        >>> int(solution.stats.iterations) > 0
        True
    """
    with asked(asked.value._replace(processor=numbers)):
        yield
