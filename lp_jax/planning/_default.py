"""The choice that `solver=None` stands for, here and on another device."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax

from lp_jax._arrays._at_once import Processor, processor
from lp_jax._arrays._types import PyTree
from lp_jax._problem import Problem
from lp_jax._programs import _traced
from lp_jax._programs._asked import asked
from lp_jax._solvers._solver import Solver
from lp_jax.planning._measure import arrays


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
        >>> with planning.assume("H200"):
        ...     print(planning.summary(planning.default(problem).solver))
        32 Picard sweeps over the layers
    """
    found: list[Default] = []

    def look(arrays: dict[str, PyTree]) -> None:
        pair, seconds = _traced.default(problem.replace(**arrays))[0]
        found.append(Default(*pair, seconds))

    jax.eval_shape(look, arrays(problem))
    return found[0]


@contextlib.contextmanager
def assume(device: str | Processor) -> Iterator[None]:
    """Let the default choose for another device in solves that are traced in the ``with`` block.

    ``device`` is a part of `jax.Device.device_kind`, such as "H200", of an accelerator whose data sheet is known.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> with planning.assume("H200"):
        ...     solution = lp_jax.solve(step, jnp.ones((4096, 4, 4)), jnp.ones((8, 4)))
        >>> int(solution.stats.iterations) > 0
        True
    """
    known = processor(device, device) if isinstance(device, str) else device
    with asked(asked.value._replace(processor=known)):
        yield
