"""The training step: from a state to the next one and metrics."""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from lp_jax import Solver, value_and_grad
from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree
from lp_jax.train._lbfgs import Backtracking
from lp_jax.train._ranks import Ranks, total
from lp_jax.train._types import Batch, Info, Loss, LossFn, Metrics, Restart, StepFn, TrainState


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first step; what the optimizer holds for a parameter gets the parameter's sharding.

    Parameters are copied, as a training step takes the state's arrays for its results.
    """

    def place(slot: jax.Array, param: jax.Array) -> jax.Array:
        # one of several vectors has them along further axes
        alike = slot.shape[: param.ndim] == param.shape
        if alike and param.sharding.num_devices > 1:
            return jax.device_put(slot, param.sharding)
        return slot

    params = jax.tree.map(jnp.copy, params)
    opt_state = jax.tree.map(
        jnp.copy, optimizer.init(params)
    )  # optax may hold one array in two places
    return TrainState(jnp.int32(0), params, map_slots(place, opt_state, params))


def replicate_rest(state: TrainState) -> TrainState:
    """Replicate the arrays that lie on one device over the mesh of the others, if there is one."""
    meshes = [x.sharding.mesh for x in jax.tree.leaves(state) if x.sharding.num_devices > 1]
    if not meshes:
        return state
    # A jitted function refuses arrays that are committed to different sets of devices, so all lie on the mesh.
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    return jax.tree.map(
        lambda x: x if x.sharding.num_devices > 1 else jax.device_put(x, everywhere), state
    )


def map_slots(
    f: Callable[[jax.Array, PyTree], PyTree], opt_state: PyTree, params: PyTree
) -> PyTree:
    """Return an optimizer's state with ``f(slot, param)`` for each slot, an array that it holds for a parameter.

    A slot is a leaf whose path ends with that of the parameter, whatever its shape. (``optax.tree.map_params`` finds only
    slots with the shape of their parameter.)
    """
    known = dict(jax.tree.leaves_with_path(params))

    def leaf(path: jax.tree_util.KeyPath, slot: jax.Array) -> PyTree:
        owner = next((path[i:] for i in range(len(path) + 1) if path[i:] in known), None)
        # An optimizer nests the tree of parameters below its own fields, so the shortest cut of the front finds the owner.
        return slot if owner is None else f(slot, known[owner])

    return jax.tree.map_with_path(leaf, opt_state)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    line_search: Backtracking | None = None,
    ranks: Ranks | None = None,
    watch: bool = True,
) -> StepFn:
    """Return the jitted training step for a loss and an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch, solver, adjoint_solver) -> (loss, info)``, a pure function, with `Info`. It
            passes both solvers to `lp_jax.solve`.
        optimizer: any optax transformation. One that has a line search, like ``optax.lbfgs()``, gets the loss as ``value_fn``.
        line_search: chooses the length of a step along the optimizer's direction; None takes the whole step.
        ranks: the MPI ranks, where each rank holds the parameters of its own layers only; None for global arrays.
        watch: whether metrics have the result of the adjoint solves; a solver without a tolerance then computes residual norms,
            up to 6 % of a step.

    Returns:
        ``step_fn(state, batch, solver=None, adjoint_solver=None) -> (state, metrics)``. It donates ``state``: afterwards only the
        returned state can be used. Another tolerance of a solver does not recompile, another number of levels or cycles does.
        None is passed on to the loss, and means the model's solvers, or the defaults of `lp_jax.solve`.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     x, y = batch
        ...     step = lambda u, layer: u + layer.dt * jnp.tanh(u @ layer.params)
        ...     solution = lp_jax.solve(step, params, x, solver=solver, adjoint_solver=adjoint_solver)
        ...     loss = jnp.mean((solution.y1 - y) ** 2)
        ...     return loss, train.Info(jnp.int32(len(x)), solution.stats, solution.result)
        >>> optimizer = optax.sgd(0.1)
        >>> state: train.TrainState = train.init_state(jnp.zeros((16, 3, 3)), optimizer)
        >>> step_fn = train.make_train_step(loss_fn, optimizer)
        >>> state, metrics = step_fn(state, (jnp.ones((8, 3)), jnp.ones((8, 3))), lp_jax.MGRIT(), None)
        >>> int(state.step), float(metrics.loss)
        (1, 0.0)
    """

    @jax.jit(donate_argnums=0)
    def step_fn(
        state: TrainState,
        batch: Batch,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> tuple[TrainState, Metrics]:
        restarts = state.restart is not None
        first_guess, adjoint_guess = state.restart or (None, None)

        def loss_of(
            params: PyTree,
            adjoint_guess: PyTree,
            guess: PyTree = first_guess,
            solver: Solver | None = solver,
        ) -> Loss:
            restart = (Restart(guess, adjoint_guess),) if restarts else ()
            return call_loss(loss_fn, params, batch, solver, adjoint_solver, *restart)

        gradient_fn = (value_and_grad if watch else jax.value_and_grad)(
            # The derivative by the adjoint guess is the adjoint trajectory: the solve defines it so, because a custom_vjp
            # has no other way out of the backward pass. It is None without a restart.
            loss_of,
            argnums=(0, 1),
            has_aux=True,
        )
        (loss, info), (gradient, adjoint_trajectory), *results = gradient_fn(
            state.params, adjoint_guess
        )
        # Optax passes value, grad and value_fn to those transformations only that ask for them, which are its line searches.
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            gradient,
            state.opt_state,
            state.params,
            value=loss,
            grad=gradient,
            value_fn=lambda params: loss_of(params, adjoint_guess)[0],
        )
        trials = None
        stuck = None
        trajectory = info.trajectory if restarts else None
        if line_search is None:
            params = optax.apply_updates(state.params, updates)
        else:
            trial_solver = line_search.solver or solver

            def evaluate(params: PyTree) -> tuple[jax.Array, PyTree]:
                # A trial begins where the solves of this step ended, because its parameters differ only by a part of an update.
                value, info = loss_of(params, adjoint_trajectory, trajectory, trial_solver)
                return value, info.trajectory if restarts else None

            slope = total(ranks, jax.tree.map(lambda g, u: jnp.sum(g * u), gradient, updates))
            params, trajectory, trials, stuck = line_search.along(
                updates, state.params, loss, slope, evaluate, trajectory
            )
        if info.replace is not None:
            # Running statistics are no trained parameters: the loss returns their
            # new values, which replace those of the optimizer.
            old, new = (flatten_dict(x, keep_empty_nodes=True) for x in (params, info.replace))
            params = unflatten_dict(old | new)
        # Both sums of squares travel in one array, so that ranks exchange one message for the two norms.
        squares = jax.tree.map(
            lambda *both: jnp.stack(both), _tree.leaf_squares(gradient), _tree.leaf_squares(params)
        )
        gradient_norm, norm = jnp.sqrt(total(ranks, squares))
        metrics = Metrics(
            loss,
            gradient_norm,
            # A norm is finite only if each entry is, so three scalars say it for all arrays.
            jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & jnp.isfinite(norm),
            info._replace(replace=None, trajectory=None),
            trials,
            stuck,
            results[0].adjoint if watch else None,
        )
        ended = Restart(trajectory, adjoint_trajectory) if restarts else None
        return TrainState(state.step + 1, params, opt_state, ended, state.control), metrics

    return step_fn


def call_loss(loss_fn: LossFn, *args: PyTree) -> Loss:
    """Call a loss; refuse one with other arguments or results."""
    signature = inspect.signature(loss_fn)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"loss_fn is called as loss_fn(params, batch, solver, "
            f"adjoint_solver{', restart' * (len(args) > 4)}), and this one has {signature}. Take "
            f"the solvers as arguments, and pass them to lp_jax.solve."
        ) from error
    out: PyTree = loss_fn(*args)  # not yet checked
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) != 2 or not isinstance(parts[1], Info):
        kinds = [
            "an array" if isinstance(part, jax.Array) else type(part).__name__ for part in parts
        ]
        got = f"({', '.join(kinds)})" if isinstance(out, tuple) else f"{kinds[0]} only"
        raise TypeError(
            f"loss_fn must return (loss, info) with a lp_jax.train.Info; got {got}. For example: "
            "return loss, Info(total, solution.stats, solution.result)."
        )
    return out
