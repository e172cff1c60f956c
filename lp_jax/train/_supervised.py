"""Classification and regression by an NNX model that is solved layer-parallel, and the plan of its solvers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lp_jax import Problem, Serial, Solver, Stats
from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree, State
from lp_jax.nn import Classifier, LayerParallel
from lp_jax.planning import Plan, _plan
from lp_jax.train._types import Batch, Info, Loss, LossFn, Restart

Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""A loss as a function of outputs and targets, ``(outputs, y)``; returns a scalar."""

Score = Callable[[jax.Array, jax.Array], tuple[jax.Array, Mapping[str, Any]]]
"""Loss of outputs and targets, and the counts of its `Info`."""

Penalty = Callable[[Problem], jax.Array]
"""A term of the loss from the problem of the trunk's layers, such as `depth_penalty`."""


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the softmax cross-entropy, a mean over the labels that are not negative: the loss of `classification`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import train
        >>> train.cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -1])).round(3)  # log 4; the second has no label
        Array(1.386, dtype=float32)
    """
    counts = labels >= 0
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(counts, labels, 0)
    )
    return jnp.sum(jnp.where(counts, losses, 0)) / jnp.sum(counts).astype(losses.dtype)


def mean_squared_error(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean of the squared differences, of arrays of one shape: the loss of `regression`.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import train
        >>> train.mean_squared_error(jnp.zeros((2, 1)), jnp.ones((2, 1)))
        Array(1., dtype=float32)
    """
    if jnp.shape(outputs) != jnp.shape(y):
        hint = " Take y[:, None]." if jnp.shape(outputs) == (*jnp.shape(y), 1) else ""
        raise ValueError(
            f"y must have the shape of the outputs, {jnp.shape(outputs)}; got {jnp.shape(y)}.{hint}"
        )
    return jnp.mean((outputs - jnp.asarray(y).astype(outputs.dtype)) ** 2)


class Evaluation(NamedTuple):
    """Mean loss and accuracy (fraction of right answers) of a model on a data set; a regression has accuracy None."""

    loss: float
    accuracy: float | None


class Residuals(NamedTuple):
    """Convergence of the forward and the adjoint solve of a training step.

    The scales are the 2-norms of the last state and of the cotangent that enters the adjoint solve.
    """

    forward: Stats
    adjoint: Stats
    forward_scale: jax.Array
    adjoint_scale: jax.Array


def classification(model: Classifier, *, penalty: Penalty | None = None) -> tuple[LossFn, PyTree]:
    """Return the softmax cross-entropy of a classifier as a pure function of its parameters.

    Args:
        model: an `lp_jax.nn.Classifier`, or any NNX module with the same ``solve``, in training or ``eval()`` mode. For
            `evaluate`, call this again after ``model.eval()``.
        penalty: a term added to the loss, as a function of the trunk's `lp_jax.Problem`:
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
        >>> x, labels, values = jnp.ones((4, 4), "float32"), jnp.zeros(4, "int32"), jnp.zeros((4, 10), "float32")
        >>> loss, info = loss_fn(params, (x, labels), lp_jax.MGRIT(), None)
        >>> int(info.total), train.evaluate(loss_fn, params, [(x, labels)]).accuracy in (0.0, 1.0)
        (4, True)
        >>> train.predict(model, params, x).shape
        (4, 10)
        >>> train.residuals(model, params, (x, labels), lp_jax.Picard(sweeps=3)).adjoint.residual_norms.shape
        (3,)
        >>> train.plan(model, params, (x, labels), seconds=0.1).error
        0.01
        >>> loss_fn, params = train.regression(model)
        >>> loss, info = loss_fn(params, (x, values), lp_jax.MGRIT(), None)
        >>> loss.shape, info.correct
        ((), None)
    """

    def score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Mapping[str, Any]]:
        shape = jnp.shape(labels)
        wanted = logits.shape[:-1]
        dtype = jnp.result_type(labels)
        said = (
            f"labels must be integers of shape {wanted}, class numbers from 0 to "
            f"{logits.shape[-1] - 1}; got {dtype} of shape {shape}"
        )
        if shape != wanted:
            hint = (
                ", which looks one-hot. Take jnp.argmax(labels, axis=-1)"
                if shape == logits.shape
                else ""
            )
            raise ValueError(f"{said}{hint}.")
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(f"{said}. Take labels.astype(int).")
        return cross_entropy(logits, labels), {
            "correct": jnp.sum(
                jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels, dtype=jnp.int32
            ),
            # Negative labels mark padding. They are in no count, and `cross_entropy` leaves them out of the mean.
            "total": jnp.sum(labels >= 0, dtype=jnp.int32),
            # A compiled program raises no error for an index out of bounds, so such labels are counted.
            "outside": jnp.sum(labels >= logits.shape[-1], dtype=jnp.int32),
        }

    return _supervised(model, score, penalty)


