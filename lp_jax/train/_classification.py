"""Classification with an NNX model that is solved layer-parallel."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lp_jax import _tree
from lp_jax._problem import Problem
from lp_jax._serial import Serial
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree
from lp_jax.nn import Classifier, LayerParallel
from lp_jax.train._step import Batch, Info, LossFn, Restart


class Evaluation(NamedTuple):
    """Mean loss, and accuracy, the fraction of right answers, of a model on a data set."""

    loss: float
    accuracy: float


class Residuals(NamedTuple):
    """Convergence of the forward and the adjoint solve of a training step.

    The scales are the 2-norms of the last state and of the cotangent that enters the adjoint solve.
    """

    forward: Stats
    adjoint: Stats
    forward_scale: jax.Array
    adjoint_scale: jax.Array


def classification(
    model: Classifier, *, penalty: Callable[[Problem], jax.Array] | None = None
) -> tuple[LossFn, PyTree]:
    """Return the softmax cross-entropy of a classifier as a pure function of its parameters.

    Args:
        model: an `lp_jax.nn.Classifier`, or any NNX module with the same ``solve``, in training or ``eval()`` mode. For
            `evaluate`, call this again after ``model.eval()``.
        penalty: what is added to the loss, as a function of the trunk's `lp_jax.Problem`:
            ``lambda problem: 0.02 * depth_penalty(problem, sweeps=6)``.

    Returns:
        ``(loss_fn, params)``: the loss for `make_train_step`, and the model's parameters and running statistics, a nested
        dict; ``nnx.update(model, params)`` puts them back. Batches are ``(x, labels)``, or ``(x, labels, key)`` for a
        model with dropout. Labels are integers with the shape of the logits without their last axis. Negative labels,
        as on padding, do not count.

    Raises:
        TypeError: for a penalty of a network whose trunk is not a single `lp_jax.nn.LayerParallel`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(16, rngs=rngs), 32, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((4,), 16, rngs=rngs), trunk, nn.DenseClosing((16,), 10, rngs=rngs))
        >>> loss_fn, params = train.classification(model)
        >>> loss, info = loss_fn(params, (jnp.ones((4, 4), "float32"), jnp.zeros(4, "int32")), lp_jax.MGRIT(), None)
        >>> int(info.total)
        4
    """
    if penalty is not None and not isinstance(model.trunk, LayerParallel):
        raise TypeError(
            f"penalty is of one block of layers: the trunk must be a LayerParallel; got {type(model.trunk).__name__}. Add that "
            "of each block in a loss of your own."
        )
    graphdef, state = nnx.split(model)

    def loss_fn(
        params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None, restart: Restart | None = None
    ) -> tuple[jax.Array, Info]:
        x, labels, keys = split_batch(batch)
        merged = nnx.merge(graphdef, params)
        given = keys if restart is None else keys | restart._asdict()
        extra: jax.Array | float = 0.0
        if penalty is not None and isinstance(merged.trunk, LayerParallel):
            extra = penalty(merged.trunk.problem(merged.opening(x), **merged.context_of(x), **keys))
        logits, solution = merged.solve(x, **given, solver=solver, adjoint_solver=adjoint_solver)
        check_labels(labels, logits)
        correct = jnp.sum(jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels, dtype=jnp.int32)
        total, scale = jnp.sum(labels >= 0, dtype=jnp.int32), _tree.norm(solution.y1)
        replace = nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))
        return cross_entropy(logits, labels) + extra, Info(
            correct,
            total,
            solution.stats,
            solution.result,
            scale,
            replace or None,
            solution.trajectory,
            outside=jnp.sum(labels >= logits.shape[-1], dtype=jnp.int32),
        )

    return loss_fn, nnx.to_pure_dict(state)


def evaluate(loss_fn: LossFn, params: PyTree, batches: Iterable[Batch], *, solver: Solver = Serial()) -> Evaluation:
    """Return loss and accuracy over a data set, by default of the exact network.

    The loss is a mean over the batch, as for `make_train_step`. Batches may differ in size; each size compiles once.
    """
    results = [_evaluate(loss_fn, params, batch, solver) for batch in batches]
    loss, correct, total = (sum(column) for column in zip(*jax.device_get(results), strict=True))
    return Evaluation(float(loss / total), float(correct / total))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(loss_fn: LossFn, params: PyTree, batch: Batch, solver: Solver) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, info = loss_fn(params, batch, solver, None)
    return loss * info.total.astype(loss.dtype), info.correct, info.total


def predict(model: Classifier, params: PyTree, x: PyTree, *, solver: Solver = Serial()) -> jax.Array:
    """Return the logits of a classifier for a batch of inputs, by default of the exact network.

    The parameters are those that `classification` returns; the model's own are not used, and it may be in training or
    ``eval()`` mode. Each shape of ``x`` compiles once.
    """
    return _logits(nnx.graphdef(model), params, x, solver)


def confusion_matrix(
    model: Classifier, params: PyTree, batches: Iterable[Batch], *, classes: int, solver: Solver = Serial()
) -> np.ndarray:
    """Return the number of times that a model gives each answer to each class; model and parameters as for `predict`.

    Args:
        model: an `lp_jax.nn.Classifier`.
        params: its parameters.
        batches: the data set, ``(x, labels)``; negative labels do not count.
        classes: number of classes.
        solver: solver of the layers.

    Returns:
        Counts, ``(classes, classes)``: a row for each true class, a column for each answer.
    """
    graphdef = nnx.graphdef(model)
    counts = np.zeros((classes, classes), int)
    for x, labels in batches:
        answers, labels = np.asarray(_logits(graphdef, params, x, solver)).argmax(axis=-1), np.asarray(labels)
        np.add.at(counts, (labels[labels >= 0], answers[labels >= 0]), 1)
    return counts


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, params: PyTree, x: PyTree, solver: Solver) -> jax.Array:
    return nnx.merge(graphdef, params).solve(x, solver=solver)[0]


def residuals(
    model: Classifier, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None = None
) -> Residuals:
    """Return the stats of the forward and the adjoint solve of a training step; model and parameters as for `predict`.

    A batch is ``(x, labels)`` or ``(x, labels, key)``. ``adjoint_solver`` None means the settings of ``solver``.
    """
    return _residuals(nnx.graphdef(model), params, batch, solver, adjoint_solver)


@functools.partial(jax.jit, static_argnums=0)
def _residuals(
    graphdef: nnx.GraphDef, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None
) -> Residuals:
    model = nnx.merge(graphdef, params)
    x, labels, keys = split_batch(batch)
    solution, pullback = model.trunk.solve_vjp(
        model.opening(x), **model.context_of(x), **keys, solver=solver, adjoint_solver=adjoint_solver
    )
    cotangent = jax.grad(lambda y1: cross_entropy(model.closing(y1), labels))(solution.y1)
    _, adjoint = pullback(cotangent)
    return Residuals(solution.stats, adjoint, _tree.norm(solution.y1), _tree.norm(cotangent))


def split_batch(batch: Batch) -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
    """Return inputs, labels and, as keyword arguments of a solve, the random key of a batch, if it has one."""
    if not (isinstance(batch, tuple | list) and len(batch) in (2, 3)):
        got = "one array" if isinstance(batch, jax.Array | np.ndarray) else f"a {type(batch).__name__} of {len(batch)}"
        raise TypeError(f"a batch must be (x, labels), or (x, labels, key) for a model with dropout; got {got}.")
    x, labels, *key = batch
    return x, labels, {"key": key[0]} if key else {}


def check_labels(labels: jax.Array, logits: jax.Array) -> None:
    """Refuse labels that are no class numbers, one for each answer."""
    wanted = f"integers of shape {logits.shape[:-1]}, class numbers from 0 to {logits.shape[-1] - 1}"
    got = f"{jnp.result_type(labels)} of shape {jnp.shape(labels)}"
    if jnp.shape(labels) == logits.shape:
        raise ValueError(f"labels must be {wanted}; got {got}, which looks one-hot. Take jnp.argmax(labels, axis=-1).")
    if jnp.shape(labels) != logits.shape[:-1]:
        raise ValueError(f"labels must be {wanted}; got {got}.")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(f"labels must be {wanted}; got {got}. Take labels.astype(int).")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean over the labels that are not negative."""
    counts = labels >= 0
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.sum(jnp.where(counts, losses, 0)) / jnp.sum(counts).astype(losses.dtype)
