"""The base of modules whose layers are solved: their solvers and workers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from lp_jax._comms._comm import Comm
from lp_jax._programs import _inputs
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver


class Solved(nnx.Module):
    """A module with solvers and workers, which are static."""

    solver: Any  # a `Solver`; None for the default
    adjoint_solver: Any  # a `Solver`; None for the settings of ``solver``

    def __init__(
        self,
        solver: Solver | str | None,
        adjoint_solver: Solver | None,
        comm: Comm | Mesh | None,
        *,
        others: tuple[str | None, ...] = (),
    ):
        """``others`` are the values of ``solver`` that stand for one."""
        self.solver = solver if solver in others else _static("solver", solver)
        self.adjoint_solver = None if adjoint_solver is None else _static("adjoint_solver", adjoint_solver)
        self.comm = nnx.static(_inputs.comm(comm))


def _static(name: str, solver: object) -> Any:
    """Return a solver as NNX metadata, with tolerances as Python floats: arrays would be state of the model."""
    _inputs.solver(name, solver)
    return nnx.static(jax.tree.map(float, solver))


def solvers_of(module: Solved, solver: Solver | None, adjoint_solver: Solver | None) -> dict[str, Any]:
    """Return the solvers of a call: its arguments or the module's."""
    if solver is None:
        solver = module.solver
        adjoint_solver = module.adjoint_solver if adjoint_solver is None else adjoint_solver
    return {"solver": solver, "adjoint_solver": adjoint_solver}


def placing_solvers(module: Solved) -> tuple[Solver, Solver]:
    """Return the forward and adjoint solver that decide which layers live where."""
    solver = module.solver or Serial()  # the default suits any placement
    return solver, module.adjoint_solver or solver


def time_first(module: Solved, x: jax.Array, features: int) -> jax.Array:
    """Return sequences ``(batch, time, features)`` as ``(time, batch, features)``, the times of this worker."""
    if x.ndim != 3 or x.shape[-1] != features:
        name, wanted = type(module).__name__, f"(batch, time, {features})"
        raise ValueError(f"{name} takes sequences of {features} features, {wanted}; got {x.shape}.")
    return module.comm.share(module.comm.replicate(jnp.swapaxes(x, 0, 1)), placing_solvers(module))
