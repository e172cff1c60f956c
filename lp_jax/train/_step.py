"""The training step: from a state to the next one and metrics."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from lp_jax import _tree
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree

Batch: TypeAlias = Any


class TrainState(NamedTuple):
    """State of a run: what it carries from step to step, and what a checkpoint holds.

    Attributes:
        step: number of steps done, an int32 scalar.
        params: the model's parameters.
        opt_state: the optimizer's state.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree


class Info(NamedTuple):
    """The auxiliary output of a loss function.

    Attributes:
        correct: number of right answers in the batch.
        total: number of answers in the batch; the loss is their mean.
        stats: stats of the forward solve.
        result: result code of the forward solve, one of `lp_jax.RESULTS`.
        scale: 2-norm of the state, if known; residual norms far below it are rounding, not divergence.
        replace: new values of the parameters that are not trained (running statistics), a part of the nested dict
            ``params``. The loss must not depend on the old values.
    """

    correct: jax.Array
    total: jax.Array
    stats: Stats
    result: jax.Array
    scale: jax.Array | float = 0.0
    replace: PyTree = None


class Metrics(NamedTuple):
    """Metrics of one step, still on the device.

    Attributes:
        loss: loss of the batch, before the update.
        gradient_norm: 2-norm of the gradient over all parameters.
        finite: whether loss, gradient and updated parameters are finite.
        info: auxiliary output of the loss function.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    info: Info


LossFn: TypeAlias = Callable[[PyTree, Batch, Solver, Solver | None], tuple[jax.Array, Info]]
StepFn: TypeAlias = Callable[[TrainState, Batch, Solver, Solver | None], tuple[TrainState, Metrics]]


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first step.

    Args:
        params: the model's parameters; copied, as a training step takes the state's arrays for its results.
        optimizer: any optax transformation. Its state of a parameter gets the parameter's sharding.
    """
    params = jax.tree.map(jnp.copy, params)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda slot, param: jax.device_put(slot, param.sharding) if param.sharding.num_devices > 1 else slot,
        optimizer.init(params),
        params,
    )
    return TrainState(jnp.int32(0), params, opt_state)


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, global_sums: Callable[[PyTree], PyTree] | None = None
) -> StepFn:
    """Return the jitted training step for a loss and an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch, solver, adjoint_solver) -> (loss, info)``, a pure function, with `Info`. It
            passes both solvers to `lp_jax.solve`.
        optimizer: any optax transformation.
        global_sums: ``global_sums(sums) -> sums``, if this process holds only a part of each parameter: from sums over the
            part, one for each parameter, to sums over all parts. `Ranks.global_sums` for MPI ranks; None for global
            arrays.

    Returns:
        ``step_fn(state, batch, solver, adjoint_solver) -> (state, metrics)``. It donates the state it is given: parameters
        and moments are held once, and only the state that it returns can be used afterwards. The solvers are
        arguments: another tolerance or weight does not recompile, another number of levels or cycles does.

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

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(
        state: TrainState, batch: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[TrainState, Metrics]:
        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, info), gradient = gradient_fn(state.params, batch, solver, adjoint_solver)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = _merged(optax.apply_updates(state.params, updates), info.replace)
        info = info._replace(replace=None)
        squares = jax.tree.map(lambda *both: jnp.stack(both), _tree.leaf_squares(gradient), _tree.leaf_squares(params))
        gradient_norm, norm = jnp.sqrt(
            jax.tree.reduce(jnp.add, squares if global_sums is None else global_sums(squares))
        )
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & jnp.isfinite(norm)
        return TrainState(state.step + 1, params, opt_state), Metrics(loss, gradient_norm, finite, info)

    return step_fn


def _merged(params: PyTree, new: PyTree) -> PyTree:
    """Return a nested dict with the values of ``new`` in place of its own."""
    if new is None:
        return params
    flat, flat_new = (flatten_dict(tree, keep_empty_nodes=True) for tree in (params, new))
    return unflatten_dict(flat | flat_new)
