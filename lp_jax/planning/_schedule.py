"""What a training step does, before it is run: counted by its solvers, or read off the program of one that counts nothing."""

from lp_jax._solver import Solver
from lp_jax._work import Batch as Batch
from lp_jax._work import Schedule, Uncounted, Work
from lp_jax.planning._program import read


def training_step(
    solver: Solver, adjoint_solver: Solver, layers: int, *, workers: int = 1, looped: bool = False
) -> Schedule:
    """Count what value and gradient take, on the busiest worker.

    Args:
        solver: of the forward solve.
        adjoint_solver: of the adjoint solve.
        layers: number of layers.
        workers: number of workers that the layers are spread over.
        looped: what ``interval_map="auto"`` means.

    Raises:
        NotImplementedError: for Newton's method within multigrid.
    """
    kept = solver.resolve(layers).keeps_states
    forward = count(solver, layers, workers=workers, looped=looped, kept=kept)
    return forward + count(adjoint_solver, layers, workers=workers, looped=looped, kept=kept, adjoint=True)


def count(
    solver: Solver, layers: int, *, workers: int = 1, looped: bool = False, kept: bool = False, adjoint: bool = False
) -> Schedule:
    """Count what a forward solve takes, or an adjoint one with the gradient that it gives.

    Args:
        solver: settings.
        layers: number of layers.
        workers: as for `training_step`.
        looped: as for `training_step`.
        kept: whether the forward solve leaves linearisations of all layers behind.
        adjoint: which of the two.
    """
    solver = solver.resolve(layers)
    work = Work(layers=layers, workers=workers, looped=looped, kept=kept, adjoint=adjoint)
    try:
        solver.count(work)
    except Uncounted:
        fixed = solver.with_effort(solver.iterations) if solver.has_tolerance else solver
        return read(fixed, layers, workers=workers, looped=solver.loops(looped), kept=kept, adjoint=adjoint)
    if workers > 1:
        work.schedule.reductions += 2  # the last state, and the residual norms
    return work.schedule