def regression(model: Classifier, *, penalty: Penalty | None = None) -> tuple[LossFn, PyTree]:
    """Return the mean squared error of a model of values as a pure function of its parameters.

    Arguments and results are those of `classification`; the closing layer has as many outputs as there are values. Batches are
    ``(x, y)`` or ``(x, y, key)``; a y of another shape than the outputs, ``(examples, values)``, raises ValueError. Scale y: a
    new network returns numbers around 1. ``Info.correct`` and `Evaluation.accuracy` are None, as no answer is right or wrong.
    """
    return _supervised(
        model,
        lambda outputs, y: (mean_squared_error(outputs, y), {"total": jnp.int32(y.size)}),
        penalty,
    )


def _supervised(model: Classifier, score: Score, penalty: Penalty | None) -> tuple[LossFn, PyTree]:
    if penalty is not None and not isinstance(model.trunk, LayerParallel):
        raise TypeError(
            "penalty is of one block of layers: the trunk must be a LayerParallel; got "
            f"{type(model.trunk).__name__}. Add that of each block in a loss of your own."
        )
    # The static part of the model stays in the closure, and the loss is a pure function of the arrays.
    graphdef, state = nnx.split(model)

    def loss_fn(
        params: PyTree,
        batch: Batch,
        solver: Solver,
        adjoint_solver: Solver | None,
        restart: Restart | None = None,
    ) -> Loss:
        x, y, keys = split_batch(batch)
        merged = nnx.merge(graphdef, params)
        options = keys if restart is None else keys | restart._asdict()
        outputs, solution = merged.solve(x, **options, solver=solver, adjoint_solver=adjoint_solver)
        loss, counts = score(outputs, y)
        if penalty is not None and isinstance(merged.trunk, LayerParallel):
            problem = merged.trunk.problem(merged.opening(x), **merged.context_of(x), **keys)
            loss += penalty(problem)
        return loss, Info(
            stats=solution.stats,
            result=solution.result,
            scale=jnp.sqrt(_tree.sum_of_squares(solution.y1)),
            # Calls of `merged` have changed its running statistics, which leave the pure function as part of `Info`.
            replace=nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat)) or None,
            trajectory=solution.trajectory,
            **counts,
        )

    return loss_fn, nnx.to_pure_dict(state)


def evaluate(
    loss_fn: LossFn, params: PyTree, batches: Iterable[Batch], *, solver: Solver = Serial()
) -> Evaluation:
    """Return loss and accuracy over a data set, by default of the exact network.

    The loss is a mean over the batch, as for `make_train_step`. Batches may differ in size; each size compiles once.
    """
    # All batches are dispatched before the host waits for the first result.
    results = jax.device_get([_evaluate(loss_fn, params, batch, solver) for batch in batches])
    loss, correct, total = jax.tree.map(lambda *parts: sum(parts), *results)
    return Evaluation(float(loss / total), None if correct is None else float(correct / total))


