"""Solvers for a model and a batch, before it is trained."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from lp_jax import planning
from lp_jax._arrays._types import PyTree, State
from lp_jax._problem import Problem
from lp_jax._solvers._serial import Serial
from lp_jax.nn import Classifier
from lp_jax.train._supervised import Measure, cross_entropy
from lp_jax.train._types import Batch


class Inner(NamedTuple):
    """The layers that are solved for, alone."""

    problem: Problem
    cotangent: State  # of their last state, as the loss gives it
    fewer: dict[str, Any] | None  # what a quarter of the examples makes smaller; None below eight examples


def inner(model: Classifier, params: PyTree, batch: Batch, loss: Measure = cross_entropy) -> Inner:
    """The layers of a classifier: of the longest block, if there are several."""
    merged = nnx.merge(nnx.graphdef(model), params)
    x, targets, *key = batch
    problem, y1, rest = _reached(merged, x, key)
    cotangent = jax.grad(lambda y: loss(merged.closing(rest(y)), targets))(y1)
    quarter = len(targets) // 4
    fewer = None
    if quarter >= 2:
        smaller, _, _ = _reached(merged, jax.tree.map(lambda leaf: leaf[:quarter], x), key)
        fewer = {name: getattr(smaller, name) for name in ("y0", "shared", "data")}
    return Inner(problem, cotangent, fewer)


def _reached(model: Any, x: PyTree, key: list[jax.Array]) -> tuple[Problem, State, Any]:
    """The longest block's problem, its last state, and all that comes between it and the closing layer."""
    given = {**model.context_of(x), **({"key": key[0]} if key else {})}
    parts = list(getattr(model.trunk, "parts", [model.trunk]))
    lengths = [getattr(part, "num_layers", 1) if hasattr(part, "problem") else 0 for part in parts]
    chosen = lengths.index(max(lengths))

    def run(y: State, some: list[Any]) -> State:
        for part in some:
            y = part.solve(y, **given, solver=Serial()).y1 if hasattr(part, "solve") else part(y)
        return y

    y = run(model.opening(x), parts[:chosen])
    problem = parts[chosen].problem(y, **given)
    return problem, run(y, parts[chosen : chosen + 1]), lambda y1: run(y1, parts[chosen + 1 :])


def plan(
    model: Classifier,
    params: PyTree,
    batch: Batch,
    *,
    loss: Measure = cross_entropy,
    error: float = 1e-2,
    workers: int = 1,
    machine: planning.Machine | None = None,
    interconnect: planning.Interconnect | None = None,
    seconds: float = 10.0,
) -> planning.Plan:
    """`lp_jax.plan` for a classifier as a batch reaches its layers, with the cotangent that its loss gives.

    ``params`` are those that `classification` or `regression` returns, a batch is ``(x, labels)`` or ``(x, labels, key)``, and
    ``loss`` is `cross_entropy`, `mean_squared_error` or a function ``(outputs, y)``; all other arguments are those of
    `lp_jax.plan`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn, train
        >>> rngs = nnx.Rngs(0)
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, rngs=rngs)
        >>> model = nn.Classifier(nn.DenseOpening((4,), 8, rngs=rngs), trunk, nn.DenseClosing((8,), 3, rngs=rngs))
        >>> _, params = train.classification(model)
        >>> batch = jnp.ones((16, 4), "float32"), jnp.zeros(16, "int32")
        >>> train.plan(model, params, batch, seconds=1.0).error
        0.01
    """
    problem, cotangent, fewer = inner(model, params, batch, loss)
    return planning.plan(
        problem,
        cotangent=cotangent,
        fewer=fewer,
        error=error,
        workers=workers,
        machine=machine,
        interconnect=interconnect,
        seconds=seconds,
    )
