"""The published rule for inexact solves: watch the convergence of twice the iterations."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.planning import with_effort
from lp_jax.train._controller import Pair
from lp_jax.train._types import Batch, LossFn


@dataclasses.dataclass(frozen=True)
class Doubling:
    """The published rule: watch the convergence of twice the iterations, and go serial for good once it fails.

    Every ``probe_every`` batches a forward solve takes twice the iterations, and at least three, as the first cycle of MGRIT
    has no residual. If the ratio of its last two residual norms is above one, the rest of the run is serial. The rule is
    here for comparison: it uses residuals and not the gradient. `lp_jax.train.Controller` bounds the gradient's error.

    Args:
        loss_fn: the loss, as for `lp_jax.train.make_train_step`.
        probe_every: number of steps between two probes.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import train
        >>> from lp_jax.train import contrib
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver)
        ...     return solution.y1.sum(), train.Info(len(batch), solution.stats, solution.result)
        >>> rule, solver = contrib.Doubling(loss_fn), lp_jax.MGRIT(iterations=2)
        >>> control = rule.begin(solver, solver)
        >>> control, row = rule.probe(control, jnp.ones(16), jnp.ones(4), solver, solver)
        >>> row["factor"] < 1, row["serial"]
        (True, False)

    Reference:
        arXiv:2601.09026.
    """

    loss_fn: LossFn
    _: dataclasses.KW_ONLY
    probe_every: int = 500

    def __post_init__(self) -> None:
        _check.integer("probe_every", self.probe_every, least=1)

    def begin(self, solver: Solver, adjoint_solver: Solver) -> jax.Array:
        """Return the first decision: not to go serial. Raise ValueError if ``solver`` has a tolerance, or nothing to double."""
        if solver.has_tolerance or solver.exact:
            raise ValueError(
                f"Doubling doubles a fixed number of iterations, and solver={solver!r} has none. Leave rtol and atol out: "
                "Picard(sweeps=4), MGRIT(iterations=2)."
            )
        return jnp.asarray(False)

    def due(self, step: int) -> bool:
        """Whether to probe before this step, the first being 0."""
        return step % self.probe_every == 0

    def solvers(self, control: jax.Array, solver: Solver, adjoint_solver: Solver) -> Pair:
        """Return the solvers of the steps that follow."""
        return (Serial(), Serial()) if control else (solver, adjoint_solver)

    def probe(
        self, control: jax.Array, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver
    ) -> tuple[jax.Array, Mapping[str, object]]:
        """Return the decision, and a row for the log: ``factor``, ``serial``, and the cost in ``gradients``.

        A forward solve counts as two thirds of a gradient. Once serial, nothing is measured.
        """
        if control:
            return jnp.asarray(True), {"serial": True, "gradients": 0}
        norms = _norms(self.loss_fn, params, batch, with_effort(solver, max(2 * solver.iterations, 3)), adjoint_solver)
        *_, previous, last = [math.inf, *(x for x in norms.tolist() if x >= 0)]
        factor = last / previous if previous > 0 else 0.0
        serial = not factor <= 1
        return jnp.asarray(serial), {"factor": factor, "serial": serial, "gradients": _FORWARD}


# Part of a gradient: as many iterations as the forward and adjoint solve of a step, without the products of weights.
_FORWARD = 2 / 3


@functools.partial(jax.jit, static_argnums=0)
def _norms(loss_fn: LossFn, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver) -> jax.Array:
    return loss_fn(params, batch, solver, adjoint_solver)[1].stats.residual_norms