@jax.jit(static_argnums=0)
def _evaluate(
    loss_fn: LossFn, params: PyTree, batch: Batch, solver: Solver
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    loss, info = loss_fn(params, batch, solver, None)
    # A mean over the batch times its number of answers is a sum, which can be added over batches of different size.
    return loss * info.total.astype(loss.dtype), info.correct, info.total


def predict(
    model: Classifier, params: PyTree, x: PyTree, *, solver: Solver = Serial()
) -> jax.Array:
    """Return the outputs of a model for a batch of inputs, the logits of a classifier, by default of the exact network.

    The parameters are those that `classification` or `regression` returns; the model's own are not used, and it may be in
    training or ``eval()`` mode. Each shape of ``x`` compiles once.
    """
    return _predict(nnx.graphdef(model), params, x, solver)


@jax.jit(static_argnums=0)
def _predict(graphdef: nnx.GraphDef, params: PyTree, x: PyTree, solver: Solver) -> jax.Array:
    return nnx.merge(graphdef, params).solve(x, solver=solver)[0]


def residuals(
    model: Classifier,
    params: PyTree,
    batch: Batch,
    solver: Solver,
    adjoint_solver: Solver | None = None,
    *,
    loss: Measure = cross_entropy,
) -> Residuals:
    """Return the stats of the forward and the adjoint solve of a training step; model and parameters as for `predict`.

    A batch is ``(x, labels)`` or ``(x, labels, key)``. ``adjoint_solver`` None means the settings of ``solver``. ``loss``
    gives the cotangent: `cross_entropy`, `mean_squared_error` or a function ``(outputs, y)`` of your own.
    """
    return _residuals(nnx.graphdef(model), loss, params, batch, solver, adjoint_solver)


@jax.jit(static_argnums=(0, 1))
def _residuals(
    graphdef: nnx.GraphDef,
    loss: Measure,
    params: PyTree,
    batch: Batch,
    solver: Solver,
    adjoint_solver: Solver | None,
) -> Residuals:
    model = nnx.merge(graphdef, params)
    x, y, keys = split_batch(batch)
    solution, pullback = model.trunk.solve_vjp(
        model.opening(x),
        **model.context_of(x),
        **keys,
        solver=solver,
        adjoint_solver=adjoint_solver,
    )
    # The cotangent that enters the adjoint solve is the gradient of the loss by the last state.
    cotangent = jax.grad(lambda y1: loss(model.closing(y1), y))(solution.y1)
    norms = (jnp.sqrt(_tree.sum_of_squares(x)) for x in (solution.y1, cotangent))
    return Residuals(solution.stats, pullback(cotangent)[1], *norms)


def split_batch(batch: Batch) -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
    """Return inputs, labels and, as keyword arguments of a solve, the random key of a batch, if it has one."""
    if not (isinstance(batch, tuple | list) and len(batch) in (2, 3)):
        got = (
            "one array"
            if isinstance(batch, jax.Array | np.ndarray)
            else f"a {type(batch).__name__} of {len(batch)}"
        )
        raise TypeError(
            f"a batch must be (x, labels), or (x, labels, key) for a model with dropout; got {got}."
        )
    x, labels, *key = batch
    return x, labels, {"key": key[0]} if key else {}


def parts_of(model: Classifier) -> list[Any]:
    """Return the parts of a trunk: those of a `Network`, or the trunk itself."""
    return list(getattr(model.trunk, "parts", [model.trunk]))


def inner(
    model: Classifier, params: PyTree, batch: Batch, loss: Measure = cross_entropy
) -> tuple[Problem, State]:
    """Return the problem of a classifier's layers, of the longest block, and the cotangent of its last state."""
    graphdef = nnx.graphdef(model)

    def length(part: Any) -> int:
        return getattr(part, "num_layers", 1) if hasattr(part, "problem") else 0

    lengths = list(map(length, parts_of(model)))
    # The longest block is where layer-parallel solvers gain most, so a plan is made for it.
    longest = lengths.index(max(lengths))

    def run(y: State, some: list[Any], context: dict[str, PyTree]) -> State:
        for part in some:
            y = part.solve(y, **context, solver=Serial()).y1 if hasattr(part, "solve") else part(y)
        return y

    @jax.jit
    def around(
        params: PyTree, x: PyTree, targets: PyTree, keys: dict[str, jax.Array]
    ) -> tuple[State, PyTree, State]:
        merged = nnx.merge(graphdef, params)
        parts = parts_of(merged)
        context = {**merged.context_of(x), **keys}
        y = run(merged.opening(x), parts[:longest], context)
        y1 = run(y, parts[longest : longest + 1], context)
        # The blocks around it are solved exactly, so that the plan sees the state and the cotangent of the exact network.
        after = parts[longest + 1 :]
        cotangent = jax.grad(lambda y: loss(merged.closing(run(y, after, context)), targets))(y1)
        return y, context, cotangent

    y, context, cotangent = around(params, *split_batch(batch))
    return parts_of(nnx.merge(graphdef, params))[longest].problem(y, **context), cotangent


def plan(
    model: Classifier,
    params: PyTree,
    batch: Batch,
    *,
    loss: Measure = cross_entropy,
    **options: Any,
) -> Plan:
    """Plan the layers of a classifier with `lp_jax.plan`, for the state and the cotangent of a batch.

    Arguments are those of `residuals`. The options are those of `lp_jax.plan`: ``error``, ``workers``, ``machine``, ``seconds``
    and others. `classification` has an example.
    """
    problem, cotangent = inner(model, params, batch, loss)
    return _plan.plan(problem, cotangent=cotangent, **options)
