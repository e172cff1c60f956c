"""Classification with an NNX model whose layers are solved layer-parallel."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lp_jax import _tree
from lp_jax._serial import Serial
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree
from lp_jax.nn import Classifier
from lp_jax.train._step import Batch, Info, LossFn


class Evaluation(NamedTuple):
    """Of a model on a data set: mean loss, and fraction of right answers."""

    loss: float
    accuracy: float


class Residuals(NamedTuple):
    """How the solves of a training step converge.

    Attributes:
        forward: stats of the forward solve.
        adjoint: stats of the adjoint solve.
        forward_scale: 2-norm of the last state.
        adjoint_scale: 2-norm of the cotangent that enters the adjoint solve.
    """

    forward: Stats
    adjoint: Stats
    forward_scale: jax.Array
    adjoint_scale: jax.Array


def classification(model: Classifier) -> tuple[LossFn, PyTree]:
    """Softmax cross-entropy of a classifier, as a pure function of its parameters.

    Args:
        model: an `lp_jax.nn.Classifier`, or any NNX module with its ``solve``. It is used in the mode that it is in:
            what `evaluate` takes is made of ``model.eval()``.

    Returns:
        ``(loss_fn, params)``: the loss for `make_train_step`, and the model's parameters, a nested dict, running statistics
        among them; ``nnx.update(model, params)`` puts them back. Batches are ``(x, labels)``, or ``(x, labels, key)`` for a
        model with dropout. Labels are integers of the shape of the logits but for their last axis; where one is negative,
        as on padding, nothing is asked.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> model = nn.Classifier(
        ...     nn.DenseOpening((8, 8, 1), 16, rngs=rngs),
        ...     nn.LayerParallel(lambda rngs: nn.DenseResidual(16, rngs=rngs), 32, rngs=rngs),
        ...     nn.DenseClosing((16,), 10, rngs=rngs),
        ... )
        >>> loss_fn, params = train.classification(model)
        >>> batch = jnp.ones((4, 8, 8, 1), "float32"), jnp.zeros(4, "int32")
        >>> loss, info = loss_fn(params, batch, lp_jax.MGRIT(), None)
        >>> int(info.total)
        4
    """
    graphdef, state = nnx.split(model)

    def loss_fn(params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None) -> tuple[jax.Array, Info]:
        x, labels, *key = batch
        merged = nnx.merge(graphdef, params)
        given = {"key": key[0]} if key else {}
        logits, solution = merged.solve(x, **given, solver=solver, adjoint_solver=adjoint_solver)
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
        total, scale = jnp.sum(labels >= 0, dtype=jnp.int32), _tree.norm(solution.y1)
        replace = nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))
        return cross_entropy(logits, labels), Info(
            correct, total, solution.stats, solution.result, scale, replace or None
        )

    return loss_fn, nnx.to_pure_dict(state)


def evaluate(loss_fn: LossFn, params: PyTree, batches: Iterable[Batch], *, solver: Solver = Serial()) -> Evaluation:
    """Loss and accuracy over a data set, by default of the exact network.

    Args:
        loss_fn: as for `make_train_step`; the loss is a mean over the batch.
        params: the model's parameters.
        batches: the data set; batches may differ in size, each size compiles once.
        solver: of the layers; serial propagation if not said otherwise.
    """
    results = [_evaluate(loss_fn, params, batch, solver) for batch in batches]
    loss, correct, total = (sum(column) for column in zip(*jax.device_get(results), strict=True))
    return Evaluation(float(loss / total), float(correct / total))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(loss_fn: LossFn, params: PyTree, batch: Batch, solver: Solver) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, info = loss_fn(params, batch, solver, None)
    return loss * info.total.astype(loss.dtype), info.correct, info.total


def predict(model: Classifier, params: PyTree, x: PyTree, *, solver: Solver = Serial()) -> jax.Array:
    """The logits of a classifier, by default of the exact network.

    Args:
        model: an `lp_jax.nn.Classifier`, in the mode that it is in; its own parameters are not used.
        params: as `classification` returns them.
        x: a batch of inputs; each shape compiles once.
        solver: of the layers; serial propagation if not said otherwise.
    """
    return _logits(nnx.graphdef(model), params, x, solver)


def confusion_matrix(
    model: Classifier, params: PyTree, batches: Iterable[Batch], *, classes: int, solver: Solver = Serial()
) -> np.ndarray:
    """How often a model answers what, class by class.

    Args:
        model: an `lp_jax.nn.Classifier`, in the mode that it is in; its own parameters are not used.
        params: as `classification` returns them.
        batches: the data set, ``(x, labels)``; where a label is negative, nothing is asked.
        classes: number of classes.
        solver: of the layers; serial propagation if not said otherwise.

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
    """Convergence of the solves of a training step: its forward solve's stats and its adjoint solve's.

    Args:
        model: an `lp_jax.nn.Classifier`; its own parameters are not used.
        params: as `classification` returns them.
        batch: ``(x, labels)``.
        solver: of the forward solve.
        adjoint_solver: of the adjoint solve; None means the settings of ``solver``.
    """
    return _residuals(nnx.graphdef(model), params, batch, solver, adjoint_solver)


@functools.partial(jax.jit, static_argnums=0)
def _residuals(
    graphdef: nnx.GraphDef, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver | None
) -> Residuals:
    model = nnx.merge(graphdef, params)
    x, labels, *key = batch
    given = {"key": key[0]} if key else {}
    solution, pullback = model.trunk.solve_vjp(
        model.opening(x), **model.context_of(x), **given, solver=solver, adjoint_solver=adjoint_solver
    )
    cotangent = jax.grad(lambda y1: cross_entropy(model.closing(y1), labels))(solution.y1)
    _, adjoint = pullback(cotangent)
    return Residuals(solution.stats, adjoint, _tree.norm(solution.y1), _tree.norm(cotangent))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the labels that are not negative."""
    asked = labels >= 0
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.where(asked, labels, 0))
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.sum(asked).astype(losses.dtype)
