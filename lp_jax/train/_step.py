"""One training step: state in, state and metrics out."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from lp_jax import _tree
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree

Batch: TypeAlias = Any


class TrainState(NamedTuple):
    """All that a run carries from step to step, and all that a checkpoint holds.

    Attributes:
        step: number of steps done, an int32 scalar.
        params: the model's parameters.
        opt_state: the optimizer's state.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree


class Info(NamedTuple):
    """What a loss function reports beside the loss.

    Attributes:
        correct: number of right answers in the batch.
        total: number of answers in the batch, which the loss is a mean over.
        stats: of the forward solve.
        result: of the forward solve, a code of `lp_jax.RESULTS`.
        scale: 2-norm of the state, if known; residual norms far below it are rounding, not divergence.
        replace: new values of those of the model's ``params`` that are not trained (running statistics), a part of that
            nested dict. The loss must not depend on the old ones.
    """

    correct: jax.Array
    total: jax.Array
    stats: Stats
    result: jax.Array
    scale: jax.Array | float = 0.0
    replace: PyTree = None


class Metrics(NamedTuple):
    """What one step measured, still on the device.

    Attributes:
        loss: of the batch, before the update.
        gradient_norm: 2-norm of the whole gradient.
        finite: whether loss, gradient and updated parameters all are.
        info: what the loss function reported.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    info: Info


LossFn: TypeAlias = Callable[[PyTree, Batch, Solver, Solver | None], tuple[jax.Array, Info]]
StepFn: TypeAlias = Callable[[TrainState, Batch, Solver, Solver | None], tuple[TrainState, Metrics]]


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; what the optimizer keeps for a parameter lies where the parameter does."""
    opt_state = optax.tree.map_params(
        optimizer,
        lambda kept, param: jax.device_put(kept, param.sharding) if param.sharding.num_devices > 1 else kept,
        optimizer.init(params),
        params,
    )
    return TrainState(jnp.int32(0), params, opt_state)


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, whole: Callable[[PyTree], PyTree] | None = None
) -> StepFn:
    """The jitted training step for a loss and an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch, solver, adjoint_solver) -> (loss, info)``, a pure function, with `Info`. It
            hands both solvers to `lp_jax.solve`.
        optimizer: any optax transformation.
        whole: ``whole(sums) -> sums``, for parameters of which this process has a part only: from sums over that part,
            one for each parameter, those over all of it. `Ranks.whole` for MPI ranks; None where arrays are global.

    Returns:
        ``step_fn(state, batch, solver, adjoint_solver) -> (state, metrics)``. The solvers are arguments: another
        tolerance or weight does not recompile, another number of levels or cycles does.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     x, y = batch
        ...     step = lambda u, layer: u + layer.dt * jnp.tanh(u @ layer.params)
        ...     solution = lp_jax.solve(step, params, x, solver=solver, adjoint_solver=adjoint_solver)
        ...     loss = jnp.mean((solution.y1 - y) ** 2)
        ...     return loss, train.Info(jnp.int32(0), jnp.int32(len(x)), solution.stats, solution.result)
        >>> optimizer = optax.sgd(0.1)
        >>> state = train.init_state(jnp.zeros((16, 3, 3)), optimizer)
        >>> step_fn = train.make_train_step(loss_fn, optimizer)
        >>> state, metrics = step_fn(state, (jnp.ones((8, 3)), jnp.ones((8, 3))), lp_jax.MGRIT(), None)
        >>> int(state.step), float(metrics.loss)
        (1, 0.0)
    """

    @jax.jit
    def step_fn(
        state: TrainState, batch: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[TrainState, Metrics]:
        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, info), gradient = gradient_fn(state.params, batch, solver, adjoint_solver)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = _replaced(optax.apply_updates(state.params, updates), info.replace)
        info = info._replace(replace=None)
        squares = jax.tree.map(lambda *both: jnp.stack(both), _tree.leaf_squares(gradient), _tree.leaf_squares(params))
        gradient_norm, norm = jnp.sqrt(jax.tree.reduce(jnp.add, squares if whole is None else whole(squares)))
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & jnp.isfinite(norm)
        return TrainState(state.step + 1, params, opt_state), Metrics(loss, gradient_norm, finite, info)

    return step_fn


def _replaced(params: PyTree, new: PyTree) -> PyTree:
    """A nested dict with a part of it exchanged."""
    if not isinstance(new, dict):
        return params if new is None else new
    return params | {name: _replaced(params[name], value) for name, value in new.items()}
