"""MG/Opt: training steps on a shallow network correct those of a deep one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from lp_jax import nn
from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.nn._refine import staying
from lp_jax.train._line_search import Backtracking
from lp_jax.train._nested import on_trunk
from lp_jax.train._ranks import Ranks, total
from lp_jax.train._step import finish_step, init_state, replicate_rest
from lp_jax.train._supervised import classification
from lp_jax.train._types import Batch, Info, LossFn, Metrics, StepFn, TrainState

_VISITS = {"V": 1, "W": 2}

_TRIAL = 1 / 3  # of a gradient: one evaluation of a layer forward, two back


class LevelState(NamedTuple):
    """State of a level from step to step; on the coarsest, ``correction`` and ``coarser`` are None."""

    optimizer: PyTree
    correction: PyTree
    coarser: PyTree  # the `LevelState` of the next coarser level


class Point(NamedTuple):
    """Value and gradient of an objective."""

    value: jax.Array
    gradient: PyTree


class Spent(NamedTuple):
    """Cost of a visit of a level."""

    gradients: jax.Array | float  # in gradients of the finest level
    trials: jax.Array | int  # of this level's line search
    stuck: jax.Array | bool


_NOTHING = Spent(0.0, 0, False)


def mgopt(
    model: nn.Classifier,
    optimizer: optax.GradientTransformation,
    *,
    levels: int = 2,
    factor: int = 2,
    pre: int = 1,
    post: int = 1,
    coarsest: int = 2,
    cycle: str = "V",
    correction: optax.GradientTransformation = optax.sgd(1.0),
    line_search: Backtracking | None = Backtracking(trials=5),
    how: str = "constant",
    loss: Callable[[nn.Classifier], tuple[LossFn, PyTree]] = classification,
    ranks: Ranks | None = None,
) -> tuple[StepFn, TrainState]:
    r"""Train a deep network with the help of shallower ones: multigrid, with the parameters as unknowns.

    A step is one cycle on one batch. Each level takes ``pre`` steps of the optimizer, adds the change of the parameters of a
    network with fewer layers, and takes ``post`` steps. The coarse problem is to minimise

    .. math:: f_H(\theta_H) - v \cdot \theta_H, \qquad v = \nabla f_H(R \theta) - P^T \nabla f(\theta),

    so that its gradient at the start is that of the fine level, restricted. P refines layers, R takes means of them.
    The change on the coarse level, :math:`e = P(\theta_H - R\theta)`, goes through ``correction`` and ``line_search``.

    Args:
        model: the network, with its initial parameters; it is not changed.
        optimizer: any optax transformation; each level has a state of its own, which it keeps from cycle to cycle.
        levels: number of networks, including the fine one.
        factor: number of layers that one layer of the next coarser network replaces.
        pre: number of steps before a level's coarse correction.
        post: number of steps after it.
        coarsest: number of steps on the coarsest level. A schedule of learning rates counts the steps of its own level.
        cycle: "V", or "W", which visits each coarser level twice.
        correction: transformation of the coarse step, which gets the negative step as a gradient. So ``optax.sgd(1.0)`` takes
            the step as it is, ``optax.sgd(0.5)`` takes half of it, ``optax.adam(1e-3)`` feeds it to Adam.
        line_search: chooses the length of the corrected step. If no length is good enough, the parameters stay as they were
            before the correction. None takes the whole step.
        how: "constant" or "linear", as for `lp_jax.nn.refine`.
        loss: ``loss(model) -> (loss_fn, params)``, for the network of each level.
        ranks: as for `lp_jax.train.make_train_step`. MPI ranks hold their layers on every level, so ``how`` is "constant".

    Returns:
        ``(step_fn, state)``, for `lp_jax.train.fit`. All levels use the solvers of the step. ``Metrics.gradients`` counts the
        whole cycle in gradients of the fine network, a coarse one by its layers, a trial of a line search as a third.

    Raises:
        ValueError: if a number is out of range, the layers cannot be divided that often, or layers would have to move between
            MPI ranks.
        TypeError: if the network has no `lp_jax.nn.LayerParallel` with layers of its own.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> from lp_jax.train import contrib
        >>> rngs, solver = nnx.Rngs(0), lp_jax.Serial()
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(4, rngs=rngs), 8, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((2,), 4, rngs=rngs), trunk, nn.DenseClosing((4,), 2, rngs=rngs))
        >>> batch = jnp.eye(2), jnp.arange(2)
        >>> step_fn, state = contrib.mgopt(model, optax.sgd(0.1), levels=3)
        >>> state, log = train.fit(step_fn, state, lambda epoch: [batch], steps_per_epoch=1, epochs=10, solver=solver)
        >>> first, *_, last = log.of("train")
        >>> last["loss"] < first["loss"], first["gradients"]
        (True, 5.5)

    References:
        Nash, "A multigrid approach to discretized optimization problems", Optimization Methods and Software 14 (2000);
        von Planta, Kopanicakova, Krause, "Training of deep residual networks with stochastic MG/OPT", arXiv:2108.04052 (2021).
    """
    _check.integer("levels", levels, least=2)
    _check.integer("factor", factor, least=2)
    for name, number, least in (("pre", pre, 0), ("post", post, 0), ("coarsest", coarsest, 1)):
        _check.integer(name, number, least=least)
    _check.one_of("cycle", cycle, tuple(_VISITS))
    _check.one_of("how", how, ("constant", "linear"))
    networks = _networks(model, levels, factor, how)
    losses, params = zip(*map(loss, networks), strict=True)
    shapes = tuple(jax.tree.map(jnp.shape, each) for each in params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(
        state: TrainState, batch: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[TrainState, Metrics]:
        levels = _Levels(
            tuple(functools.partial(_batch_loss, loss_fn, batch, adjoint_solver) for loss_fn in losses),
            solver,
            optimizer,
            correction,
            line_search,
            functools.partial(_move, functools.partial(nn.refine, factor=factor, how=how), shapes),
            functools.partial(_move, functools.partial(nn.coarsen, factor=factor), shapes),
            tuple(float(factor) ** -level for level in range(len(losses))),
            pre,
            post,
            coarsest,
            _VISITS[cycle],
            functools.partial(total, ranks),
        )
        at, info = levels.at(0, optax.tree.zeros_like(state.params), state.params)
        params, memory, spent = levels.visit(0, optax.tree.zeros_like(state.params), state.params, state.opt_state, at)
        after, metrics = finish_step(
            state._replace(params=params, opt_state=memory), at.value, at.gradient, info, ranks
        )
        if line_search is not None:
            metrics = metrics._replace(trials=jnp.asarray(spent.trials), stuck=jnp.asarray(spent.stuck))
        return after, metrics._replace(gradients=jnp.float32(1) + spent.gradients)

    memory = None
    for each in reversed(params):
        own = init_state(each, correction).opt_state if memory else None
        memory = LevelState(init_state(each, optimizer).opt_state, own, memory)
    return step_fn, replicate_rest(init_state(params[0], optimizer)._replace(opt_state=memory))


@dataclasses.dataclass(frozen=True, eq=False)
class _Levels:
    """The networks on a batch, from fine to coarse; ``v`` is the correction of a level's objective."""

    losses: Sequence[Callable[[PyTree, Solver], tuple[jax.Array, Info]]]
    solver: Solver
    optimizer: optax.GradientTransformation
    correction: optax.GradientTransformation
    line_search: Backtracking | None
    prolong: Callable[[int, PyTree], PyTree]  # to this level
    restrict: Callable[[int, PyTree], PyTree]
    costs: Sequence[float]  # of a gradient on each level
    pre: int
    post: int
    coarsest: int
    visits: int
    total: Callable[[PyTree], jax.Array]

    def dot(self, a: PyTree, b: PyTree) -> jax.Array:
        return self.total(jax.tree.map(jnp.vdot, a, b))

    def value(self, level: int, v: PyTree, params: PyTree, solver: Solver) -> jax.Array:
        return self.losses[level](params, solver)[0] - self.dot(v, params)

    def at(self, level: int, v: PyTree, params: PyTree) -> tuple[Point, Info]:
        (value, info), gradient = jax.value_and_grad(self.losses[level], has_aux=True)(params, self.solver)
        return Point(value - self.dot(v, params), optax.tree.sub(gradient, v)), info

    def update(self, params: PyTree, opt_state: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = self.optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def steps(
        self, level: int, v: PyTree, number: int, params: PyTree, opt_state: PyTree, at: Point
    ) -> tuple[PyTree, PyTree, Point]:
        """Take ``number`` steps of the optimizer, and evaluate the objective after each."""

        def body(_: jax.Array, carry: tuple[PyTree, PyTree, Point]) -> tuple[PyTree, PyTree, Point]:
            params, opt_state, at = carry
            params, opt_state = self.update(params, opt_state, at.gradient)
            return params, opt_state, self.at(level, v, params)[0]

        return lax.fori_loop(0, number, body, (params, opt_state, at))

    def visit(
        self, level: int, v: PyTree, params: PyTree, memory: LevelState, at: Point
    ) -> tuple[PyTree, LevelState, Spent]:
        """Improve the parameters of a level, given its objective ``at`` them."""
        if level == len(self.losses) - 1:
            params, opt_state, at = self.steps(level, v, self.coarsest - 1, params, memory.optimizer, at)
            params, opt_state = self.update(params, opt_state, at.gradient)
            spent, taken = _NOTHING, self.coarsest - 1
        else:
            params, opt_state, at = self.steps(level, v, self.pre, params, memory.optimizer, at)
            params, memory, spent = self.correct(level, v, params, memory, at)
            if self.post:
                at, _ = self.at(level, v, params)
                params, opt_state, at = self.steps(level, v, self.post - 1, params, opt_state, at)
                params, opt_state = self.update(params, opt_state, at.gradient)
            taken = self.pre + self.post
        spent = spent._replace(gradients=spent.gradients + taken * self.costs[level])
        return params, memory._replace(optimizer=opt_state), spent

    def correct(
        self, level: int, v: PyTree, params: PyTree, memory: LevelState, at: Point
    ) -> tuple[PyTree, LevelState, Spent]:
        """Add the correction by the coarser levels."""
        below, coarser = level + 1, memory.coarser
        start = self.restrict(below, params)
        (gradient,) = jax.linear_transpose(functools.partial(self.prolong, level), start)(at.gradient)
        own, _ = self.at(below, optax.tree.zeros_like(start), start)
        v_below = optax.tree.sub(own.gradient, gradient)
        learnt, at_learnt = start, Point(own.value - self.dot(v_below, start), gradient)
        gradients = jnp.float32(0)
        for number in range(self.visits if below < len(self.losses) - 1 else 1):
            if number > 0:
                at_learnt, _ = self.at(below, v_below, learnt)
            learnt, coarser, spent = self.visit(below, v_below, learnt, coarser, at_learnt)
            gradients += self.costs[below] + spent.gradients
        backwards = self.prolong(level, optax.tree.sub(start, learnt))
        direction, correction_state = self.correction.update(backwards, memory.correction, params)
        memory = memory._replace(correction=correction_state, coarser=coarser)
        if self.line_search is None:
            return optax.apply_updates(params, direction), memory, _NOTHING._replace(gradients=gradients)
        solver = self.line_search.solver or self.solver
        slope = jnp.minimum(self.dot(at.gradient, direction), 0)  # uphill, a plain decrease will do
        search = self.line_search.along(
            direction, params, at.value, slope, None, lambda params: (self.value(level, v, params, solver), None)
        )
        gradients += search.trials * _TRIAL * self.costs[level]
        return search.params, memory, Spent(gradients, search.trials, search.stuck)


def _batch_loss(
    loss_fn: LossFn, batch: Batch, adjoint_solver: Solver | None, params: PyTree, solver: Solver
) -> tuple[jax.Array, Info]:
    return loss_fn(params, batch, solver, adjoint_solver)


def _move(change: Callable[[jax.Array], jax.Array], shapes: Sequence[PyTree], level: int, tree: PyTree) -> PyTree:
    """Bring parameters to a level: those of its layers change, all others stay."""
    return jax.tree.map(lambda x, shape: x if x.shape == shape else change(x), tree, shapes[level])


def _networks(model: nn.Classifier, levels: int, factor: int, how: str) -> Sequence[nn.Classifier]:
    on_trunk(model.trunk, lambda block: staying(block, block.num_layers, how))
    networks = [model]
    for _ in range(levels - 1):
        coarse = nnx.clone(networks[-1])
        coarse.trunk = on_trunk(coarse.trunk, functools.partial(nn.coarsen, factor=factor))
        networks.append(coarse)
    return networks
