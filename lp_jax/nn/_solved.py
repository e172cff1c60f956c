"""The base of modules whose layers are solved: their solvers and workers."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from lp_jax import Comm, Problem, Serial, Solution, Solver, Stats
from lp_jax._arrays._types import PyTree, State
from lp_jax._levels._result import ranked
from lp_jax._programs import _inputs
from lp_jax._solvers._solver import NOT_MEASURED


class Solved(nnx.Module, abc.ABC):
    """A module with solvers and workers, which are static; it is called and solved with the inputs of its `problem`."""

    solver: Any  # a `Solver`; None for the default
    adjoint_solver: Any  # a `Solver`; None for the settings of ``solver``

    def __init__(
        self,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        comm: Comm | Mesh | None = None,
    ):
        _inputs.solvers(optional=True, solver=solver, adjoint_solver=adjoint_solver)
        # NNX metadata; tolerances as Python floats, as arrays would be state of the model
        self.solver = nnx.static(jax.tree.map(float, solver))
        self.adjoint_solver = nnx.static(jax.tree.map(float, adjoint_solver))
        self.comm = nnx.static(_inputs.comm(comm))

    @abc.abstractmethod
    def problem(self, *inputs: Any, **named: Any) -> Problem:
        """Return the problem that `solve` solves, for `lp_jax.plan`, `lp_jax.calibrate` and `lp_jax.solve`."""

    def __call__(self, *inputs: Any, **named: Any) -> State:
        """Return the last state, ``y1`` of `solve`."""
        return self.solve(*inputs, **named).y1

    def solve(
        self,
        *inputs: Any,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | State = "constant",
        adjoint_guess: State | None = None,
        **named: Any,
    ) -> Solution:
        """Solve the problem of these inputs, which are those of `problem`; guesses as for `lp_jax.solve`.

        ``solver`` is the solver of this call instead of the module's, forward and adjoint unless ``adjoint_solver`` is given.
        ``solver=lp_jax.Serial()`` gives the exact states and the exact gradient.
        """
        problem = self.problem(*inputs, **named)
        return problem.solve(
            **self._solvers(solver, adjoint_solver), guess=guess, adjoint_guess=adjoint_guess
        )

    def solve_vjp(
        self,
        *inputs: Any,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        **named: Any,
    ) -> tuple[Solution, Callable[[State], tuple[State, Stats]]]:
        """Return the solution of `solve`, and ``pullback(y1_cotangent) -> (y0_cotangent, adjoint_stats)``.

        Running statistics are not updated.
        """
        solution, pullback = self.problem(*inputs, **named).solve_vjp(
            **self._solvers(solver, adjoint_solver)
        )

        def pull(cotangent: State) -> tuple[State, Stats]:
            gradients, stats = pullback(cotangent)
            return gradients.y0, stats

        return solution, pull

    def _solvers(self, solver: Solver | None, adjoint_solver: Solver | None) -> dict[str, Any]:
        """Return the solvers of a call: its arguments or the module's."""
        if solver is None:
            solver = self.solver
            adjoint_solver = adjoint_solver or self.adjoint_solver
        return {"solver": solver, "adjoint_solver": adjoint_solver}

    def placing_solvers(self) -> tuple[Solver, Solver]:
        """Return the forward and adjoint solver that decide which layers live where."""
        solver = self.solver or Serial()  # the default suits any placement
        return solver, self.adjoint_solver or solver

    def time_first(self, x: jax.Array, features: int) -> jax.Array:
        """Return sequences ``(batch, time, features)`` as ``(time, batch, features)``, the times of this worker."""
        if x.ndim != 3 or x.shape[-1] != features:
            name = type(self).__name__
            raise ValueError(
                f"{name} takes sequences of {features} features, (batch, time, {features}); got "
                f"{x.shape}."
            )
        return self.comm.share(self.comm.replicate(jnp.swapaxes(x, 0, 1)), self.placing_solvers())


def combined_stats(
    stats: Stats, add: Callable[[PyTree], PyTree], largest: Callable[[PyTree], PyTree]
) -> Stats:
    """Return the stats of several solves as those of one; the norm of an iteration is over all solves that made it.

    A norm counts as not measured if one of these solves did not measure its own. ``add`` and ``largest`` reduce over the solves:
    over a leading axis of the stats, or over processes.
    """
    norms = stats.residual_norms
    made = (
        lax.broadcasted_iota(jnp.int32, norms.shape, norms.ndim - 1) < stats.iterations[..., None]
    )
    lacking = made & (norms < 0)
    # `add` sums all three at once, because over processes each call is a message.
    squares, solves, gaps = add(
        (jnp.where(made, norms, 0) ** 2, made.astype(jnp.int32), lacking.astype(jnp.int32))
    )
    iterations, result = largest((stats.iterations, ranked(stats.result)))
    # The 2-norm over all solves is the root of the sum of squares; a solve that had stopped before adds nothing.
    norms = jnp.where((solves > 0) & (gaps == 0), jnp.sqrt(squares), NOT_MEASURED)
    return Stats(iterations, norms, ranked(result))
