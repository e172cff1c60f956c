"""`multigrid`: the levels of a problem, and cycles on them."""

from collections.abc import Callable, Sequence

from lp_jax._arrays._types import CPoints, PyTree, Scalar
from lp_jax._levels import _sweep
from lp_jax._levels._level import Level
from lp_jax._problem import Problem
from lp_jax._programs import _inputs, _traced
from lp_jax._solvers import _cycle
from lp_jax._solvers._coarse_step import CoarseStep, Rediscretize, coarser
from lp_jax._solvers._solver import Solver


def hierarchy(problem: Problem, solver: Solver) -> tuple[Level, ...]:
    """Return the levels that a solve works on.

    Args:
        problem: with `MPIComm`, or `MeshComm` inside a ``jax.shard_map`` over its axis (``check_vma=False``), each worker passes
            its own layers, whole intervals of them, and gets its part of the levels. ``aux`` is left out.
        solver: defines the coarsening and the coarse steps.

    Returns:
        The levels, finest first.

    Raises:
        ValueError: for a `MeshComm` outside of a ``jax.shard_map``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> levels = lp_jax.multigrid.hierarchy(problem, lp_jax.MGRIT(levels=3, coarsening=4))
        >>> u = lp_jax.multigrid.cascade(levels)
        >>> [level.steps for level in levels], u.shape, lp_jax.multigrid.prolong(levels[0], u).shape
        ([64, 16, 4], (16,), (16,))
    """
    _inputs.solver("solver", solver)
    program, arrays = _traced.trace(problem.replace(comm=problem.comm.inside()), (solver,))
    resolved: Solver = arrays.solver
    return resolved.discretize(program.chain(program.slots(arrays.slices), arrays.y0, arrays.shared))


def rediscretize(
    level: Level, params: str | Callable[[PyTree], PyTree] | CoarseStep = "inject", factor: int = 1
) -> Level:
    """Return the next coarser level: ``Phi'_j(u) = Phi(u; params_j, t_j, m dt)``, one layer in the place of each interval.

    Args:
        level: a level of the layers, not of an adjoint.
        params: parameters of the coarse layers, as for `Rediscretize`; or another coarse step, as ``MGRIT.coarse_step`` takes it.
        factor: coarsening factor of the new level, 1 for the coarsest.

    Raises:
        ValueError: for an adjoint level, and for unknown ``params``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import multigrid
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> fine, _ = multigrid.hierarchy(problem, lp_jax.MGRIT(coarsening=4))
        >>> multigrid.rediscretize(fine, "mean").steps, multigrid.rediscretize(fine, lp_jax.Picard(sweeps=2)).steps
        (16, 16)
    """
    if level.chain is None:
        raise ValueError(
            "rediscretize got an adjoint level. The coarse levels of an adjoint are those that a cycle is given."
        )
    coarse_step = params if isinstance(params, CoarseStep) else Rediscretize(params)
    steps = coarse_step.coarsen(level.chain, level.number + 1, level.interval_span, at_once=level.at_once)
    return coarser(level, steps, factor)


def march(level: Level) -> CPoints:
    """Solve a level step after step, and return its C-points, on the coarsest level all its points."""
    return _sweep.march(level)[0]


def v_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Scalar]:
    """One V-cycle of the full approximation scheme.

    Args:
        levels: finest first.
        u: C-points of ``levels[0]``, leaves ``(intervals, ...)``.
        options: ``relaxation``, ``c_weight`` and ``coarsest``, as for `MGRIT`.

    Returns:
        The corrected C-points, and this worker's sum of squared residuals after relaxation; ``levels[0].norm`` makes it the norm
        over all workers.

    Example:
        >>> import functools, jax.numpy as jnp, lp_jax
        >>> from lp_jax import multigrid
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> for one in (multigrid.v_cycle, multigrid.f_cycle, multigrid.w_cycle):
        ...     cycle = functools.partial(one, relaxation="FCF")
        ...     solution = problem.solve(solver=lp_jax.MGRIT(levels=3, cycle=cycle))
    """
    return _cycle.fas_cycle(_cycle.Scheme(**options), levels, u, "V")


def f_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Scalar]:
    """One F-cycle: each coarse level is visited by an F-cycle, then by a V-cycle. As `v_cycle` else."""
    return _cycle.fas_cycle(_cycle.Scheme(**options), levels, u, "F")


def w_cycle(levels: Sequence[Level], u: CPoints, **options: PyTree) -> tuple[CPoints, Scalar]:
    """One W-cycle: each coarse level is visited by two W-cycles. As `v_cycle` else."""
    return _cycle.fas_cycle(_cycle.Scheme(**options), levels, u, "W")


def cascade(levels: Sequence[Level], kind: str = "V", **options: PyTree) -> CPoints:
    """Approximate the C-points without a guess, from the coarsest level to the finest. Options are those of `v_cycle`."""
    return _cycle.cascade(_cycle.Scheme(**options), levels, kind)
