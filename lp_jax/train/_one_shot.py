"""One-shot training: states, cotangents and parameters converge together."""

from typing import Any

import jax
import optax

from lp_jax import Solver
from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree
from lp_jax.train._step import init_state, make_train_step, replicate_rest
from lp_jax.train._types import Batch, LossFn, Restart, StepFn, TrainState


def one_shot(
    loss_fn: LossFn,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    batch: Batch,
    *,
    solver: Solver,
    adjoint_solver: Solver | None = None,
    **options: Any,
) -> tuple[StepFn, TrainState]:
    """Train with one or two sweeps or cycles per step, which begin where those of the last step ended.

    Parameters change a little at a time, so a few sweeps from the last step's states and cotangents follow, and all three
    converge together. Every step needs the same examples: the full batch, or one large one.

    Args:
        loss_fn: ``loss_fn(params, batch, solver, adjoint_solver, restart) -> (loss, info)``, as for `make_train_step`. It
            passes ``guess`` and ``adjoint_guess`` of the `Restart` to `lp_jax.solve`, and returns ``Solution.trajectory`` as
            ``info.trajectory``. `classification` makes one.
        params: the model's parameters.
        optimizer: any optax transformation. L-BFGS, ``optax.chain(optax.scale_by_lbfgs(), optax.scale(-1.0))`` or that of
            `lp_jax.train.scale_by_lbfgs`, goes with ``line_search=Backtracking()``, whose trials are forward solves.
        batch: the examples of all steps.
        solver: solver of the forward solves: ``Picard(sweeps=1)``, for example.
        adjoint_solver: solver of the adjoint solves; None means the settings of ``solver``.
        **options: ``line_search`` and ``ranks``, as for `make_train_step`.

    Returns:
        ``(step_fn, state)``, for `fit`. The state holds the trajectories of the solves, so checkpoints have them.

    Raises:
        ValueError: if ``loss_fn`` returns no trajectory.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver, restart=None):
        ...     guesses = {} if restart is None else restart._asdict()
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver, **guesses)
        ...     info = train.Info(len(batch), solution.stats, solution.result, trajectory=solution.trajectory)
        ...     return jnp.mean((solution.y1 - 2) ** 2), info
        >>> solver, batch = lp_jax.Picard(sweeps=1), jnp.ones(4)
        >>> step_fn, state = train.one_shot(loss_fn, jnp.zeros(16), optax.sgd(1.0), batch, solver=solver)
        >>> state, log = train.fit(step_fn, state, lambda epoch: [batch], steps_per_epoch=1, epochs=30, solver=solver)
        >>> log.rows[-1]["loss"] < 1e-6
        True

    References:
        Guenther, Gauger, Schroder, "A non-intrusive parallel-in-time approach for simultaneous optimization with unsteady
        PDEs", Optimization Methods and Software 34 (2019); Guenther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel
        training of deep residual neural networks", SIAM J. Math. Data Sci. 2 (2020), section 4.
    """
    adjoint_solver = adjoint_solver or solver.for_adjoint()
    # an adjoint trajectory has the shape of a forward one of the same solver
    like = jax.eval_shape(loss_fn, params, batch, adjoint_solver, adjoint_solver)[1].trajectory
    if like is None:
        raise ValueError(
            "loss_fn must return where its forward solve ended, train.Info(..., "
            "trajectory=solution.trajectory); it returned no trajectory."
        )

    @jax.jit
    def begin(params: PyTree, batch: Batch) -> Restart:
        # The first guesses are the trajectories with which one forward and one adjoint solve end.
        guess = loss_fn(params, batch, solver, adjoint_solver)[1].trajectory
        zeros = _tree.zeros_like(like)
        # The gradient by the adjoint guess is the trajectory with which the adjoint solve ended: see `make_train_step`.
        of_guess = jax.grad(
            lambda zeros: loss_fn(params, batch, solver, adjoint_solver, Restart(guess, zeros))[0]
        )
        return Restart(guess, of_guess(zeros))

    state = init_state(params, optimizer)._replace(restart=begin(params, batch))
    return make_train_step(loss_fn, optimizer, **options), replicate_rest(state)
