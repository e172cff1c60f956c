"""MG/Opt: training steps on a shallow network correct those of a deep one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lp_jax import nn
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.nn._refine import staying
from lp_jax.train._lbfgs import Backtracking
from lp_jax.train._nested import on_trunk
from lp_jax.train._ranks import Ranks, total
from lp_jax.train._step import finish_step, init_state, replicate_rest
from lp_jax.train._supervised import classification
from lp_jax.train._types import Batch, Info, LossFn, Metrics, StepFn, TrainState

_TRIAL = 1 / 3  # of a gradient: one evaluation of a layer forward, two back

Point: TypeAlias = tuple[jax.Array, PyTree]
"""Value and gradient of an objective."""

Visited: TypeAlias = tuple[
    PyTree, tuple[PyTree, ...], jax.Array | float, tuple[jax.Array | None, jax.Array | None]
]
"""Parameters, states of this level and those below, cost in gradients of the finest level, trials and failure of a search."""


def mgopt(
    model: nn.Classifier,
    optimizer: optax.GradientTransformation,
    *,
    levels: int = 2,
    factor: int = 2,
    pre: int = 1,
    post: int = 1,
    coarsest: int = 2,
    line_search: Backtracking | None = Backtracking(trials=5),
    loss: Callable[[nn.Classifier], tuple[LossFn, PyTree]] = classification,
    ranks: Ranks | None = None,
) -> tuple[StepFn, TrainState]:
    r"""Train a deep network with the help of shallower ones: multigrid, with the parameters as unknowns.

    A step is one V-cycle on one batch. Each level takes ``pre`` steps of the optimizer, adds the change of the parameters of a
    network with fewer layers, and takes ``post`` steps. The coarse problem is to minimise

    .. math:: f_H(\theta_H) - v \cdot \theta_H, \qquad v = \nabla f_H(R \theta) - P^T \nabla f(\theta),

    so that its gradient at the start is that of the fine level, restricted. P repeats layers, R takes means of them.
    The change on the coarse level, :math:`P(\theta_H - R\theta)`, goes through ``line_search``.

    There are ``levels`` networks. Each layer of one stands for ``factor`` layers of the next finer one; the shallowest takes
    ``coarsest`` steps. Each level has a loss and parameters, ``loss(model)``, and a state of the optimizer, whose schedule counts
    the steps of its level. ``line_search=None`` takes the whole correction. ``ranks`` as for `lp_jax.train.make_train_step`.

    Returns:
        ``(step_fn, state)``, for `lp_jax.train.fit`. All levels use the solvers of the step. ``Metrics.gradients`` counts the
        whole cycle in gradients of the fine network, a coarse one by its layers, a trial of a line search as a third.

    Raises:
        ValueError: if a number is out of range, the layers cannot be divided that often, or would have to move between ranks.
        TypeError: if the network has no `lp_jax.nn.LayerParallel` with layers of its own.

    References:
        Nash, "A multigrid approach to discretized optimization problems", Optimization Methods and Software 14 (2000);
        von Planta, Kopanicakova, Krause, "Training of deep residual networks with stochastic MG/OPT", arXiv:2108.04052 (2021).
    """
    for name, number, least in (
        ("levels", levels, 2),
        ("factor", factor, 2),
        ("coarsest", coarsest, 1),
    ):
        _check.integer(name, number, least=least)
    for name, number in (("pre", pre), ("post", post)):
        _check.integer(name, number, least=0)
    on_trunk(model.trunk, lambda block: staying(block, block.num_layers))
    networks = [model]
    for _ in range(levels - 1):
        coarse = nnx.clone(networks[-1])
        coarse.trunk = on_trunk(coarse.trunk, functools.partial(nn.coarsen, factor=factor))
        networks.append(coarse)
    losses, params = zip(*map(loss, networks), strict=True)
    shapes = tuple(jax.tree.map(jnp.shape, each) for each in params)
    shared = (
        optimizer,
        line_search,
        shapes,
        factor,
        pre,
        post,
        coarsest,
        functools.partial(total, ranks),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(
        state: TrainState, batch: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[TrainState, Metrics]:
        fixed = [
            lambda params, solver, f=f: f(params, batch, solver, adjoint_solver) for f in losses
        ]
        cycle, v = _Cycle(fixed, solver, *shared), optax.tree.zeros_like(state.params)
        at, info = cycle.at(0, v, state.params)
        params, memory, spent, (trials, stuck) = cycle.visit(
            0, v, state.params, state.opt_state, at
        )
        after, metrics = finish_step(
            state._replace(params=params, opt_state=memory), *at, info, ranks
        )
        return after, metrics._replace(trials=trials, stuck=stuck, gradients=jnp.float32(1) + spent)

    states = tuple(init_state(each, optimizer).opt_state for each in params)
    return step_fn, replicate_rest(init_state(params[0], optimizer)._replace(opt_state=states))


@dataclasses.dataclass(frozen=True, eq=False)
class _Cycle:
    """A cycle over the networks on a batch, from fine to coarse; ``v`` is the correction of a level's objective."""

    losses: Sequence[Callable[[PyTree, Solver], tuple[jax.Array, Info]]]
    solver: Solver
    optimizer: optax.GradientTransformation
    line_search: Backtracking | None
    shapes: Sequence[PyTree]  # of the parameters of each level
    factor: int
    pre: int
    post: int
    coarsest: int
    total: Callable[[PyTree], jax.Array]

    def dot(self, a: PyTree, b: PyTree) -> jax.Array:
        return self.total(jax.tree.map(jnp.vdot, a, b))

    def at(self, level: int, v: PyTree, params: PyTree) -> tuple[Point, Info]:
        (value, info), gradient = jax.value_and_grad(self.losses[level], has_aux=True)(
            params, self.solver
        )
        return (value - self.dot(v, params), optax.tree.sub(gradient, v)), info

    def move(self, change: Callable[[jax.Array], jax.Array], level: int, tree: PyTree) -> PyTree:
        """Bring parameters to a level: those of its layers change, all others stay."""
        return jax.tree.map(
            lambda x, shape: x if x.shape == shape else change(x), tree, self.shapes[level]
        )

    def steps(
        self, level: int, v: PyTree, number: int, params: PyTree, opt_state: PyTree, at: Point
    ) -> tuple[PyTree, PyTree, Point]:
        """Take ``number`` steps of the optimizer, and evaluate the objective after each."""

        def body(_: jax.Array, carry: tuple[PyTree, PyTree, Point]) -> tuple[PyTree, PyTree, Point]:
            params, opt_state = self.step(*carry)
            return params, opt_state, self.at(level, v, params)[0]

        return _tree.fori_loop(0, number, body, (params, opt_state, at))

    def step(self, params: PyTree, opt_state: PyTree, at: Point) -> tuple[PyTree, PyTree]:
        updates, opt_state = self.optimizer.update(at[1], opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def visit(
        self, level: int, v: PyTree, params: PyTree, states: tuple[PyTree, ...], at: Point
    ) -> Visited:
        """Improve the parameters of a level, given its objective ``at`` them."""
        own, below, cost = states[0], states[1:], self.factor**-level
        if not below:
            params, own = self.step(*self.steps(level, v, self.coarsest - 1, params, own, at))
            return params, (own,), (self.coarsest - 1) * cost, (None, None)
        params, own, at = self.steps(level, v, self.pre, params, own, at)
        params, below, spent, search = self.correct(level, v, params, below, at)
        if self.post:
            at, _ = self.at(level, v, params)
            params, own = self.step(*self.steps(level, v, self.post - 1, params, own, at))
        return params, (own, *below), spent + (self.pre + self.post) * cost, search

    def correct(
        self, level: int, v: PyTree, params: PyTree, states: tuple[PyTree, ...], at: Point
    ) -> Visited:
        """Add the correction by the coarser levels."""
        below, (before, fine) = level + 1, at
        restrict = functools.partial(nn.coarsen, factor=self.factor)
        start = self.move(restrict, below, params)
        gradient = self.move(
            lambda x: self.factor * restrict(x), below, fine
        )  # the transpose of repeating layers
        (value, own), _ = self.at(below, optax.tree.zeros_like(start), start)
        v_below = optax.tree.sub(own, gradient)
        at = value - self.dot(v_below, start), gradient
        learnt, states, spent, _ = self.visit(below, v_below, start, states, at)
        direction = self.move(
            functools.partial(nn.refine, factor=self.factor), level, optax.tree.sub(learnt, start)
        )
        spent += self.factor**-below
        if self.line_search is None:
            return optax.apply_updates(params, direction), states, spent, (None, None)
        solver = self.line_search.solver or self.solver
        slope = jnp.minimum(self.dot(fine, direction), 0)  # uphill, a plain decrease will do

        def value_at(params: PyTree) -> tuple[jax.Array, None]:
            return self.losses[level](params, solver)[0] - self.dot(v, params), None

        params, _, trials, stuck = self.line_search.along(
            direction, params, before, slope, value_at
        )
        return params, states, spent + trials * _TRIAL * self.factor**-level, (trials, stuck)
