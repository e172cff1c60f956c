"""Solvers for a model and a batch, before it is trained."""

from typing import Any

import jax
from flax import nnx

from lp_jax._arrays._types import PyTree, State
from lp_jax._problem import Problem
from lp_jax._solvers._serial import Serial
from lp_jax.nn import Classifier
from lp_jax.planning import Plan, _plan
from lp_jax.train._supervised import Measure, cross_entropy
from lp_jax.train._types import Batch


def inner(model: Classifier, params: PyTree, batch: Batch, loss: Measure = cross_entropy) -> tuple[Problem, State]:
    """Return the problem of a classifier's layers, of the longest block, and the cotangent of its last state."""
    graphdef = nnx.graphdef(model)

    def parts_of(model: Classifier) -> list[Any]:
        return list(getattr(model.trunk, "parts", [model.trunk]))

    lengths = [getattr(part, "num_layers", 1) if hasattr(part, "problem") else 0 for part in parts_of(model)]
    longest = lengths.index(max(lengths))

    def run(y: State, some: list[Any], context: dict[str, PyTree]) -> State:
        for part in some:
            y = part.solve(y, **context, solver=Serial()).y1 if hasattr(part, "solve") else part(y)
        return y

    @jax.jit
    def around(params: PyTree, x: PyTree, targets: PyTree, key: list[jax.Array]) -> tuple[State, PyTree, State]:
        merged = nnx.merge(graphdef, params)
        parts = parts_of(merged)
        context = {**merged.context_of(x), **({"key": key[0]} if key else {})}
        y = run(merged.opening(x), parts[:longest], context)
        y1 = run(y, parts[longest : longest + 1], context)
        after = parts[longest + 1 :]
        return y, context, jax.grad(lambda y: loss(merged.closing(run(y, after, context)), targets))(y1)

    x, targets, *key = batch
    y, context, cotangent = around(params, x, targets, key)
    return parts_of(nnx.merge(graphdef, params))[longest].problem(y, **context), cotangent


def plan(model: Classifier, params: PyTree, batch: Batch, *, loss: Measure = cross_entropy, **options: Any) -> Plan:
    """Plan the layers of a classifier with `lp_jax.plan`, for the state and the cotangent of a batch.

    ``params`` are those that `classification` or `regression` returns. A batch is ``(x, labels)`` or ``(x, labels, key)``.
    ``loss`` is `cross_entropy`, `mean_squared_error` or a function ``(outputs, y)``. The options are those of `lp_jax.plan`:
    ``error``, ``workers``, ``machine``, ``seconds`` and others.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((4,), 8, rngs=rngs), trunk, nn.DenseClosing((8,), 3, rngs=rngs))
        >>> _, params = train.classification(model)
        >>> batch = jnp.ones((4, 4), "float32"), jnp.zeros(4, "int32")
        >>> train.plan(model, params, batch, seconds=0.1).error
        0.01
    """
    problem, cotangent = inner(model, params, batch, loss)
    return _plan.plan(problem, cotangent=cotangent, **options)
