"""A solver written outside the library, over its public names: every layer takes the state that entered it."""

import dataclasses

import jax

import lp_jax


@lp_jax.register()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation(lp_jax.Solver):
    """Jacobi's method on the layers."""

    iterations: int = 3
    keep: bool = False

    @property
    def keeps_states(self):
        return self.keep

    def improve(self, levels, u):
        relaxed = lp_jax.multigrid.c_relax(levels[0], u)
        return relaxed, lp_jax.multigrid.measure(
            levels[0], jax.tree.map(lambda a, b: a - b, relaxed, u)
        )
