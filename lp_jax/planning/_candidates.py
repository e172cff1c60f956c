"""Pairs of solvers that a plan compares."""

import dataclasses
import itertools

from lp_jax._programs import _inputs
from lp_jax._solvers._coarse_step import Identity
from lp_jax._solvers._default import Pair
from lp_jax._solvers._mgrit import MGRIT
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._rediscretize import Rediscretize
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard, Sweeps

TOLERANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MOST_SWEEPS = 32
MOST_ITERATIONS, RELAXATIONS = 10, 16


def as_pair(solvers: Solver | Pair | tuple[Solver, None]) -> Pair:
    """Return a solver with its adjoint one; by default that for linear systems."""
    solver, adjoint = solvers if isinstance(solvers, tuple) else (solvers, None)
    _inputs.solver("solver", solver)
    adjoint = solver.for_adjoint() if adjoint is None else adjoint
    _inputs.solver("adjoint_solver", adjoint)
    return solver, adjoint


def sweeps(kind: type[Sweeps]) -> list[Pair]:
    """Sweeps to a tolerance; one program for all of them. The adjoint's tolerance is ten times looser."""
    pairs = itertools.pairwise(TOLERANCES)
    return [(kind(sweeps=MOST_SWEEPS, rtol=rtol), kind(sweeps=MOST_SWEEPS, rtol=loose)) for loose, rtol in pairs]


def newton() -> list[Pair]:
    """Newton's method with full Jacobians to a tolerance, for states whose first axis is that of the examples.

    One program serves all. The adjoint system is linear, so one iteration solves it. Relaxations keep a solver that is
    recommended for a new network good for the trained one.
    """
    solvers = [
        Newton(iterations=MOST_ITERATIONS, relaxations=RELAXATIONS, rtol=rtol, batch_axes=1) for rtol in TOLERANCES[1:4]
    ]
    return [(solver, solver.for_adjoint()) for solver in solvers]


def cycles(layers: int, workers: int = 1) -> list[Pair]:
    """Multigrid: one interval per worker with the identity as coarse step, few levels with sweeps or injection."""
    kept = MGRIT(storage="all")
    hierarchies = [
        *(dataclasses.replace(kept, coarsening=m, coarse_step=Identity()) for m in _factors(layers, workers)),
        *(
            dataclasses.replace(kept, coarsening=m, coarse_step=Picard(sweeps=s, around=around))
            for m in (4, 8)
            for s, around in ((1, "start"), (2, "start"), (2, "trajectory"))
        ),
        dataclasses.replace(kept, levels=3, coarse_step=Picard(sweeps=1)),
        dataclasses.replace(kept, levels=3, coarse_step=Rediscretize()),
    ]
    return [
        (dataclasses.replace(one, iterations=forward), dataclasses.replace(one, iterations=adjoint))
        for one in hierarchies
        if not one.resolve(layers).exact
        for forward, adjoint in ((1, 1), (2, 1), (2, 2), (3, 3))
    ]


def exact_cycles(layers: int, workers: int) -> list[Pair]:
    """One interval per worker, and as many cycles as intervals: every state is exact, whatever the network."""
    kept = MGRIT(coarse_step=Identity(), storage="all")
    factors = _factors(layers, workers) if workers > 1 else []
    return [(dataclasses.replace(kept, coarsening=m, iterations=-(-layers // m)),) * 2 for m in factors]


def _factors(layers: int, workers: int) -> list[int]:
    """One interval per worker; without workers, a few intervals."""
    factors = [-(-layers // intervals) for intervals in ((workers,) if workers > 1 else (4, 8))]
    return [m for m in factors if 2 <= m < layers]
