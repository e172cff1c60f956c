"""A solver written outside the library, over its public classes: every layer takes the state that entered it."""

import dataclasses

import jax
import jax.numpy as jnp

from lp_jax._level import sweep
from lp_jax._solver import Solver


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation(Solver):
    """Jacobi's method on the layers."""

    iterations: int = dataclasses.field(default=3, metadata={"static": True})
    keep: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def keeps_states(self):
        return self.keep

    def stride(self, steps):
        return 1

    def discretize(self, chain):
        return (chain.finest(1),)

    def start(self, levels, guess):
        return jax.tree.map(lambda y: jnp.stack([y] * levels[0].intervals), levels[0].y0) if guess is None else guess, 0

    def improve(self, levels, u):
        swept, _ = sweep(levels[0], levels[0].entries(u))
        return swept, sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (swept, u)), strict=True))

    def finish(self, levels, u, advance):
        return u, None if advance is None else sweep(levels[0], levels[0].entries(u), advance=advance)[1]
