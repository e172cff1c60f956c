"""The records of training: its state, what a loss returns, the metrics of a step."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from lp_jax import Stats
from lp_jax._arrays._types import PyTree

Batch = PyTree


class Restart(NamedTuple):
    """Initial guesses for both solves of a training step, as for `lp_jax.solve`: trajectories of the last step."""

    guess: PyTree
    adjoint_guess: PyTree


class TrainState(NamedTuple):
    """State of a run from step to step, and the content of a checkpoint.

    ``step`` is the number of steps done, an int32 scalar. `one_shot` sets ``restart``, guesses for the solves of the next step,
    and `fit` sets ``control``, the decision of a `Controller`; None without them.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    restart: Restart | None = None
    control: PyTree = None


class Info(NamedTuple):
    """The auxiliary output of a loss function.

    Attributes:
        total: number of answers in the batch; the loss is their mean.
        stats: stats of the forward solve.
        result: result code of the forward solve, one of `lp_jax.RESULTS`.
        correct: number of right answers in the batch; None for a regression.
        scale: 2-norm of the state, if known; residual norms far below it are rounding, not divergence.
        replace: new values of the parameters that are not trained (running statistics), a part of the nested dict
            ``params``. The loss must not depend on the old values.
        trajectory: ``Solution.trajectory`` of the forward solve, from which `one_shot` starts the next step.
        outside: number of labels outside the classes. Check these first if a loss is not finite.
    """

    total: jax.Array
    stats: Stats
    result: jax.Array
    correct: jax.Array | None = None
    scale: jax.Array | float = 0.0
    replace: PyTree = None
    trajectory: PyTree = None
    outside: jax.Array | int = 0


class Metrics(NamedTuple):
    """Metrics of one step, still on the device.

    Attributes:
        loss: loss of the batch, before the update.
        gradient_norm: 2-norm of the gradient over all parameters.
        finite: whether loss, gradient and updated parameters are finite.
        info: auxiliary output of the loss function.
        trials, stuck: number of step lengths that the line search tried, and whether none was good enough, so that the
            parameters did not change; None without a line search.
        adjoint_result: worst result code of the adjoint solves, one of `lp_jax.RESULTS`; None if it was not watched.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    info: Info
    trials: jax.Array | None = None
    stuck: jax.Array | None = None
    adjoint_result: jax.Array | None = None


Loss = tuple[jax.Array, Info]
"""The result of a loss function: a mean over the batch, and its `Info`."""

LossFn = Callable[..., Loss]
"""``loss_fn(params, batch, solver, adjoint_solver)``; for `one_shot`, with a `Restart` as a fifth argument."""

StepFn = Callable[..., tuple[TrainState, Metrics]]
"""``step_fn(state, batch, solver, adjoint_solver)``; without solvers, the loss uses its own."""
