"""The pieces of a multigrid cycle, pure functions on the levels of a problem.

Compose them into a cycle of your own, for `MGRIT(cycle=...)`, or call them by hand, on one device, over MPI ranks, or inside a
``jax.shard_map`` over the layers. The two-grid method on C-points ``u``:

    >>> import jax.numpy as jnp, lp_jax
    >>> from lp_jax import multigrid
    >>> def two_grid(levels, u):
    ...     fine, coarse = levels
    ...     r = multigrid.residual(fine, u)
    ...     v = multigrid.restrict(fine, u)
    ...     coarse = coarse.with_rhs(multigrid.coarse_rhs(coarse, v, multigrid.restrict(fine, r)))
    ...     return multigrid.correct(fine, u, multigrid.march(coarse), v), multigrid.measure(fine, r)
    >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
    >>> solver = lp_jax.MGRIT(cycle=two_grid, iterations=4)
    >>> bool(jnp.isclose(problem.solve(solver=solver).y1, problem.solve(solver=lp_jax.Serial()).y1))
    True

Source: Falgout, Friedhoff, Kolev, MacLachlan, Schroder, "Parallel time integration with multigrid", SIAM J. Sci. Comput.
36 (2014).
"""

from lp_jax._levels._level import Level as Level, measure as measure
from lp_jax._levels._relax import (
    c_relax as c_relax,
    coarse_rhs as coarse_rhs,
    correct as correct,
    f_relax as f_relax,
    prolong as prolong,
    residual as residual,
    restrict as restrict,
)
from lp_jax._levels._sweep import march as march
from lp_jax._levels._tolerance import Progress as Progress
from lp_jax._problem import hierarchy as hierarchy
from lp_jax._solvers._coarse_step import rediscretize as rediscretize
from lp_jax._solvers._cycle import (
    cascade as cascade,
    f_cycle as f_cycle,
    v_cycle as v_cycle,
    w_cycle as w_cycle,
)
from lp_jax._solvers._solver import solve_levels as solve_levels
